"""Llama."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, MLP, NORMS

FAMILY = Family("llama", ("LlamaForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + MLP)
