"""What the user declared must exist: a pattern with a slip in it would send what it should hold back."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from weightlink.hooks.errors import ConfigError

if TYPE_CHECKING:
    from weightlink.hooks.geometry import Layout
    from weightlink.hooks.settings import LinkSettings


def require_declared(settings: LinkSettings, trainers: Sequence[Layout], engines: Iterable[Layout]) -> None:
    """Raises :class:`ConfigError` for a pattern of ``exclude``, ``ignore`` or ``engine_owned`` that matches nothing.

    :param trainers: layouts of all trainer ranks
    :param engines: layouts of all ranks of all engines
    """
    own = {p.name for layout in trainers for p in layout.params}
    excluded = {name for layout in trainers for name in layout.excluded}
    _require("exclude", settings.exclude, excluded, own, "parameter of the trainer")
    canonical = {spec.name for layout in trainers for spec in layout.tensors}
    _require("ignore", settings.ignore, canonical, canonical, "tensor of the trainer")
    params = {p.name for layout in engines for p in layout.params}
    _require("engine_owned", settings.engine_owned, params, params, "parameter of an engine")


def _require(setting: str, patterns: Sequence[str], matched: set[str], known: set[str], what: str) -> None:
    for pattern in patterns:
        if not fnmatch.filter(matched, pattern):
            near = difflib.get_close_matches(pattern, sorted(known), 3, 0.4)
            raise ConfigError(
                f"{setting}: {pattern!r} matches no {what}",
                expected="a name, or a pattern with *",
                found=f"names like {', '.join(near)}" if near else f"{len(known)} names, none like it",
                remedy="correct the pattern, or leave it out",
            )
