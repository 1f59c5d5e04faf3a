"""Families as data: which Hugging Face names the dimension-0 rows of a Megatron parameter belong to.

A rule is one line. ``Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight")`` renames. A rule with sections cuts
dimension 0: the rows are ``groups`` equal groups, and each group holds the sections in order. Sizes are symbols,
resolved from the model's own configuration:

======================== ===========================================================================
``groups``               query groups
``q``, ``k``, ``v``      rows of one query group that belong to the query, key and value heads
``ffn``                  rows of the gate, and of the up, projection of a dense MLP
``vocab``                true vocabulary size; rows beyond it are Megatron's padding
======================== ===========================================================================

``{L}`` stands for the global layer number, ``{E}`` for the global expert number; every placeholder of the key may be
used in the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightlink.hooks.errors import NameMapError, PluginError
from weightlink.hooks.protocols import Family as FamilyLike

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Rule:
    """One Megatron key, or key pattern.

    :param key: as in ``sharded_state_dict``, with placeholders
    :param to: the HF name, or ``(HF name, rows)`` pairs that cut each group of dimension 0
    :param groups: symbol of the number of groups; empty for one group
    """

    key: str
    to: str | tuple[tuple[str, str], ...]
    groups: str = ""


@dataclass(frozen=True)
class Match:
    """A rule applied to one key: HF names filled in. ``sections`` is empty when the whole tensor has one name."""

    name: str
    sections: tuple[tuple[str, str], ...] = ()
    groups: str = ""


@dataclass(frozen=True)
class Family:
    """The rules of one model family.

    :param name: how users choose it (``family=``)
    :param architectures: entries of ``config.json``'s ``architectures`` that it serves
    :param rules: all rules; two rules for one key are an error
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    _table: dict[str, tuple[Rule, tuple[str, ...]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table: dict[str, tuple[Rule, tuple[str, ...]]] = {}
        for rule in self.rules:
            pattern = _PLACEHOLDER.sub("#", rule.key)
            if pattern in table:
                raise PluginError(f"family {self.name!r} has two rules for one key", found=rule.key)
            table[pattern] = (rule, tuple(_PLACEHOLDER.findall(rule.key)))
        object.__setattr__(self, "_table", table)

    def match(self, key: str) -> Match | None:
        """The rule for a key of ``sharded_state_dict``, with its numbers filled in; None without one."""
        found = self._table.get(_NUMBER.sub("#", key))
        if found is None:
            return None
        rule, names = found
        values = dict(zip(names, _NUMBER.findall(key), strict=True))
        if isinstance(rule.to, str):
            return Match(rule.to.format(**values))
        return Match("", tuple((name.format(**values), rows) for name, rows in rule.to), rule.groups)

    def unknown(self, keys: Sequence[str], *, rank: str) -> NameMapError:
        """The error for ``keys`` without a rule, with the line that would add one."""
        example = _NUMBER.sub("{L}", keys[0], count=1)
        return NameMapError(
            f"family {self.name!r} has no rule for {len(keys)} Megatron parameter(s)",
            tensor=", ".join(keys[:8]) + (", ..." if len(keys) > 8 else ""),
            rank=rank,
            remedy="add a rule to the family, or ship one in a plugin with a weightlink_families hook: "
            f'Rule("{example}", "<Hugging Face name>")',
        )


def in_layer(*rules: Rule) -> tuple[Rule, ...]:
    """The rules with Megatron's and Hugging Face's prefix of decoder layer ``{L}``."""
    source, target = "decoder.layers.{L}.", "model.layers.{L}."
    return tuple(
        Rule(
            source + rule.key,
            target + rule.to if isinstance(rule.to, str) else tuple((target + name, rows) for name, rows in rule.to),
            rule.groups,
        )
        for rule in rules
    )


def choose_family(families: Mapping[str, FamilyLike], architecture: str, name: str | None = None) -> Family:
    """The family called ``name`` or, without a name, the one that serves ``architecture``.

    Raises :class:`NameMapError` listing what is known, :class:`PluginError` for a family that is not a :class:`Family`.
    """
    if name is not None:
        if name not in families:
            raise NameMapError(f"unknown model family {name!r}", expected=", ".join(sorted(families)))
        chosen = [families[name]]
    else:
        chosen = [family for family in families.values() if architecture in family.architectures]
        if len(chosen) != 1:
            known = sorted({item for family in families.values() for item in family.architectures})
            raise NameMapError(
                f"{len(chosen)} model families serve the architecture {architecture!r}",
                expected="one of " + ", ".join(known),
                found=", ".join(family.name for family in chosen) or architecture,
                remedy="name one with family=, or ship one in a plugin with a weightlink_families hook",
            )
    if not isinstance(chosen[0], Family):
        raise PluginError(
            f"family {chosen[0].name!r} cannot map Megatron parameters",
            expected="a weightlink.converters.families.base.Family",
            found=type(chosen[0]).__name__,
        )
    return chosen[0]


# --- rules that several families share --------------------------------------------------------------------------------

EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "vocab"),)),
    Rule("output_layer.weight", (("lm_head.weight", "vocab"),)),
    Rule("decoder.final_layernorm.weight", "model.norm.weight"),
)

#: Transformer Engine fuses the norms into the linear layers; the local spec keeps modules of their own.
NORMS = in_layer(
    Rule("input_layernorm.weight", "input_layernorm.weight"),
    Rule("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    Rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Rule("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)

ATTENTION = in_layer(
    Rule(
        "self_attention.linear_qkv.weight",
        (("self_attn.q_proj.weight", "q"), ("self_attn.k_proj.weight", "k"), ("self_attn.v_proj.weight", "v")),
        groups="groups",
    ),
    Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

QKV_BIAS = in_layer(
    Rule(
        "self_attention.linear_qkv.bias",
        (("self_attn.q_proj.bias", "q"), ("self_attn.k_proj.bias", "k"), ("self_attn.v_proj.bias", "v")),
        groups="groups",
    ),
)

QK_NORM = in_layer(
    Rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

#: With ``singleton_local_shards`` gate and up have keys of their own (``_w``, ``_v``); without it they share one.
MLP = in_layer(
    Rule("mlp.linear_fc1.weight", (("mlp.gate_proj.weight", "ffn"), ("mlp.up_proj.weight", "ffn"))),
    Rule("mlp.linear_fc1.weight_w", "mlp.gate_proj.weight"),
    Rule("mlp.linear_fc1.weight_v", "mlp.up_proj.weight"),
    Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)

EXPERTS = in_layer(
    Rule("mlp.router.weight", "mlp.gate.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc1.weight_w", "mlp.experts.{E}.gate_proj.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc1.weight_v", "mlp.experts.{E}.up_proj.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc2.weight", "mlp.experts.{E}.down_proj.weight"),
)
