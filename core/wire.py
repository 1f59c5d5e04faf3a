"""Executes a program over a channel: pack, send, receive, unpack. The same code on every device.

Two rounds are in flight: while one is on the wire the next is packed, or the one before is unpacked. Staging memory is
two rounds of buckets per direction, allocated once, whatever the model's size. Every bucket carries a header (update,
bucket, bytes, checksum), compared on the device and looked at once, after the last round.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from weightlink.hooks.errors import PlanMismatch, TransferError
from weightlink.hooks.geometry import Fills
from weightlink.program import DTYPES, HEADER, Program

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.protocols import Channel, Pending
    from weightlink.hooks.settings import WireSettings

_MAGIC = 0x574C_424B_5431_0001  # "WLBKT1"
_WORDS = HEADER // 8
_COLUMNS = 512
_IN_FLIGHT = 2


@dataclass
class Moved:
    """What one run moved: payload bytes, and the seconds spent packing or unpacking."""

    bytes: int = 0
    apply: float = 0.0


def update_tag(update: str) -> int:
    """A signed 64-bit number for an update id, as it stands in bucket headers."""
    return int.from_bytes(hashlib.blake2b(update.encode(), digest_size=8).digest(), "little", signed=True)


class Checksum:
    """A 64-bit sum over a payload's bytes: one pass, position-sensitive within blocks of 4 KiB, on the device."""

    def __init__(self, device: torch.device) -> None:
        odd = np.random.Generator(np.random.PCG64(0x5745)).integers(0, 1 << 63, _COLUMNS, np.int64) | 1
        self._keys = torch.from_numpy(odd).to(device)

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """Of a one-dimensional, contiguous uint8 tensor, as an int64 scalar tensor."""
        nbytes = payload.numel()
        if payload.data_ptr() % 8:
            payload = payload.clone()
        whole = nbytes // 8 * 8
        words = payload[:whole].view(torch.int64)
        rows = words.numel() // _COLUMNS * _COLUMNS
        total = (words[:rows].view(-1, _COLUMNS).sum(0) * self._keys).sum() + nbytes
        rest = words[rows:]
        total = total + (rest * self._keys[: rest.numel()]).sum()
        tail = payload[whole:].to(torch.int64)
        return total + (tail * self._keys[: tail.numel()]).sum()


@dataclass
class _Bucket:
    """One bucket, bound to live memory."""

    id: int
    peer: int
    nbytes: int  # on the wire, alignment included
    payload: int  # weights only
    views: list[torch.Tensor]  # of parameters, in wire order
    places: list[tuple[int, torch.dtype, tuple[int, ...]]]  # byte offset, dtype and shape of each in the payload
    direct: torch.Tensor | None  # the parameter's own bytes, for a direct bucket


