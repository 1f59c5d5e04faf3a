"""Llama."""

from weightlink.converters.families.base import ATTENTION, EMBEDDINGS, MLP, NORMS, Family

FAMILY = Family("llama", ("LlamaForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + MLP)
