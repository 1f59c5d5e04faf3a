"""The first bytes over a new channel: both ends of every pair show that they mean the same transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from weightlink.hooks.errors import PlanMismatch

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.protocols import Channel

_MAGIC = 0x574C_4853_4B31_0001  # "WLHSK1"


def handshake(channel: Channel, digests: Mapping[int, bytes], device: torch.device, deadline: Deadline) -> None:
    """Move one small message each way between every pair that will exchange payload, and compare what both mean.

    :param digests: of what will travel between this rank and each of its peers, 16 bytes
    Raises :class:`PlanMismatch` when a peer's digest differs from ours."""
    channel.barrier("every member to join the link", deadline)
    peers = sorted(digests)
    words = {peer: np.frombuffer(digests[peer], np.int64).tolist() for peer in peers}
    mine = {p: torch.tensor([_MAGIC, channel.rank, *words[p]], dtype=torch.int64) for p in peers}
    sends = {p: t.to(device).view(torch.uint8) for p, t in mine.items()}
    theirs = {p: torch.zeros(4 * 8, dtype=torch.uint8, device=device) for p in peers}
    channel.post(list(sends.items()), list(theirs.items()), deadline).wait(deadline)
    for peer in peers:
        got = theirs[peer].cpu().view(torch.int64).tolist()
        want = [_MAGIC, peer, *words[peer]]
        if got != want:
            raise PlanMismatch(
                "two ranks of the link mean different transfers",
                rank=f"group ranks {channel.rank} and {peer}",
                expected=want,
                found=got,
                remedy="check that both sides run the same weightlink version, then connect again",
            )
    channel.barrier("every member's handshake", deadline)
