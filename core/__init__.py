"""weightlink: moves model weights from RL trainers into running SGLang engines, provably complete, as one transaction.

The names below are loaded on first use: engines import this package in every process, and most need none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightlink.hooks.errors import WeightlinkError
    from weightlink.link import Link, connect
    from weightlink.report import UpdateReport

__version__ = "0.1.0"

_HOMES = {
    "connect": "weightlink.link",
    "Link": "weightlink.link",
    "UpdateReport": "weightlink.report",
    "WeightlinkError": "weightlink.hooks.errors",
}

__all__ = ["Link", "UpdateReport", "WeightlinkError", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
