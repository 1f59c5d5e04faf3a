"""Sender and receiver: messages, staging memory and checksums. Ranks are threads' worth of calls in one process; what
is sent lies in a box until it is received, as the very bytes that were posted."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
import weightlink.bound
from weightlink.bound import MOST_ROUNDS, ROW, Checksum, Message, Ring
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import TransferError
from weightlink.hooks.geometry import Fills, Layout
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, build_plan
from weightlink.plugins.bench.shapes import MIXED, Dims, Shape, shape
from weightlink.program import Buckets, Copies, Program
from weightlink.threads import single_threaded
from weightlink.wire import Receiver, Sender

CPU = torch.device("cpu")
#: Nothing in it is a multiple of a row or of a message.
DIMS = Dims(layers=2, hidden=72, inter=40, heads=4, kv_heads=2, head=24, vocab=323, experts=6)
WIRE = WireSettings(bucket_bytes=32768, direct_bytes=6000, max_peers=1)

Boxes = dict[tuple[int, int], deque[torch.Tensor]]
Alter = Callable[[int, torch.Tensor], object]


class Box:
    """The channel of one rank. ``alter`` may change what is on its way, given the number of the message."""

    def __init__(self, rank: int, boxes: Boxes, alter: Alter | None = None) -> None:
        self.rank, self.size, self._boxes, self._alter, self._count = rank, 99, boxes, alter, 0

    def post(self, sends: Sequence, receives: Sequence, deadline: Deadline) -> Landing:
        for peer, tensor in sends:
            moving = tensor.clone()
            if self._alter is not None:
                self._alter(self._count, moving)
            self._count += 1
            self._boxes.setdefault((self.rank, peer), deque()).append(moving)
        return Landing(self, list(receives))

    def land(self, receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        for peer, tensor in receives:
            arrived = self._boxes[(peer, self.rank)].popleft()
            assert arrived.numel() == tensor.numel()
            tensor.copy_(arrived)


class Landing:
    def __init__(self, box: Box, receives: list[tuple[int, torch.Tensor]]) -> None:
        self._box, self._receives = box, receives

    def wait(self, deadline: Deadline) -> None:
        self._box.land(self._receives)


class Case:
    """A trainer's and an engine's ranks with real memory, one plan, and what must arrive."""

    def __init__(self, made: Shape, wire: WireSettings = WIRE) -> None:
        self.made = made
        self.plan: Plan = build_plan(made.trainers, [EngineLayouts("engine", made.engines)], wire)
        self.sources = [self.memory(layout) for layout in made.trainers]
        self.targets = [self.memory(layout) for layout in made.engines]
        self.senders = [Sender(self.program(rank, True), wire, CPU) for rank in range(len(made.trainers))]
        self.receivers = [Receiver(self.program(rank, False), Fills(), wire, CPU) for rank in range(len(made.engines))]

    def program(self, rank: int, sending: bool) -> Program:
        return self.plan.send_program(0, rank) if sending else self.plan.receive_program(0, rank)

    @staticmethod
    def memory(layout: Layout) -> list[torch.Tensor]:
        return [torch.full(p.shape, torch.nan, dtype=getattr(torch, p.dtype)) for p in layout.params]

    @staticmethod
    def places(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[slice, ...], torch.Tensor]]:
        """Tensor number, canonical slice and local view of every region."""
        found = []
        r = layout.regions
        for n in range(len(r)):
            dims = len(layout.tensors[r.tensor[n]].shape)
            where = tuple(slice(int(a), int(a + b)) for a, b in zip(r.lo[n][:dims], r.size[n][:dims], strict=True))
            view = tensors[r.param[n]].as_strided(r.size[n][:dims].tolist(), r.stride[n][:dims].tolist(), r.offset[n])
            found.append((int(r.tensor[n]), where, view))
        return found

    def push(
        self,
        seed: int,
        update: str = "update",
        alter: Alter | None = None,
        prepared: Callable[[], object] | None = None,
    ) -> None:
        """One update of random values, and its check. With ``prepared`` the senders prepare it, and that is called."""
        generator = torch.Generator().manual_seed(seed)
        self.values = [
            torch.randint(-(1 << 15), 1 << 15, spec.shape, dtype=torch.int16, generator=generator)
            for spec in self.plan.manifest
        ]
        for layout, tensors in zip(self.made.trainers, self.sources, strict=True):
            for number, where, view in self.places(layout, tensors):
                view.copy_(self.values[number][where].view(torch.bfloat16))
        if prepared is not None:
            for sender, tensors in zip(self.senders, self.sources, strict=True):
                sender.prepare(tensors)
            prepared()
        boxes: Boxes = {}
        deadline, trainers = Deadline.after(60), len(self.senders)
        for rank, (sender, tensors) in enumerate(zip(self.senders, self.sources, strict=True)):
            sender.run(tensors, Box(rank, boxes, alter), update, deadline)
        for rank, (receiver, tensors) in enumerate(zip(self.receivers, self.targets, strict=True)):
            receiver.run(tensors, Box(trainers + rank, boxes), "update", deadline)
        assert not any(boxes.values())
        for receiver in self.receivers:
            receiver.check()

    def require_arrival(self) -> None:
        for layout, tensors in zip(self.made.engines, self.targets, strict=True):
            for number, where, view in self.places(layout, tensors):
                got = view.clone().view(torch.int16)
                assert torch.equal(got, self.values[number][where]), layout.tensors[number].name


@pytest.fixture(params=[ROW, 3 * ROW, 0], ids=["row", "rows", "whole"])
def messages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Buckets travel in messages of this size."""
    monkeypatch.setattr(weightlink.bound, "message_bytes", lambda device: request.param)
    return int(request.param)


