"""A model family: a name, the architectures it serves, and its rules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightlink.converters.families.rules import NUMBER, Match, Part, Rule, match, meet, pattern
from weightlink.hooks.errors import NameMapError, PluginError
from weightlink.hooks.protocols import Family as FamilyLike

__all__ = ["Family", "Match", "Part", "Rule", "choose_family"]


@dataclass(frozen=True)
class Family:
    """The rules of one model family.

    :param name: how users choose it (``family=``)
    :param architectures: entries of ``config.json``'s ``architectures`` that it serves
    :param rules: all rules; two rules for one key are an error
    :param rotary_interleaved: what ``rotary_interleaved`` a Megatron model must have to compute what the HF model does
        with its rows in the same order
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    rotary_interleaved: bool = False
    _table: dict[str, list[Rule]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table: dict[str, list[Rule]] = {}
        for rule in self.rules:
            rule.validate(self.name)
            alike = table.setdefault(pattern(rule.key), [])
            twice = next((other for other in alike if meet(other.key, rule.key)), None)
            if twice is not None:
                raise PluginError(
                    f"family {self.name!r} has two rules for one key", found=f"{twice.key} and {rule.key}"
                )
            alike.append(rule)
        object.__setattr__(self, "_table", table)

    def match(self, key: str, sizes: Mapping[str, int] | None = None, rank: str = "") -> Match | None:
        """The rule for a key of ``sharded_state_dict``, with its numbers filled in; None without one.

        :param sizes: symbols that names may use in expressions
        :raises NameMapError: for such a symbol that is not among them
        """
        rule = next((rule for rule in self._table.get(pattern(key), ()) if meet(rule.key, key)), None)
        return None if rule is None else match(rule, key, sizes or {}, rank)

    def unknown(self, keys: Sequence[str], *, rank: str) -> NameMapError:
        """The error for ``keys`` without a rule, with the line that would add one."""
        letters = itertools.chain("LE", (f"N{n}" for n in itertools.count(3)))
        example = NUMBER.sub(lambda _: f"{{{next(letters)}}}", keys[0])
        return NameMapError(
            f"family {self.name!r} has no rule for {len(keys)} Megatron parameter(s)",
            tensor=", ".join(keys[:8]) + (", ..." if len(keys) > 8 else ""),
            rank=rank,
            remedy="add a rule to the family, or ship one in a plugin with a weightlink_families hook: "
            f'Rule("{example}", "<Hugging Face name>"); or leave it out with exclude=["{keys[0]}"]',
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
