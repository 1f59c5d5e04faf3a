"""Surveys from the wire: whatever is malformed is a PlanMismatch, at once, and nothing else ever.

Every case runs in this process: one of them is a segmentation fault without the checks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from layouts import contiguous
from weightlink.hooks.errors import PlanMismatch, WeightlinkError
from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, build_plan, make_plan
from weightlink.survey import Survey

WIRE = WireSettings(bucket_bytes=4096, direct_bytes=64)


def whole(rank: str, shapes: list[tuple[int, ...]]) -> Layout:
    tensors = tuple(TensorSpec(f"t{n}", shape, "float32") for n, shape in enumerate(shapes))
    build, params = RegionBuilder(), []
    for n, spec in enumerate(tensors):
        build.add(n, n, lo=[0] * len(spec.shape), size=list(spec.shape), offset=0, stride=contiguous(spec.shape))
        params.append(ParamSpec(spec.name, spec.shape, "float32", n, 0, contiguous(spec.shape)))
    return Layout(rank, tensors, tuple(params), build.build())


def message() -> list:
    """A packed survey as plain lists: manifest, tables, sides; two kinds of tensors, a table for each side."""
    shapes = [(4, 5), (6, 3), (4, 5), (6, 3)]
    trainers = [whole("trainer 0", shapes), whole("trainer 1", shapes)]
    plan = build_plan(trainers, [EngineLayouts("e", [whole("rank 0", shapes)])], WIRE)
    return msgspec.msgpack.decode(plan.survey.pack())


def column(values: list[int], kind: str = "<i8") -> list:
    return [kind, np.array(values, kind).tobytes()]


KIND, ROWS, RANK, DTYPE, BOX = 1, 2, 3, 4, 5


def values(table: list, which: int) -> np.ndarray:
    kind, data = table[which]
    return np.frombuffer(data, kind).astype(np.int64)


def change(which: int, new: Callable[[np.ndarray], np.ndarray]) -> Callable[[list], None]:
    def apply(plain: list) -> None:
        table = plain[1][0]
        table[which] = column(new(values(table, which)).tolist())

    return apply


def put(which: int, at: int, value: int) -> Callable[[list], None]:
    def apply(old: np.ndarray) -> np.ndarray:
        old[at] = value
        return old

    return change(which, apply)


def wrapped(plain: list) -> None:
    """Counts whose sum is right modulo 2**64."""
    plain[0] = plain[0] + [{"name": f"more{n}", "shape": [n + 7], "dtype": "float32"} for n in range(4)]
    for t in plain[1]:
        kinds = values(t, KIND).tolist()
        top = max(kinds) + 1
        t[KIND] = column([*kinds, *(top + n for n in range(4))])
        t[ROWS] = column([*values(t, ROWS).tolist(), *([1 << 62] * 4)])


CASES = {
    "kind below zero": put(KIND, 2, -1),
    "kind far below zero": put(KIND, 2, -99),
    "first kind below zero": put(KIND, 0, -1),
    "kind too large": put(KIND, 3, 7),
    "kind huge": put(KIND, 3, 1 << 62),
    "rank below zero": put(RANK, 0, -1),
    "rank huge": put(RANK, 0, 1 << 62),
    "dtype below zero": put(DTYPE, 0, -1),
    "rows below zero": change(ROWS, lambda old: np.array([old.sum() + 3, *([0] * (len(old) - 2)), -3])),
    "rows that wrap": wrapped,
    "rows too many": put(ROWS, 0, 1 << 40),
    "box beyond its tensor": put(BOX, 0, 1000),
    "box far beyond its tensor": put(BOX, 0, 1 << 61),
    "size of a universe": change(BOX, lambda old: np.where(np.arange(len(old)) == 2, 1 << 32, old)),
    "sizes that wrap": change(
        BOX, lambda old: np.where((np.arange(len(old)) % 6 == 2) | (np.arange(len(old)) % 6 == 3), 1 << 32, old)
    ),
    "step of zero": put(BOX, 4, 0),
    "step huge": put(BOX, 4, 1 << 62),
}


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_survey_is_a_plan_mismatch(name: str) -> None:
    plain = message()
    CASES[name](plain)
    with pytest.raises(PlanMismatch):
        Survey.unpack(msgspec.msgpack.encode(plain))


def test_shapes_too_large_for_this_world() -> None:
    plain = message()
    spec = plain[0][0]
    spec["shape"] = [1 << 62, 1 << 62]
    plain[0][2]["shape"] = [1 << 62, 1 << 62]
    with pytest.raises(WeightlinkError):
        make_plan(Survey.unpack(msgspec.msgpack.encode(plain)), WIRE, ignore=["*"])


def test_more_dimensions_than_a_region_has_and_negative_ones() -> None:
    for shape in ([1] * 9, [-4, -5], [0, 5]):
        plain = message()
        plain[0][0]["shape"] = plain[0][2]["shape"] = shape
        with pytest.raises(WeightlinkError):
            make_plan(Survey.unpack(msgspec.msgpack.encode(plain)), WIRE, ignore=["*"])


def test_names_that_come_twice() -> None:
    plain = message()
    plain[0][1]["name"] = plain[0][0]["name"]
    with pytest.raises(PlanMismatch):
        Survey.unpack(msgspec.msgpack.encode(plain))


def test_nested_too_deeply() -> None:
    good = msgspec.msgpack.encode(message())
    assert good[0] == 0x93
    with pytest.raises(PlanMismatch):
        Survey.unpack(b"\x94" + good[1:] + b"\x91" * 200_000 + b"\xc0")


@pytest.mark.parametrize("seed", range(6))
def test_fuzzed_bytes(seed: int) -> None:
    good = msgspec.msgpack.encode(message())
    rng = random.Random(seed)
    for _ in range(100):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            what = rng.random()
            if what < 0.6:
                data[rng.randrange(len(data))] = rng.randrange(256)
            elif what < 0.8:
                del data[rng.randrange(len(data)) :][: rng.randint(1, 9)]
            else:
                at = rng.randrange(len(data))
                data[at:at] = rng.randbytes(rng.randint(1, 9))
        attempt(bytes(data))


@pytest.mark.parametrize("seed", range(12))
def test_fuzzed_fields(seed: int) -> None:
    rng = random.Random(seed)
    special = [0, 1, 2, -1, -2, 5, 127, 255, 1 << 31, 1 << 40, 1 << 61, -(1 << 62), (1 << 63) - 1, -(1 << 63)]
    for _ in range(30):
        plain = message()
        for _ in range(rng.randint(1, 3)):
            table = rng.choice(plain[1])
            which = rng.choice([KIND, ROWS, RANK, DTYPE, BOX])
            old = values(table, which)
            if len(old):
                old = old.copy()
                old[rng.randrange(len(old))] = rng.choice(special)
            table[which] = column(old.tolist())
            if rng.random() < 0.1:
                table[0] = rng.choice([0, 1, 3, 5])
        attempt(msgspec.msgpack.encode(plain))


def attempt(data: bytes) -> None:
    """Refused, or planned, or refused while it is planned; nothing but our errors."""
    with contextlib.suppress(WeightlinkError):
        make_plan(Survey.unpack(data), WIRE, ignore=["*"])
