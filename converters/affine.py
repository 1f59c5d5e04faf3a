"""Exact arithmetic on affine maps between two linear address spaces.

An :class:`Affine` ties addresses of one space to addresses of another: element ``at + sum(k_d * at_stride_d)``
corresponds to ``to + sum(k_d * to_stride_d)`` for every index ``k`` of a box. A strided view, a copy between two views
and the place of a checkpoint tensor inside a buffer are all of this form, so that following data movement is
composition of maps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

LIMIT = 1024
"""Most boxes that one copy may fall into. Real loaders need a few; beyond this a copy is not worth describing."""

_STEPS = 100 * LIMIT

Dim = tuple[int, int, int]
Lattice = tuple[int, int, int]
"""``(lo, size, step)`` within one dimension of a box."""


class TooComplex(Exception):
    """A data movement that does not fall into at most :data:`LIMIT` boxes."""


class Affine(NamedTuple):
    """``dims`` are ``(size, at stride, to stride)``; sizes are positive, no dimension of size one is needed."""

    at: int
    to: int
    dims: tuple[Dim, ...]

    @property
    def numel(self) -> int:
        return math.prod(dim[0] for dim in self.dims)

    @property
    def swapped(self) -> Affine:
        """The same pairs, seen from the other space."""
        return Affine(self.to, self.at, tuple((n, to, at) for n, at, to in self.dims))

    def bounds(self) -> tuple[int, int]:
        """Lowest and highest ``at`` address."""
        low = high = self.at
        for n, stride, _ in self.dims:
            if stride < 0:
                low += (n - 1) * stride
            else:
                high += (n - 1) * stride
        return low, high

    def restrict(self, box: Iterable[Lattice]) -> Affine:
        """The part whose index lies in ``box``, one lattice per dimension."""
        at, to, dims = self.at, self.to, []
        for (_, a, b), (lo, n, step) in zip(self.dims, box, strict=True):
            at += lo * a
            to += lo * b
            if n > 1:
                dims.append((n, a * step, b * step))
        return Affine(at, to, tuple(dims))

    def points(self, position: int) -> Iterator[Affine]:
        """One map per index of the dimension at ``position``, which disappears."""
        n, a, b = self.dims[position]
        rest = self.dims[:position] + self.dims[position + 1 :]
        for k in range(n):
            yield Affine(self.at + k * a, self.to + k * b, rest)


class _Axis(NamedTuple):
    size: int
    stride: int
    dim: int
    unit: int
    """Steps of the owner's dimension ``dim`` per step along this axis; negative after a reflection."""


class Pair(NamedTuple):
    """A box of solutions of ``a.at(k) == b.at(m)``. ``dims`` are ``(size, a's dim, a's step, b's dim, b's step)``;
    an a-only dimension (``a`` repeats an address) has b's step 0."""

    a_lo: tuple[int, ...]
    b_lo: tuple[int, ...]
    dims: tuple[tuple[int, int, int, int, int], ...]


def _axes(owner: Affine) -> tuple[list[_Axis], list[int], int, list[int]]:
    """Axes by falling stride, the index from which they count, the address there, and dimensions of stride zero."""
    axes, lo, base, free = [], [0] * len(owner.dims), owner.at, []
    for d, (n, stride, _) in enumerate(owner.dims):
        if n == 1:
            continue
        if stride == 0:
            free.append(d)
        elif stride > 0:
            axes.append(_Axis(n, stride, d, 1))
        else:
            axes.append(_Axis(n, -stride, d, -1))
            lo[d] = n - 1
            base += (n - 1) * stride
    axes.sort(key=lambda axis: -axis.stride)
    return axes, lo, base, free


def _span(axes: Sequence[_Axis]) -> int:
    return sum((axis.size - 1) * axis.stride for axis in axes)


