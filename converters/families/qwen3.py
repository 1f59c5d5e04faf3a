"""Qwen3: Llama with norms on queries and keys."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, MLP, NORMS, QK_NORM

FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + QK_NORM + MLP)
