"""Makes the tests' own modules importable by name, also in the processes that they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
import proofs  # noqa: E402 - found by the line above

os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_addoption(parser: pytest.Parser) -> None:
    proofs.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    proofs.keep(session, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--write-table"):
        proofs.PAGE.write_text(proofs.page(proofs.proven(session.stash[proofs.COLLECTED])))


@pytest.fixture
def rigs() -> Iterator[Callable[..., Any]]:
    """Makes a rig of rig.py from random layouts: ``rigs(seed, trainers, engines, ...)`` -> rig, tensors."""
    from rig import make

    made: list[Any] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        rig, tensors = make(*args, **kwargs)
        made.append(rig)
        return rig, tensors

    yield build
    for rig in made:
        rig.close()