class _Meeting:
    """Solves ``sum(k*a) - sum(m*b) == delta`` over two boxes, as boxes. The largest stride is settled first: equal
    strides run along each other, a dimension that reaches over several steps of the other is split into digits, and
    what is left is enumerated."""

    def __init__(self) -> None:
        self.found: list[Pair] = []
        self.steps = 0

    def solve(
        self,
        a: list[_Axis],
        b: list[_Axis],
        delta: int,
        a_lo: list[int],
        b_lo: list[int],
        dims: tuple[tuple[int, int, int, int, int], ...],
    ) -> None:
        self.steps += 1
        if self.steps > _STEPS or len(self.found) > LIMIT:
            raise TooComplex
        if delta > _span(a) or -delta > _span(b):
            return
        if not a and not b:
            self.found.append(Pair(tuple(a_lo), tuple(b_lo), dims))
            return
        if a and b and a[0].stride == b[0].stride:
            self._along(a, b, delta, a_lo, b_lo, dims)
        elif not b or (a and a[0].stride > b[0].stride):
            if b and (split := _digits(b, a)):
                blocks, rest, taken = split
                self.solve(a, blocks, delta, a_lo, b_lo, dims)
                if taken < b[0].size:
                    moved = _moved(b_lo, b[0], taken)
                    self.solve(a, rest, delta + taken * b[0].stride, a_lo, moved, dims)
                return
            axis, others = a[0], a[1:]
            low, high = delta - _span(others), delta + _span(b)
            for k in _multiples(low, high, axis):
                self.solve(others, b, delta - k * axis.stride, _moved(a_lo, axis, k), b_lo, dims)
        else:
            if a and (split := _digits(a, b)):
                blocks, rest, taken = split
                self.solve(blocks, b, delta, a_lo, b_lo, dims)
                if taken < a[0].size:
                    moved = _moved(a_lo, a[0], taken)
                    self.solve(rest, b, delta - taken * a[0].stride, moved, b_lo, dims)
                return
            axis, others = b[0], b[1:]
            low, high = -delta - _span(others), -delta + _span(a)
            for m in _multiples(low, high, axis):
                self.solve(a, others, delta + m * axis.stride, a_lo, _moved(b_lo, axis, m), dims)

    def _along(
        self,
        a: list[_Axis],
        b: list[_Axis],
        delta: int,
        a_lo: list[int],
        b_lo: list[int],
        dims: tuple[tuple[int, int, int, int, int], ...],
    ) -> None:
        head_a, rest_a, head_b, rest_b = a[0], a[1:], b[0], b[1:]
        stride = head_a.stride
        first = -((_span(rest_a) - delta) // stride)
        last = (delta + _span(rest_b)) // stride
        for ahead in range(max(first, 1 - head_b.size), min(last, head_a.size - 1) + 1):
            start = max(0, -ahead)
            size = min(head_b.size, head_a.size - ahead) - start
            extra = ((size, head_a.dim, head_a.unit, head_b.dim, head_b.unit),) if size > 1 else ()
            self.solve(
                rest_a,
                rest_b,
                delta - ahead * stride,
                _moved(a_lo, head_a, start + ahead),
                _moved(b_lo, head_b, start),
                dims + extra,
            )


def _moved(lo: list[int], axis: _Axis, steps: int) -> list[int]:
    if not steps:
        return lo
    moved = list(lo)
    moved[axis.dim] += steps * axis.unit
    return moved


def _multiples(low: int, high: int, axis: _Axis) -> range:
    """Steps along ``axis`` whose distance lies in ``[low, high]``."""
    return range(max(0, -(-low // axis.stride)), min(axis.size - 1, high // axis.stride) + 1)


def _digits(small: list[_Axis], large: list[_Axis]) -> tuple[list[_Axis], list[_Axis], int] | None:
    """Splits the head of ``small`` into two digits, so that the upper one has the stride that the head of ``large`` has
    or can be split to. Returns the axes of whole blocks, those of the left-over part, and the steps before that part
    (all of them if nothing is left over); None if there is no whole block."""
    head = small[0]
    common = math.lcm(head.stride, large[0].stride)
    per = common // head.stride
    if head.size <= per or (large[0].stride != common and large[0].size <= common // large[0].stride):
        return None
    whole, left = divmod(head.size, per)
    blocks = [_Axis(per, head.stride, head.dim, head.unit), *small[1:]]
    if whole > 1:
        blocks.insert(0, _Axis(whole, common, head.dim, head.unit * per))
    rest = [_Axis(left, head.stride, head.dim, head.unit)] if left > 1 else []
    return blocks, [*rest, *small[1:]], whole * per


def meet(a: Affine, b: Affine) -> list[Pair]:
    """Where the ``at`` addresses of ``a`` and ``b`` coincide, as disjoint boxes. ``b`` must not repeat an address.
    Raises :class:`TooComplex`."""
    a_axes, a_lo, a_base, a_free = _axes(a)
    b_axes, b_lo, b_base, b_free = _axes(b)
    if b_free:
        raise TooComplex
    meeting = _Meeting()
    meeting.solve(a_axes, b_axes, b_base - a_base, a_lo, b_lo, ())
    if not a_free:
        return meeting.found
    free = tuple((a.dims[d][0], d, 1, 0, 0) for d in a_free)
    return [Pair(pair.a_lo, pair.b_lo, pair.dims + free) for pair in meeting.found]


def _to(owner: Affine, lo: Sequence[int]) -> int:
    return owner.to + sum(k * dim[2] for k, dim in zip(lo, owner.dims, strict=True))


def compose(view: Affine, piece: Affine) -> list[Affine]:
    """``view.to -> piece.to`` over the addresses that both have. Raises :class:`TooComplex`."""
    if len(piece.dims) == 1 and piece.dims[0][1:] == (1, 1):
        low, high = view.bounds()
        if piece.at <= low and high < piece.at + piece.dims[0][0]:
            return [Affine(view.to, piece.to + view.at - piece.at, tuple((n, to, at) for n, at, to in view.dims))]
    return [
        Affine(
            _to(view, pair.a_lo),
            _to(piece, pair.b_lo),
            tuple((n, sa * view.dims[da][2], sb * piece.dims[db][2] if sb else 0) for n, da, sa, db, sb in pair.dims),
        )
        for pair in meet(view, piece)
    ]


def overlaps(a: Affine, b: Affine) -> bool:
    """Whether the ranges of ``at`` addresses touch; cheap, and never False for maps that meet."""
    a_low, a_high = a.bounds()
    b_low, b_high = b.bounds()
    return a_low <= b_high and b_low <= a_high


def agree(a: Affine, b: Affine) -> bool:
    """Whether both lead to the same ``to`` wherever their ``at`` addresses coincide. Raises :class:`TooComplex`."""
    return all(
        _to(a, pair.a_lo) == _to(b, pair.b_lo)
        and all(sa * a.dims[da][2] == (sb * b.dims[db][2] if sb else 0) for _, da, sa, db, sb in pair.dims)
        for pair in meet(a, b)
    )


def subtract(a: Affine, b: Affine) -> list[Affine]:
    """``a`` without the ``at`` addresses of ``b``, as disjoint maps. Raises :class:`TooComplex`."""
    kept: list[Affine] = []
    todo = [a]
    while todo:
        part = todo.pop()
        shared = meet(part, b) if overlaps(part, b) else []
        if not shared:
            kept.append(part)
            continue
        if len(todo) + len(kept) > LIMIT:
            raise TooComplex
        todo += complement(part, _box(part, shared[0]))
    return kept


def _box(owner: Affine, pair: Pair) -> list[Lattice]:
    """A lattice per dimension of ``owner`` that lies within the pair's box (all of it, if one lattice can say it)."""
    box = [(lo, 1, 1) for lo in pair.a_lo]
    for n, dim, step, _, _ in sorted(pair.dims, key=lambda row: abs(row[2])):
        lo, size, unit = box[dim]
        first = lo + min(0, (n - 1) * step)
        if size == 1:
            box[dim] = (first, n, abs(step))
        elif abs(step) == size * unit:
            box[dim] = (first, n * size, unit)
        # Another digit that does not continue the first: only its first value is taken, the rest is met again later.
    return box


def complement(owner: Affine, box: Sequence[Lattice]) -> list[Affine]:
    """``owner`` without the part whose index lies in ``box``, as disjoint maps."""
    parts = []
    whole: list[Lattice] = [(0, dim[0], 1) for dim in owner.dims]
    for d, (lo, n, step) in enumerate(box):
        last = lo + (n - 1) * step
        outside = [(0, lo, 1), (last + 1, owner.dims[d][0] - last - 1, 1)]
        outside += [(lo + r, n - 1, step) for r in range(1, step)]
        if len(outside) > LIMIT:
            raise TooComplex
        parts += [owner.restrict([*box[:d], part, *whole[d + 1 :]]) for part in outside if part[1] > 0]
    return parts


def runs(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """``values`` as ``(first, count, difference)`` of arithmetic progressions, in order. Raises :class:`TooComplex`."""
    found = []
    start = 0
    while start < len(values):
        stop = start + 1
        step = values[stop] - values[start] if stop < len(values) else 1
        while stop < len(values) and values[stop] - values[stop - 1] == step:
            stop += 1
        found.append((values[start], stop - start, step))
        start = stop
        if len(found) > LIMIT:
            raise TooComplex
    return found


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``."""
    return tuple(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()


class Box(NamedTuple):
    """A region: canonical ``lo, size, step`` per dimension, local ``offset`` and ``stride`` per canonical dimension."""

    lo: list[int]
    size: list[int]
    step: list[int]
    offset: int
    stride: list[int]


def boxes(piece: Affine, shape: Sequence[int]) -> list[Box]:
    """``piece`` (local -> row-major element of ``shape``) as regions in the canonical per-dimension form.

    A dimension that repeats an element, that runs backwards, or that shares its canonical dimension with another one
    becomes several regions. Raises :class:`TooComplex`.
    """
    strides = contiguous(shape)
    simple = _simple(piece, shape, strides)
    if simple is not None:
        return [simple]
    canonical = Affine(0, 0, tuple((n, stride, 0) for n, stride in zip(shape, strides, strict=True)))
    found: list[Box] = []
    todo = [piece.swapped]
    while todo:
        part = todo.pop()
        if len(found) + len(todo) > LIMIT:
            raise TooComplex
        repeated = [d for d, (n, canon, _) in enumerate(part.dims) if n > 1 and canon == 0]
        if repeated:
            if part.dims[repeated[0]][0] > LIMIT:
                raise TooComplex
            todo += part.points(repeated[0])
            continue
        for pair in meet(part, canonical):
            dims = tuple((n, sb * strides[db], sa * part.dims[da][2]) for n, da, sa, db, sb in pair.dims)
            at = sum(k * stride for k, stride in zip(pair.b_lo, strides, strict=True))
            found += _split(Affine(at, _to(part, pair.a_lo), dims), [row[3] for row in pair.dims], shape, strides)
            if len(found) > LIMIT:
                raise TooComplex
    return found


def _split(part: Affine, owners: list[int], shape: Sequence[int], strides: Sequence[int]) -> list[Box]:
    """``part`` (canonical -> local), each of whose dimensions lies within the canonical dimension ``owners[d]``."""
    for d, (n, _, local) in enumerate(part.dims):
        twin = next((e for e in range(d) if owners[e] == owners[d]), None)
        if twin is not None and (merged := _merged(part.dims[twin], part.dims[d])) is not None:
            dims = (*part.dims[:twin], merged, *part.dims[twin + 1 : d], *part.dims[d + 1 :])
            return _split(Affine(part.at, part.to, dims), owners[:d] + owners[d + 1 :], shape, strides)
        if twin is not None or local < 0:
            chosen = d if twin is None or n <= part.dims[twin][0] else twin
            if part.dims[chosen][0] > LIMIT:
                raise TooComplex
            rest = owners[:chosen] + owners[chosen + 1 :]
            found = []
            for point in part.points(chosen):
                found += _split(point, rest, shape, strides)
                if len(found) > LIMIT:
                    raise TooComplex
            return found
    box = _simple(part.swapped, shape, strides)
    if box is None:
        raise TooComplex
    return [box]


def _merged(a: Dim, b: Dim) -> Dim | None:
    """Two dimensions as one, where the slower one continues the faster one in both spaces."""
    fast, slow = (a, b) if abs(a[1]) < abs(b[1]) else (b, a)
    if slow[1] == fast[0] * fast[1] and slow[2] == fast[0] * fast[2]:
        return (fast[0] * slow[0], fast[1], fast[2])
    return None


def _simple(piece: Affine, shape: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The one region that ``piece`` is, if each of its dimensions runs forwards within its own canonical dimension."""
    lo, rest, offset = [], piece.to, piece.at
    for stride in strides:
        lo.append(rest // stride)
        rest %= stride
    size, step, local = [1] * len(shape), [1] * len(shape), [0] * len(shape)
    for n, at, to in piece.dims:
        if n == 1:
            continue
        dim = next((d for d, stride in enumerate(strides) if shape[d] > 1 and 0 < stride <= to), None)
        if dim is None or size[dim] > 1 or to % strides[dim] or at <= 0:
            return None
        each = to // strides[dim]
        if lo[dim] + (n - 1) * each >= shape[dim]:
            return None
        size[dim], step[dim], local[dim] = n, each, at
    return Box(lo, size, step, offset, local)
