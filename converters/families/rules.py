"""Rules as data: which Hugging Face rows the dimension-0 rows of a Megatron parameter belong to.

A rule is one line. ``Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight")`` renames. A rule with parts cuts
dimension 0: the rows are ``groups`` equal groups, and the parts follow one another in each group. A part is ``units``
runs of ``rows`` rows. Run ``u``, counted over all groups, lies at canonical rows ``u * every + at`` and after.

Numbers are expressions: sums of products of integers and symbols, such as ``"2*head+groups*k"``. Symbols are resolved
from the model's own configuration (:func:`weightlink.converters.megatron.sizes_of`):

======================== ===========================================================================
``vocab``                true vocabulary size; rows beyond it are Megatron's padding
``heads``, ``groups``    attention heads, and query groups
``qpg``, ``head``        heads per query group, and rows per head
``q``, ``k``, ``v``      rows of one query group that belong to the query, key and value heads
``ffn``                  rows of the gate, and of the up, projection of a dense MLP
``moe_ffn``              the same of one routed expert
``shared_ffn``           the same of the shared experts together
``experts``              routed experts of a layer
``layers``               decoder layers, next-token layers not counted
``gdn_groups``           key heads of a gated delta net
``gdn_k``, ``gdn_v``     rows of one key head, and of the value heads that belong to it
``gdn_heads``            value heads that belong to one key head
``vit_heads``            attention heads of a vision tower
``vit_head``             rows per head of a vision tower
======================== ===========================================================================

``{L}`` stands for the global layer number, ``{E}`` for the global expert number; every placeholder of the key may be
used in the names, also in an expression: ``{L+layers}``. A placeholder is all that stands between two dots, or at an
end; a number that the key states itself fits only that number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weightlink.hooks.errors import NameMapError, PluginError

PLACEHOLDER = re.compile(r"\{(\w+)\}")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_IN_NAME = re.compile(r"\{([^{}]*)\}")
_EXPRESSION = re.compile(r"\w+(\*\w+)*(\+\w+(\*\w+)*)*")


@dataclass(frozen=True)
class Part:
    """A part of each group of a Megatron tensor's rows.

    :param name: the HF name
    :param rows: rows of one run; empty for all rows of the tensor
    :param units: runs in each group
    :param every: canonical rows from one run to the next; empty for ``rows``
    :param at: canonical row of the first run's first row
    :param size: canonical rows of the whole HF tensor; empty for ``groups * units * every``
    """

    name: str
    rows: str = ""
    units: str = "1"
    every: str = ""
    at: str = "0"
    size: str = ""


@dataclass(frozen=True)
class Rule:
    """One Megatron key, or key pattern.

    :param key: as in ``sharded_state_dict``, with placeholders
    :param to: the HF name, or parts that cut each group of dimension 0; ``(HF name, rows)`` is a part in short
    :param groups: number of groups; empty for one
    :param transpose: the HF tensor's dimensions are the Megatron tensor's in reverse
    :param stack: size of a leading HF dimension that the key's last placeholder indexes; empty for none
    :param norm: a norm's scale: a Megatron model with zero-centred norms holds it less one
    :param centred: HF, too, holds that scale less one
    """

    key: str
    to: str | tuple[Part | tuple[str, str], ...]
    groups: str = ""
    transpose: bool = False
    stack: str = ""
    norm: bool = False
    centred: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """``to`` as parts."""
        if isinstance(self.to, str):
            return (Part(self.to),)
        return tuple(part if isinstance(part, Part) else Part(*part) for part in self.to)

    def prefixed(self, source: str, target: str) -> Rule:
        """The rule with ``source`` before its key and ``target`` before its names."""
        if isinstance(self.to, str):
            return replace(self, key=source + self.key, to=target + self.to)
        parts = tuple(replace(part, name=target + part.name) for part in self.parts)
        return replace(self, key=source + self.key, to=parts)

    def validate(self, family: str) -> None:
        """Raises :class:`PluginError` for what no model could resolve."""
        parts = self.parts
        if not parts:
            raise PluginError(f"family {family!r}: a rule without a name", tensor=self.key)
        placeholders = PLACEHOLDER.findall(self.key)
        known = set(placeholders)
        if placeholders != [slot[1:-1] for slot in slots(self.key) if slot.startswith("{")] or len(known) != len(
            placeholders
        ):
            raise PluginError(
                f"family {family!r}: a key's placeholders must differ, and each must be all between two dots",
                tensor=self.key,
            )
        expressions = [self.groups, self.stack]
        for part in parts:
            expressions += [part.rows, part.units, part.every, part.at, part.size]
            inserted = _IN_NAME.findall(part.name)
            expressions += inserted
            if any(not symbols(text) & known for text in inserted):
                raise PluginError(
                    f"family {family!r}: a name uses a placeholder that the key does not have",
                    found=f"{part.name} for {self.key}",
                )
        wrong = [text for text in expressions if text and not _EXPRESSION.fullmatch(text)]
        if wrong:
            raise PluginError(
                f"family {family!r}: not a sum of products of symbols and integers", tensor=self.key, found=wrong
            )
        whole = [part for part in parts if not part.rows]
        if whole and (len(parts) > 1 or self.groups or whole[0] != Part(whole[0].name)):
            raise PluginError(f"family {family!r}: a part without rows stands alone", tensor=self.key)
        if self.centred and not self.norm:
            raise PluginError(f"family {family!r}: only a norm's scale can be zero-centred", tensor=self.key)
        if self.stack and not known:
            raise PluginError(f"family {family!r}: nothing indexes the stacked dimension", tensor=self.key)


@dataclass(frozen=True)
class Match:
    """A rule applied to one key.

    :param rule: the rule
    :param parts: its parts with HF names filled in
    :param index: what the key's last placeholder stood for; 0 without one
    """

    rule: Rule
    parts: tuple[Part, ...]
    index: int


def match(rule: Rule, key: str, sizes: Mapping[str, int], rank: str) -> Match:
    """``rule`` applied to ``key``, which must fit it. Raises :class:`NameMapError` for a symbol that is not known."""
    filled = zip(slots(rule.key), slots(key), strict=True)
    numbers = {slot[1:-1]: int(number) for slot, number in filled if slot.startswith("{")}
    known = {**sizes, **numbers}

    def insert(found: re.Match[str]) -> str:
        return str(value(found[1], known, key, rank))

    parts = tuple(replace(part, name=_IN_NAME.sub(insert, part.name)) for part in rule.parts)
    return Match(rule, parts, [*numbers.values()][-1] if numbers else 0)


def pattern(key: str) -> str:
    """What a key and the rule for it have in common."""
    return NUMBER.sub("#", PLACEHOLDER.sub("0", key))


def slots(key: str) -> list[str]:
    """The numbers of a key, and its placeholders where they stand for one, in order."""
    return [word for word in key.split(".") if NUMBER.fullmatch(word) or PLACEHOLDER.fullmatch(word)]


def meet(a: str, b: str) -> bool:
    """Whether two keys of one :func:`pattern`, with placeholders or without, have a key in common."""
    pairs = zip(slots(a), slots(b), strict=True)
    return all(x == y or x.startswith("{") or y.startswith("{") for x, y in pairs)


def symbols(expression: str) -> set[str]:
    """The symbols of an expression."""
    return {word for word in re.split(r"[*+]", expression) if word and not word.isdigit()}


def value(expression: str, sizes: Mapping[str, int], key: str, rank: str) -> int:
    """The value of an expression of the rule for ``key``. Raises :class:`NameMapError` for symbols without a size."""
    absent = symbols(expression) - sizes.keys()
    if absent:
        raise NameMapError(
            f"a rule names sizes that the model's configuration does not have: {', '.join(sorted(absent))}",
            tensor=key,
            rank=rank,
            expected=", ".join(sorted(sizes)),
        )
    total = 0
    for term in expression.split("+"):
        product = 1
        for word in term.split("*"):
            product *= int(word) if word.isdigit() else sizes[word]
        total += product
    return total
