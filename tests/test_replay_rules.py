"""The rules of a loader replay: what cannot be followed is named, and nothing resident changes, come what may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from replaying import Loader, Shapes, Toy, Weights, check, fused, opaque, plain, replay, rows
from torch import nn
from weightlink.converters.replay import observe
from weightlink.hooks.errors import LayoutError, ReplayError
from weightlink.hooks.geometry import TensorSpec

# --- what cannot be followed ----------------------------------------------------------------------------------------


def rest(m: Toy, w: dict[str, torch.Tensor]) -> None:
    if "b" in w:
        m.w1.data.copy_(w["b"])


def transforms_after(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])
    m.w0.data.copy_(-torch.exp(m.w0))
    rest(m, w)


def changes_in_place(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])
    m.w0.data.mul_(2)
    rest(m, w)


def writes_out(m: Toy, w: dict[str, torch.Tensor]) -> None:
    torch.add(w["a"], 1, out=m.w0.data)
    rest(m, w)


def computes_before(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"] + torch.arange(3))
    rest(m, w)


def rebinds_parameter(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0 = nn.Parameter(w["a"].float(), requires_grad=False)
    rest(m, w)


def rebinds_data(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])
    m.w0.data = torch.cat([m.w0.data, m.w0.data])
    rest(m, w)


def deletes(m: Toy, w: dict[str, torch.Tensor]) -> None:
    del m.w0
    rest(m, w)


def reads_number(m: Toy, w: dict[str, torch.Tensor]) -> None:
    rest(m, w)
    m.w0.data.fill_(w["a"][0, 0].item())


def scatters(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data[torch.tensor([3, 1, 0, 2, 4]), torch.tensor([1, 1, 2, 0, 0])] = w["a"][:, 0]
    rest(m, w)


def partly_uninitialised(m: Toy, w: dict[str, torch.Tensor]) -> None:
    packed = torch.empty(5, 3)
    packed[:4] = w["a"][:4]
    m.w0.data.copy_(packed)
    rest(m, w)


def fills_unseen(m: Toy, w: dict[str, torch.Tensor]) -> None:
    table = torch.zeros(5, 3)
    table.numpy()[1, 1] = 4
    m.w0.data.copy_(table)
    rest(m, w)


def fills_a_table(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(torch.arange(15.0).view(5, 3))
    rest(m, w)


def from_another_weight(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data[:2].copy_(m.w1.data)
    rest(m, w)


def fills_from_a_weight(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.fill_(m.w1.max().item())
    rest(m, w)


def changes_its_input(m: Toy, w: dict[str, torch.Tensor]) -> None:
    w["a"].neg_()
    m.w0.data.copy_(w["a"])
    rest(m, w)


def negates_lazily(m: Toy, w: dict[str, torch.Tensor]) -> None:
    """What ``x.conj().imag`` is: a view of the same memory that shows other numbers."""
    m.w0.data.copy_(torch._neg_view(w["a"]))
    rest(m, w)


def negates_its_destination(m: Toy, w: dict[str, torch.Tensor]) -> None:
    torch._neg_view(m.w0.data).copy_(w["a"])
    rest(m, w)


@pytest.mark.parametrize(
    ("loader", "names", "served"),
    [
        (negates_lazily, {"w0", "a"}, True),
        (negates_its_destination, {"w0", "a"}, True),
        (transforms_after, {"w0", "a"}, True),
        (changes_in_place, {"w0", "a"}, True),
        (writes_out, {"w0", "a"}, True),
        (computes_before, {"w0", "a"}, True),
        (reads_number, {"w0", "a"}, True),
        (partly_uninitialised, {"w0", "a"}, True),
        (changes_its_input, {"w0", "a"}, True),
        (fills_unseen, {"w0"}, True),
        (fills_a_table, {"w0"}, True),
        (fills_from_a_weight, {"w0"}, True),
        (rebinds_parameter, {"w0", "a"}, False),
        (rebinds_data, {"w0", "a"}, False),
        (deletes, {"w0"}, False),
        (scatters, {"w0", "a"}, False),
        (from_another_weight, {"w0"}, False),
    ],
)
def test_what_cannot_be_followed_is_opaque(loader: Loader, names: set[str], served: bool) -> None:
    """Either the engine's own loader serves it, with what it needs and no more, or it is refused by name."""
    shapes: Shapes = {"a": (5, 3), "b": (2, 3)}
    layout = check(lambda: Toy(loader, (5, 3), (2, 3)), shapes) if loader not in (
        rebinds_data, rebinds_parameter, deletes, partly_uninitialised,
    ) else replay(Toy(loader, (5, 3), (2, 3)), shapes)  # fmt: skip
    assert set(opaque(layout)) == names
    assert {entry.delivered for entry in layout.opaque} == {served}
    if served:
        staged = [p.name for p in layout.params if p.staged]
        assert staged == sorted(names - {"w0"})
        assert {(row[0], row[1]) for row in rows(layout)} == {("b", "w1"), *((name, name) for name in staged)}


