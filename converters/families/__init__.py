"""Built-in model families. A family is one small file of data; see :mod:`weightlink.converters.families.base`."""

from __future__ import annotations

from collections.abc import Sequence

from weightlink.converters.families import (
    bailing_moe,
    bailing_moe_linear,
    deepseek,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
)
from weightlink.converters.families.base import Family
from weightlink.hooks import hookimpl

BUILTIN = (
    bailing_moe.FAMILY,
    bailing_moe_linear.FAMILY,
    deepseek.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.TEXT,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_vl.FAMILY,
)


@hookimpl
def weightlink_families() -> Sequence[Family]:
    """The families that weightlink itself knows."""
    return BUILTIN
