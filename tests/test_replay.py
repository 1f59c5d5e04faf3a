"""The loader replay against the same loader run for real, on toy modules. No framework is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import live, poison, write
from torch import nn
from weightlink.converters.replay import observe
from weightlink.hooks.errors import LayoutError, ReplayError
from weightlink.hooks.geometry import Layout, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["Toy", dict[str, torch.Tensor]], None]
Shapes = dict[str, tuple[int, ...]]


class Toy(nn.Module):
    """Parameters ``w0``, ``w1``, ... of given shapes, and a loader."""

    def __init__(self, loader: Loader, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.loader = loader
        for i, shape in enumerate(shapes):
            data = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
            self.register_parameter(f"w{i}", nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, dict(weights))


def coded(shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors in which every element of every tensor has its own value."""
    result, start = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        result[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(shape).to(dtype)
        start += count
    return result


def state(model: nn.Module) -> list[tuple[str, int, bytes]]:
    """Pointers and bytes of everything resident, dictionaries included."""
    found = []
    for path, module in model.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor):
                octets = torch.empty(0, dtype=torch.uint8).set_(value.data.untyped_storage())
                found.append((f"{path}.{name}", value.data_ptr(), octets.numpy().tobytes()))
            else:
                found.append((f"{path}.{name}", id(value), b""))
    return found


def replay(model: nn.Module, shapes: Shapes, dtype: str = "float32", **kwargs: object) -> Layout:
    """Observes, and checks that nothing resident changed."""
    specs = [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]
    before = state(model)
    try:
        return observe(rank="toy", tensors=specs, load=model.load_weights, modules=[("", model)], **kwargs)
    finally:
        assert state(model) == before


def check(build: Callable[[], nn.Module], shapes: Shapes, dtype: torch.dtype = torch.float32) -> Layout:
    """The layout, after its prediction was compared with what the loader really does, bit for bit."""
    layout = replay(build(), shapes, str(dtype).removeprefix("torch."))
    weights = coded(shapes, dtype)
    real, predicted = build(), build()
    poison(list(real.state_dict().values()) + list(predicted.state_dict().values()))
    real.load_weights(iter(weights.items()))
    write(layout, live([("", predicted)], layout.params), weights)
    opaque = {entry.name for entry in layout.opaque}
    for (name, want), got in zip(real.state_dict().items(), predicted.state_dict().values(), strict=True):
        if name not in opaque:
            octets = [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (want, got)]
            assert torch.equal(*octets), name
    return layout


def rows(layout: Layout) -> list[tuple[str, str, list[int], list[int], list[int], int, list[int]]]:
    """Readable regions, without unused dimensions."""
    result = []
    r = layout.regions
    for i in range(len(r)):
        spec = layout.tensors[r.tensor[i]]
        d = len(spec.shape)
        columns = [c[i][:d].tolist() for c in (r.lo, r.size, r.step, r.stride)]
        result.append(
            (
                spec.name,
                layout.params[r.param[i]].name,
                columns[0],
                columns[1],
                columns[2],
                int(r.offset[i]),
                columns[3],
            )
        )
    return result


def opaque(layout: Layout) -> dict[str, str]:
    return {entry.name: entry.reason for entry in layout.opaque}


# --- pure movement --------------------------------------------------------------------------------------------------


def plain(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])