def test_casting_is_not_quantising() -> None:
    shapes: Shapes = {"a": (5, 3)}
    layout = check(lambda: Toy(plain, (5, 3), dtype=torch.float8_e4m3fn), shapes, torch.bfloat16)
    assert "not quantising" in opaque(layout)["w0"]
    assert len(layout.regions) == 0
    same = check(lambda: Toy(plain, (5, 3), dtype=torch.float8_e4m3fn), shapes, torch.float8_e4m3fn)
    assert same.opaque == ()


@pytest.mark.parametrize(
    ("source", "via", "target", "followed"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, torch.bfloat16, True),
        (torch.float16, torch.float32, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, torch.float32, False),
        (torch.float32, torch.bfloat16, torch.float16, False),
        (torch.float32, torch.float64, torch.float32, False),
    ],
)
def test_chains_of_casts(source: torch.dtype, via: torch.dtype, target: torch.dtype, followed: bool) -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"].to(via))

    layout = check(lambda: Toy(loader, (50, 30), dtype=target), {"a": (50, 30)}, source)
    assert (layout.opaque == ()) is followed


def test_a_number_used_after_the_next_name_is_not_a_constant() -> None:
    def load(weights: Weights) -> None:
        scale = 0.0
        for name, weight in weights:
            if name == "a":
                scale = weight[0].item()
            else:
                model.w1.data.copy_(weight)
        model.w0.data.fill_(2 * scale)

    model = Toy(plain, (5, 3), (2, 3))
    model.load_weights = load  # type: ignore[method-assign]
    layout = replay(model, {"a": (1,), "b": (2, 3)})
    assert set(opaque(layout)) == {"w0", "a"}
    assert {(row[0], row[1]) for row in rows(layout)} == {("b", "w1"), ("a", "a")}


def test_reinterpreted_source_bits_are_opaque() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"].view(torch.bfloat16))

    layout = check(lambda: Toy(loader, (5, 3), dtype=torch.bfloat16), {"a": (5, 3)}, torch.float16)
    assert set(opaque(layout)) == {"w0", "a"}


def test_reinterpreted_bits_are_opaque() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.view(torch.int32).copy_(w["a"].view(torch.int32))

    assert set(opaque(replay(Toy(loader, (5, 3)), {"a": (5, 3)}))) == {"w0", "a"}


def test_too_many_pieces_are_opaque() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"].flip(0))

    assert set(opaque(replay(Toy(loader, (3000,)), {"a": (3000,)}))) == {"w0", "a"}


# --- attributes, aliases, buffers -----------------------------------------------------------------------------------