@pytest.mark.parametrize("world", [(1, 1), (2, 2), (2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("peers", [1, 3])
def test_every_element_arrives_in_one_update_after_the_other(messages: int, world: tuple[int, int], peers: int) -> None:
    case = Case(shape(DIMS, *world), WireSettings(bucket_bytes=32768, direct_bytes=6000, max_peers=peers))
    for seed in (1, 2):
        case.push(seed)
        case.require_arrival()


@pytest.mark.parametrize("which", ["sender", "receiver"])
def test_one_end_may_stage_what_the_other_has_in_place(messages: int, which: str) -> None:
    class Staged(Case):
        def program(self, rank: int, sending: bool) -> Program:
            program = super().program(rank, sending)
            assert program.buckets.direct.any()
            if sending == (which == "sender"):
                program.buckets.direct = np.zeros_like(program.buckets.direct)
            return program

    case = Staged(shape(DIMS, 2, 2))
    case.push(3)
    case.require_arrival()


def test_ranks_whose_largest_buckets_differ_have_the_same_checksums() -> None:
    """The checksum of a bucket does not depend on what else its sender or its receiver has to do."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (5 * ROW + 77,), dtype=torch.uint8, generator=generator)
    sums = torch.zeros(3, dtype=torch.int64)
    for n, rows in enumerate((6, 7, 1000)):
        Message(0, 0, data).check(Checksum(rows, CPU), sums[n])
    assert len(set(sums.tolist())) == 1
    case = Case(shape(DIMS, 3, 2))
    assert len({int(case.program(rank, True).buckets.nbytes.max()) for rank in range(3)}) > 1
    case.push(11)
    case.require_arrival()


def test_memory_that_moved_is_bound_anew() -> None:
    case = Case(shape(DIMS, 1, 1))
    case.push(4)
    for tensors in (*case.sources, *case.targets):
        tensors[:] = [torch.full_like(t, torch.nan) for t in tensors]
    case.push(5)
    case.require_arrival()


def test_prepared_sums_serve_one_run(messages: int) -> None:
    case = Case(shape(DIMS, 2, 2))
    for seed in (21, 22):
        case.push(seed, prepared=lambda: None)
        case.require_arrival()
    case.push(23)
    case.require_arrival()
    for sender, tensors in zip(case.senders, case.sources, strict=True):
        sender.prepare(tensors)  # an update that never came to its transfer
    case.push(24, prepared=lambda: None)
    case.require_arrival()


def test_a_tensor_that_changes_after_its_sum_was_taken_shows(messages: int) -> None:
    case = Case(shape(DIMS, 1, 1))
    program = case.program(0, True)
    direct = int(np.flatnonzero(program.buckets.direct[program.copies.bucket])[0])
    tensor, element = case.sources[0][program.copies.param[direct]], int(program.copies.offset[direct])
    with pytest.raises(TransferError, match=r"^1 of \d+ buckets did not arrive"):
        case.push(25, prepared=lambda: tensor.view(torch.int16).view(-1)[element].bitwise_xor_(4))
    case.push(26)
    case.require_arrival()


def test_memory_that_moves_after_its_sum_was_taken_is_summed_anew() -> None:
    case = Case(shape(DIMS, 1, 1))

    def move() -> None:
        case.sources[0][:] = [t.clone() for t in case.sources[0]]

    case.push(27, prepared=move)
    case.require_arrival()


def flip(data: torch.Tensor) -> None:
    data[-1] ^= 64


def exchange_rows(data: torch.Tensor) -> None:
    data[: 2 * ROW] = data[: 2 * ROW].roll(ROW)


@pytest.mark.parametrize(
    ("which", "change"),
    [(0, flip), (5, flip), (-1, flip), (2, torch.Tensor.zero_), (1, exchange_rows)],
    ids=["first message", "sixth message", "headers", "one message lost", "rows exchanged"],
)
def test_whatever_happens_on_the_wire_shows(
    monkeypatch: pytest.MonkeyPatch, which: int, change: Callable[[torch.Tensor], object]
) -> None:
    monkeypatch.setattr(weightlink.bound, "message_bytes", lambda device: 3 * ROW)
    case = Case(shape(DIMS, 1, 1))
    sizes: list[int] = []
    case.push(6, alter=lambda count, data: sizes.append(data.numel()))
    case.require_arrival()
    assert sizes[1] == 3 * ROW
    assert len(sizes) > 7
    number = which % len(sizes)
    with pytest.raises(TransferError, match="did not arrive as they were sent"):
        case.push(7, alter=lambda count, data: change(data) if count == number else None)
    case.push(8)
    case.require_arrival()


def test_bytes_of_another_update_show() -> None:
    case = Case(shape(DIMS, 1, 1))
    with pytest.raises(TransferError, match="did not arrive as they were sent"):
        case.push(9, update="an older update")


def test_staging_is_two_buckets_per_peer_and_direction_whatever_the_size_of_the_model() -> None:
    sizes = []
    for layers in (2, 6):
        case = Case(shape(msgspec.structs.replace(DIMS, layers=layers), 2, 2))
        sides = (*case.senders, *case.receivers)
        assert max(side.staging_bytes for side in sides) <= 2 * WIRE.bucket_bytes + 2 * ROW
        sizes.append(max(side.staging_bytes for side in sides))
    assert 0 < sizes[1] < 1.5 * sizes[0]
    full = shape(MIXED, 2, 2)
    plan = build_plan(full.trainers, [EngineLayouts("engine", full.engines)], WireSettings())
    for rank in range(2):
        for program in (plan.send_program(0, rank), plan.receive_program(0, rank)):
            assert 0 < Ring(program).size <= 2 * (WireSettings().bucket_bytes + ROW)


@pytest.mark.parametrize("seed", range(20))
def test_rounds_under_way_together_share_no_staging_memory(seed: int) -> None:
    rng = random.Random(seed)
    rounds = sorted(rng.randrange(40) for _ in range(80))
    sizes = [rng.choice([1, 100, ROW, 3 * ROW + 1, 9 * ROW]) for _ in rounds]
    direct = [int(rng.random() < 0.3) for _ in rounds]
    n = len(rounds)
    buckets = Buckets(
        np.arange(n), np.zeros(n, np.int32), np.array(rounds, np.int32), np.array(sizes), np.array(direct, np.int32)
    )
    ring = Ring(Program("", "", 40, Copies(), buckets))
    assert sorted(number for numbers in ring.rounds for number in numbers) == list(range(n))
    staged = [sum(-(-sizes[k] // ROW) * ROW for k in numbers if not direct[k]) for numbers in ring.rounds]
    assert ring.size == min(2 * max(staged), sum(staged))
    together = 0
    for r in range(len(ring.rounds)):
        assert -1 <= ring.after[r] < r
        assert r - ring.after[r] <= MOST_ROUNDS
        assert r == 0 or ring.after[r] >= ring.after[r - 1]
        used = np.zeros(ring.size, np.int8)
        for other in range(ring.after[r] + 1, r + 1):
            together += other < r
            for number in ring.rounds[other]:
                start = ring.starts[number]
                assert (start is None) == bool(direct[number])
                if start is not None:
                    assert start % ROW == 0
                    assert start + sizes[number] <= ring.size
                    used[start : start + sizes[number]] += 1
        assert used.max(initial=0) <= 1
    assert together >= len(ring.rounds) - 1  # the next round begins while one is under way


def test_operators_keep_to_one_thread_inside_and_get_theirs_back() -> None:
    before = torch.get_num_threads()
    inside: list[int] = []
    meet = threading.Barrier(3)

    def work() -> None:
        with single_threaded(CPU):
            meet.wait(30)
            inside.append(torch.get_num_threads())
            meet.wait(30)

    threads = [threading.Thread(target=work) for _ in range(2)]
    torch.set_num_threads(3)
    try:
        for thread in threads:
            thread.start()
        meet.wait(30)
        meet.wait(30)
        for thread in threads:
            thread.join()
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (inside, later, torch.get_num_threads()) == ([1, 1], [3], 3)
    finally:
        torch.set_num_threads(before)
