"""Executes a program over a channel: pack, send, receive, unpack. The same code on every device.

While one message is on the wire the next is packed, or the one before is unpacked. Staging memory is two rounds of
buckets per direction, allocated once, whatever the model's size. Every message has a header (update, bucket, bytes,
checksum). Headers follow their payload in one last message per peer, are compared on the device and looked at once. How
large a message is and where it lies does not show in them, so one end may stage a bucket that the other has in place.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from weightlink.bound import ROW, Bound, Checksum, Ring
from weightlink.hooks.errors import TransferError
from weightlink.hooks.geometry import Fills
from weightlink.hops import UPSTREAM, Forward, Hops
from weightlink.program import HEADER, Program
from weightlink.threads import single_threaded

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.protocols import Channel, Pending
    from weightlink.hooks.settings import WireSettings

_MAGIC = 0x574C_424B_5431_0002  # "WLBKT2"
_WORDS = HEADER // 8
_TAG, _SUM = 1, 5  # columns of a header: magic, update, bucket, first byte, bytes, checksum


@dataclass
class Moved:
    """What one run moved: payload bytes, and the seconds spent packing or unpacking."""

    bytes: int = 0
    apply: float = 0.0


def update_tag(update: str) -> int:
    """A signed 64-bit number for an update id, as it stands in headers."""
    return int.from_bytes(hashlib.blake2b(update.encode(), digest_size=8).digest(), "little", signed=True)


class _Side:
    """What sender and receiver share: staging memory and buckets bound to the live tensors."""

    _unpack: bool

    def __init__(self, program: Program, fills: Fills, wire: WireSettings, device: torch.device) -> None:
        self.program = program
        self._fills = fills
        self._ring = Ring(program)
        self._staging = torch.empty(self._ring.size, dtype=torch.uint8, device=device)
        self._checksum = Checksum(-(-int(program.buckets.nbytes.max(initial=0)) // ROW), device)
        self._bound: tuple[tuple[int, ...], Bound] | None = None
        self._headers = torch.zeros((0, _WORDS), dtype=torch.int64, device=device)
        self._sums: list[torch.Tensor] = []

    @property
    def staging_bytes(self) -> int:
        """Memory that this side holds besides the tensors."""
        return int(self._staging.numel())

    def _bind(self, tensors: Sequence[torch.Tensor]) -> Bound:
        """Buckets over the tensors as they are now; kept while no pointer moves."""
        key = tuple(t.data_ptr() for t in tensors)
        if self._bound is None or self._bound[0] != key:
            bound = Bound(self.program, self._fills, self._ring, self._staging, tensors, unpack=self._unpack)
            self._bound = (key, bound)
            table = np.zeros((len(bound.headers), _WORDS), np.int64)
            table[:, 0] = _MAGIC
            table[:, 2:5] = np.array(bound.headers, np.int64).reshape(-1, 3)
            self._headers = torch.from_numpy(table).to(self._staging.device)
            self._sums = list(self._headers[:, _SUM].unbind())
        return self._bound[1]

    def unbind(self) -> None:
        """Forget the live tensors, which the buckets would keep from being freed."""
        self._bound = None

    def _tables(self, bound: Bound, headers: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The headers of each peer's messages, as bytes."""
        return [(peer, headers[a:b].reshape(-1).view(torch.uint8)) for peer, (a, b) in bound.peers.items()]


class Sender(_Side):
    """A trainer rank's side of one engine's group."""

    _unpack = False

    def __init__(self, program: Program, wire: WireSettings, device: torch.device) -> None:
        super().__init__(program, Fills(), wire, device)
        self._summed: Bound | None = None

    def prepare(self, tensors: Sequence[torch.Tensor]) -> None:
        """What of the next run can be done while the receivers still serve: bind the buckets, and take the checksums of
        what is sent in place. A tensor that changes before that run is over does not pass the receivers' check."""
        with torch.no_grad():
            bound = self._bind(tensors)
            for message in bound.messages:
                if message.in_place:
                    message.check(self._checksum, self._sums[message.row])
        if self._staging.device.type == "cuda":
            torch.cuda.current_stream(self._staging.device).synchronize()  # the run may be on another thread's stream
        self._summed = bound

    def run(self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline) -> Moved:
        """Send every bucket; returns when all of them have left this rank."""
        with torch.no_grad(), single_threaded(self._staging.device):
            return self._run(tensors, channel, update, deadline)

    def _run(self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline) -> Moved:
        bound = self._bind(tensors)
        # Sums serve one run: whoever changes the tensors need not say so.
        summed, self._summed = self._summed is bound, None
        self._headers[:, _TAG] = update_tag(update)
        moved = Moved(bound.bytes)
        flying: deque[tuple[int, list[Pending]]] = deque()
        for turn, this in enumerate(bound.rounds):
            while flying and flying[0][0] <= this.after:
                _wait(flying.popleft()[1], deadline)
            pending: list[Pending] = []
            flying.append((turn, pending))
            for step, post in zip(this.steps, this.posts, strict=True):
                started = time.monotonic()
                for message in step:
                    message.pack()
                    if not (summed and message.in_place):
                        message.check(self._checksum, self._sums[message.row])
                moved.apply += time.monotonic() - started
                pending.append(channel.post(post, [], deadline))
        flying.append((len(bound.rounds), [channel.post(self._tables(bound, self._headers), [], deadline)]))
        for _, pending in flying:
            _wait(pending, deadline)
        return moved


