"""Copies put together move the same elements between the same places, and are as few as they should be."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import weightlink.bound
from hypothesis import given, settings
from hypothesis import strategies as st
from weightlink.bound import Bound, Ring
from weightlink.coalesce import Strided, coalesce, simplified
from weightlink.hooks.geometry import DIMS, Fills, pad
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, build_plan
from weightlink.plugins.bench.shapes import Dims, shape
from weightlink.program import Program

CPU = torch.device("cpu")


def copies(rows: list[tuple[int, int, int, list[int], list[int]]]) -> Strided:
    """From group, first element on the wire, first element in memory, size and stride in memory."""
    return Strided.of(
        np.array([r[0] for r in rows], np.int64),
        np.array([r[1] for r in rows], np.int64),
        np.array([r[2] for r in rows], np.int64),
        np.array([pad(r[3], 1) for r in rows], np.int64).reshape(-1, DIMS),
        np.array([pad(r[4], 0) for r in rows], np.int64).reshape(-1, DIMS),
    )


def moved(c: Strided) -> list[tuple[int, int, int]]:
    """Every element that moves: its group, its place on the wire and in memory."""
    found = []
    for n in range(len(c)):
        wire, memory = c.wire[n], c.memory[n]
        for d in range(c.size.shape[1]):
            steps = np.arange(c.size[n, d])
            wire = np.add.outer(wire, steps * c.wire_stride[n, d])
            memory = np.add.outer(memory, steps * c.memory_stride[n, d])
        found += [
            (int(c.group[n]), w, m) for w, m in zip(wire.flatten().tolist(), memory.flatten().tolist(), strict=True)
        ]
    return sorted(found)


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_same_elements_move(rng: random.Random) -> None:
    """Lattices of equal blocks, some of them missing, between others of any size, in memory that goes up or down."""
    rows: list[tuple[int, int, int, list[int], list[int]]] = []
    wire = 0
    for _ in range(rng.randint(1, 5)):
        group, memory = rng.randint(0, 1), rng.randint(0, 4) * 1000
        size = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        stride, room = [0] * len(size), 1
        for d in reversed(range(len(size))):
            stride[d] = room
            room = room * size[d] + rng.choice((0, 0, 1))
        align = rng.choice((1, 1, 4))
        inner, outer = room + rng.choice((0, 0, 2)), rng.choice((-1, 1, 1, 1)) * 50
        for far in range(rng.randint(1, 5)):
            for near in range(rng.randint(1, 4)):
                if rng.random() < 0.9:
                    rows.append((group, wire, memory + 500 + far * outer + near * inner, size, stride))
                wire += -(-int(np.prod(size)) // align) * align
                if rng.random() < 0.1:
                    wire += 3
    if not rows:
        return
    rng.shuffle(rows)
    before = copies(rows)
    after = coalesce(before)
    assert len(after) <= len(before)
    assert moved(after) == moved(before)
    assert moved(simplified(before)) == moved(before)
    assert (np.diff(after.group) >= 0).all()
    assert after.memory_stride.min() >= 0  # a view cannot run backwards


def test_nothing_is_nothing() -> None:
    assert len(coalesce(copies([]))) == 0


def test_neighbouring_rows_become_one_run() -> None:
    """Query, key and value of different heights, one after the other here and there."""
    rows, at = [], 0
    for height in (12, 3, 3, 7):
        rows.append((0, at, 100 + at, [height, 5], [5, 1]))
        at += height * 5
    one = coalesce(copies(rows))
    assert (one.wire.tolist(), one.memory.tolist(), one.size.tolist()) == ([0], [100], [[125]])


def test_a_gap_on_one_side_keeps_neighbours_apart() -> None:
    assert len(coalesce(copies([(0, 0, 0, [4], [1]), (0, 5, 4, [6], [1])]))) == 2
    assert len(coalesce(copies([(0, 0, 0, [4], [1]), (0, 4, 5, [6], [1])]))) == 2
    assert len(coalesce(copies([(0, 0, 0, [4], [1]), (1, 4, 4, [6], [1])]))) == 2


def test_experts_at_constant_distances_become_one_copy() -> None:
    """Columns of each expert's matrix, padded on the wire, others between them: experts x rows x columns."""
    rows, at = [], 0
    for expert in range(6):
        rows.append((0, at, expert * 7 * 11 + 4, [7, 5], [11, 1]))
        rows.append((1, at + 38, expert * 20, [13], [1]))  # another parameter's
        at += 51
    found = coalesce(copies(rows))
    assert found.dims.tolist() == [3, 2]
    assert found.size.tolist() == [[6, 7, 5], [6, 13, 1]]
    assert found.memory_stride.tolist() == [[77, 11, 1], [20, 1, 0]]
    assert found.wire_stride.tolist() == [[51, 5, 1], [51, 1, 0]]


