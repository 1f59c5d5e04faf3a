"""From boxes to pieces: what each engine rank takes from which source box, cut so that a piece fits into a bucket.

Everything here is per kind of tensor (:mod:`weightlink.kinds`); :class:`Pieces` then counts each piece once per tensor
of its kind, without writing the pieces out.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from weightlink.converters.boxes import Boxes, overlaps, union_volume
from weightlink.converters.coverage import Violations, prove_tiling
from weightlink.hooks.geometry import DIMS, Int64, TensorSpec, pad
from weightlink.kinds import Rows, UInt64, hash_rows, joint, kinds_of
from weightlink.program import ITEMSIZES
from weightlink.survey import Holding


@dataclass
class Sources:
    """The trainer's side: equal boxes on several ranks are replicas of one source box.

    ``sets[holders[b]]`` are the ranks that hold source box ``b``. Source boxes are those of one tensor per kind.
    """

    rows: Rows
    kind: Int64  # per tensor
    volume: Int64  # elements per kind
    boxes: Boxes  # grouped by kind
    key: UInt64  # of each box, as in ``rows``
    holders: Int64
    sets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, manifest: Sequence[TensorSpec], trainers: Sequence[Holding], found: Violations) -> Sources:
        """Adds to ``found`` whatever keeps the boxes from tiling every tensor exactly."""
        rows = Rows.of(trainers, by_dtype=False)
        kind, first = joint(kinds_of(rows, len(manifest)), _shapes(manifest))
        chosen, group = _of_first(rows, kind, first)
        key = hash_rows(rows.key[chosen], group)
        _, at, box = np.unique(key, return_index=True, return_inverse=True)
        whole = rows.boxes(chosen[at], group[at])
        order = np.lexsort((rows.rank[chosen], box))
        bounds = np.searchsorted(box[order], np.arange(len(at) + 1))
        rank = rows.rank[chosen[order]].tolist()
        numbers: dict[tuple[int, ...], int] = {}
        holders = np.zeros(len(at), np.int64)
        for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            holders[n] = numbers.setdefault(tuple(dict.fromkeys(rank[start:end])), len(numbers))
        volume = np.array([math.prod(t.shape) for t in manifest], np.int64)
        prove_tiling(
            whole,
            volume[first],
            name=lambda k: _name(manifest, kind, k),
            rank=lambda b: trainers[int(rows.rank[chosen[at[b]]])].rank,
            nobody="no trainer rank",
            found=found,
        )
        return cls(rows, kind, volume[first], whole, rows.key[chosen[at]], holders, tuple(numbers))


def _name(manifest: Sequence[TensorSpec], kind: Int64, number: int) -> str:
    """A tensor of a kind, and how many more there are."""
    members = np.flatnonzero(kind == number)
    more = f" (and {len(members) - 1} more like it)" if len(members) > 1 else ""
    return manifest[int(members[0])].name + more


def _shapes(manifest: Sequence[TensorSpec]) -> Int64:
    shapes = np.array([pad(t.shape, 1) for t in manifest], np.int64).reshape(-1, DIMS)
    return np.unique(hash_rows(shapes), return_inverse=True)[1].reshape(-1).astype(np.int64)


def _of_first(rows: Rows, kind: Int64, first: Int64) -> tuple[Int64, Int64]:
    """The rows of the first tensor of each kind, and their kinds."""
    is_first = np.zeros(len(kind), bool)
    is_first[first] = True
    chosen = np.flatnonzero(is_first[rows.tensor])
    return chosen, kind[rows.tensor[chosen]]


@dataclass
class Pieces:
    """All copies into one engine, as (tensor, table row) pairs.

    A *piece* belongs to a kind: a box, its wire dtype, the source box that it is read from. A row of the *table* is a
    piece on its way to one receiver. Copy ``n`` is row ``row[n]`` of the table for tensor ``tensor[n]``.
    """

    rows: Rows
    tensor: Int64
    row: Int64
    # table
    piece: Int64
    dst: Int64
    turn: Int64  # which of a receiver's equal boxes
    # pieces
    source: Int64
    target_key: UInt64  # of the box that it is part of, as in ``rows``
    lo: Int64
    size: Int64
    step: Int64
    dtype: Int64

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def table_bytes(self) -> Int64:
        """Wire bytes per row of the table."""
        nbytes: Int64 = self.size.prod(axis=1) * ITEMSIZES[self.dtype]
        return nbytes[self.piece]

    @cached_property
    def nbytes(self) -> Int64:
        """Wire bytes per copy."""
        nbytes: Int64 = self.table_bytes[self.row]
        return nbytes


def pieces_of(
    name: str,
    manifest: Sequence[TensorSpec],
    sources: Sources,
    targets: Sequence[Holding],
    limit: int,
    ignore: Sequence[str],
    found: Violations,
) -> Pieces:
    """What the ranks of one engine take.

    :param limit: bytes of the largest piece
    :param ignore: names, or patterns with ``*``, that no rank needs to take
    Adds to ``found`` every region that nobody fills and every tensor that nobody takes, whole.
    """
    rows = Rows.of(targets, by_dtype=True)
    kind, first = joint(sources.kind, kinds_of(rows, len(manifest)))
    chosen, group = _of_first(rows, kind, first)
    key = hash_rows(rows.key[chosen], group)
    _, at, box = np.unique(key, return_index=True, return_inverse=True)
    box = box.reshape(-1)
    whole = rows.boxes(chosen[at], group[at])
    dtype = rows.dtype[chosen[at]].astype(np.int64)

    # The source boxes of each kind here: an engine may tell tensors apart that are one kind to the trainer.
    by_kind = np.argsort(sources.boxes.group, kind="stable")
    bounds = np.searchsorted(sources.boxes.group[by_kind], np.arange(len(sources.volume) + 1))
    wanted = sources.kind[first]
    count = (bounds[1:] - bounds[:-1])[wanted]
    again = by_kind[np.repeat(bounds[wanted], count) + within(count)]
    part = sources.boxes.take(again)
    pairs = overlaps(Boxes(np.repeat(np.arange(len(first)), count), part.lo, part.size, part.step), whole)
    order = np.lexsort((again[pairs.a], pairs.b))
    a, b = again[pairs.a[order]], pairs.b[order]
    lo, size, step = pairs.lo[order], pairs.size[order], pairs.step[order]
    _prove_arrival(name, manifest, kind, whole, b, size, rows, chosen[at], targets, found)
    _prove_consumed(name, manifest, sources, kind, first, whole, ignore, found)

    copy, lo, size, step = split(lo, size, step, ITEMSIZES[dtype[b]], limit)
    a, b = a[copy], b[copy]
    # Each piece once per receiver of its box, kind by kind.
    by_box = np.argsort(box, kind="stable")
    starts = np.searchsorted(box[by_box], np.arange(len(at) + 1))
    fan = (starts[1:] - starts[:-1])[b]
    piece = np.repeat(np.arange(len(b)), fan)
    receiver = chosen[by_box[np.repeat(starts[b], fan) + within(fan)]]
    table_kind = group[at][b[piece]] if len(piece) else np.zeros(0, np.int64)
    order = np.lexsort((rows.rank[receiver], table_kind))
    piece, receiver, table_kind = piece[order], receiver[order], table_kind[order]
    bounds = np.searchsorted(table_kind, np.arange(len(first) + 1))
    count = (bounds[1:] - bounds[:-1])[kind]
    return Pieces(
        rows,
        np.repeat(np.arange(len(manifest)), count),
        np.repeat(bounds[:-1][kind], count) + within(count),
        piece,
        rows.rank[receiver].astype(np.int64),
        rows.turn[receiver].astype(np.int64),
        a,
        rows.key[chosen[at]][b],
        lo,
        size,
        step,
        dtype[b],
    )


def within(count: Int64) -> Int64:
    """``0 .. c-1`` for each ``c`` of ``count``, one after the other."""
    within: Int64 = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return within


def _prove_arrival(
    name: str,
    manifest: Sequence[TensorSpec],
    kind: Int64,
    whole: Boxes,
    b: Int64,
    size: Int64,
    rows: Rows,
    row: Int64,
    targets: Sequence[Holding],
    found: Violations,
) -> None:
    """Each destination box gets all its elements."""
    arrives = np.zeros(len(whole), np.int64)
    np.add.at(arrives, b, size.prod(axis=1))
    for n in np.flatnonzero(arrives != whole.numel):
        found.add(
            _name(manifest, kind, int(whole.group[n])),
            f"{name} {targets[int(rows.rank[row[n]])].rank}",
            f"{int(arrives[n])} of {int(whole.numel[n])} elements have a source",
        )


def _prove_consumed(
    name: str,
    manifest: Sequence[TensorSpec],
    sources: Sources,
    kind: Int64,
    first: Int64,
    whole: Boxes,
    ignore: Sequence[str],
    found: Violations,
) -> None:
    """Each tensor is taken by somebody, whole."""
    volume, consumed = sources.volume[sources.kind[first]], union_volume(whole, len(first))
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
