"""The sharded tensors of a Megatron state dict, each over the live parameter that it shows.

Megatron splits some parameters when a checkpoint is made. Most splits are views. Legacy grouped experts give transposed
copies, which would never show a later optimizer step: for these, the split is made once more of a tensor that holds its
own element numbers, and what comes out says which view of the parameter the copy is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from weightlink.converters.megatron import Shard, memory_of, shards_of


def entries(state: Mapping[str, Any]) -> list[Shard]:
    """The sharded tensors of ``module.sharded_state_dict()``, in order, with every factory applied."""
    return [shard for item in _leaves(state) for shard in _built(item)]


def _leaves(state: object) -> Iterator[object]:
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value)
    else:
        yield state


def _built(item: Any) -> Iterator[Shard]:
    if not hasattr(item, "build_fn"):
        yield from shards_of(item)
        return
    made, live = list(shards_of(item.build())), item.data
    if not isinstance(live, torch.Tensor) or all(_same_memory(shard.data, live) for shard in made):
        yield from made
        return
    numbers = torch.arange(live.numel(), dtype=torch.int64).view(live.shape)
    probes = list(shards_of(item.build_fn(item.key, numbers, item.replica_id, item.flattened_range)))
    for shard, probe in zip(made, probes, strict=True):
        if not _same_memory(shard.data, live) and probe.data is not None and live.is_contiguous():
            view = _view(live.detach(), probe.data)
            # A split that also computes would give other values.
            if view is not None and shard.data is not None and torch.equal(view, shard.data):
                shard.data = view
        yield shard


def _same_memory(data: torch.Tensor | None, live: torch.Tensor) -> bool:
    return data is not None and memory_of(data) == memory_of(live)


def _view(live: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor | None:
    """The view of a contiguous tensor that picks its elements ``numbers``; None if no strides do."""
    if not numbers.numel() or int(numbers.min()) < 0 or int(numbers.max()) >= live.numel():
        return None
    first = int(numbers[(0,) * numbers.dim()])
    stride = []
    for dim, length in enumerate(numbers.shape):
        second = numbers.select(dim, 1)[(0,) * (numbers.dim() - 1)] if length > 1 else first
        stride.append(int(second) - first)
    expected = torch.tensor(first)
    for dim, (length, step) in enumerate(zip(numbers.shape, stride, strict=True)):
        shape = [1] * numbers.dim()
        shape[dim] = length
        expected = expected + (torch.arange(length) * step).view(shape)
    if min(stride) < 0 or not torch.equal(numbers.cpu(), expected.expand(numbers.shape)):
        return None
    return live.as_strided(tuple(numbers.shape), stride, live.storage_offset() + first)
