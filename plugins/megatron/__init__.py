"""Megatron-Core trainers. Megatron itself is imported only once a Megatron model is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlink.hooks import hookimpl
from weightlink.plugins.megatron.adapter import MegatronAdapter, chunks_of
from weightlink.plugins.megatron.load import load_hf

if TYPE_CHECKING:
    from weightlink.hooks.protocols import TrainingAdapter

__all__ = ["MegatronAdapter", "load_hf"]


@hookimpl
def weightlink_training_adapter(model: object) -> TrainingAdapter | None:
    """The adapter for a Megatron module, its DDP wrapper, or a list of model chunks."""
    return MegatronAdapter(model) if chunks_of(model) else None
