"""Mistral: Llama's layers."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, MLP, NORMS

FAMILY = Family("mistral", ("MistralForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + MLP)
