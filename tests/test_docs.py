"""The pages that commands write are what the commands would write now."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs import COLLECTED, FEATURES, PAGE, page, proven
from weightlink.converters.families import BUILTIN


def test_the_table_of_families_is_what_the_tests_say(request: pytest.FixtureRequest) -> None:
    items = request.session.stash[COLLECTED]
    files = {item.path.name for item in items}
    missing = {path.name for path in Path(__file__).parent.glob("test_*.py")} - files
    if missing:
        pytest.skip(f"not the whole suite: {len(missing)} files were not collected")
    assert PAGE.read_text() == page(proven(items)), "run `make table` and commit docs/families.md"


def test_every_family_is_proven_by_some_test(request: pytest.FixtureRequest) -> None:
    items = request.session.stash[COLLECTED]
    if len({item.path for item in items}) < 5:
        pytest.skip("not the whole suite")
    found = proven(items)
    assert [family.name for family in BUILTIN if not found[family.name]] == []
    assert set(FEATURES) - {feature for cells in found.values() for feature in cells} == set()