class Receiver(_Side):
    """An engine rank's side. :meth:`run` writes; :meth:`check` tells whether what was written is what was sent."""

    _unpack = True

    def __init__(self, program: Program, fills: Fills, wire: WireSettings, device: torch.device) -> None:
        super().__init__(program, fills, wire, device)
        self._theirs = self._headers.clone()
        self._complete = False

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        channel: Channel,
        update: str,
        deadline: Deadline,
        hops: Hops = Hops(),  # noqa: B008 - nobody changes it
    ) -> Moved:
        """Receive every bucket and copy it in place, and write the fills. With an upstream neighbour everything comes
        from it instead of ``channel``; a downstream neighbour is given everything that came."""
        # Parameters that were created in inference mode may only be written in it.
        inference = torch.inference_mode(any(t.is_inference() for t in tensors))
        with inference, torch.no_grad(), single_threaded(self._staging.device):
            return self._run(tensors, channel, update, deadline, hops)

    def _run(
        self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline, hops: Hops
    ) -> Moved:
        self._complete = False
        bound = self._bind(tensors)
        self._headers[:, _TAG] = update_tag(update)
        self._theirs = torch.zeros_like(self._headers)
        moved = Moved(bound.bytes)
        forward = Forward(hops.downstream, deadline)
        flying: deque[list[Pending]] = deque()
        posted = 0
        for turn, this in enumerate(bound.rounds):
            while posted < len(bound.rounds) and bound.rounds[posted].after < turn:
                forward.wait(bound.rounds[posted].after)
                flying.append([_post(channel, hops, post, deadline) for post in bound.rounds[posted].posts])
                posted += 1
            for step, pending in zip(this.steps, flying.popleft(), strict=True):
                pending.wait(deadline)
                forward.send(turn, [message.data for message in step])
                started = time.monotonic()
                for message in step:
                    message.check(self._checksum, self._sums[message.row])
                    message.unpack()
                moved.apply += time.monotonic() - started
        tables = self._tables(bound, self._theirs)
        _post(channel, hops, tables, deadline).wait(deadline)
        forward.send(len(bound.rounds), [table for _, table in tables])
        forward.wait(len(bound.rounds))
        if bound.zeros:
            torch._foreach_zero_(bound.zeros)
        for view, value in bound.fills:
            view.fill_(value)
        self._complete = True
        return moved

    def check(self) -> None:
        """Raises :class:`TransferError` naming the buckets whose header or checksum did not match."""
        if not self._complete:
            raise TransferError("the transfer was not completed")
        bad = torch.nonzero((self._headers != self._theirs).any(1)).flatten().tolist()
        if not bad:
            return
        mine, theirs = self._headers[bad].tolist(), self._theirs[bad].tolist()
        numbers = list(dict.fromkeys(row[2] for row in mine))
        peers = {int(n): int(p) for n, p in zip(self.program.buckets.id, self.program.buckets.peer, strict=True)}
        raise TransferError(
            f"{len(numbers)} of {len(self.program.buckets)} buckets did not arrive as they were sent: "
            + ", ".join(map(str, numbers[:20])),
            rank=f"group rank {peers[numbers[0]]} -> this rank",
            expected=f"bucket {numbers[0]}, {mine[0][4]} bytes from byte {mine[0][3]}, and their checksum",
            found=f"header {theirs[0]} instead of {mine[0]}",
            remedy="check the network; the engine stays unready until a full update",
        )


def _post(channel: Channel, hops: Hops, receives: Sequence[tuple[int, torch.Tensor]], deadline: Deadline) -> Pending:
    """Receive from the trainer's ranks, or all of it from the neighbour who received it from them."""
    if hops.upstream is None:
        return channel.post([], receives, deadline)
    return hops.upstream.post([], [(UPSTREAM, data) for _, data in receives], deadline)


def _wait(pending: Sequence[Pending], deadline: Deadline) -> None:
    for one in pending:
        one.wait(deadline)
