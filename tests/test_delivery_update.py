"""Opaque tensors in whole updates: real groups, boards and owner threads; staging memory lives as long as it must."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence

import pytest
import rig as rigged
import torch
import weightlink.rank
from layouts import canonical, random_side
from oracle import live, poison
from rig import Rig, TorchEngine
from torch import nn
from weightlink.converters.replay import observe
from weightlink.hooks import messages as m
from weightlink.hooks.errors import WeightlinkError
from weightlink.hooks.geometry import Layout, ParamSpec, Regions, TensorSpec
from weightlink.rank import EngineRank

TENSORS = [TensorSpec("a", (6, 5), "float32"), TensorSpec("b", (4, 3), "float32"), TensorSpec("c", (7, 2), "float32")]


class Model(nn.Module):
    """Half of every tensor by TP rank; a is transformed, b and c are copied, b together with a."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        for name, shape in (("p", (3, 5)), ("q", (2, 3)), ("r", (7, 2))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name == "a":
                self.p.data.copy_(weight[3 * self.rank : 3 * self.rank + 3])
                self.p.data.copy_(-torch.exp(self.p / 40))
            elif name == "b":
                self.q.data.copy_(weight[2 * self.rank : 2 * self.rank + 2])
            else:
                self.r.data.copy_(weight)


class LoadingEngine(TorchEngine):
    """An engine rank whose layout is observed on a real module."""

    def __init__(self, place: m.RankPlace, layout: Layout, dtype: str, log: list[str]) -> None:
        super().__init__(place, layout, dtype, log)
        self.model = Model(place.rank)
        self.params = list(self.model.parameters())
        self.given: list[weakref.ref[torch.Tensor]] = []

    def observe(self, tensors: Sequence[TensorSpec], kind: str, selector: str) -> Layout:
        self._note("observe")
        return observe(rank=str(self.place), tensors=tensors, load=self.model.load_weights, modules=[("", self.model)])

    def tensors(self, params: Sequence[ParamSpec]) -> Sequence[torch.Tensor]:
        assert not any(p.staged for p in params)
        return live([("", self.model)], params)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.given = [weakref.ref(tensor.untyped_storage()) for _, tensor in tensors]
        self._note("load " + ", ".join(name for name, _ in tensors))
        self.model.load_weights(tensors)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(rigged, "TorchEngine", LoadingEngine)
    trainers = random_side(random.Random(3), "trainer", TENSORS, 2, padding=True, replicas=True)
    blank = [Layout(f"rank {r}", (), (), Regions()) for r in range(2)]
    made = Rig(trainers, {"http://e0": blank})
    yield made
    made.close()


def values(rig: Rig, factor: float) -> dict[str, torch.Tensor]:
    wanted = {name: value * factor for name, value in canonical(TENSORS).items()}
    for trainer in rig.trainers:
        trainer.load(wanted)
    return {name: torch.from_numpy(value).float() for name, value in wanted.items()}


def expect(rig: Rig, wanted: dict[str, torch.Tensor]) -> None:
    for rank, adapter in enumerate(rig.engines["http://e0"].adapters):
        judge = Model(rank)
        judge.load_weights(wanted.items())
        for (name, want), have in zip(judge.named_parameters(), adapter.model.parameters(), strict=True):
            assert torch.equal(want, have), (rank, name)


def test_opaque_tensors_arrive_and_leave_nothing_behind(rig: Rig) -> None:
    rig.connect()
    found = rig.attachments[1].engines[0]
    assert {name for name, _ in found.opaque} == {"p", "a"}
    assert found.staged == 6 * 5 * 4
    engine = rig.engines["http://e0"]
    for version in (1, 2):
        wanted = values(rig, version / 4)
        for adapter in engine.adapters:
            poison(adapter.params)
        engine.log.clear()
        report = rig.push(version)
        expect(rig, wanted)
        assert report.engines[0].staged == 6 * 5 * 4
        for rank, adapter in enumerate(engine.adapters):
            mine = [line for line in engine.log if line.startswith(str(rank)) and "synch" not in line]
            assert mine == [f"{rank} {what}" for what in ("begin", "load a", "finish", f"commit {version}")]
            assert [reference() for reference in adapter.given] == [None]


@pytest.mark.parametrize("where", ["load a", "finish"])
def test_a_failed_delivery_is_retried_whole(rig: Rig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightlink.rank.logger, "exception", lambda *args: None)  # pytest would keep the traceback
    rig.connect()
    values(rig, 1.0)
    rig.push(1)
    engine = rig.engines["http://e0"]
    engine.adapters[1].fail[where] = RuntimeError("kaboom")
    values(rig, 2.0)
    with pytest.raises(WeightlinkError, match="kaboom"):
        rig.push(2)
    assert engine.front.state is m.EngineState.DIRTY
    assert [reference() for adapter in engine.adapters for reference in adapter.given] == [None, None]
    wanted = values(rig, 3.0)
    rig.connect()
    rig.push(3)
    expect(rig, wanted)
    assert engine.front.state is m.EngineState.READY


def test_without_memory_for_staging_nothing_changes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.connect()
    before = values(rig, 1.0)
    rig.push(1)
    engine = rig.engines["http://e0"]
    real = EngineRank._stage

    def scarce(self: EngineRank, layout: Layout) -> dict[int, torch.Tensor]:
        if self is engine.ranks[1]:
            raise MemoryError("no memory left")
        return real(self, layout)

    monkeypatch.setattr(EngineRank, "_stage", scarce)
    values(rig, 2.0)
    with pytest.raises(WeightlinkError, match="no memory left"):
        rig.push(2)
    expect(rig, before)
    assert engine.front.state is m.EngineState.READY
    monkeypatch.undo()
    wanted = values(rig, 3.0)
    rig.connect()
    rig.push(3)
    expect(rig, wanted)


def test_what_no_call_serves_is_refused_at_connect(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def rebinding(self: Model, weights) -> None:
        for name, weight in weights:
            if name == "a":
                self.p = nn.Parameter(weight[:3] * 2, requires_grad=False)

    monkeypatch.setattr(Model, "load_weights", rebinding)
    with pytest.raises(WeightlinkError, match="the loader rebinds it") as caught:
        rig.connect()
    assert caught.value.tensor == "p"
    assert "begin" not in " ".join(rig.engines["http://e0"].log)
