"""Ling and Ring (Bailing MoE), versions 1 and 2: queries, keys and values in one matrix, names of their own."""

from weightlink.converters.families.base import Family, Part, Rule
from weightlink.converters.families.common import EXPERTS, MLP, NORMS, in_layer, shared_experts
from weightlink.converters.families.mtp import next_token

EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", (("model.word_embeddings.weight", "vocab"),)),
    Rule("output_layer.weight", (("lm_head.weight", "vocab"),)),
    Rule("decoder.final_layernorm.weight", "model.norm.weight", norm=True),
)


def _qkv(kind: str) -> Rule:
    """All queries, then all keys, then all values."""
    name, size = f"attention.query_key_value.{kind}", "groups*q+groups*k+groups*v"
    parts = (
        Part(name, rows="q", size=size),
        Part(name, rows="k", at="groups*q", size=size),
        Part(name, rows="v", at="groups*q+groups*k", size=size),
    )
    return Rule(f"self_attention.linear_qkv.{kind}", parts, groups="groups")


ATTENTION = in_layer(
    _qkv("weight"),
    _qkv("bias"),
    Rule("self_attention.linear_proj.weight", "attention.dense.weight"),
    Rule("self_attention.q_layernorm.weight", "attention.query_layernorm.weight", norm=True),
    Rule("self_attention.k_layernorm.weight", "attention.key_layernorm.weight", norm=True),
)

ROUTER_BIAS = in_layer(Rule("mlp.router.expert_bias", "mlp.gate.expert_bias"))

REST = NORMS + MLP + EXPERTS + ROUTER_BIAS + shared_experts("shared_experts")

FAMILY = Family(
    "bailing_moe",
    ("BailingMoeForCausalLM", "BailingMoEForCausalLM", "BailingMoeV2ForCausalLM"),
    EMBEDDINGS + ATTENTION + REST + next_token(ATTENTION + REST, norm="final_layernorm"),
)
