"""Qwen3-VL: Qwen3 with a vision tower; the MoE variant stacks its experts in one HF tensor, transposed."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, MLP, NORMS, QK_NORM, in_layer
from weightlink.converters.families.rules import Part, Rule
from weightlink.converters.families.vision import with_vision


def _half(key: str, at: str) -> Rule:
    part = Part("mlp.experts.gate_up_proj", rows="moe_ffn", at=at, size="2*moe_ffn")
    return Rule(f"mlp.experts.experts.{{E}}.linear_fc1.{key}", (part,), transpose=True, stack="experts")


_STACKED = in_layer(
    Rule("mlp.router.weight", "mlp.gate.weight"),
    _half("weight_w", "0"),
    _half("weight_v", "moe_ffn"),
    Rule("mlp.experts.experts.{E}.linear_fc2.weight", "mlp.experts.down_proj", transpose=True, stack="experts"),
)

FAMILY = Family(
    "qwen3_vl",
    ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    with_vision(EMBEDDINGS + NORMS + ATTENTION + QK_NORM + MLP + _STACKED),
)
