"""From boxes to pieces: what each engine rank takes from which source box, cut so that a piece fits into a bucket.

Everything here is per kind of tensor (:mod:`weightlink.kinds`); :class:`Pieces` then counts each piece once per tensor
of its kind, without writing the copies out.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from weightlink.converters.boxes import Boxes, overlaps, union_volume
from weightlink.converters.coverage import Violations, prove_tiling
from weightlink.hooks.geometry import DIMS, Int64, TensorSpec
from weightlink.kinds import Table, UInt64, hash_rows, numbered, sorted_by, spread, within
from weightlink.program import ITEMSIZES
from weightlink.survey import Side


@dataclass
class Sources:
    """The trainer's side: equal boxes on several ranks are replicas of one source box.

    ``sets[holders[b]]`` are the ranks that hold source box ``b``. Source boxes are those of one tensor per kind.
    """

    table: Table
    volume: Int64  # elements per kind
    boxes: Boxes  # grouped by kind, in order
    key: UInt64  # of each box, as the table's ``box_key``
    holders: Int64
    sets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, manifest: Sequence[TensorSpec], trainers: Side, found: Violations) -> Sources:
        """Adds to ``found`` whatever keeps the boxes from tiling every tensor exactly."""
        table = trainers.table
        box, first = numbered(hash_rows(table.box_key, table.row_kind))
        whole = _boxes(table, first, table.row_kind[first])
        volume = np.array([math.prod(manifest[n].shape) for n in table.first.tolist()], np.int64)
        prove_tiling(
            whole,
            volume,
            name=lambda k: _name(manifest, table.kind, k),
            rank=lambda b: trainers.ranks[int(table.rank[first[b]])],
            nobody="no trainer rank",
            found=found,
        )
        return cls(table, volume, whole, table.box_key[first], *_holders(box, table.rank, len(first)))


def _holders(box: Int64, rank: Int64, boxes: int) -> tuple[Int64, tuple[tuple[int, ...], ...]]:
    """The set of ranks of each box, by number, and the sets."""
    if not boxes:
        return np.zeros(0, np.int64), ()
    ranks = int(rank.max()) + 1
    pairs = np.unique(box * ranks + rank)  # a rank may have a box twice: tied weights
    owner, rank = pairs // ranks, pairs % ranks
    start = np.searchsorted(owner, np.arange(boxes + 1))
    sums = [np.add.reduceat(hash_rows(rank, variant=v), start[:-1]) for v in (0, 1)]
    holders, first = numbered(hash_rows(*sums, np.diff(start)))
    return holders, tuple(tuple(rank[start[b] : start[b + 1]].tolist()) for b in first.tolist())


def _boxes(table: Table, row: Int64, group: Int64) -> Boxes:
    """The boxes of rows of a table as members of groups."""
    box = table.box[row]
    return Boxes(group, box[:, :DIMS], box[:, DIMS : 2 * DIMS], box[:, 2 * DIMS :])


def _name(manifest: Sequence[TensorSpec], kind: Int64, number: int) -> str:
    """A tensor of a kind, and how many more there are."""
    members = np.flatnonzero(kind == number)
    more = f" (and {len(members) - 1} more like it)" if len(members) > 1 else ""
    return manifest[int(members[0])].name + more


@dataclass
class Pieces:
    """All copies into one engine, as runs.

    A *kind* here is one to the trainer and to the engine. A *piece* belongs to a kind: a box, its wire dtype, the
    source box that it is read from. A *run* is a piece on its way to one receiver, once for each tensor of its kind:
    copy ``n`` of a run is tensor ``members[start + n]``, for ``n < count``.
    """

    members: Int64
    # runs
    piece: Int64
    dst: Int64
    turn: Int64  # which of a receiver's equal boxes
    start: Int64
    count: Int64
    # pieces
    source: Int64
    target_key: UInt64  # of the box that it is part of, as the table's ``key``
    lo: Int64
    size: Int64
    step: Int64
    dtype: Int64

    def __len__(self) -> int:
        return int(self.count.sum())

    @cached_property
    def nbytes(self) -> Int64:
        """Wire bytes of each copy of a run."""
        nbytes: Int64 = self.size.prod(axis=1) * ITEMSIZES[self.dtype]
        return nbytes[self.piece]


def pieces_of(
    name: str,
    manifest: Sequence[TensorSpec],
    sources: Sources,
    targets: Side,
    limit: int,
    ignore: Sequence[str],
    found: Violations,
) -> Pieces:
    """What the ranks of one engine take.

    :param limit: bytes of the largest piece
    :param ignore: names, or patterns with ``*``, that no rank needs to take
    Adds to ``found`` every region that nobody fills and every tensor that nobody takes, whole.
    """
    table = targets.table
    kind, first = numbered(sources.table.kind * table.kinds + table.kind)
    members, member_start = sorted_by(kind, len(first))
    ours, theirs = sources.table.kind[first], table.kind[first]
    # The rows of each kind here: an engine may tell tensors apart that are one kind to the trainer, and the reverse.
    count = np.diff(table.start)[theirs]
    row, row_kind = spread(table.start[theirs], count), np.repeat(np.arange(len(first)), count)
    box, at = numbered(hash_rows(table.key[row], row_kind))
    whole = _boxes(table, row[at], row_kind[at])
    dtype, key = table.dtype[row[at]], table.key[row[at]]

    source_start = np.searchsorted(sources.boxes.group, np.arange(len(sources.volume) + 1))
    count = np.diff(source_start)[ours]
    again = spread(source_start[ours], count)
    part = sources.boxes.take(again)
    pairs = overlaps(Boxes(np.repeat(np.arange(len(first)), count), part.lo, part.size, part.step), whole)
    order = np.lexsort((pairs.a, pairs.b))
    a, b = again[pairs.a[order]], pairs.b[order]
    lo, size, step = pairs.lo[order], pairs.size[order], pairs.step[order]
    holder = table.rank[row[at]]
    _prove_arrival(name, manifest, kind, whole, b, size, lambda n: targets.ranks[int(holder[n])], found)
    _prove_consumed(name, manifest, sources.volume[ours], kind, whole, ignore, found)

    copy, lo, size, step = split(lo, size, step, ITEMSIZES[dtype[b]], limit)
    a, b = a[copy], b[copy]
    # Each piece once per receiver of its box.
    by_box, box_start = sorted_by(box, len(at))
    fan = np.diff(box_start)[b]
    piece = np.repeat(np.arange(len(b)), fan)
    receiver = by_box[spread(box_start[b], fan)]
    order = np.lexsort((table.rank[row[receiver]], row_kind[receiver]))
    piece, receiver = piece[order], receiver[order]
    return Pieces(
        members,
        piece,
        table.rank[row[receiver]],
        table.turn[row[receiver]],
        member_start[row_kind[receiver]],
        np.diff(member_start)[row_kind[receiver]],
        a,
        key[b],
        lo,
        size,
        step,
        dtype[b],
    )


def _prove_arrival(
    name: str,
    manifest: Sequence[TensorSpec],
    kind: Int64,
    whole: Boxes,
    b: Int64,
    size: Int64,
    ranks: Callable[[int], str],
    found: Violations,
) -> None:
    """Each destination box gets all its elements."""
    arrives = np.zeros(len(whole), np.int64)
    np.add.at(arrives, b, size.prod(axis=1))
    for n in np.flatnonzero(arrives != whole.numel).tolist():
        found.add(
            _name(manifest, kind, int(whole.group[n])),
            f"{name} {ranks(n)}",
            f"{int(arrives[n])} of {int(whole.numel[n])} elements have a source",
        )


def _prove_consumed(
    name: str,
    manifest: Sequence[TensorSpec],
    volume: Int64,
    kind: Int64,
    whole: Boxes,
    ignore: Sequence[str],
    found: Violations,
) -> None:
    """Each tensor is taken by somebody, whole."""
    consumed = union_volume(whole, len(volume))
    for number in np.flatnonzero(consumed < volume):
        for tensor in np.flatnonzero(kind == number):
            if not any(fnmatch.fnmatchcase(manifest[tensor].name, pattern) for pattern in ignore):
                found.add(
                    manifest[tensor].name,
                    name,
                    f"the engine's loader takes {int(consumed[number])} of {int(volume[number])} elements; "
                    "pass ignore=[...] if it may leave them out",
                )


def split(lo: Int64, size: Int64, step: Int64, itemsize: Int64, limit: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Cut boxes above ``limit`` bytes along their outermost dimensions into nearly equal pieces.

    :returns: the box that each piece is cut from, and the pieces' ``lo``, ``size`` and ``step``"""
    copy = np.arange(len(lo))
    for dim in range(lo.shape[1]):
        nbytes = size.prod(axis=1) * itemsize[copy]
        if not (nbytes > limit).any():
            break
        row_bytes = nbytes // np.maximum(size[:, dim], 1)
        most = np.maximum(limit // np.maximum(row_bytes, 1), 1)
        parts = np.where(nbytes > limit, -(-size[:, dim] // most), 1)
        per = -(-size[:, dim] // parts)
        parts = -(-size[:, dim] // per)
        repeat = np.repeat(np.arange(len(copy)), parts)
        k = within(parts)
        copy, lo, size, step, per = copy[repeat], lo[repeat], size[repeat], step[repeat], per[repeat]
        start = k * per
        lo[:, dim] += start * step[:, dim]
        size[:, dim] = np.minimum(per, size[:, dim] - start)
    return copy, lo, size, np.where(size == 1, 1, step)
