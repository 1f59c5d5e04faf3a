"""The loader replay follows data movement: its prediction against the same loader run for real, on toy modules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import Loader, Shapes, Toy, check, coded, fused, plain, replay, rows
from torch import nn

# --- pure movement --------------------------------------------------------------------------------------------------


def column_shard(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"].narrow(0, 3, 3))


def row_shard(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"].narrow(1, 2, 2))


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
        m.w2.data.copy_(w["a"])
        m.w2.data[1:3].copy_(w["a"][:2])

    layout = replay(Toy(loader, (5, 3), (5, 3), (5, 3)), {"a": (5, 3), "b": (2, 3)})
    totals = [int(layout.regions.numel[layout.regions.param == p].sum()) for p in (0, 1, 2)]
    assert totals == [15, 21, 21]


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
