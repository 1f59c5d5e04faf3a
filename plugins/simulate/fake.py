"""Process groups of any size in one process: every group that a framework asks for is one of torch's fake groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch.testing._internal.distributed.fake_pg import FakeStore


def install() -> None:
    """From now on, and for this process, groups connect to nobody. Call it before a framework is imported."""
    # Which functions ``torch.device("meta")`` redirects is settled at its first use: now, before anybody wraps them.
    torch.utils._device._device_constructors()
    init, new_group = dist.init_process_group, dist.new_group

    def init_fake(*_: Any, rank: int, world_size: int, **__: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_fake(ranks: list[int] | None = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake")

    for name, function in (("init_process_group", init_fake), ("new_group", new_fake)):
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)
