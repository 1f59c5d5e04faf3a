"""Over random layouts: what the ranks' own programs move equals the slice of the canonical tensor, and layouts that do
not cover everything exactly are refused before a byte moves."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import complaints, contradicts, memory, put, random_manifest, random_side
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import LayoutError
from weightlink.hooks.geometry import Fills, Layout, Regions, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, build_plan
from weightlink.program import Program, verify_local, verify_receive
from weightlink.wire import Receiver, Sender

CPU = torch.device("cpu")
FLOATS = ("float32", "bfloat16", "float16")
WIRES = (
    WireSettings(bucket_bytes=4096, direct_bytes=64, max_peers=1),
    WireSettings(bucket_bytes=4096, direct_bytes=1 << 20, max_peers=3),
)
randoms = st.randoms(use_true_random=False)


#: How often each property is tried, as a multiple of its own number: a little by default, much more in the full grid.
effort = pytest.mark.parametrize("effort", [1, pytest.param(25, marks=pytest.mark.grid)])


def tried(times: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Runs the decorated property at once, on ``times`` examples."""
    chosen = settings(
        max_examples=times,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    return lambda holds: chosen(given(*strategies)(holds))()


class Post:
    """The channel of one group rank whose peers are all in this process: what is sent waits until it is received."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], deque[torch.Tensor]]) -> None:
        self.rank, self._boxes = rank, boxes
        self._due: list[tuple[int, torch.Tensor]] = []

    def post(self, sends: Sequence, receives: Sequence, deadline: Deadline) -> Post:
        for peer, tensor in sends:
            self._boxes.setdefault((self.rank, peer), deque()).append(tensor.clone())
        batch = Post(self.rank, self._boxes)
        batch._due = list(receives)
        return batch

    def wait(self, deadline: Deadline) -> None:
        for peer, tensor in self._due:
            arrived = self._boxes[(peer, self.rank)].popleft()
            assert arrived.numel() == tensor.numel()
            tensor.copy_(arrived)


def carry(
    plan: Plan,
    trainers: Sequence[Layout],
    engines: Sequence[Layout],
    sources: Sequence,
    targets: Sequence,
    declared: Sequence[str] = (),
):
    """Every rank does what its packed program says, after both sides have proven theirs."""
    boxes: dict[tuple[int, int], deque[torch.Tensor]] = {}
    deadline = Deadline.after(60)
    numbers = {spec.name: n for n, spec in enumerate(plan.manifest)}
    for rank, layout in enumerate(trainers):
        program = Program.unpack(plan.send_program(0, rank).pack())
        places = np.array([numbers[spec.name] for spec in layout.tensors], np.int64)
        verify_local(program, layout, places, rank=layout.rank)
        Sender(program, plan.wire, CPU).run(sources[rank], Post(rank, boxes), "update", deadline)
    for rank, layout in enumerate(engines):
        program = Program.unpack(plan.receive_program(0, rank).pack())
        verify_receive(program, layout, plan_digest=plan.digest, rank=layout.rank, declared=declared)
        receiver = Receiver(program, layout.fills, plan.wire, CPU)
        receiver.run(targets[rank], Post(len(trainers) + rank, boxes), "update", deadline)
        receiver.check()
    assert not any(boxes.values())


def index_coded(manifest: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Each element of each tensor has a value of its own, exact in every float dtype: no two positions look alike."""
    values, start = {}, 1
    for spec in manifest:
        numel = int(np.prod(spec.shape))
        assert start + numel < 1 << 9
        codes = torch.arange(start, start + numel, dtype=torch.int32)
        # 8 bits of mantissa are exact in bf16 and fp16; the sign and the exponent tell the rest apart.
        values[spec.name] = (
            ((codes % 128 + 128) * torch.where(codes // 128 % 2 == 0, 1.0, -1.0))
            .mul(2.0 ** (codes // 256))
            .reshape(spec.shape)
        )
        start += numel
    return values


def good_case(rng: random.Random, dtypes: Sequence[str] = ("float32",)):
    manifest = random_manifest(rng)
    trainers = random_side(rng, "trainer", manifest, dtypes=dtypes, fill=False)
    return manifest, trainers, random_side(rng, "rank", manifest, dtypes=dtypes, fill=True)


def require_arrival(plan: Plan, trainers: Sequence[Layout], engines: Sequence[Layout], values: dict[str, torch.Tensor]):
    sources, targets, wanted = ([memory(layout) for layout in side] for side in (trainers, engines, engines))
    for layout, tensors in zip(trainers, sources, strict=True):
        put(layout, tensors, values)
    for layout, tensors in zip(engines, wanted, strict=True):
        put(layout, tensors, values)
    carry(plan, trainers, engines, sources, targets)
    for layout, got, want in zip(engines, targets, wanted, strict=True):
        for spec, have, should in zip(layout.params, got, want, strict=True):
            # The whole storage, so that nothing was written beside the parameter either.
            a, b = (torch.frombuffer(bytearray(bytes(t.untyped_storage())), dtype=torch.uint8) for t in (have, should))
            assert torch.equal(a, b), f"{spec} on {layout.rank}"


@effort
def test_what_is_sent_through_regions_is_the_slice(effort):
    @tried(60 * effort, randoms, st.sampled_from(WIRES))
    def holds(rng, wire):
        manifest, trainers, engines = good_case(rng, FLOATS)
        assert complaints(trainers, engines) == []
        plan = build_plan(trainers, [EngineLayouts("engine", engines)], wire)
        require_arrival(plan, trainers, engines, index_coded(manifest))


def change(rng: random.Random, layout: Layout) -> Layout | None:
    """The layout with one region or fill dropped, doubled, moved, cut or stretched; None when there is nothing."""
    fills = len(layout.fills) and rng.random() < 0.3
    table = layout.fills if fills else layout.regions
    if not len(table):
        return None
    row = rng.randrange(len(table))
    everything = np.arange(len(table))
    what = rng.choice(["drop", "double", "lo", "size", "step", "offset", "stride", "tensor", "param"])
    columns = {name: getattr(table, name).copy() for name in table.COLUMNS}
    if what in ("drop", "double"):
        keep = np.delete(everything, row) if what == "drop" else np.append(everything, row)
        columns = {name: column[keep] for name, column in columns.items()}
        if what == "double" and rng.random() < 0.5:
            columns["offset"][-1] += rng.choice([-1, 1])
    elif what not in columns:
        return None
    elif what in ("tensor", "param"):
        columns[what][row] = rng.randrange(len(layout.tensors if what == "tensor" else layout.params))
    else:
        dims = len(layout.tensors[int(layout.regions.tensor[row])].shape) if not fills else 2
        spot = (row,) if columns[what].ndim == 1 else (row, rng.randrange(dims))
        columns[what][spot] += rng.choice([-2, -1, 1, 2])
    event(f"{what} of a {'fill' if fills else 'region'}")
    if fills:
        return dataclasses.replace(layout, fills=Fills(*columns.values()))
    return dataclasses.replace(layout, regions=Regions(*columns.values()))


@effort
def test_a_changed_layout_is_refused_or_still_right(effort):
    """Whatever happens to a layout on its way: it is refused unless the element-wise judge finds it right too."""

    @tried(100 * effort, randoms, st.booleans())
    def holds(rng, engine_side):
        manifest, trainers, engines = good_case(rng)
        side = engines if engine_side else trainers
        victim = rng.randrange(len(side))
        changed = change(rng, side[victim])
        if changed is None:
            return
        side[victim] = changed
        try:
            side[victim] = Layout.unpack(changed.pack())
            plan = build_plan(trainers, [EngineLayouts("engine", engines)], WIRES[0])
        except LayoutError:
            event("refused")
            return
        event("accepted")
        assert complaints(trainers, engines) == []
        if not any(map(contradicts, trainers)):  # tied weights may share memory; here they would not be equal
            require_arrival(plan, trainers, engines, index_coded(manifest))


@effort
def test_a_lost_or_doubled_region_of_an_engine_is_refused(effort):
    @tried(40 * effort, randoms, st.booleans())
    def holds(rng, double):
        _, trainers, engines = good_case(rng)
        victim = rng.choice([n for n, layout in enumerate(engines) if len(layout.regions)])
        layout = engines[victim]
        rows = np.arange(len(layout.regions))
        row = rng.randrange(len(rows))
        rows = np.append(rows, row) if double else np.delete(rows, row)
        engines[victim] = dataclasses.replace(layout, regions=layout.regions.take(rows))
        with pytest.raises(LayoutError):
            build_plan(trainers, [EngineLayouts("engine", engines)], WIRES[0])


@effort
def test_a_piece_that_no_trainer_rank_holds_any_more_is_missed(effort):
    @tried(40 * effort, randoms)
    def holds(rng):
        _, trainers, engines = good_case(rng)
        victim = rng.choice([n for n, layout in enumerate(trainers) if len(layout.regions)])
        row = rng.randrange(len(trainers[victim].regions))

        def piece(regions, i):
            return int(regions.tensor[i]), regions.lo[i].tolist()

        mine = piece(trainers[victim].regions, row)
        for n, layout in enumerate(trainers):
            rows = [i for i in range(len(layout.regions)) if piece(layout.regions, i) != mine]
            trainers[n] = dataclasses.replace(layout, regions=layout.regions.take(np.array(rows, np.intp)))
        with pytest.raises(LayoutError):
            build_plan(trainers, [EngineLayouts("engine", engines)], WIRES[0])
