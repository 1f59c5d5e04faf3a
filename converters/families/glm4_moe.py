"""GLM-4.5 and GLM-4.6: dense first layers, then routed experts with a correction bias and shared experts. Biases on
the query, key and value projections, and norms on queries and keys in the larger models."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import (
    ATTENTION,
    EMBEDDINGS,
    EXPERTS,
    MLP,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    shared_experts,
)
from weightlink.converters.families.mtp import next_token

LAYER = NORMS + ATTENTION + QKV_BIAS + QK_NORM + MLP + EXPERTS + ROUTER_BIAS + shared_experts("shared_experts")

FAMILY = Family("glm4_moe", ("Glm4MoeForCausalLM",), EMBEDDINGS + LAYER + next_token(LAYER))
