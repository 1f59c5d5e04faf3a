"""Next-token layers (multi-token prediction): a decoder layer after the last one, and what joins it to the model.

Megatron's own embeddings and output layer serve these layers too, so the copies that a checkpoint may hold of them
(``embed_tokens`` and ``shared_head.head`` of such a layer) have no rule: name them with ``ignore`` when loading one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weightlink.converters.families.common import in_layer
from weightlink.converters.families.rules import Rule

#: Numbered from 0 in Megatron, and on from the last decoder layer in Hugging Face.
_SOURCE, _TARGET = "mtp.layers.{L}.", "model.layers.{L+layers}."


def next_token(layer: Iterable[Rule], norm: str = "shared_head.norm") -> tuple[Rule, ...]:
    """The rules of next-token layers whose transformer layer has the rules ``layer`` of a decoder layer.

    :param norm: what Hugging Face calls the last norm
    """
    joints = in_layer(
        Rule("enorm.weight", "enorm.weight", norm=True),
        Rule("hnorm.weight", "hnorm.weight", norm=True),
        Rule("eh_proj.weight", "eh_proj.weight"),
        Rule("final_layernorm.weight", f"{norm}.weight", norm=True),
        source=_SOURCE,
        target=_TARGET,
    )
    return joints + tuple(_moved(rule) for rule in layer)


def _moved(rule: Rule) -> Rule:
    key = rule.key.replace("decoder.layers.{L}.", _SOURCE + "transformer_layer.")
    if isinstance(rule.to, str):
        return replace(rule, key=key, to=rule.to.replace("model.layers.{L}.", _TARGET))
    parts = tuple(replace(part, name=part.name.replace("model.layers.{L}.", _TARGET)) for part in rule.parts)
    return replace(rule, key=key, to=parts)
