"""A rank's place in a chain of engines: it receives from the one before it, and passes on to the one after it.

Every two neighbours have a channel of their own, of two members: rank r of the one engine and rank r of the next. What
is passed on is what arrived, message by message, and at last the trainer's own headers: whoever receives compares with
the trainer's checksums, not with a relay's. So a rank need not finish its own check before it passes a message on, and
no engine commits what was not checked against its origin.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlink.handshake import handshake
from weightlink.hooks.errors import WeightlinkError
from weightlink.rendezvous import connect, local_address_towards

if TYPE_CHECKING:
    import torch
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.messages import Attach
    from weightlink.hooks.protocols import Channel, Pending, Transport
    from weightlink.program import Program

logger = logging.getLogger("weightlink")

#: Members of the channel between two neighbours.
UPSTREAM, DOWNSTREAM = 0, 1


@dataclass
class Hops:
    """Channels to the neighbours; None where the chain ends. The trainer comes before the first."""

    upstream: Channel | None = None
    downstream: Channel | None = None

    def abort(self) -> None:
        """Wake the neighbours, who would wait for this rank. Safe from any thread, safe to repeat."""
        for channel in (self.upstream, self.downstream):
            if channel is not None:
                channel.abort()

    def close(self) -> None:
        """Leave the channels. Safe to repeat."""
        for channel in (self.upstream, self.downstream):
            if channel is not None:
                channel.close()


def join_hops(
    transport: Transport, offer: Attach, rank: int, program: Program, device: torch.device, deadline: Deadline
) -> Hops:
    """Form the channels to the neighbours that the offer names, and compare what both ends will receive. Together with
    them: the engine before this one first, so that a chain joins from its head on.

    Raises :class:`PlanMismatch` when a neighbour means something else; nothing is left open then."""
    hops = Hops()
    try:
        if offer.upstream:
            hops.upstream = _join(transport, offer, offer.upstream, rank, DOWNSTREAM, device, deadline)
            handshake(hops.upstream, {UPSTREAM: program.digest()}, device, deadline)
        if offer.downstream:
            hops.downstream = _join(transport, offer, offer.downstream, rank, UPSTREAM, device, deadline)
            handshake(hops.downstream, {DOWNSTREAM: program.digest()}, device, deadline)
    except BaseException:
        hops.abort()
        hops.close()
        raise
    return hops


def _join(
    transport: Transport, offer: Attach, key: str, rank: int, member: int, device: torch.device, deadline: Deadline
) -> Channel:
    return transport.open(
        connect(offer.host, offer.port, deadline),
        key=f"{key}/{rank}",
        rank=member,
        size=2,
        host=local_address_towards(offer.host, offer.port),
        device=device,
        wire=offer.wire,
        deadline=deadline,
    )


class Forward:
    """Passes messages on during one update. A neighbour that is lost fails; this rank goes on without it."""

    def __init__(self, channel: Channel | None, deadline: Deadline) -> None:
        self._channel = channel
        self._deadline = deadline
        self._flying: deque[tuple[int, Pending]] = deque()

    def send(self, turn: int, messages: Sequence[torch.Tensor]) -> None:
        """Post messages of one round; they must be left alone until :meth:`wait` for it."""
        if self._channel is None:
            return
        try:
            pending = self._channel.post([(DOWNSTREAM, message) for message in messages], [], self._deadline)
        except WeightlinkError as error:
            self._lose(error)
        else:
            self._flying.append((turn, pending))

    def wait(self, turn: int) -> None:
        """Until everything of the rounds up to ``turn`` has left."""
        while self._flying and self._flying[0][0] <= turn:
            try:
                self._flying.popleft()[1].wait(self._deadline)
            except WeightlinkError as error:
                self._lose(error)

    def _lose(self, error: WeightlinkError) -> None:
        logger.warning("the next engine of the chain is lost; its own rank will report it: %s", error)
        if self._channel is not None:
            self._channel.abort()
        self._channel = None
        self._flying.clear()
