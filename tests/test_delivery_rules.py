"""Which call of the engine's own loader serves what the replay lost, and what no call can serve."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from replaying import Shapes, Toy, Weights, check, opaque, replay, rows
from torch import nn
from weightlink.converters.coverage import Violations, delivered, may_own, prove_destination
from weightlink.hooks.errors import LayoutError
from weightlink.hooks.geometry import Layout, Opaque


class Streaming(nn.Module):
    """A loader that takes one tensor at a time, as real ones do: ``take(self, name, weight)``, then ``end(self)``."""

    def __init__(self, take, end=lambda m: None, shapes=((5, 3), (5, 3), (5, 3)), dtype=torch.float32) -> None:
        super().__init__()
        self.take, self.end = take, end
        for n, shape in enumerate(shapes):
            self.register_parameter(f"w{n}", nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        self.local: dict[str, object] = {}
        for name, weight in weights:
            self.take(self, name, weight)
        self.end(self)
        self.local = {}


SHAPES: Shapes = {"a": (5, 3), "b": (5, 3), "c": (5, 3)}


def staged(layout: Layout) -> list[str]:
    return [p.name for p in layout.params if p.staged]


def served(layout: Layout) -> bool:
    return all(entry.delivered for entry in layout.opaque)


def simple(m: Streaming, name: str, weight: torch.Tensor) -> None:
    m.get_parameter({"a": "w0", "b": "w1", "c": "w2"}[name]).data.copy_(weight)


def test_a_coupled_group_is_named_whole_and_only_it() -> None:
    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        if name == "c":
            m.w2.data.copy_(weight)
            return
        m.local[name] = weight
        if len(m.local) == 2:
            m.w0.data.copy_(torch.cat([m.local.pop("a")[:2], m.local.pop("b")[:3]]) * 2)

    layout = check(lambda: Streaming(take, shapes=((5, 3), (0,), (5, 3))), SHAPES)
    assert served(layout)
    assert staged(layout) == ["a", "b"]
    assert set(opaque(layout)) == {"w0", "a", "b"}


def test_halves_of_what_is_lost_take_their_other_destinations_along() -> None:
    """``a`` goes in place to w1 and computed to w0: it travels both ways, and the call repeats what w1 has."""

    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        if name == "a":
            m.w0.data.copy_(weight.neg())
            m.w1.data.copy_(weight)
        elif name == "c":
            m.w2.data.copy_(weight)

    layout = check(lambda: Streaming(take), {"a": (5, 3), "c": (5, 3)})
    assert served(layout)
    assert staged(layout) == ["a"]
    assert {(row[0], row[1]) for row in rows(layout)} == {("a", "a"), ("a", "w1"), ("c", "w2")}


def test_a_call_that_would_disturb_others_takes_them_along() -> None:
    """The loader clears w1 first and fills w2 in the end: a call without b would leave w1 empty; w2 it leaves right."""

    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        if not m.local:
            m.local["cleared"] = True
            m.w1.data.zero_()
        if name == "a":
            m.w0.data.copy_(weight.neg())
        elif name == "b":
            m.w1.data.copy_(weight)

    layout = check(lambda: Streaming(take, lambda m: m.w2.data.fill_(3)), {"a": (5, 3), "b": (5, 3)})
    assert served(layout)
    assert staged(layout) == ["a", "b"]
    assert "fewer names" in opaque(layout)["w1"]
    assert {layout.params[int(p)].name for p in layout.fills.param} == {"w2"}


def test_a_scale_that_becomes_a_number_belongs_to_what_it_scales() -> None:
    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        if name == "a":
            m.local["scale"] = weight[0, 0].item()
        elif name == "b":
            m.w0.data.copy_(weight * m.local.get("scale", 1.0))
        else:
            m.w2.data.copy_(weight)

    layout = check(lambda: Streaming(take, shapes=((5, 3), (0,), (5, 3))), SHAPES)
    assert served(layout)
    assert staged(layout) == ["a", "b"]


def test_a_comparison_of_values_is_followed_into_what_it_decides() -> None:
    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        if name == "a" and torch.equal(weight, weight.flip(0)):
            m.w0.data.copy_(weight)
        elif name == "a":
            m.w0.data.copy_(weight.neg())
        else:
            m.w1.data.copy_(weight)

    layout = check(lambda: Streaming(take, shapes=((5, 3), (5, 3))), {"a": (5, 3), "b": (5, 3)})
    assert served(layout)
    assert staged(layout) == ["a"]


def test_what_is_written_after_another_name_brings_that_name() -> None:
    """w0 holds nothing of ``b``, but is written only when ``b`` comes."""

    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        if name == "a":
            m.local["a"] = weight
        elif name == "b":
            m.w0.data.copy_(m.local["a"].neg())
            m.w1.data.copy_(weight)
        else:
            m.w2.data.copy_(weight)

    layout = check(lambda: Streaming(take), SHAPES)
    assert served(layout)
    assert staged(layout) == ["a", "b"]


def test_a_loader_that_wants_everything_gets_everything() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"].neg())
        m.w1.data.copy_(w["b"])

    layout = check(lambda: Toy(loader, (5, 3), (5, 3)), {"a": (5, 3), "b": (5, 3)})
    assert served(layout)
    assert staged(layout) == ["a", "b"]
    assert opaque(layout)["b"] == "the loader needs it in the same call"
    assert {(row[0], row[1]) for row in rows(layout)} == {("a", "a"), ("b", "b"), ("b", "w1")}


def test_derived_weights_of_a_loader_come_with_a_call_without_names() -> None:
    def build() -> Streaming:
        return Streaming(simple, lambda m: m.w3.data.copy_(2 * m.w0), shapes=((5, 3),) * 4)

    layout = check(build, SHAPES)
    assert served(layout)
    assert staged(layout) == []
    assert set(opaque(layout)) == {"w3"}


class Caching(Streaming):
    """Keeps a tensor that is computed from w0; what the engine does after an update may or may not renew it."""

    def __init__(self, renew: bool, how: str) -> None:
        super().__init__(self.one, shapes=((5, 3), (5, 3), (5, 3)))
        self.table, self.renew, self.how = torch.zeros(5, 3), renew, how

    def one(self, _: Streaming, name: str, weight: torch.Tensor) -> None:
        simple(self, name, weight)
        if name == "b":
            self.compute()

    def compute(self) -> None:
        if self.how == "in place":
            self.table.copy_(2 * self.w0)
        else:
            self.table = 2 * self.w0

    def finish(self) -> None:
        if self.renew:
            self.compute()


@pytest.mark.parametrize("how", ["in place", "anew"])
@pytest.mark.parametrize("renew", [True, False])
def test_derived_tensors_that_only_the_loader_renews_need_it(renew: bool, how: str) -> None:
    """The loader computes the table from what a left in w0, when it takes b: the call needs b, and a to be there."""
    model = Caching(renew, how)
    layout = replay(model, SHAPES, finish=model.finish)
    if renew:
        assert layout.opaque == ()
    elif how == "anew":
        assert {entry.name: entry.delivered for entry in layout.opaque} == {"table": False}
    else:
        assert {entry.name for entry in layout.opaque if entry.delivered} == {"table", "a", "b"}
        assert staged(layout) == ["a", "b"]
    assert replay(Caching(renew, how), SHAPES).opaque == ()


# --- what no call can serve -----------------------------------------------------------------------------------------


def replaces(m: Streaming, name: str, weight: torch.Tensor) -> None:
    if name == "a":
        m.w0.data.copy_(weight.neg())
        m.table = m.w1 * 2  # whoever looks at the table holds the old one
    else:
        simple(m, name, weight)


def partly(m: Streaming, name: str, weight: torch.Tensor) -> None:
    if name == "a":
        m.w0.data[:4].copy_(weight[:4].neg())
    else:
        simple(m, name, weight)


def rebinds(m: Streaming, name: str, weight: torch.Tensor) -> None:
    if name == "a":
        m.w0 = nn.Parameter(weight.neg(), requires_grad=False)
    else:
        simple(m, name, weight)


def caches(m: Streaming, name: str, weight: torch.Tensor) -> None:
    simple(m, name, weight)
    if name == "a":
        m.table = weight + 1


def fails(m: Streaming, name: str, weight: torch.Tensor) -> None:
    if name == "a":
        raise ValueError("no a today")
    simple(m, name, weight)


@pytest.mark.parametrize(
    ("take", "name", "reason"),
    [
        (replaces, "table", "holds the old one"),
        (partly, "w0", "leaves 3 of 15 elements"),
        (rebinds, "w0", "rebinds"),
        (caches, "table", "assigns"),
        (fails, "a", "no a today"),
    ],
)
def test_what_no_call_serves_is_refused_by_name(take, name: str, reason: str) -> None:
    model = Streaming(take)
    model.table = torch.zeros(5, 3)
    layout = replay(model, SHAPES, finish=lambda: None)
    assert not layout.opaque[0].delivered
    with pytest.raises(LayoutError, match=reason) as caught:
        delivered(layout, "rank 0")
    assert caught.value.tensor == name


@pytest.mark.parametrize("how", ["copied", "computed"])
def test_a_bare_cast_to_a_quantised_dtype_is_refused(how: str) -> None:
    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        m.w0.data.copy_(weight if how == "copied" else weight * 2)

    layout = replay(Streaming(take, shapes=((5, 3),), dtype=torch.float8_e4m3fn), {"a": (5, 3)}, "bfloat16")
    with pytest.raises(LayoutError, match="w0"):
        delivered(layout, "rank 0")


def test_a_loader_that_quantises_itself_is_called() -> None:
    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        m.w0.data.copy_((weight / 4).to(torch.float8_e4m3fn))

    layout = check(lambda: Streaming(take, shapes=((5, 3),), dtype=torch.float8_e4m3fn), {"a": (5, 3)}, torch.bfloat16)
    assert served(layout)


# --- the proof ------------------------------------------------------------------------------------------------------


def proof(layout: Layout) -> list[str]:
    found = Violations()
    r, f = layout.regions, layout.fills
    prove_destination(
        layout.params,
        np.concatenate([r.param, f.param]).astype(np.int64),
        np.concatenate([r.offset, f.offset]),
        np.concatenate([r.size, f.size]),
        np.concatenate([r.stride, f.stride]),
        rank="rank 0",
        owned=may_own(layout, True, ["*"]),
        found=found,
        delivered=delivered(layout, "rank 0"),
    )
    return found.lines


def test_an_opaque_destination_is_neither_written_twice_nor_owned_nor_forgotten() -> None:
    def take(m: Streaming, name: str, weight: torch.Tensor) -> None:
        m.get_parameter({"a": "w0", "b": "w1"}[name]).data.copy_(weight.neg() if name == "a" else weight)

    layout = replay(Streaming(take, shapes=((5, 3), (5, 3))), {"a": (5, 3), "b": (5, 3)})
    assert proof(layout) == []
    hidden = dataclasses.replace(layout, opaque=())
    assert proof(hidden) == []  # declared: "*" owns w0
    assert may_own(layout, True, ["*"]) == []
    both = dataclasses.replace(layout, opaque=(*layout.opaque, Opaque("w1", "also", 1, True)))
    assert any("w1" in line and "own loader" in line for line in proof(both))
    refused = dataclasses.replace(layout, opaque=(Opaque("w0", "why", 0),))
    with pytest.raises(LayoutError, match="w0: why"):
        proof(refused)
    stolen = dataclasses.replace(layout, regions=layout.regions.take(layout.regions.param == 1))
    assert any(line.startswith("a on") for line in proof(stolen))  # nothing arrives in the staging
    assert Layout.unpack(layout.pack()).opaque == layout.opaque
    with pytest.raises(LayoutError, match="out of range"):
        Layout.unpack(dataclasses.replace(layout, opaque=(Opaque("x", "y", 99, True),)).pack())