def test_two_projections_of_each_expert_become_one_copy_of_one_dimension_more() -> None:
    """Gate and up at one distance, experts at another."""
    rows = [
        (0, (expert * 2 + half) * 24, expert * 101 + half * 50, [6, 4], [8, 1])
        for expert in range(5)
        for half in range(2)
    ]
    assert coalesce(copies(rows)).size.tolist() == [[5, 2, 6, 4]]


def test_a_missing_expert_splits_the_run_once() -> None:
    rows = [(0, n * 16, n * 40, [16], [1]) for n in range(20) if n != 8]
    assert sorted(coalesce(copies(rows)).size[:, 0].tolist()) == [8, 11]


class Counted:
    """How many copies each rank makes per update, as planned and as bound."""

    def __init__(self, dims: Dims, world: tuple[int, int], *, flat: bool = False) -> None:
        made = shape(dims, *world)
        plan = build_plan(made.trainers, [EngineLayouts("engine", made.engines)], WireSettings())
        self.planned: list[int] = []
        self.bound: list[int] = []
        for sending, layouts in ((True, made.trainers), (False, made.engines)):
            for rank, layout in enumerate(layouts):
                program = plan.send_program(0, rank) if sending else plan.receive_program(0, rank)
                sizes = [int(np.prod(p.shape)) for p in layout.params]
                if flat:
                    memory = torch.zeros(sum(sizes), dtype=torch.bfloat16).split(sizes)
                else:
                    memory = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
                self.planned.append(int((program.buckets.direct[program.copies.bucket] == 0).sum()))
                self.bound.append(self.count(program, list(memory), sending))

    @staticmethod
    def count(program: Program, tensors: list[torch.Tensor], sending: bool) -> int:
        ring = Ring(program)
        staging = torch.empty(ring.size, dtype=torch.uint8)
        bound = Bound(program, Fills(), ring, staging, tensors, unpack=not sending)
        messages = [m for r in bound.rounds for step in r.steps for m in step]
        moves = [pair for m in messages for pair in m.moves.values()]
        assert sum(p.numel() for packed, _ in moves for p in packed) * 2 == sum(
            program.buckets.nbytes[program.buckets.direct == 0]
        ) - _padding(program)
        return sum(len(packed) for packed, _ in moves)


def _padding(program: Program) -> int:
    c = program.copies
    staged = program.buckets.direct == 0
    return int(program.buckets.nbytes[staged].sum() - c.nbytes[staged[c.bucket]].sum())


#: A small mixture of experts in which nothing is a multiple of a message, most of it in small matrices.
MOE = Dims(layers=2, hidden=72, inter=40, heads=4, kv_heads=2, head=24, vocab=323, experts=24)


def test_a_mixture_of_experts_makes_few_copies() -> None:
    """An engine has all experts of a layer in two tensors; a trainer has each in two, in memory of their own."""
    counted = Counted(MOE, (1, 2))
    assert counted.planned == [328, 164, 164]
    assert counted.bound == [224, 20, 20]


def test_parameters_in_one_flat_buffer_are_put_together() -> None:
    assert Counted(MOE, (1, 2), flat=True).bound == [18, 8, 8]


def test_copies_are_put_together_within_a_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightlink.bound, "message_bytes", lambda device: 4096)
    assert Counted(MOE, (1, 2)).bound[1] > 40