class Derived(nn.Module):
    """A loader with caches, derived tensors, buffers and tied weights, as real models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cos", torch.ones(4), persistent=False)
        self.derived = torch.full((5, 3), 9.0)
        self.table = torch.zeros(5, 3)
        self.fresh: torch.Tensor | None = None
        self.cache: dict[str, torch.Tensor] = {}
        self.seen: list[str] = ["start"]

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "embed":
                self.embed.weight.data.copy_(weight)
                self.embed.weight.is_loaded = True
            elif name == "scale":
                self.scale.copy_(weight)
            elif name == "table":
                self.table.copy_(weight)
            elif name == "map":
                self.fresh = weight + torch.arange(3)
            self.cache[name] = weight
            self.seen.append(name)
        self.derived.copy_(self.embed.weight * 2)
        self.extra = torch.cat([self.embed.weight, self.embed.weight])


def test_attributes_aliases_and_buffers() -> None:
    torch.manual_seed(0)
    model = Derived()
    shapes: Shapes = {"embed": (5, 3), "scale": (3,), "table": (5, 3), "map": (3,)}
    layout = replay(model, shapes)
    assert model.fresh is None
    assert model.cache == {}
    assert model.seen == ["start"]
    assert not hasattr(model, "extra")
    assert not hasattr(model.embed.weight, "is_loaded")
    params = {p.name: p for p in layout.params}
    assert set(params) == {"embed.weight", "scale", "cos", "table"}
    assert [params[n].loaded for n in ("embed.weight", "scale", "cos", "table")] == [True, True, False, True]
    assert {(row[0], row[1]) for row in rows(layout)} == {
        ("embed", "embed.weight"),
        ("scale", "scale"),
        ("table", "table"),
    }
    reasons = opaque(layout)
    assert "fresh" in reasons
    assert "map" in reasons
    assert "derived" not in reasons


def test_weights_made_in_inference_mode() -> None:
    shapes: Shapes = {"q": (8, 5), "k": (4, 5), "v": (4, 5)}
    with torch.inference_mode():
        model = Toy(fused, (8, 5))
    assert model.w0.is_inference()
    layout = replay(model, shapes)
    assert layout.opaque == ()
    assert rows(layout) == rows(replay(Toy(fused, (8, 5)), shapes))


def test_views_of_one_memory_share_a_storage() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"])
        m.w1.data.copy_(w["b"])

    def build() -> Toy:
        model = Toy(loader, (2, 3), (3, 3))
        whole = torch.zeros(5, 3)
        model.w0.data, model.w1.data = whole[:2], whole[2:]
        return model

    layout = check(build, {"a": (2, 3), "b": (3, 3)})
    assert layout.opaque == ()
    assert [(p.storage, p.start) for p in layout.params] == [(0, 0), (0, 6)]
    assert layout.regions.offset.tolist() == [0, 0]


def test_prefixes_name_two_models() -> None:
    target, draft = Toy(plain, (5, 3)), Toy(plain, (5, 3))

    def load(weights: Weights) -> None:
        listed = list(weights)
        target.load_weights(listed)
        draft.load_weights(listed)

    layout = observe(
        rank="toy", tensors=[TensorSpec("a", (5, 3), "float32")], load=load, modules=[("", target), ("draft", draft)]
    )
    assert [p.name for p in layout.params] == ["w0", "draft.w0"]
    assert len(layout.regions) == 2


# --- failures -------------------------------------------------------------------------------------------------------


def picky(m: Toy, weights: Weights) -> None:
    for at, (name, weight) in enumerate(weights):
        m.counter = at
        if not at:
            m.w0.data = m.w0.data.clone()
        if name in ("b", "d"):
            raise ValueError(f"cannot load {name}")
        m.get_parameter({"a": "w0", "c": "w1", "e": "w2"}[name]).data.copy_(weight)


def test_one_bad_name_does_not_hide_the_others() -> None:
    model = Toy(plain, (5, 3), (5, 3), (5, 3))
    model.load_weights = lambda weights: picky(model, weights)  # type: ignore[method-assign]
    layout = replay(model, {name: (5, 3) for name in "abcde"})
    reasons = opaque(layout)
    assert reasons["b"] == "the loader raised ValueError: cannot load b"
    assert "d" in reasons
    assert {row[1] for row in rows(layout)} == {"w1", "w2"}
    assert reasons["w0"] == "the loader rebinds it"


def test_failures_are_bounded() -> None:
    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise ValueError(next(weights)[0])

    model = Toy(plain, (5, 3))
    model.load_weights = load  # type: ignore[method-assign, assignment]
    with pytest.raises(ReplayError, match="more than 2 names"):
        replay(model, {name: (5, 3) for name in "abcdef"}, retries=2)


def test_a_failure_after_the_last_name_is_traced_to_the_tensor_in_use() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w1.data.copy_(w["b"])
        if "a" in w:
            m.w0.data.copy_(w["a"].view(7, 2))

    layout = replay(Toy(loader, (5, 3), (2, 3)), {"a": (5, 3), "b": (2, 3)})
    assert set(opaque(layout)) == {"a"}
    assert {row[1] for row in rows(layout)} == {"w1"}


def test_a_failure_without_a_name_is_an_error() -> None:
    def load(weights: Weights) -> None:
        raise RuntimeError("no")

    model = Toy(plain, (5, 3))
    model.load_weights = load  # type: ignore[method-assign]
    with pytest.raises(ReplayError, match="the loader failed: RuntimeError: no"):
        replay(model, {"a": (5, 3)})


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(LayoutError, match="unknown dtype"):
        replay(Toy(plain, (5, 3)), {"a": (5, 3)}, "int4")


def swallowing(work: Callable[[], object]) -> None:
    def run() -> None:
        try:
            work()
        except ReplayError:
            return

    thread = threading.Thread(target=run, name="loader-worker")
    thread.start()
    thread.join()


@pytest.mark.parametrize("what", ["writes a weight", "reads a tensor", "takes a name"])
def test_another_thread_is_refused_even_if_its_error_is_swallowed(what: str) -> None:
    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        _, weight = next(weights)
        if what == "writes a weight":
            swallowing(lambda: model.w0.data.fill_(3))
        elif what == "reads a tensor":
            swallowing(lambda: weight.narrow(0, 0, 2))
        else:
            swallowing(lambda: next(weights))

    model = Toy(plain, (5, 3))
    model.load_weights = load  # type: ignore[method-assign, assignment]
    with pytest.raises(ReplayError, match="loader-worker"):
        replay(model, {"a": (5, 3), "b": (5, 3)})
    done = []
    thread = threading.Thread(target=lambda: done.append(torch.ones(2).add_(1).sum().item()))
    thread.start()
    thread.join()
    assert done == [4.0]


def test_a_write_that_the_dispatcher_does_not_see_is_an_error() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"])
        m.w1.data.numpy()[1, 2] = -1

    model = Toy(loader, (5, 3), (2, 3))
    specs = [TensorSpec("a", (5, 3), "float32")]
    with pytest.raises(ReplayError, match="changed a resident weight") as caught:
        observe(rank="toy", tensors=specs, load=model.load_weights, modules=[("", model)])
    assert caught.value.tensor == "w1"


def test_the_digest_sees_positions() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        values = m.w0.data.numpy()
        values[0], values[700_000] = values[700_000].copy(), values[0].copy()

    model = Toy(loader, (700_001,))
    with pytest.raises(ReplayError, match="changed a resident weight"):
        observe(rank="toy", tensors=[], load=model.load_weights, modules=[("", model)])
