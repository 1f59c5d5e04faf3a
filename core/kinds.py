"""Tensors that lie on the ranks in the same way are one *kind*, and are compared once for all of them.

The layers of a model repeat, and so do its experts: a model of fifty thousand tensors has a few thousand kinds. What is
worked out per kind (overlaps, proofs, pieces, senders, buckets) costs no more for a deeper model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from weightlink.hooks.geometry import DIMS, Int64

UInt64 = npt.NDArray[np.uint64]

_KEYS = np.random.Generator(np.random.PCG64(0x574C)).integers(0, 1 << 63, (2, 3 * DIMS + 4), np.uint64) | np.uint64(1)


def _mix(x: UInt64) -> UInt64:
    """A bijection of 64 bits in which every bit of the argument moves every bit of the value."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def hash_rows(*columns: npt.NDArray[np.integer] | UInt64, variant: int = 0) -> UInt64:
    """One number per row of the columns given side by side (one- or two-dimensional)."""
    total: UInt64 = np.zeros(len(columns[0]), np.uint64)
    at = 0
    for column in columns:
        if column.ndim == 1:
            total += column.astype(np.uint64) * _KEYS[variant, at]
            at += 1
        else:
            width = column.shape[1]
            total += column.astype(np.uint64) @ _KEYS[variant, at : at + width]
            at += width
    return _mix(total)


def within(count: Int64) -> Int64:
    """``0 .. c-1`` for each ``c`` of ``count``, one after the other."""
    within: Int64 = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return within


def spread(start: Int64, count: Int64) -> Int64:
    """``s .. s+c-1`` for each ``s`` of ``start`` and ``c`` of ``count``, one after the other."""
    spread: Int64 = np.arange(int(count.sum())) + np.repeat(start - np.cumsum(count) + count, count)
    return spread


def numbered(values: npt.NDArray[np.integer] | UInt64) -> tuple[Int64, Int64]:
    """``(number, first)``: equal values get one number, in order of appearance; and where each appears first."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[inverse.reshape(-1)], first[order].astype(np.int64)


def sorted_by(number: Int64, numbers: int) -> tuple[Int64, Int64]:
    """``(order, start)``: positions by their number, those of ``n`` at ``order[start[n]:start[n + 1]]``, ascending."""
    # Sixteen bits are sorted digit by digit, in linear time.
    order = np.argsort(number.astype(np.uint16) if numbers <= 1 << 16 else number, kind="stable")
    start = np.zeros(numbers + 1, np.int64)
    np.cumsum(np.bincount(number, minlength=numbers), out=start[1:])
    return order, start


@dataclass(frozen=True, eq=False)
class Table:
    """The boxes of all ranks of one side, those of one tensor per kind.

    :param kind: per tensor, numbered in order of appearance
    :param start: the rows of kind ``k`` are ``start[k]:start[k + 1]``, in order of their ranks
    :param rank: per row
    :param dtype: per row, position in :data:`~weightlink.program.DTYPES`
    :param box: per row ``lo``, ``size`` and ``step``, :data:`DIMS` columns each
    """

    kind: Int64
    start: Int64
    rank: Int64
    dtype: Int64
    box: Int64

    @classmethod
    def of(cls, tensor: Int64, rank: Int64, dtype: Int64, box: Int64, shape: Int64) -> Table:
        """From all boxes of all tensors, rank by rank.

        :param shape: a number per tensor; tensors of different shape are of different kind
        """
        tensors = len(shape)
        key = hash_rows(box, dtype)
        turn = turns(hash_rows(key, tensor, rank))
        order, start = sorted_by(tensor, tensors)
        held = np.flatnonzero(np.diff(start))
        sums = []
        for variant in (0, 1):
            # A sum does not depend on the order of the rows.
            total = np.zeros(tensors, np.uint64)
            if len(held):
                sign = hash_rows(key, rank, turn, variant=variant)
                total[held] = np.add.reduceat(sign[order], start[held])
            sums.append(total)
        kind, first = numbered(hash_rows(*sums, np.diff(start), shape))
        count = np.diff(start)[first]
        rows = order[spread(start[first], count)]
        return cls(kind, np.append(0, np.cumsum(count)), rank[rows], dtype[rows], box[rows])

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def kinds(self) -> int:
        """How many."""
        return len(self.start) - 1

    @cached_property
    def first(self) -> Int64:
        """The first tensor of each kind."""
        return np.flatnonzero(np.diff(np.maximum.accumulate(self.kind), prepend=-1)).astype(np.int64)

    @cached_property
    def row_kind(self) -> Int64:
        """Per row."""
        return np.repeat(np.arange(self.kinds), np.diff(self.start))

    @cached_property
    def members(self) -> tuple[Int64, Int64]:
        """The tensors by kind, see :func:`sorted_by`."""
        return sorted_by(self.kind, self.kinds)

    @cached_property
    def box_key(self) -> UInt64:
        """Of each row's box, whoever holds it in whatever dtype."""
        return hash_rows(self.box)

    @cached_property
    def key(self) -> UInt64:
        """Of each row's box and dtype."""
        return hash_rows(self.box, self.dtype)

    @cached_property
    def turn(self) -> Int64:
        """Counts equal boxes of one rank and tensor: each is memory of its own."""
        return turns(hash_rows(self.key, self.row_kind, self.rank))

    def of_rank(self, rank: int) -> tuple[Int64, Int64]:
        """``(row, tensor)`` of all boxes of a rank."""
        rows = np.flatnonzero(self.rank == rank)
        members, start = self.members
        kind = self.row_kind[rows]
        count = (start[1:] - start[:-1])[kind]
        return np.repeat(rows, count), members[spread(start[:-1][kind], count)]

    def equals(self, other: Table) -> bool:
        """Whether the same ranks hold the same boxes."""
        columns = ("kind", "start", "rank", "dtype", "box")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)


def turns(place: UInt64) -> Int64:
    """How often each value came before."""
    turn = np.zeros(len(place), np.int64)
    order = np.argsort(place, kind="stable")
    by_value = place[order]
    same = np.zeros(len(order), bool)
    same[1:] = by_value[1:] == by_value[:-1]
    if same.any():
        at = np.arange(len(order))
        turn[order] = at - np.maximum.accumulate(np.where(same, 0, at))
    return turn
