"""Mixtral: Llama with routed experts in place of every dense MLP, under names of their own."""

from weightlink.converters.families.base import Family, Rule
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, NORMS, in_layer

EXPERTS = in_layer(
    Rule("mlp.router.weight", "block_sparse_moe.gate.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc1.weight_w", "block_sparse_moe.experts.{E}.w1.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc1.weight_v", "block_sparse_moe.experts.{E}.w3.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc2.weight", "block_sparse_moe.experts.{E}.w2.weight"),
)

FAMILY = Family("mixtral", ("MixtralForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + EXPERTS)