def column_shard(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"].narrow(0, 3, 3))


def row_shard(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"].narrow(1, 2, 2))


def fused(m: Toy, w: dict[str, torch.Tensor]) -> None:
    at = 0
    for name, start, size in (("q", 4, 4), ("k", 2, 2), ("v", 2, 2)):
        m.w0.data.narrow(0, at, size).copy_(w[name].narrow(0, start, size))
        at += size


def interleaved(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data[:3].copy_(w["a"][::2])
    m.w0.data[3:].copy_(w["a"][1::2])


def into_steps(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data[::2] = w["a"]
    m.w0.data[1::2] = w["b"]


def through_buffer(m: Toy, w: dict[str, torch.Tensor]) -> None:
    packed = torch.zeros(8, 3)
    packed[1:3] = w["a"]
    packed[4:7, 1:] = w["b"]
    packed[2] = w["a"][0]
    m.w0.data.copy_(packed)


def through_empty(m: Toy, w: dict[str, torch.Tensor]) -> None:
    packed = torch.empty(5, 3, dtype=torch.float32)
    packed[:2].copy_(w["a"])
    packed[2:].copy_(w["b"])
    m.w0.data.copy_(packed.t())


def heads(m: Toy, w: dict[str, torch.Tensor]) -> None:
    grouped = w["a"].view(2, 5, 3, 2)
    for at, (start, size) in enumerate(((0, 3), (3, 1), (4, 1))):
        part = grouped[:, start : start + size].reshape(-1, 2)
        m.get_parameter(f"w{at}").data.copy_(part)


MOVES: dict[str, tuple[Loader, tuple[tuple[int, ...], ...], Shapes]] = {
    "plain": (plain, ((5, 3),), {"a": (5, 3)}),
    "column shard": (column_shard, ((3, 4),), {"a": (6, 4)}),
    "row shard": (row_shard, ((6, 2),), {"a": (6, 4)}),
    "fused qkv": (fused, ((8, 5),), {"q": (8, 5), "k": (4, 5), "v": (4, 5)}),
    "transpose": (lambda m, w: m.w0.data.copy_(w["a"].t()), ((3, 5),), {"a": (5, 3)}),
    "permute": (lambda m, w: m.w0.data.copy_(w["a"].permute(2, 0, 1)), ((4, 2, 3),), {"a": (2, 3, 4)}),
    "stride 2": (interleaved, ((6, 4),), {"a": (6, 4)}),
    "into steps": (into_steps, ((6, 4),), {"a": (3, 4), "b": (3, 4)}),
    "cat rows": (lambda m, w: m.w0.data.copy_(torch.cat([w["a"], w["b"]])), ((7, 3),), {"a": (5, 3), "b": (2, 3)}),
    "cat columns": (
        lambda m, w: m.w0.data.copy_(torch.cat([w["a"], w["b"]], 1)), ((2, 8),), {"a": (2, 5), "b": (2, 3)}
    ),
    "cat with zeros": (
        lambda m, w: m.w0.data.copy_(torch.cat([w["a"], torch.zeros(1, 3), w["b"]])[1:]),
        ((7, 3),),
        {"a": (5, 3), "b": (2, 3)},
    ),
    "pad": (lambda m, w: m.w0.data.copy_(nn.functional.pad(w["a"], (1, 2, 3, 0))), ((8, 6),), {"a": (5, 3)}),
    "pad by a value": (
        lambda m, w: m.w0.data.copy_(nn.functional.pad(w["a"], (0, 1), value=-2)), ((5, 4),), {"a": (5, 3)}
    ),
    "pad away": (lambda m, w: m.w0.data.copy_(nn.functional.pad(w["a"], (-1, 1, 0, -2))), ((3, 3),), {"a": (5, 3)}),
    "contiguous": (lambda m, w: m.w0.data.copy_(w["a"].t().contiguous()[1:]), ((2, 5),), {"a": (5, 3)}),
    "clone": (lambda m, w: m.w0.data.copy_(w["a"].clone()[2:]), ((3, 3),), {"a": (5, 3)}),
    "to": (lambda m, w: m.w0.data.copy_(w["a"].to("cpu", torch.float32, copy=True)[1:]), ((4, 3),), {"a": (5, 3)}),
    "stack": (lambda m, w: m.w0.data.copy_(torch.stack([w["a"], w["b"]], 1)), ((5, 2, 3),), {"a": (5, 3), "b": (5, 3)}),
    "index_select": (
        lambda m, w: m.w0.data.copy_(w["a"].index_select(0, torch.tensor([4, 0, 2, 1]))),
        ((4, 3),),
        {"a": (5, 3)},
    ),
    "index": (lambda m, w: m.w0.data.copy_(w["a"][:, torch.tensor([2, 0, 1])]), ((5, 3),), {"a": (5, 3)}),
    "flip": (lambda m, w: m.w0.data.copy_(w["a"].flip(0)), ((5, 3),), {"a": (5, 3)}),
    "repeat": (lambda m, w: m.w0.data.copy_(w["a"].repeat(2, 1, 2)), ((2, 5, 6),), {"a": (5, 3)}),
    "repeat_interleave": (lambda m, w: m.w0.data.copy_(w["a"].repeat_interleave(2, 0)), ((10, 3),), {"a": (5, 3)}),
    "expand": (lambda m, w: m.w0.data.copy_(w["a"]), ((4, 3),), {"a": (3,)}),
    "scalar": (lambda m, w: m.w0.data[2].copy_(w["a"]), ((4, 3),), {"a": ()}),
    "flatten": (lambda m, w: m.w0.data.copy_(w["a"].reshape(-1)[4:11]), ((7,),), {"a": (5, 3)}),
    "split": (lambda m, w: [p.data.copy_(x) for p, x in zip(m.parameters(), w["a"].split([2, 3]), strict=True)],
              ((2, 3), (3, 3)), {"a": (5, 3)}),
    "unbind, squeeze": (lambda m, w: m.w0.data.copy_(w["a"].unbind(1)[1].squeeze(1)), ((5, 3),), {"a": (5, 2, 1, 3)}),
    "heads": (heads, ((18, 2), (6, 2), (6, 2)), {"a": (30, 2)}),
    "through a zeroed buffer": (through_buffer, ((8, 3),), {"a": (2, 3), "b": (3, 2)}),
    "through an empty buffer": (through_empty, ((3, 5),), {"a": (2, 3), "b": (3, 3)}),
    "foreach": (lambda m, w: torch._foreach_copy_([m.w0.data], [w["a"]]), ((5, 3),), {"a": (5, 3)}),
    "inference mode": (
        lambda m, w: torch.inference_mode()(lambda: m.w0.data.copy_(w["a"].chunk(2, 1)[1].t().reshape(2, 5)))(),
        ((2, 5),),
        {"a": (5, 4)},
    ),
    "five dimensions": (
        lambda m, w: m.w0.data.copy_(w["a"].permute(4, 0, 3, 1, 2)[1:]), ((1, 3, 2, 2, 4),), {"a": (3, 2, 4, 2, 2)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_movement_is_followed(case: str) -> None:
    loader, parameters, shapes = MOVES[case]
    layout = check(lambda: Toy(loader, *parameters), shapes)
    assert layout.opaque == ()
    assert len(layout.regions) > 0
    assert [p.name for p in layout.params] == [f"w{i}" for i in range(len(parameters))]


def test_regions_are_minimal_and_canonical() -> None:
    loader, parameters, shapes = MOVES["stride 2"]
    assert rows(replay(Toy(loader, *parameters), shapes)) == [
        ("a", "w0", [0, 0], [3, 4], [2, 1], 0, [4, 1]),
        ("a", "w0", [1, 0], [3, 4], [2, 1], 12, [4, 1]),
    ]
    loader, parameters, shapes = MOVES["transpose"]
    assert rows(replay(Toy(loader, *parameters), shapes)) == [("a", "w0", [0, 0], [5, 3], [1, 1], 0, [1, 5])]


# --- constants ------------------------------------------------------------------------------------------------------


def test_fill_gives_way_to_a_later_copy() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.fill_(3)
        m.w0.data[1:4, 1:].copy_(w["a"])
        m.w0.data[4:, 0].zero_()
        m.w0.data[0, 2] = 7.5

    layout = check(lambda: Toy(loader, (6, 4)), {"a": (3, 3)})
    assert layout.opaque == ()
    assert layout.regions.numel.tolist() == [9]
    values = {v: int(layout.fills.size[layout.fills.value == v].prod(axis=1).sum()) for v in (3.0, 0.0, 7.5)}
    assert values == {3.0: 12, 0.0: 2, 7.5: 1}


def test_copy_gives_way_to_a_later_fill() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"])
        m.w0.data[:, ::3] = 0

    layout = check(lambda: Toy(loader, (5, 4)), {"a": (5, 4)})
    assert layout.regions.numel.sum() == 10


def test_equal_copies_count_once_and_different_ones_stay() -> None:
    def loader(m: Toy, w: dict[str, torch.Tensor]) -> None:
        m.w0.data.copy_(w["a"])
        m.w0.data[2:].copy_(w["a"][2:])
        m.w1.data.copy_(w["a"])
        m.w1.data[1:3].copy_(w["b"])

    layout = replay(Toy(loader, (5, 3), (5, 3)), {"a": (5, 3), "b": (2, 3)})
    totals = [int(layout.regions.numel[layout.regions.param == p].sum()) for p in (0, 1)]
    assert totals == [15, 21]


# --- what cannot be followed ----------------------------------------------------------------------------------------


def transforms_after(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])
    m.w0.data.copy_(-torch.exp(m.w0))
    m.w1.data.copy_(w["b"])


def changes_in_place(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])
    m.w0.data.mul_(2)
    m.w1.data.copy_(w["b"])


def writes_out(m: Toy, w: dict[str, torch.Tensor]) -> None:
    torch.add(w["a"], 1, out=m.w0.data)
    m.w1.data.copy_(w["b"])


def computes_before(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"] + torch.arange(3))
    m.w1.data.copy_(w["b"])


def rebinds_parameter(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0 = nn.Parameter(w["a"].float(), requires_grad=False)
    m.w1.data.copy_(w["b"])


def rebinds_data(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])
    m.w0.data = torch.cat([m.w0.data, m.w0.data])
    m.w1.data.copy_(w["b"])


def deletes(m: Toy, w: dict[str, torch.Tensor]) -> None:
    del m.w0
    m.w1.data.copy_(w["b"])


def reads_number(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w1.data.copy_(w["b"])
    m.w0.data.fill_(w["a"][0, 0].item())


def scatters(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data[torch.tensor([3, 1, 0, 2, 4]), torch.tensor([1, 1, 2, 0, 0])] = w["a"][:, 0]
    m.w1.data.copy_(w["b"])


def partly_uninitialised(m: Toy, w: dict[str, torch.Tensor]) -> None:
    packed = torch.empty(5, 3)
    packed[:4] = w["a"][:4]
    m.w0.data.copy_(packed)
    m.w1.data.copy_(w["b"])


def fills_unseen(m: Toy, w: dict[str, torch.Tensor]) -> None:
    table = torch.zeros(5, 3)
    table.numpy()[1, 1] = 4
    m.w0.data.copy_(table)
    m.w1.data.copy_(w["b"])


def fills_a_table(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(torch.arange(15.0).view(5, 3))
    m.w1.data.copy_(w["b"])


def from_another_weight(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data[:2].copy_(m.w1.data)
    m.w1.data.copy_(w["b"])


def fills_from_a_weight(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.fill_(m.w1.max().item())
    m.w1.data.copy_(w["b"])


def changes_its_input(m: Toy, w: dict[str, torch.Tensor]) -> None:
    w["a"].neg_()
    m.w0.data.copy_(w["a"])
    m.w1.data.copy_(w["b"])


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (transforms_after, {"w0", "a"}),
        (changes_in_place, {"w0", "a"}),
        (writes_out, {"w0", "a"}),
        (computes_before, {"w0", "a"}),
        (rebinds_parameter, {"w0", "a"}),
        (rebinds_data, {"w0", "a"}),
        (deletes, {"w0"}),
        (reads_number, {"w0", "a"}),
        (scatters, {"w0", "a"}),
        (partly_uninitialised, {"w0", "a"}),
        (changes_its_input, {"w0", "a"}),
        (fills_unseen, {"w0"}),
        (fills_a_table, {"w0"}),
        (from_another_weight, {"w0"}),
        (fills_from_a_weight, {"w0"}),
    ],
)
def test_what_cannot_be_followed_is_opaque(loader: Loader, names: set[str]) -> None:
    shapes: Shapes = {"a": (5, 3), "b": (2, 3)}
    layout = check(lambda: Toy(loader, (5, 3), (2, 3)), shapes) if loader not in (
        rebinds_data, rebinds_parameter, deletes,
    ) else replay(Toy(loader, (5, 3), (2, 3)), shapes)  # fmt: skip
    assert set(opaque(layout)) == names
    assert {(row[0], row[1]) for row in rows(layout)} == {("b", "w1")}


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
        self.seen: list[str] = []

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "embed":
                self.embed.weight.data.copy_(weight)
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
    assert model.seen == []
    assert not hasattr(model, "extra")
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
    loader, parameters, shapes = MOVES["fused qkv"]
    with torch.inference_mode():
        model = Toy(loader, *parameters)
    assert model.w0.is_inference()
    layout = replay(model, shapes)
    assert layout.opaque == ()
    assert rows(layout) == rows(replay(Toy(loader, *parameters), shapes))


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


# --- random chains --------------------------------------------------------------------------------------------------

Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["narrow", "step", "transpose", "reshape", "clone", "flip", "cat", "pad", "select", "index", "repeat",
             "stack", "to", "buffer", "expand", "unfold", "zeros", "reverse_cat"]
        ),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    max_size=7,
)  # fmt: skip


def advance(x: torch.Tensor, y: torch.Tensor, step: Step) -> torch.Tensor:
    """One movement, made valid for the shape at hand."""
    what, i, j = step
    if x.numel() > 400 or x.dim() > 4:
        return x
    d = i % x.dim()
    n = x.shape[d]
    if what == "narrow":
        lo = j % n
        return x.narrow(d, lo, max(1, (n - lo) - i % 2))
    if what == "step":
        return x[(slice(None),) * d + (slice(j % n, None, 2 + i % 2),)]
    if what == "transpose":
        return x.transpose(d, j % x.dim())
    if what == "reshape":
        total = x.numel()
        fits = [k for k in (2, 3, 4, 5, 6) if total % k == 0]
        return x.reshape(fits[j % len(fits)], -1) if fits else x.reshape(-1)
    if what == "clone":
        return x.t().contiguous() if x.dim() == 2 else x.clone()
    if what == "flip":
        return x.flip(d)
    if what == "cat":
        return torch.cat([x, x.narrow(d, j % n, 1)], d)
    if what == "reverse_cat":
        other = y.reshape(-1)[: x.numel() // n]
        return torch.cat([other.reshape(x.narrow(d, 0, 1).shape), x], d) if other.numel() * n == x.numel() else x
    if what == "pad":
        return nn.functional.pad(x, (i % 3, j % 2), value=float(j))
    if what == "select":
        return x.select(d, j % n) if x.dim() > 1 else x
    if what == "index":
        return x.index_select(d, torch.tensor([(j + k * (1 + i % 2)) % n for k in range(n)]))
    if what == "repeat":
        return x.repeat_interleave(1 + j % 2, d)
    if what == "stack":
        return torch.stack([x, x], d)
    if what == "to":
        return x.to(torch.float32)
    if what == "buffer":
        out = torch.empty_like(x, device="cpu")
        for k in range(n):
            out.select(d, k).copy_(x.select(d, n - 1 - k))
        return out
    if what == "expand":
        return x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:])
    if what == "unfold":
        return x.unfold(d, min(n, 2), 1)
    out = torch.zeros([*x.shape[:d], n + 1, *x.shape[d + 1 :]])
    out.narrow(d, j % 2, n).copy_(x)
    return out


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([(4, 6), (3, 2, 4), (12,), (2, 3, 2, 2)]))
def test_random_chains_of_movement(steps: list[Step], shape: tuple[int, ...]) -> None:
    shapes: Shapes = {"a": shape, "b": (5, 3)}

    def run(w: dict[str, torch.Tensor]) -> torch.Tensor:
        x = w["a"]
        for step in steps:
            x = advance(x, w["b"], step)
        return x

    result = tuple(run(coded(shapes)).shape)
    layout = check(lambda: Toy(lambda m, w: m.w0.data.copy_(run(w)), result), shapes)
    assert layout.opaque == ()
