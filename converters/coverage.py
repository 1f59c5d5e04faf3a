"""Proofs before the first byte: every source element exists once, every destination element is written once.

Disjoint boxes whose volumes add up to the whole cover it exactly; both are decided on the boxes themselves, without
touching an element. Only a view that is no box of its parameter is counted element by element.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from weightlink.converters.boxes import Boxes, overlaps
from weightlink.hooks.errors import CoverageError, LayoutError
from weightlink.hooks.geometry import DIMS, ITEMSIZE, Int64, Layout, ParamSpec, pad

#: Largest parameter, in elements, whose coverage is counted element by element when its views are not boxes.
COUNT_LIMIT = 1 << 27


@dataclass
class Violations:
    """Collects what is wrong, so that one error lists everything."""

    lines: list[str] = field(default_factory=list)
    tensor: str = ""
    rank: str = ""

    def add(self, tensor: str, rank: str, text: str) -> None:
        """One violation; the first one also fills the error's own fields."""
        if not self.lines:
            self.tensor, self.rank = tensor, rank
        self.lines.append(f"{tensor} on {rank}: {text}")

    def raise_if_any(self, what: str, remedy: str) -> None:
        """Raises :class:`CoverageError` listing every violation (the first 50 in full)."""
        if not self.lines:
            return
        shown = self.lines[:50]
        if len(self.lines) > len(shown):
            shown.append(f"... and {len(self.lines) - len(shown)} more")
        raise CoverageError(
            f"{what}: {len(self.lines)} violation{'s' if len(self.lines) > 1 else ''}\n    " + "\n    ".join(shown),
            tensor=self.tensor,
            rank=self.rank,
            remedy=remedy,
        )


def prove_single_memory(layout: Layout, found: Violations) -> None:
    """A box that a rank gives twice must be one piece of memory both times (tied weights are)."""
    r = layout.regions
    boxes = Boxes(r.tensor.astype(np.int64), r.lo, r.size, r.step)
    storage = np.array([(p.storage, p.start) for p in layout.params] or [(0, 0)], np.int64)[r.param]
    first, box = boxes.unique()
    other = first[box]
    same = (storage == storage[other]).all(axis=1) & (r.offset == r.offset[other])
    for row in np.flatnonzero(~same):
        names = [layout.params[int(r.param[n])].name for n in (other[row], row)]
        tensor = layout.tensors[int(r.tensor[row])].name
        found.add(tensor, layout.rank, f"given twice, by {names[0]} and by {names[1]}")


def prove_reads(layout: Layout, found: Violations) -> None:
    """Every region of a source layout must lie within the elements of its parameter."""
    r, params = layout.regions, layout.params
    _, is_box = param_boxes(params, r.param.astype(np.int64), r.offset, r.size, r.stride)
    extent = _extent(params)
    for row in np.flatnonzero(~is_box):
        spec = params[int(r.param[row])]
        offset, size, stride = r.offset[row], r.size[row], r.stride[row]
        last = int(offset + ((size - 1) * stride).sum())
        inside = int(offset) >= 0 and bool((stride >= 0).all()) and last < int(extent[int(r.param[row])])
        if inside and int(extent[int(r.param[row])]) != int(np.prod(spec.shape, dtype=np.int64)):
            inside = _within_elements(spec, int(offset), size, stride)
        if not inside:
            name = layout.tensors[int(r.tensor[row])].name
            found.add(name, layout.rank, f"is read from beyond the elements of {spec.name}")


def _within_elements(spec: ParamSpec, offset: int, size: Int64, stride: Int64) -> bool:
    """Whether a view stays on the elements of a parameter with gaps; False if that is too large to tell."""
    extent = int(_extent([spec])[0])
    if extent > COUNT_LIMIT:
        return False
    own = np.zeros(extent, bool)
    np.lib.stride_tricks.as_strided(own, spec.shape or (1,), spec.stride or (1,))[...] = True
    return bool(np.lib.stride_tricks.as_strided(own[offset:], size.tolist(), stride.tolist()).all())


def prove_tiling(
    boxes: Boxes,
    volume: Int64,
    *,
    name: Callable[[int], str],
    rank: Callable[[int], str],
    nobody: str,
    found: Violations,
) -> None:
    pairs = overlaps(boxes, boxes)
    twice = pairs.a < pairs.b
    for a, b, lo, size in zip(
        pairs.a[twice][:20], pairs.b[twice][:20], pairs.lo[twice][:20], pairs.size[twice][:20], strict=True
    ):
        found.add(
            name(int(boxes.group[a])),
            rank(int(b)),
            f"{int(size.prod())} elements from index {_index(lo)} are also given by {rank(int(a))} in another cut",
        )
    covered = np.zeros(len(volume), np.int64)
    np.add.at(covered, boxes.group, boxes.numel)
    for group in np.flatnonzero(covered < volume):
        holder = np.flatnonzero(boxes.group == group)
        who = rank(int(holder[0])) if len(holder) else nobody
        found.add(name(int(group)), who, f"{int(volume[group] - covered[group])} of {int(volume[group])} missing")


