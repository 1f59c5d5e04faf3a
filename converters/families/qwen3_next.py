"""Qwen3-Next: gated delta nets between gated attention layers, zero-centred norms, a gated shared expert."""

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
from weightlink.converters.families.gated import DELTA_NET, GATED_ATTENTION, PACKED_INPUTS
from weightlink.converters.families.qwen2_moe import SHARED_EXPERT_GATE

FAMILY = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    zero_centred(EMBEDDINGS + NORMS + QK_NORM)
    + GATED_ATTENTION
    + DELTA_NET
    + PACKED_INPUTS
    + MLP
    + EXPERTS
    + shared_experts("shared_expert")
    + SHARED_EXPERT_GATE,
)
