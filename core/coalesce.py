"""Fewer, larger copies: those that continue one another become one, those at constant distances one with one more
dimension.

Each end does it for itself when it binds its copies: positions on the wire stay as they are. A rank of a mixture of
experts has a copy per expert, projection and shard; moved one by one, each costs a call, and on a GPU a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from weightlink.hooks.geometry import Int64

#: Dimensions that constant distances may add, one at a time: rows, experts.
LEVELS = 2

#: Odd, so that multiplying by it loses nothing modulo 2^64.
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass
class Strided:
    """``n`` copies between wire and memory, in elements. Only copies of one ``group`` are ever joined: what groups have
    in common (message, storage, dtypes) is the caller's.

    :param wire: first element in the staging memory, ``[n]``
    :param memory: first element in the storage, ``[n]``
    :param size: ``[n, dims]``; dimensions of one element follow the others
    :param wire_stride: elements of staging memory from one index to the next, ``[n, dims]``
    :param memory_stride: elements of the storage from one index to the next, ``[n, dims]``
    """

    group: Int64
    wire: Int64
    memory: Int64
    size: Int64
    wire_stride: Int64
    memory_stride: Int64

    @classmethod
    def of(cls, group: Int64, wire: Int64, memory: Int64, size: Int64, stride: Int64) -> Strided:
        """Copies that lie packed on the wire, each in the order of its elements."""
        inner = np.ones_like(size)
        inner[:, :-1] = size[:, :0:-1].cumprod(axis=1)[:, ::-1]
        return cls(group, wire, memory, size, inner, stride)

    def __len__(self) -> int:
        return len(self.wire)

    @property
    def dims(self) -> Int64:
        """How many dimensions of each copy count, at least one: ``[n]``."""
        dims: Int64 = np.maximum((self.size != 1).sum(axis=1), 1)
        return dims

    def _take(self, rows: Int64) -> Strided:
        return Strided(
            self.group[rows],
            self.wire[rows],
            self.memory[rows],
            self.size[rows],
            self.wire_stride[rows],
            self.memory_stride[rows],
        )


def coalesce(copies: Strided) -> Strided:
    """The same elements between the same places in as few copies as are found in one pass of each kind, in the order of
    groups and places on the wire."""
    copies = _continued(simplified(copies))
    for _ in range(LEVELS):
        before = len(copies)
        copies = _continued(simplified(_spaced(copies)))
        if len(copies) == before:
            break
    return copies._take(np.lexsort((copies.wire, copies.group)))


def simplified(c: Strided) -> Strided:
    """The same elements in the same order with the fewest dimensions, the outermost first."""
    rows = np.arange(len(c))
    size = np.ones_like(c.size)
    wire, memory = np.zeros_like(c.size), np.zeros_like(c.size)
    last = np.full(len(c), -1)
    for d in range(c.size.shape[1]):
        n, w, m = c.size[:, d], c.wire_stride[:, d], c.memory_stride[:, d]
        at = np.maximum(last, 0)
        joins = (last >= 0) & (wire[rows, at] == n * w) & (memory[rows, at] == n * m)
        last += (n != 1) & ~joins
        here = np.flatnonzero(n != 1)
        at = last[here]
        size[here, at] *= n[here]
        wire[here, at], memory[here, at] = w[here], m[here]
    single = last < 0
    wire[single, 0] = memory[single, 0] = 1
    kept = max(int(last.max(initial=0)) + 1, 1)
    return Strided(c.group, c.wire, c.memory, size[:, :kept], wire[:, :kept], memory[:, :kept])


def _sorted_alike(c: Strided, *, outer: bool) -> tuple[Strided, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Copies that are alike one after the other, by place on the wire; and whether each is like the one before it.

    :param outer: the outermost size counts, too"""
    columns = [c.group, *(c.size.T if outer else c.size.T[1:]), *c.wire_stride.T, *c.memory_stride.T]
    key = np.zeros(len(c), np.uint64)
    for column in columns:
        key = (key ^ (key >> np.uint64(29))) * _MIX + column.astype(np.uint64)
    order = np.lexsort((c.wire, key))  # two kinds of one key only hide joins from one another
    alike = np.ones(max(len(c) - 1, 0), bool)
    for column in columns:
        placed = column[order]
        alike &= placed[1:] == placed[:-1]
    return c._take(order), alike


def _continued(c: Strided) -> Strided:
    """Copies that begin where the one before would go on, on the wire and in memory, become longer ones."""
    c, alike = _sorted_alike(c, outer=False)
    first = c.size[:-1, 0]
    alike &= c.wire[1:] == c.wire[:-1] + first * c.wire_stride[:-1, 0]
    alike &= c.memory[1:] == c.memory[:-1] + first * c.memory_stride[:-1, 0]
    heads = np.flatnonzero(np.concatenate([np.ones(min(len(c), 1), bool), ~alike]))
    joined = c._take(heads)
    if len(heads) < len(c):
        joined.size = joined.size.copy()
        joined.size[:, 0] = np.add.reduceat(c.size[:, 0], heads)
    return joined


def _spaced(c: Strided) -> Strided:
    """Copies of equal form at constant distances become one with an outermost dimension more."""
    c, alike = _sorted_alike(c, outer=True)
    if len(c) < 2:
        return c
    wire, memory = np.diff(c.wire), np.diff(c.memory)
    alike &= memory > 0
    # Steps from one copy to the next, in runs of equal ones. Two runs that meet share a copy; the first one has it, and
    # a run of one step without it is none. So of runs of one step that follow one another, every other one counts.
    begins = np.ones(len(alike), bool)
    begins[1:] = ~(alike[1:] & alike[:-1] & (wire[1:] == wire[:-1]) & (memory[1:] == memory[:-1]))
    run = np.flatnonzero(begins & alike)
    ends = np.append(np.flatnonzero(begins), len(alike))
    length = ends[np.searchsorted(ends, run, side="right")] - run
    meets = np.zeros(len(run), bool)
    meets[1:] = run[1:] == run[:-1] + length[:-1]
    number = np.arange(len(run))
    fresh = np.maximum.accumulate(np.where(~meets, number, 0))
    long = np.maximum.accumulate(np.where(length > 1, number, -1))
    # Since the run that last had its end for certain: a longer one, or the first of those that meet.
    certain = np.concatenate([[-1], long[:-1]])
    taken = meets & np.where(certain >= fresh, (number - certain) % 2 == 1, (number - fresh) % 2 == 1)
    head, count = run + taken, length + 1 - taken
    head, step, count = head[count > 1], run[count > 1], count[count > 1]

    kept = np.ones(len(c), bool)
    inside = np.zeros(len(c) + 1, np.int64)
    np.add.at(inside, head + 1, 1)
    np.add.at(inside, head + count, -1)
    kept[inside[:-1].cumsum() > 0] = False
    outer = np.zeros((3, len(c)), np.int64)
    outer[0] = 1
    outer[:, head] = count, wire[step], memory[step]
    rows = np.flatnonzero(kept)
    found = c._take(rows)
    return Strided(
        found.group,
        found.wire,
        found.memory,
        np.concatenate([outer[0, rows, None], found.size], axis=1),
        np.concatenate([outer[1, rows, None], found.wire_stride], axis=1),
        np.concatenate([outer[2, rows, None], found.memory_stride], axis=1),
    )
