"""Lattice boxes as numpy columns: which overlap, and in what. All regions of all tensors at once.

A box is ``lo, size, step`` per dimension (``DIMS`` columns each) and belongs to a *group* (a tensor, a parameter); only
boxes of one group can overlap. The cost is proportional to the overlaps found along the most selective dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from weightlink.hooks.geometry import DIMS, Int64


@dataclass
class Boxes:
    """``n`` boxes. ``group`` is any integer key; ``size >= 1`` everywhere."""

    group: Int64
    lo: Int64
    size: Int64
    step: Int64

    def __post_init__(self) -> None:
        self.group = self.group.astype(np.int64)
        # One canonical form: the step of a single element says nothing.
        self.step = np.where(self.size == 1, 1, self.step)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def hi(self) -> Int64:
        """Last index per dimension, inclusive."""
        hi: Int64 = self.lo + (self.size - 1) * self.step
        return hi

    @property
    def numel(self) -> Int64:
        """Elements per box."""
        numel: Int64 = self.size.prod(axis=1)
        return numel

    def unique(self) -> tuple[Int64, Int64]:
        """``(first, inverse)``: position of the first of each set of equal boxes, and each box's set."""
        keys = np.concatenate([self.group[:, None], self.lo, self.size, self.step], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return first.astype(np.int64), inverse.reshape(-1).astype(np.int64)

    def take(self, index: Int64) -> Boxes:
        """The boxes at ``index``."""
        return Boxes(self.group[index], self.lo[index], self.size[index], self.step[index])


@dataclass
class Overlaps:
    """``n`` non-empty intersections of box ``a[i]`` of one set with box ``b[i]`` of another."""

    a: Int64
    b: Int64
    lo: Int64
    size: Int64
    step: Int64


def overlaps(a: Boxes, b: Boxes) -> Overlaps:
    """Every pair of overlapping boxes of equal group, with the exact intersection (again a lattice box)."""
    empty = np.zeros(0, np.int64)
    if not len(a) or not len(b):
        none = np.zeros((0, DIMS), np.int64)
        return Overlaps(empty, empty, none, none, none)
    i, j = _candidates(a, b)
    lo, size, step = _intersect(
        (a.lo[i], a.size[i], a.step[i], a.hi[i]),
        (b.lo[j], b.size[j], b.step[j], b.hi[j]),
    )
    keep = (size > 0).all(axis=1)
    return Overlaps(i[keep], j[keep], lo[keep], size[keep], step[keep])


def _candidates(a: Boxes, b: Boxes) -> tuple[Int64, Int64]:
    """Pairs whose intervals meet along the dimension that leaves the fewest."""
    best: tuple[int, Int64, Int64, Int64] | None = None
    a_hi, b_hi = a.hi, b.hi
    top = int(max(a_hi.max(), b_hi.max())) + 2
    used = np.flatnonzero((a_hi != 0).any(axis=0) | (b_hi != 0).any(axis=0)).tolist()
    for dim in used or [0]:
        # One axis for all groups: groups lie behind one another, so that an interval never leaves its group.
        begin, end = b.group * top + b.lo[:, dim], b.group * top + b_hi[:, dim]
        order = np.argsort(begin, kind="stable")
        reach = np.maximum.accumulate(end[order])
        first = np.searchsorted(reach, a.group * top + a.lo[:, dim], side="left")
        last = np.searchsorted(begin[order], a.group * top + a_hi[:, dim], side="right")
        count = np.maximum(last - first, 0)
        total = int(count.sum())
        if best is None or total < best[0]:
            best = (total, order, first, count)
    if best is None:
        raise ValueError("boxes without dimensions")
    total, order, first, count = best
    i = np.repeat(np.arange(len(a)), count)
    within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    j = order[np.repeat(first, count) + within]
    meet = (a.group[i] == b.group[j]) & ((a.lo[i] <= b_hi[j]) & (b.lo[j] <= a_hi[i])).all(axis=1)
    return i[meet].astype(np.int64), j[meet].astype(np.int64)


def _intersect(
    a: tuple[Int64, Int64, Int64, Int64], b: tuple[Int64, Int64, Int64, Int64]
) -> tuple[Int64, Int64, Int64]:
    """Per dimension the common elements of two arithmetic progressions: again one, or nothing (size 0)."""
    a_lo, _, a_step, a_hi = a
    b_lo, _, b_step, b_hi = b
    first, last = np.maximum(a_lo, b_lo), np.minimum(a_hi, b_hi)
    step = np.ones_like(first)
    stepped = (a_step != 1) | (b_step != 1)
    steps = np.stack([a_step[stepped], b_step[stepped]], axis=1)
    for sa, sb in np.unique(steps, axis=0) if len(steps) else ():
        here = (a_step == sa) & (b_step == sb)
        common = math.gcd(int(sa), int(sb))
        both = int(sa) // common * int(sb)
        gap = (b_lo - a_lo)[here]
        inverse = pow(int(sa) // common, -1, int(sb) // common) if sb != common else 0
        start = a_lo[here] + (gap // common * inverse) % (int(sb) // common) * int(sa)
        least = np.maximum(a_lo, b_lo)[here]
        start = start + -((start - least) // both) * both
        start = np.where(start < least, start + both, start)
        first[here] = np.where(gap % common == 0, start, last[here] + 1)
        step[here] = both
    size = np.where(last >= first, (last - first) // step + 1, 0)
    return first, size, np.where(size == 1, 1, step)


def union_volume(boxes: Boxes, groups: int) -> Int64:
    """Elements per group, of ``groups``, that lie in at least one box. Made for boxes of which few overlap."""
    volume = np.zeros(groups, np.int64)
    np.add.at(volume, boxes.group, boxes.numel)
    pairs = overlaps(boxes, boxes)
    for group in np.unique(boxes.group[pairs.a[pairs.a < pairs.b]]).tolist():
        mine = boxes.take(np.flatnonzero(boxes.group == group))
        volume[group] = _union(mine.take(mine.unique()[0]))
    return volume


def _union(boxes: Boxes) -> int:
    """Along each dimension the indices that the same boxes hold are one class, so that only classes are counted."""
    inside, counts = np.ones((len(boxes), *[1] * DIMS), bool), np.ones([1] * DIMS, np.int64)
    for dim in range(DIMS):
        held = np.zeros((len(boxes), int(boxes.hi[:, dim].max()) + 1), bool)
        for n in range(len(boxes)):
            held[n, boxes.lo[n, dim] : boxes.hi[n, dim] + 1 : boxes.step[n, dim]] = True
        classes, count = np.unique(held, axis=1, return_counts=True)
        axis = [-1 if d == dim else 1 for d in range(DIMS)]
        inside, counts = inside & classes.reshape(len(boxes), *axis), counts * count.reshape(axis)
    return int(counts[inside.any(axis=0)].sum())