def _index(lo: Int64) -> list[int]:
    values: list[int] = lo.tolist()
    while len(values) > 1 and values[-1] == 0:
        values.pop()
    return values


def may_own(layout: Layout, owns_weights: bool, declared: Sequence[str]) -> list[int]:
    """Parameters that the engine's loader never touches, and whose content is the engine's own business.

    What the engine computes itself (non-persistent buffers) always is. Anything else looks just like a tensor that the
    trainer forgot, so it must be declared, and the engine must have loaded it.

    :param owns_weights: the engine loaded a checkpoint itself
    :param declared: local names, or patterns with ``*``, that the trainer's user declared to be the engine's own
    """
    touched = {*layout.regions.param.tolist(), *layout.fills.param.tolist(), *(o.param for o in layout.opaque)}

    def owned(p: ParamSpec) -> bool:
        return not p.loaded or (owns_weights and any(fnmatch.fnmatchcase(p.name, pattern) for pattern in declared))

    return [n for n, p in enumerate(layout.params) if n not in touched and not p.staged and owned(p)]


def delivered(layout: Layout, rank: str) -> list[int]:
    """Parameters that the engine's own loader writes, whole, when it gets the staged tensors.

    Raises :class:`LayoutError` naming what nobody can write: an opaque destination or tensor without delivery."""
    refused = [entry for entry in layout.opaque if not entry.delivered]
    if refused:
        raise LayoutError(
            f"{len(refused)} tensors cannot be updated in this engine: "
            + "; ".join(f"{entry.name}: {entry.reason}" for entry in refused[:10]),
            tensor=refused[0].name,
            rank=rank,
            remedy="neither a write in place nor the engine's own load_weights is proven to give what a load of the"
            " checkpoint gives",
        )
    return [entry.param for entry in layout.opaque if entry.param is not None]


def prove_destination(
    params: Sequence[ParamSpec],
    param: Int64,
    offset: Int64,
    size: Int64,
    stride: Int64,
    *,
    rank: str,
    owned: Iterable[int],
    found: Violations,
    delivered: Iterable[int] = (),
) -> list[str]:
    """Every element of every parameter is written exactly once by the given views (copies and fills together).

    :param param, offset, size, stride: the views; offsets in elements from the parameter's first
    :param owned: parameters that the engine may own altogether (it computed or loaded them itself)
    :param delivered: parameters that the engine's own loader writes, see :func:`delivered`; no view may touch them
    :returns: names of the engine-owned parameters, those that nothing touches
    """
    may_own, loaded = set(owned), set(delivered)
    volume = np.array([int(np.prod(p.shape, dtype=np.int64)) for p in params], np.int64)
    boxes, is_box = param_boxes(params, param, offset, size, stride)
    outside = (size < 1).any(axis=1)
    outside |= (offset < 0) | (stride < 0).any(axis=1) | (_last(offset, size, stride) >= _extent(params)[param])
    for row in np.flatnonzero(outside)[:20]:
        found.add(params[int(param[row])].name, rank, "a write reaches beyond the parameter")
    counted = {int(p) for p in param[~is_box & ~outside]}
    for number in sorted(counted):
        here = np.flatnonzero((param == number) & ~outside)
        _count(params[number], offset[here], size[here], stride[here], rank, found)
    rows = np.flatnonzero(is_box & ~outside & ~np.isin(param, list(counted)))
    touched = set(np.unique(param).tolist())
    for number in sorted(loaded & touched):
        found.add(params[number].name, rank, "is written by the plan and by the engine's own loader")
    owned_now = [n for n in range(len(params)) if n not in touched and n not in loaded]
    expected = volume.copy()
    for number in [*owned_now, *counted, *loaded]:
        expected[number] = 0
    prove_tiling(
        boxes.take(rows),
        expected,
        name=lambda p: params[p].name,
        rank=lambda _: rank,
        nobody=rank,
        found=found,
    )
    for number in owned_now:
        if number not in may_own and volume[number]:
            found.add(
                params[number].name,
                rank,
                "the trainer sends nothing for it; if it is the engine's own, declare it with engine_owned=[...]",
            )
    _prove_storage(params, rank, found)
    return [params[n].name for n in owned_now]


def _prove_storage(params: Sequence[ParamSpec], rank: str, found: Violations) -> None:
    """Two parameters that share part of a storage would be written over one another."""
    # In bytes: parameters of several dtypes may lie in one storage.
    width = [ITEMSIZE[p.dtype] for p in params]
    begin = [p.start * n for p, n in zip(params, width, strict=True)]
    end = [at + int(count) * n for at, count, n in zip(begin, _extent(params), width, strict=True)]
    order = sorted((n for n in range(len(params)) if end[n] > begin[n]), key=lambda n: (params[n].storage, begin[n]))
    for a, b in itertools.pairwise(order):
        left, right = params[a], params[b]
        if left.storage == right.storage and begin[b] < end[a]:
            found.add(right.name, rank, f"shares memory with {left.name} without being the same tensor")


