"""Qwen2-MoE: Qwen2 with routed experts and a gated shared expert in place of some or all dense MLPs."""

from weightlink.converters.families.base import Family, Rule
from weightlink.converters.families.common import (
    ATTENTION,
    EMBEDDINGS,
    EXPERTS,
    MLP,
    NORMS,
    QKV_BIAS,
    in_layer,
    shared_experts,
)

SHARED_EXPERT_GATE = in_layer(Rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"))

FAMILY = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    EMBEDDINGS + NORMS + ATTENTION + QKV_BIAS + MLP + EXPERTS + shared_experts("shared_expert") + SHARED_EXPERT_GATE,
)
