"""DeepSeek-V2, DeepSeek-V3 and what has their architecture (Kimi-K2): multi-head latent attention.

Rows of the rotary parts are in the same order on both sides: Megatron's latent attention takes them in pairs itself.
"""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import (
    EMBEDDINGS,
    EXPERTS,
    MLP,
    NORMS,
    ROUTER_BIAS,
    in_layer,
    shared_experts,
)
from weightlink.converters.families.mtp import next_token
from weightlink.converters.families.rules import Rule

#: V2-Lite has ``q_proj`` in place of the two query projections.
LATENT_ATTENTION = in_layer(
    Rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    Rule("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    Rule("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    Rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    Rule("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", norm=True),
    Rule("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", norm=True),
    Rule("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", norm=True),
    Rule("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", norm=True),
)

LAYER = NORMS + LATENT_ATTENTION + MLP + EXPERTS + ROUTER_BIAS + shared_experts("shared_experts")

FAMILY = Family("deepseek", ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), EMBEDDINGS + LAYER + next_token(LAYER))
