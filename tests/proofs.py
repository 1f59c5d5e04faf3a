"""The table of families and features in the docs: each cell names the test that proves it.

Tests say what they prove with ``@pytest.mark.proves("qwen3", "logits", "trainer TP")``; the cells of the grid say it by
themselves. ``make table`` collects the whole suite and writes docs/families.md; a test fails when the file is not what
the suite says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import toys
from limits import LIMITS
from weightlink.converters.families import BUILTIN

PAGE = Path(__file__).parent.parent / "docs" / "families.md"

FEATURES = {
    "rules": "the family's rules, on synthetic Megatron entries",
    "logits": "a checkpoint imported into Megatron gives transformers' logits",
    "trainer TP": "tensor parallel trainer",
    "trainer PP": "pipeline stages",
    "trainer VPP": "interleaved (virtual) stages",
    "trainer EP": "expert parallel",
    "trainer ETP": "expert tensor parallel other than TP",
    "trainer CP": "context parallel",
    "engine TP": "tensor parallel engine",
    "engine PP": "pipeline stages",
    "engine EP": "expert parallel",
    "engine EPxTP": "experts split both ways",
    "engine DP attention": "attention data parallelism",
    "engine KV copies": "more tensor parallel ranks than key-value heads",
    "MTP": "next-token layers: logits of transformers' own layer",
    "draft": "an engine's draft model, made of the next-token layer",
    "coded": "index-coded weights on both sides",
    "server": "a real server, its own checksums",
}


def add_options(parser: pytest.Parser) -> None:
    """Adds ``--write-table``."""
    parser.addoption("--write-table", action="store_true", help="write docs/families.md from the collected tests")


def proven(items: Iterable[pytest.Item]) -> dict[str, dict[str, str]]:
    """Family -> feature -> the first test that proves it."""
    found: dict[str, dict[str, str]] = {family.name: {} for family in BUILTIN}
    for item in items:
        for mark in item.iter_markers("proves"):
            family, *features = mark.args
            unknown = [feature for feature in features if feature not in FEATURES]
            if family not in found or unknown or not features:
                raise pytest.UsageError(f"{item.nodeid} proves something unknown: {mark.args}")
            for feature in features:
                here = found[family].get(feature)
                # A test of the default run is the better proof.
                if here is None or (here.endswith(_GRID_ONLY) and item.get_closest_marker("grid") is None):
                    found[family][feature] = _short(item)
    return found


_GRID_ONLY = " (grid)"


def _short(item: pytest.Item) -> str:
    name = item.nodeid.rpartition("/")[2]
    return name + (_GRID_ONLY if item.get_closest_marker("grid") else "")


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """docs/families.md."""
    tests: dict[str, int] = {}
    lines = [
        "# Families",
        "",
        "Made by `make table` from the tests. A number is the test that proves the cell, listed below; a letter is a",
        "reason; an empty cell is unproven. Bit for bit means: what travelled equals SGLang's own load on every rank.",
        "",
    ]
    lines += [f"- **{feature}**: {text}" for feature, text in FEATURES.items()]
    lines += ["", "| family | architectures | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 2) + "|"]
    reasons: dict[str, str] = {}
    for family in BUILTIN:
        row = [family.name, "<br>".join(family.architectures)]
        for feature in FEATURES:
            test, why = found[family.name].get(feature), LIMITS.get(family.name, {}).get(feature)
            if test is not None:
                row.append(str(tests.setdefault(test, len(tests) + 1)))
            elif why is not None:
                row.append(reasons.setdefault(why, _letter(len(reasons))))
            else:
                row.append("")
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "## Reasons", ""]
    lines += [f"- {letter}: {why}" for why, letter in reasons.items()]
    lines += ["", "## Tests", ""]
    lines += [f"{number}. `{test}`" for test, number in tests.items()]
    return "\n".join(lines) + "\n"


def _letter(number: int) -> str:
    return chr(ord("a") + number % 26) * (number // 26 + 1)


def rows(listed: Iterable[tuple[Any, ...]], *features: str, full: bool = False) -> list[Any]:
    """Rows of parameters whose first is a toy, as proofs of ``features`` for the toy's family.

    :param full: only for the full grid
    """
    more = [pytest.mark.grid] if full else []
    return [pytest.param(*row, marks=[pytest.mark.proves(toys.family_of(row[0]), *features), *more]) for row in listed]


def keep(session: Any, items: list[pytest.Item]) -> None:
    """Remembers all collected tests, before any is deselected."""
    session.stash[COLLECTED] = list(items)


COLLECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()
