"""Entries of a sharded state dict: copies of a parameter become views of it, or stay copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from weightlink.plugins.megatron.entries import entries


@dataclass
class Entry:
    """The attributes of a Megatron ShardedTensor."""

    key: str
    data: torch.Tensor
    global_offset: tuple[int, ...] = ()
    prepend_axis_num: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


@dataclass
class Factory:
    """The attributes of a Megatron ShardedTensorFactory."""

    key: str
    data: torch.Tensor
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    replica_id: int = 0
    flattened_range: None = None

    def build_fn(self, key: str, tensor: torch.Tensor, replica: int, flattened: None) -> Any:
        return {"data": [Entry(f"{key}.{n}", part) for n, part in enumerate(self.split(tensor))]}

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


def experts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """As legacy grouped experts give [hidden 4, 2 experts * 2 * 3]: gates and ups of each, transposed, contiguous."""
    halves = torch.chunk(tensor.view(2, 4, 6).transpose(-1, -2), 2, -2)
    return [half[expert].contiguous() for half in halves for expert in range(2)]


@pytest.mark.parametrize("base", [torch.randn(4, 12), torch.randn(6, 12)[2:]])
def test_a_copy_that_strides_can_describe_is_read_from_the_parameter(base: torch.Tensor) -> None:
    live = torch.nn.Parameter(base)
    wanted = experts(live.detach())
    found = entries({"a": Factory("w", live, experts), "b": {"c": [Entry("plain", base)]}})
    assert [shard.key for shard in found] == ["w.0", "w.1", "w.2", "w.3", "plain"]
    for shard, want in zip(found[:4], wanted, strict=True):
        assert torch.equal(shard.data, want)
        assert shard.data.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
    with torch.no_grad():
        live.add_(1.0)
    for shard, want in zip(found[:4], experts(live.detach()), strict=True):
        assert torch.equal(shard.data, want)


def views(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(2))


def scrambled(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.flatten()[torch.tensor([0, 5, 3, 7])]]


def changed(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor * 2]


def changed_within(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[:2] * 2]  # by its numbers every second element


@pytest.mark.parametrize(
    ("split", "shared"), [(views, True), (scrambled, False), (changed, False), (changed_within, False)]
)
def test_views_are_left_alone_and_other_copies_stay_copies(split: Any, shared: bool) -> None:
    live = torch.arange(1.0, 9.0).reshape(4, 2)
    for shard in entries({"a": Factory("w", live, split)}):
        assert (shard.data.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()) is shared


def te_grouped() -> list[str]:
    """In a Megatron rank: keys of Transformer Engine's grouped experts, by Megatron's own code around a stand-in for
    the linear layers, which Transformer Engine alone has."""
    from types import SimpleNamespace

    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    class Linear(torch.nn.Module):
        def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any, **unused: Any) -> Any:
            # What TEGroupedLinear gives for singleton_local_shards: local names, keys with the global expert.
            return {
                f"{prefix}{kind}{n}": ShardedTensor.from_rank_offsets(f"{2 + n}.{prefix}{kind}", torch.zeros(shape))
                for n in range(2)
                for kind, shape in (("weight", (6, 4)), ("bias", (6,)))
            }

    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    experts = SimpleNamespace(
        _modules={"linear_fc1": Linear(), "linear_fc2": Linear()},
        config=SimpleNamespace(gated_linear_unit=True),
        ep_group=SimpleNamespace(size=lambda: 2, rank=lambda: 1),
        tp_group=one,
        num_local_experts=2,
    )
    metadata = {"singleton_local_shards": True, "dp_cp_group": one}
    state = TEGroupedMLP.sharded_state_dict(experts, "decoder.layers.3.mlp.experts.", (), metadata)
    return [shard.key for shard in entries(state)]
