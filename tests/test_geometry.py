"""Boxes and coverage against brute force over sets of elements."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import random_side, random_tensors
from weightlink.converters.boxes import Boxes, overlaps
from weightlink.converters.coverage import Violations, prove_destination, prove_tiling
from weightlink.hooks.errors import CoverageError, LayoutError
from weightlink.hooks.geometry import DIMS, Layout, ParamSpec, RegionBuilder, TensorSpec

axis = st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 4))
box = st.tuples(st.integers(0, 1), st.lists(axis, min_size=2, max_size=2))


def boxes_of(listed) -> Boxes:
    def column(k, filler):
        return np.array([[a[k] for a in axes] + [filler] * (DIMS - 2) for _, axes in listed], np.int64)

    return Boxes(np.array([g for g, _ in listed], np.int64), column(0, 0), column(1, 1), column(2, 1))


def elements(axes) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(lo, lo + n * step, step) for lo, n, step in axes)))


@given(st.lists(box, max_size=6), st.lists(box, max_size=6))
@settings(max_examples=300, deadline=None)
def test_overlaps_are_exactly_the_common_elements(a, b):
    found = overlaps(boxes_of(a), boxes_of(b)) if a and b else None
    expected = {
        (i, j): common
        for (i, (ga, xa)), (j, (gb, xb)) in itertools.product(enumerate(a), enumerate(b))
        if ga == gb and (common := elements(xa) & elements(xb))
    }
    got = {}
    if found is not None:
        for n in range(len(found.a)):
            axes = list(
                zip(found.lo[n][:2].tolist(), found.size[n][:2].tolist(), found.step[n][:2].tolist(), strict=True)
            )
            got[int(found.a[n]), int(found.b[n])] = elements(axes)
    assert got == expected


def prove(layout: Layout, owned=()) -> list[str]:
    r, f = layout.regions, layout.fills
    found = Violations()
    names = prove_destination(
        layout.params,
        np.concatenate([r.param, f.param]).astype(np.int64),
        np.concatenate([r.offset, f.offset]),
        np.concatenate([r.size, f.size]),
        np.concatenate([r.stride, f.stride]),
        rank=layout.rank,
        owned=owned,
        found=found,
    )
    found.raise_if_any("coverage", "none")
    return names


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_complete_destinations_are_proven_and_any_loss_is_found(seed):
    rng = random.Random(seed)
    tensors = random_tensors(rng, 3, dims=4)
    for layout in random_side(rng, "engine", tensors, 2, padding=True, replicas=True):
        assert prove(layout) == []
        count = len(layout.regions)
        if not count:
            continue
        victim = rng.randrange(count)
        without = Layout(
            layout.rank, layout.tensors, layout.params, layout.regions.take(np.arange(count) != victim), layout.fills
        )
        with pytest.raises(CoverageError, match=r"missing|sends nothing"):
            prove(without)
        doubled = Layout(
            layout.rank,
            layout.tensors,
            layout.params,
            layout.regions.take(np.array([*range(count), victim])),
            layout.fills,
        )
        with pytest.raises(CoverageError, match=r"another cut|more than once"):
            prove(doubled)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_sources_must_tile_every_tensor(seed):
    rng = random.Random(seed)
    tensors = random_tensors(rng, 3)
    layouts = random_side(rng, "trainer", tensors, 3, padding=True, replicas=True)
    rows = [(layout, n) for layout in layouts for n in range(len(layout.regions))]

    def check(keep):
        parts = [layout.regions.take(np.array([n])) for layout, n in keep]
        group, lo, size, step = (
            np.concatenate([getattr(p, c) for p in parts]) for c in ("tensor", "lo", "size", "step")
        )
        found = Violations()
        boxes = Boxes(group, lo, size, step)
        first, _ = boxes.unique()
        prove_tiling(
            boxes.take(first),
            np.array([np.prod(t.shape) for t in tensors]),
            name=lambda n: tensors[n].name,
            rank=lambda n: keep[first[n]][0].rank,
            nobody="no trainer rank",
            found=found,
        )
        return found.lines

    assert check(rows) == []
    victim = rng.choice(rows)
    same = [
        row
        for row in rows
        if all(
            (getattr(row[0].regions, c)[row[1]] == getattr(victim[0].regions, c)[victim[1]]).all()
            for c in ("tensor", "lo", "size", "step")
        )
    ]
    rest = [row for row in rows if row not in same]
    if rest:
        name = tensors[int(victim[0].regions.tensor[victim[1]])].name
        assert any(line.startswith(name) and "missing" in line for line in check(rest))


def test_views_that_are_no_boxes_are_counted():
    """A diagonal-like view runs along no dimension of its parameter: decided element by element."""
    spec = (ParamSpec("p", (4, 4), "float32", 0, 0, (4, 1)),)
    tensors = (TensorSpec("d", (4,), "float32"), TensorSpec("u", (12,), "float32"))
    build = RegionBuilder()
    build.add(0, 0, lo=[0], size=[4], offset=0, stride=[5])
    with pytest.raises(CoverageError, match="12 of 16 missing"):
        prove(Layout("r", tensors, spec, build.build()))
    for row in range(3):
        build.add(1, 0, lo=[row * 4], size=[4], offset=row * 5 + 1, stride=[1])
    assert prove(Layout("r", tensors, spec, build.build())) == []


def test_untouched_parameters_are_owned_only_when_the_engine_may():
    params = tuple(ParamSpec(n, (3,), "float32", i, 0, (1,)) for i, n in enumerate(("mine", "theirs")))
    build = RegionBuilder()
    build.add(0, 1, lo=[0], size=[3], offset=0, stride=[1])
    layout = Layout("r", (TensorSpec("t", (3,), "float32"),), params, build.build())
    assert prove(layout, owned=[0]) == ["mine"]
    with pytest.raises(CoverageError, match="mine on r: the trainer sends nothing"):
        prove(layout)


def test_parameters_that_share_memory_in_part_are_refused():
    params = (ParamSpec("a", (4,), "float32", 7, 0, (1,)), ParamSpec("b", (4,), "float32", 7, 2, (1,)))
    build = RegionBuilder()
    build.add(0, 0, lo=[0], size=[4], offset=0, stride=[1])
    build.add(0, 1, lo=[0], size=[4], offset=0, stride=[1])
    with pytest.raises(CoverageError, match="b on r: shares memory with a"):
        prove(Layout("r", (TensorSpec("t", (4,), "float32"),), params, build.build()))


@pytest.mark.parametrize(
    ("dtype", "start", "shared"), [("bfloat16", 7, True), ("bfloat16", 8, False), ("int64", 1, True)]
)
def test_memory_is_compared_in_bytes_when_dtypes_differ(dtype, start, shared):
    """``a`` takes bytes 0 to 16 of the storage."""
    params = (ParamSpec("a", (4,), "float32", 7, 0, (1,)), ParamSpec("b", (3,), dtype, 7, start, (1,)))
    build = RegionBuilder()
    build.add(0, 0, lo=[0], size=[4], offset=0, stride=[1])
    build.add(1, 1, lo=[0], size=[3], offset=0, stride=[1])
    layout = Layout("r", (TensorSpec("t", (4,), "float32"), TensorSpec("u", (3,), dtype)), params, build.build())
    if shared:
        with pytest.raises(CoverageError, match="b on r: shares memory with a"):
            prove(layout)
    else:
        prove(layout)


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_a_layout_survives_its_message(seed):
    rng = random.Random(seed)
    for layout in random_side(rng, "r", random_tensors(rng, 3), 2, padding=True, replicas=False):
        back = Layout.unpack(layout.pack())
        assert (back.rank, back.tensors, back.params) == (layout.rank, layout.tensors, layout.params)
        for table in ("regions", "fills"):
            for name in getattr(layout, table).COLUMNS:
                assert (getattr(getattr(back, table), name) == getattr(getattr(layout, table), name)).all()


def test_malformed_layouts_are_refused():
    build = RegionBuilder()
    build.add(0, 0, lo=[2], size=[3], offset=0, stride=[1])
    layout = Layout(
        "r", (TensorSpec("t", (4,), "float32"),), (ParamSpec("p", (3,), "float32", 0, 0, (1,)),), build.build()
    )
    with pytest.raises(LayoutError, match="outside its canonical tensor"):
        Layout.unpack(layout.pack())
    with pytest.raises(LayoutError, match="not a layout"):
        Layout.unpack(b"\x00garbage")
    build = RegionBuilder()
    build.add(3, 0, lo=[0], size=[3], offset=0, stride=[1])
    layout.regions = build.build()
    with pytest.raises(LayoutError, match="tensor index is out of range"):
        Layout.unpack(layout.pack())
    with pytest.raises(LayoutError, match="at most 5 dimensions"):
        build.add(0, 0, lo=[0] * 6, size=[1] * 6, offset=0, stride=[0] * 6)
