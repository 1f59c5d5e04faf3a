"""Qwen3.5, dense and MoE, with its vision tower or text only: Qwen3-Next's layers, inputs of the delta net unpacked."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import (
    EMBEDDINGS,
    EXPERTS,
    MLP,
    NORMS,
    QK_NORM,
    shared_experts,
    zero_centred,
)
from weightlink.converters.families.gated import DELTA_NET, GATED_ATTENTION, PLAIN_INPUTS
from weightlink.converters.families.qwen2_moe import SHARED_EXPERT_GATE
from weightlink.converters.families.vision import with_vision

_RULES = (
    zero_centred(EMBEDDINGS + NORMS + QK_NORM)
    + GATED_ATTENTION
    + DELTA_NET
    + PLAIN_INPUTS
    + MLP
    + EXPERTS
    + shared_experts("shared_expert")
    + SHARED_EXPERT_GATE
)

FAMILY = Family(
    "qwen3_5", ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), with_vision(_RULES)
)
TEXT = Family("qwen3_5_text", ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _RULES)