def _extent(params: Sequence[ParamSpec]) -> Int64:
    """Elements from a parameter's first to its last, inclusive; 0 for an empty one."""
    values = []
    for p in params:
        empty = any(n == 0 for n in p.shape)
        values.append(0 if empty else 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride, strict=True)))
    return np.array(values, np.int64)


def _last(offset: Int64, size: Int64, stride: Int64) -> Int64:
    last: Int64 = offset + ((size - 1) * stride).sum(axis=1)
    return last


def param_boxes(
    params: Sequence[ParamSpec], param: Int64, offset: Int64, size: Int64, stride: Int64
) -> tuple[Boxes, Int64]:
    """Affine views of parameters as boxes in the parameters' own indices; and which of them are boxes at all.

    Each dimension of a view must run along one dimension of its parameter, and stay inside it.
    """
    n = len(param)
    shapes = np.array([pad(p.shape, 1) for p in params] or [[1] * DIMS], np.int64)
    strides = np.array([pad(p.stride, 0) for p in params] or [[0] * DIMS], np.int64)
    shape, along = shapes[param] if n else shapes[:0], strides[param] if n else strides[:0]
    along = np.where(shape == 1, 0, along)  # a dimension of one element has no direction
    lo, box, step = (np.full((n, DIMS), v, np.int64) for v in (0, 1, 1))
    rest, ok = offset.copy(), np.ones(n, bool)
    by_stride = np.argsort(-along, axis=1, kind="stable")
    for k in range(DIMS):  # coordinates of the first element, longest stride first
        dim = by_stride[:, k : k + 1]
        s = np.take_along_axis(along, dim, 1)[:, 0]
        coordinate: Int64 = np.where(s > 0, rest // np.maximum(s, 1), 0).astype(np.int64)
        np.put_along_axis(lo, dim, coordinate[:, None], 1)
        rest = rest - coordinate * s
    ok &= (rest == 0) & ((lo >= 0) & (lo < np.maximum(shape, 1))).all(axis=1)
    for d in range(DIMS):
        runs = size[:, d] > 1
        placed = ~runs
        for k in range(DIMS):  # the longest parameter stride that divides this view's stride and leaves room
            dim = by_stride[:, k : k + 1]
            s = np.take_along_axis(along, dim, 1)[:, 0]
            multiple = np.where(s > 0, stride[:, d] // np.maximum(s, 1), 0)
            start = np.take_along_axis(lo, dim, 1)[:, 0]
            room = np.take_along_axis(shape, dim, 1)[:, 0]
            free = np.take_along_axis(box, dim, 1)[:, 0] == 1
            fits = (s > 0) & (multiple > 0) & (multiple * s == stride[:, d]) & free
            fits &= start + (size[:, d] - 1) * multiple < room
            use = ~placed & fits
            put = np.where(use, size[:, d], np.take_along_axis(box, dim, 1)[:, 0])
            np.put_along_axis(box, dim, put[:, None], 1)
            put = np.where(use, multiple, np.take_along_axis(step, dim, 1)[:, 0])
            np.put_along_axis(step, dim, put[:, None], 1)
            placed |= use
        ok &= placed
    return Boxes(param.astype(np.int64), lo, box, step), ok


def _count(spec: ParamSpec, offset: Int64, size: Int64, stride: Int64, rank: str, found: Violations) -> None:
    """The slow, exact way for views that are no boxes: how often is each element written?"""
    numel = int(np.prod(spec.shape, dtype=np.int64))
    extent = int(_extent([spec])[0])
    if extent > COUNT_LIMIT:
        found.add(spec.name, rank, f"cannot be proven: its views are no boxes and it has {numel} elements")
        return
    times = np.zeros(extent, np.uint16)
    for o, n, s in zip(offset, size, stride, strict=True):
        if _nested(n, s):
            view = np.lib.stride_tricks.as_strided(times[int(o) :], n.tolist(), [int(x) * times.itemsize for x in s])
            view += 1
        else:  # it may meet itself, which an addition in place would not notice
            np.add.at(times, int(o) + (np.indices(n.tolist()) * s.reshape(-1, *[1] * len(n))).sum(axis=0), 1)
    mine = np.lib.stride_tricks.as_strided(
        times, spec.shape or (1,), [s * times.itemsize for s in spec.stride] or [times.itemsize]
    )
    missing, doubled = int((mine == 0).sum()), int((mine > 1).sum())
    stray = int(times.sum(dtype=np.int64) - mine.sum(dtype=np.int64))
    if stray:
        found.add(spec.name, rank, f"{stray} elements are written between those of the parameter")
    if missing:
        found.add(spec.name, rank, f"{missing} of {numel} missing")
    if doubled:
        found.add(spec.name, rank, f"{doubled} of {numel} written more than once")


def _nested(size: Int64, stride: Int64) -> bool:
    """Whether every dimension steps over all that the smaller ones reach, so that no element comes twice."""
    reach = 0
    for s, n in sorted(zip(stride.tolist(), size.tolist(), strict=True)):
        if n > 1:
            if s <= reach:
                return False
            reach += (n - 1) * s
    return True
