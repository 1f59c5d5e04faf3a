"""Point-to-point transport: NCCL on GPUs, Gloo on CPUs, on groups that no framework knows of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.protocols import Channel
    from weightlink.hooks.settings import WireSettings


class P2P:
    """The ``p2p`` transport.

    :param coalesce: this member can post a round as one coalesced operation (NCCL). With False on any member, or in the
        link's settings, every member posts one operation at a time, in an order that cannot deadlock.
    """

    name = "p2p"

    def __init__(self, *, coalesce: bool = True) -> None:
        self._coalesce = coalesce

    def open(
        self,
        store: dist.Store,
        *,
        key: str,
        rank: int,
        size: int,
        host: str,
        device: torch.device,
        wire: WireSettings,
        deadline: Deadline,
    ) -> Channel:
        """Joins the group ``key``: payload and control apart. Returns when every member has joined.

        Raises ``ConfigError`` (bad rank, host or device), ``PlanMismatch`` (members on different backends or library
        versions), ``DeadlineExceeded`` naming the missing ranks, or ``TransferError`` (a member lost on the way).
        """
        from weightlink.plugins.transports.channel import open_channel

        return open_channel(
            store,
            key=key,
            rank=rank,
            size=size,
            host=host,
            device=device,
            wire=wire,
            coalesce=self._coalesce,
            deadline=deadline,
        )
