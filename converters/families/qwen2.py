"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, MLP, NORMS, QKV_BIAS

FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + QKV_BIAS + MLP)
