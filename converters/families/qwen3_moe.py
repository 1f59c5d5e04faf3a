"""Qwen3-MoE: Qwen3 with routed experts in place of some or all dense MLPs."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, EXPERTS, MLP, NORMS, QK_NORM

FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + QK_NORM + MLP + EXPERTS)
