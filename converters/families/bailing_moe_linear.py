"""Ling and Ring 2.5 (Bailing MoE with linear attention): what Megatron-Core has of them.

That is latent attention, experts and dense MLPs. For the layers with linear attention Megatron-Core has no module; a
trainer that brings one ships the rules for its names in a plugin.
"""

from weightlink.converters.families.bailing_moe import EMBEDDINGS, REST
from weightlink.converters.families.base import Family, Rule
from weightlink.converters.families.common import in_layer

LATENT_ATTENTION = in_layer(
    Rule("self_attention.linear_q_proj.weight", "attention.q_proj.weight"),
    Rule("self_attention.linear_q_down_proj.weight", "attention.q_a_proj.weight"),
    Rule("self_attention.linear_q_up_proj.weight", "attention.q_b_proj.weight"),
    Rule("self_attention.linear_kv_down_proj.weight", "attention.kv_a_proj_with_mqa.weight"),
    Rule("self_attention.linear_kv_up_proj.weight", "attention.kv_b_proj.weight"),
    Rule("self_attention.linear_proj.weight", "attention.dense.weight"),
    Rule("self_attention.q_layernorm.weight", "attention.q_a_layernorm.weight", norm=True),
    Rule("self_attention.kv_layernorm.weight", "attention.kv_a_layernorm.weight", norm=True),
    Rule("self_attention.linear_q_up_proj.layer_norm_weight", "attention.q_a_layernorm.weight", norm=True),
    Rule("self_attention.linear_kv_up_proj.layer_norm_weight", "attention.kv_a_layernorm.weight", norm=True),
)

FAMILY = Family("bailing_moe_linear", ("BailingMoeV2_5ForCausalLM",), EMBEDDINGS + LATENT_ATTENTION + REST)
