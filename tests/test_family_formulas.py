"""Families whose Hugging Face tensors interleave, pack or stack rows: against what the two models do with the rows.

Each case holds index-coded Hugging Face tensors, and Megatron's tensors made from them by the reshapes that the models
themselves apply. Cut anywhere, every element must be sent to where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import FAMILIES, cut, rows
from weightlink.converters.megatron import read_layout

LAYER, HF = "decoder.layers.3.", "model.layers.3."
NUMBERS = iter(range(1, 1 << 20, 1 << 12))


def coded(*shape: int) -> torch.Tensor:
    return next(NUMBERS) + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@dataclass
class Case:
    family: str
    megatron: dict[str, torch.Tensor]
    hf: dict[str, torch.Tensor]
    sizes: dict[str, int]


def gated_attention() -> Case:
    groups, qpg, head, width = 3, 2, 4, 5
    q, k, v = coded(groups * qpg * 2 * head, width), coded(groups * head, width), coded(groups * head, width)
    # HF: each head's rows are its query and then its gate. Megatron: a group's queries, its gates, its key, its value.
    queries, gates = q.view(groups, qpg, 2, head, width).unbind(2)
    parts = [queries.flatten(1, 2), gates.flatten(1, 2), k.view(groups, head, width), v.view(groups, head, width)]
    return Case(
        "qwen3_next",
        {LAYER + "self_attention.linear_qkv.weight": torch.cat(parts, 1).flatten(0, 1)},
        {HF + f"self_attn.{name}_proj.weight": tensor for name, tensor in (("q", q), ("k", k), ("v", v))},
        {"groups": groups, "qpg": qpg, "head": head, "k": head, "v": head},
    )


NET = LAYER + "self_attention."
DELTA = {"gdn_groups": 3, "gdn_k": 4, "gdn_v": 2 * 5, "gdn_heads": 2}


def packed_delta_net() -> Case:
    keys, width, ratio = 3, 6, 2
    qkvz, ba = coded(keys * (4 + 4 + 10 + 10), width), coded(keys * 2 * ratio, width)
    parts = qkvz.view(keys, -1, width).split([4, 4, 10, 10], 1) + ba.view(keys, -1, width).split([ratio, ratio], 1)
    names = ("query", "key", "value", "z", "beta", "alpha")
    return Case(
        "qwen3_next",
        {NET + f"in_proj.weight.{name}": part.flatten(0, 1) for name, part in zip(names, parts, strict=True)},
        {HF + "linear_attn.in_proj_qkvz.weight": qkvz, HF + "linear_attn.in_proj_ba.weight": ba},
        DELTA,
    )


def plain_delta_net() -> Case:
    qkv, z, b, a, conv = coded(12 + 12 + 30, 7), coded(30, 7), coded(6, 7), coded(6, 7), coded(12 + 12 + 30, 1, 4)
    entries = {NET + "in_proj.weight.z": z, NET + "in_proj.weight.beta": b, NET + "in_proj.weight.alpha": a}
    for tensor, where in ((qkv, "in_proj"), (conv, "conv1d")):
        for name, part in zip(("query", "key", "value"), tensor.split([12, 12, 30]), strict=True):
            entries[NET + f"{where}.weight.{name}"] = part
    hf = {"in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": b, "in_proj_a": a, "conv1d": conv}
    return Case(
        "qwen3_5_text", entries, {HF + f"linear_attn.{name}.weight": tensor for name, tensor in hf.items()}, DELTA
    )


def alternating_experts() -> Case:
    experts, hidden, ffn = 3, 5, 4
    gate_up, down = coded(experts, hidden, 2 * ffn), coded(experts, ffn, hidden)
    gate_up_bias, down_bias = coded(experts, 2 * ffn), coded(experts, hidden)
    entries = {}
    for e in range(experts):
        base = LAYER + f"mlp.experts.experts.{e}."
        entries |= {
            base + "linear_fc1.weight_w": gate_up[e, :, ::2].t().contiguous(),
            base + "linear_fc1.weight_v": gate_up[e, :, 1::2].t().contiguous(),
            base + "linear_fc1.bias_w": gate_up_bias[e, ::2].contiguous(),
            base + "linear_fc1.bias_v": gate_up_bias[e, 1::2].contiguous(),
            base + "linear_fc2.weight": down[e].t().contiguous(),
            base + "linear_fc2.bias": down_bias[e],
        }
    names = {
        "gate_up_proj": gate_up,
        "down_proj": down,
        "gate_up_proj_bias": gate_up_bias,
        "down_proj_bias": down_bias,
    }
    hf = {HF + f"mlp.experts.{name}": tensor for name, tensor in names.items()}
    return Case("gpt_oss", entries, hf, {"experts": experts, "moe_ffn": ffn})


def stacked_experts() -> Case:
    experts, hidden, ffn = 3, 5, 4
    gate_up, down = coded(experts, hidden, 2 * ffn), coded(experts, ffn, hidden)
    entries = {}
    for e in range(experts):
        base = f"language_model.{LAYER}mlp.experts.experts.{e}."
        gate, up = gate_up[e].t().chunk(2)
        entries[base + "linear_fc1.weight_w"] = gate.contiguous()
        entries[base + "linear_fc1.weight_v"] = up.contiguous()
        entries[base + "linear_fc2.weight"] = down[e].t().contiguous()
    hf = "model.language_model.layers.3.mlp.experts."
    return Case(
        "qwen3_vl",
        entries,
        {hf + "gate_up_proj": gate_up, hf + "down_proj": down},
        {"experts": experts, "moe_ffn": ffn},
    )


def vision_attention() -> Case:
    heads, head, width = 3, 4, 5
    weight, bias = coded(3 * heads * head, width), coded(3 * heads * head)
    # HF: qkv(x).reshape(length, 3, heads, head). Megatron: each head's query, key and value together.
    order = torch.arange(3 * heads * head).view(3, heads, head).transpose(0, 1).flatten()
    key = "vision_model.decoder.layers.3.self_attention.linear_qkv."
    return Case(
        "qwen3_vl",
        {key + "weight": weight[order], key + "bias": bias[order]},
        {"model.visual.blocks.3.attn.qkv.weight": weight, "model.visual.blocks.3.attn.qkv.bias": bias},
        {"vit_heads": heads, "vit_head": head},
    )


CASES = [gated_attention, packed_delta_net, plain_delta_net, alternating_experts, stacked_experts, vision_attention]


def proof(make) -> object:
    case = make()
    return pytest.param(case, id=make.__name__, marks=pytest.mark.proves(case.family, "rules"))


@pytest.mark.parametrize("case", [proof(make) for make in CASES])
@given(cuts=st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=15, deadline=None)
def test_every_element_goes_back_to_where_it_came_from(case: Case, cuts: list[float]) -> None:
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for key, whole in case.megatron.items():
        bounds = sorted({0, len(whole), *(round(share * len(whole)) for share in cuts)})
        for start, end in pairwise(bounds):  # ranks, also with cuts inside a group
            layout, sources = read_layout(
                [cut(key, whole, start, end)], FAMILIES[case.family], case.sizes, dtype="float32", rank="r"
            )
            part = rows(layout, [source.refresh() for source in sources])
            assert not part.keys() & found.keys()
            found |= part
    want = {
        (name, tuple(index)): tensor[tuple(index)].item()
        for name, tensor in case.hf.items()
        for index in torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(-1, tensor.dim()).tolist()
    }
    assert found == want


@pytest.mark.parametrize(
    ("key", "family", "zero_centred", "shift"),
    [
        # HF holds w - 1, as a zero-centred Megatron model does; its one plain norm is that of the delta net.
        ("input_layernorm.weight", "qwen3_next", True, 0.0),
        ("input_layernorm.weight", "qwen3_next", False, -1.0),
        ("self_attention.in_proj.layer_norm_weight", "qwen3_next", True, 0.0),
        ("self_attention.linear_qkv.layer_norm_weight", "qwen3_5_text", False, -1.0),
        ("self_attention.q_layernorm.weight", "qwen3_next", True, 0.0),
        ("self_attention.out_norm.weight", "qwen3_next", True, 1.0),
        ("self_attention.out_norm.weight", "qwen3_next", False, 0.0),
        ("input_layernorm.weight", "qwen3", True, 1.0),
    ],
)
def test_norms_are_sent_as_hugging_face_centres_them(key, family, zero_centred, shift):
    live = torch.tensor([0.5, -0.25, 0.125])
    _, sources = read_layout(
        [cut(LAYER + key, live, 0, 3)],
        FAMILIES[family],
        {},
        dtype="float32",
        rank="r",
        zero_centred=zero_centred,
    )
    assert torch.equal(sources[0].refresh(), live + shift)
    assert (sources[0].sent is sources[0].live) == (shift == 0.0)
    sources[0].sent.copy_(torch.tensor([2.0, 3.0, 4.0]))
    sources[0].store()
    assert torch.equal(live, torch.tensor([2.0, 3.0, 4.0]) - shift)
