"""Qwen3: Llama with norms on queries and keys."""

from weightlink.converters.families.base import ATTENTION, EMBEDDINGS, MLP, NORMS, QK_NORM, Family

FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + QK_NORM + MLP)
