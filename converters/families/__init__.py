"""Built-in model families. A family is one small file of data; see :mod:`weightlink.converters.families.base`."""

from __future__ import annotations

from collections.abc import Sequence

from weightlink.converters.families import (
    bailing_moe,
    deepseek,
    glm4,
    glm4_moe,
    llama,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from weightlink.converters.families.base import Family
from weightlink.hooks import hookimpl

BUILTIN = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    bailing_moe.FAMILY,
    deepseek.FAMILY,
)


@hookimpl
def weightlink_families() -> Sequence[Family]:
    """The families that weightlink itself knows."""
    return BUILTIN