class _Side:
    """What sender and receiver share: slots of staging memory and buckets bound to the live tensors."""

    def __init__(self, program: Program, wire: WireSettings, device: torch.device) -> None:
        self.program = program
        self.device = device
        self.checksum = Checksum(device)
        self.rounds: list[list[int]] = [[] for _ in range(program.rounds)]
        for number, r in enumerate(program.buckets.round.tolist()):
            self.rounds[r].append(number)
        self.rounds = [numbers for numbers in self.rounds if numbers]
        packed = program.buckets.direct == 0
        most = max((len(numbers) for numbers in self.rounds), default=0)
        largest = int(program.buckets.nbytes[packed].max(initial=0))
        self._size = HEADER + -(-largest // 16) * 16
        self._staging = torch.empty((_IN_FLIGHT * most, self._size), dtype=torch.uint8, device=device)
        self._most = most
        self._bound: tuple[tuple[int, ...], list[_Bucket]] | None = None
        order = np.argsort(program.copies.bucket, kind="stable")
        bounds = np.searchsorted(program.copies.bucket[order], np.arange(len(program.buckets) + 1))
        self._rows = [order[bounds[n] : bounds[n + 1]] for n in range(len(program.buckets))]

    def slot(self, turn: int, place: int) -> torch.Tensor:
        """Staging memory for the ``place``-th bucket of round ``turn``."""
        return self._staging[(turn % _IN_FLIGHT) * self._most + place]

    def bind(self, tensors: Sequence[torch.Tensor]) -> list[_Bucket]:
        """Buckets over the tensors as they are now; cached while no pointer moves."""
        key = tuple(t.data_ptr() for t in tensors)
        if self._bound is None or self._bound[0] != key:
            live = [t.detach() for t in tensors]
            self._bound = (key, [self._bind_one(n, live) for n in range(len(self.program.buckets))])
        return self._bound[1]

    def unbind(self) -> None:
        """Forget the live tensors, which the buckets would keep from being freed."""
        self._bound = None

    def _bind_one(self, number: int, tensors: Sequence[torch.Tensor]) -> _Bucket:
        c, b = self.program.copies, self.program.buckets
        views, places = [], []
        for row in self._rows[number].tolist():
            shape, stride = _simplify(c.size[row].tolist(), c.stride[row].tolist())
            tensor = tensors[int(c.param[row])]
            views.append(tensor.as_strided(shape, stride, tensor.storage_offset() + int(c.offset[row])))
            places.append((int(c.at[row]), getattr(torch, DTYPES[int(c.dtype[row])]), shape))
        direct = views[0].reshape(-1).view(torch.uint8) if b.direct[number] else None
        payload = int(c.nbytes[self._rows[number]].sum())
        return _Bucket(int(b.id[number]), int(b.peer[number]), int(b.nbytes[number]), payload, views, places, direct)

    def staged(self, bucket: _Bucket, slot: torch.Tensor) -> list[torch.Tensor]:
        """The payload's pieces inside a slot."""
        payload = slot[HEADER:]
        pieces = []
        for at, dtype, shape in bucket.places:
            numel = 1
            for n in shape:
                numel *= n
            pieces.append(payload[at : at + numel * dtype.itemsize].view(dtype).view(shape))
        return pieces

    def header(self, bucket: _Bucket, tag: int, payload: torch.Tensor) -> torch.Tensor:
        """The header that belongs to a payload, on the device, without waiting for it."""
        words = torch.tensor(
            [_MAGIC, tag, bucket.id, bucket.nbytes, *[0] * (_WORDS - 4)], dtype=torch.int64, device=self.device
        )
        words[4] = self.checksum(payload)
        return words


def _simplify(size: list[int], stride: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order with the fewest dimensions."""
    dims: list[tuple[int, int]] = []
    for n, s in zip(size, stride, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * s:
            dims[-1] = (dims[-1][0] * n, s)
        else:
            dims.append((n, s))
    if not dims:
        dims = [(1, 1)]
    return tuple(n for n, _ in dims), tuple(s for _, s in dims)


class Sender(_Side):
    """A trainer rank's side of one engine's group."""

    def run(self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline) -> Moved:
        """Send every bucket; returns when all of them have left this rank."""
        with torch.no_grad():
            return self._run(tensors, channel, update, deadline)

    def _run(self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline) -> Moved:
        buckets, tag, moved = self.bind(tensors), update_tag(update), Moved()
        flying: list[Pending] = []
        for turn, numbers in enumerate(self.rounds):
            if len(flying) == _IN_FLIGHT:
                flying.pop(0).wait(deadline)
            started = time.monotonic()
            sends: list[tuple[int, torch.Tensor]] = []
            for place, number in enumerate(numbers):
                bucket, slot = buckets[number], self.slot(turn, place)
                if bucket.direct is not None:
                    slot[:HEADER].view(torch.int64).copy_(self.header(bucket, tag, bucket.direct))
                    sends += [(bucket.peer, slot[:HEADER]), (bucket.peer, bucket.direct)]
                else:
                    torch._foreach_copy_(self.staged(bucket, slot), bucket.views)
                    payload = slot[HEADER : HEADER + bucket.nbytes]
                    slot[:HEADER].view(torch.int64).copy_(self.header(bucket, tag, payload))
                    sends.append((bucket.peer, slot[: HEADER + bucket.nbytes]))
                moved.bytes += bucket.payload
            moved.apply += time.monotonic() - started
            flying.append(channel.post(sends, [], deadline))
        for pending in flying:
            pending.wait(deadline)
        return moved


class Receiver(_Side):
    """An engine rank's side. :meth:`run` writes; :meth:`check` tells whether what was written is what was sent."""

    def __init__(self, program: Program, fills: Fills, wire: WireSettings, device: torch.device) -> None:
        super().__init__(program, wire, device)
        self._fills = fills
        self._bad = torch.zeros(len(program.buckets), dtype=torch.bool, device=device)
        self._headers = torch.zeros((len(program.buckets), _WORDS), dtype=torch.int64, device=device)

    def run(self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline) -> Moved:
        """Receive every bucket and copy it in place, and write the fills."""
        # Parameters that were created in inference mode may only be written in it.
        with torch.inference_mode(any(t.is_inference() for t in tensors)), torch.no_grad():
            return self._run(tensors, channel, update, deadline)

    def _run(self, tensors: Sequence[torch.Tensor], channel: Channel, update: str, deadline: Deadline) -> Moved:
        buckets, tag, moved = self.bind(tensors), update_tag(update), Moved()
        self._bad.fill_(True)
        flying: list[tuple[int, Pending]] = []
        for turn, numbers in enumerate(self.rounds):
            receives: list[tuple[int, torch.Tensor]] = []
            for place, number in enumerate(numbers):
                bucket, slot = buckets[number], self.slot(turn, place)
                if bucket.direct is not None:
                    receives += [(bucket.peer, slot[:HEADER]), (bucket.peer, bucket.direct)]
                else:
                    receives.append((bucket.peer, slot[: HEADER + bucket.nbytes]))
            flying.append((turn, channel.post([], receives, deadline)))
            if len(flying) == _IN_FLIGHT:
                self._land(*flying.pop(0), buckets, tag, moved, deadline)
        for turn, pending in flying:
            self._land(turn, pending, buckets, tag, moved, deadline)
        self._fill(tensors)
        return moved

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the engine's loader writes besides the checkpoint: padding is part of the weights."""
        f = self._fills
        for n in range(len(f)):
            tensor = tensors[int(f.param[n])].detach()
            start = tensor.storage_offset() + int(f.offset[n])
            tensor.as_strided(f.size[n].tolist(), f.stride[n].tolist(), start).fill_(float(f.value[n]))

    def _land(
        self, turn: int, pending: Pending, buckets: list[_Bucket], tag: int, moved: Moved, deadline: Deadline
    ) -> None:
        pending.wait(deadline)
        started = time.monotonic()
        for place, number in enumerate(self.rounds[turn]):
            bucket, slot = buckets[number], self.slot(turn, place)
            payload = bucket.direct if bucket.direct is not None else slot[HEADER : HEADER + bucket.nbytes]
            header = slot[:HEADER].view(torch.int64)
            self._headers[number].copy_(header)
            self._bad[number] = (header != self.header(bucket, tag, payload)).any()
            if bucket.direct is None:
                torch._foreach_copy_(bucket.views, self.staged(bucket, slot))
            moved.bytes += bucket.payload
        moved.apply += time.monotonic() - started

    def check(self) -> None:
        """Raises :class:`TransferError` naming the buckets whose header or checksum did not match."""
        bad = torch.nonzero(self._bad).flatten().tolist()
        if not bad:
            return
        b = self.program.buckets
        first = bad[0]
        raise TransferError(
            f"{len(bad)} of {len(b)} buckets did not arrive as they were sent: "
            + ", ".join(str(int(b.id[n])) for n in bad[:20]),
            rank=f"group rank {int(b.peer[first])} -> this rank",
            expected=f"bucket {int(b.id[first])}, {int(b.nbytes[first])} bytes, and its checksum",
            found=f"header {self._headers[first].tolist()}",
            remedy="check the network; the engine stays unready until a full update",
        )


def handshake(channel: Channel, program: Program, device: torch.device, deadline: Deadline) -> None:
    """Move one small message each way between every pair that will exchange payload, and compare what both mean.

    Raises :class:`PlanMismatch` when a peer's digest of the pair's copies differs from ours."""
    channel.barrier("every member to join the link", deadline)
    peers = program.peers()
    digests = {peer: np.frombuffer(program.pair_digest(peer), np.int64) for peer in peers}
    mine = {p: torch.tensor([_MAGIC, channel.rank, *d.tolist()], dtype=torch.int64) for p, d in digests.items()}
    sends = {p: t.to(device).view(torch.uint8) for p, t in mine.items()}
    theirs = {p: torch.zeros(4 * 8, dtype=torch.uint8, device=device) for p in peers}
    channel.post(list(sends.items()), list(theirs.items()), deadline).wait(deadline)
    for peer in peers:
        got = theirs[peer].cpu().view(torch.int64).tolist()
        want = [_MAGIC, peer, *digests[peer].tolist()]
        if got != want:
            raise PlanMismatch(
                "two ranks of the link mean different transfers",
                rank=f"group ranks {channel.rank} and {peer}",
                expected=want,
                found=got,
                remedy="check that both sides run the same weightlink version, then connect again",
            )
    channel.barrier("every member's handshake", deadline)
