"""The pages that commands write are what the commands would write now."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs import COLLECTED, FEATURES, PAGE, page, proven
from weightlink.converters.families import BUILTIN


def whole(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All collected tests; skips unless every file's are among them."""
    items: list[pytest.Item] = request.session.stash[COLLECTED]
    missing = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {item.path.name for item in items}
    if missing:
        pytest.skip(f"not the whole suite: {len(missing)} files were not collected")
    return items


def test_the_table_of_families_is_what_the_tests_say(request: pytest.FixtureRequest) -> None:
    assert PAGE.read_text() == page(proven(whole(request))), "run `make table` and commit docs/families.md"


def test_every_family_is_proven_by_some_test(request: pytest.FixtureRequest) -> None:
    found = proven(whole(request))
    assert [family.name for family in BUILTIN if not found[family.name]] == []
    assert set(FEATURES) - {feature for cells in found.values() for feature in cells} == set()
