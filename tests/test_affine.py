"""Affine maps against the enumeration of every element."""

from __future__ import annotations

import itertools
import random

import pytest
from weightlink.converters import affine
from weightlink.converters.affine import Affine, TooComplex


def points(m: Affine) -> list[tuple[int, int]]:
    """Every ``(at, to)`` of a map."""
    return [
        (
            m.at + sum(k * dim[1] for k, dim in zip(index, m.dims, strict=True)),
            m.to + sum(k * dim[2] for k, dim in zip(index, m.dims, strict=True)),
        )
        for index in itertools.product(*(range(dim[0]) for dim in m.dims))
    ]


def random_view(rng: random.Random) -> tuple[int, list[tuple[int, int]]]:
    """Offset and ``(size, stride)`` of a sliced, stepped, turned and permuted tensor."""
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    offset, dims = rng.randint(0, 4), []
    for n, stride in zip(shape, affine.contiguous(shape), strict=True):
        step, lo = rng.choice([1, 1, 2, 3]), rng.randint(0, n - 1)
        size = rng.randint(1, (n - 1 - lo) // step + 1)
        offset += lo * stride
        stride *= step
        if rng.random() < 0.2:
            offset += (size - 1) * stride
            stride = -stride
        dims.append((size, stride))
    rng.shuffle(dims)
    return offset, dims


def random_map(rng: random.Random) -> Affine:
    offset, dims = random_view(rng)
    codes = affine.contiguous([n for n, _ in dims])
    return Affine(offset, rng.randint(0, 3), tuple((n, s, c) for (n, s), c in zip(dims, codes, strict=True)))


@pytest.mark.parametrize("seed", range(8))
def test_compose_subtract_agree(seed: int) -> None:
    rng = random.Random(seed)
    met = 0
    for _ in range(500):
        a, b = random_map(rng), random_map(rng)
        there = dict(points(b))
        shared = [(to, there[at]) for at, to in points(a) if at in there]
        met += bool(shared)
        assert sorted(p for part in affine.compose(a, b) for p in points(part)) == sorted(shared)
        left = [(at, to) for at, to in points(a) if at not in there]
        assert sorted(p for part in affine.subtract(a, b) for p in points(part)) == sorted(left)
        assert affine.agree(a, b) == all(mine == theirs for mine, theirs in shared)
        assert affine.overlaps(a, b) or not shared
    assert met > 50


@pytest.mark.parametrize("seed", range(8))
def test_boxes_hold_every_element_once(seed: int) -> None:
    rng = random.Random(seed)
    seen = 0
    for _ in range(500):
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        strides = affine.contiguous(shape)
        offset, dims = random_view(rng)
        local = affine.contiguous([n for n, _ in dims])
        m = Affine(
            100, offset, tuple((n, c * rng.choice([1, 1, -1]), s) for (n, s), c in zip(dims, local, strict=True))
        )
        if max(to for _, to in points(m)) >= shape[0] * strides[0]:
            continue
        seen += 1
        if rng.random() < 0.2:
            m = Affine(m.at, m.to, ((3, 1000, 0), *m.dims))
        found = []
        for box in affine.boxes(m, shape):
            for lo, size, step, limit in zip(box.lo, box.size, box.step, shape, strict=True):
                assert 0 <= lo <= lo + (size - 1) * step < limit
                assert step >= 1
            for index in itertools.product(*(range(n) for n in box.size)):
                at = box.offset + sum(k * stride for k, stride in zip(index, box.stride, strict=True))
                to = sum((lo + k * step) * s for lo, k, step, s in zip(box.lo, index, box.step, strides, strict=True))
                found.append((at, to))
        assert sorted(found) == sorted(points(m))
    assert seen > 50


def test_what_needs_too_many_boxes_is_refused() -> None:
    with pytest.raises(TooComplex):
        affine.boxes(Affine(2 * affine.LIMIT, 0, ((2 * affine.LIMIT, -1, 1),)), [2 * affine.LIMIT])
    with pytest.raises(TooComplex):
        affine.runs([k * k for k in range(3 * affine.LIMIT)])


def test_large_maps_cost_no_more_than_small_ones() -> None:
    rows, columns = 1 << 20, 1 << 16
    flat = Affine(0, 5, ((rows * columns - 7, 1, 1),))
    found = affine.boxes(flat, [rows, columns])
    assert len(found) <= 5
    assert sum(box.size[0] * box.size[1] for box in found) == rows * columns - 7


def test_dimensions_are_split_and_joined_as_the_shape_asks() -> None:
    split = affine.boxes(Affine(7, 0, ((24, 1, 1),)), [2, 3, 4])
    assert split == [([0, 0, 0], [2, 3, 4], [1, 1, 1], 7, [12, 4, 1])]
    joined = affine.boxes(Affine(7, 0, ((2, 12, 12), (3, 4, 4), (4, 1, 1))), [24])
    assert joined == [([0], [24], [1], 7, [1])]
