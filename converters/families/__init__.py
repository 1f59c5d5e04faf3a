"""Built-in model families. A family is one small file of data; see :mod:`weightlink.converters.families.base`."""

from __future__ import annotations

from collections.abc import Sequence

from weightlink.converters.families import llama, qwen2, qwen3, qwen3_moe
from weightlink.converters.families.base import Family
from weightlink.hooks import hookimpl

BUILTIN = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY)


@hookimpl
def weightlink_families() -> Sequence[Family]:
    """The families that weightlink itself knows."""
    return BUILTIN
