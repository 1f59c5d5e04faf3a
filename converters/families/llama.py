"""Llama 2 and 3, with or without biases."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, MLP, MLP_BIAS, NORMS, OUTPUT_BIAS, QKV_BIAS

FAMILY = Family(
    "llama", ("LlamaForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + QKV_BIAS + OUTPUT_BIAS + MLP + MLP_BIAS
)
