"""Buckets bound to live memory: where each lies in the staging ring, and the messages that it travels in.

A bucket travels in messages of bounded size, so that one is packed, checked or unpacked while the next is on the wire,
and while it is still in the processor's cache. Where messages begin follows from the bucket's size alone: both ends
agree, whatever each of them stages. Everything here is made once; an update that follows only runs over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from weightlink.hooks.geometry import Fills
from weightlink.program import DTYPES, Program

#: Bytes of a row, of which the checksum sees the position in its bucket.
ROW = 4096
#: Rounds under way at most: memory allows more of them where buckets are small, or need no staging.
MOST_ROUNDS = 16


def message_bytes(device: torch.device) -> int:
    """Most bytes of one message, a multiple of :data:`ROW`; 0 for whole buckets. Equal on both ends of a link, whose
    devices are of one kind. On a CPU a message should stay in the cache until it is dealt with; elsewhere each costs
    the launch of a kernel, and bandwidth does not depend on it."""
    return 16 << 20 if device.type == "cpu" else 0


class Checksum:
    """A 64-bit sum over a bucket's bytes: one pass, on the device; what is in the wrong row of 4 KiB shows.

    :param rows: most rows of one bucket
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # The same numbers on every rank, however many of them it needs.
        self._of_rows = _odd(0x5745, rows).to(device)
        self._of_bytes = _odd(0x574C, ROW).to(device)

    def __call__(self, words: torch.Tensor, rest: torch.Tensor, row: int, out: torch.Tensor) -> None:
        """Of one message.

        :param words: its whole rows as int64, ``[rows, ROW / 8]``
        :param rest: the bytes after them
        :param row: position in the bucket of its first row
        :param out: int64 scalar that is overwritten
        """
        torch.sum(words.sum(1) * self._of_rows[row : row + len(words)], 0, out=out)
        if rest.numel():
            out += (rest.to(torch.int64) * self._of_bytes[: rest.numel()]).sum()


def _odd(seed: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 63, count, np.int64) | 1)


@dataclass
class Message:
    """One message of one bucket. ``packed`` and ``loose`` are equally long lists of views: of the staging memory, and
    of the parameters, for the copies that this rank packs before it sends, or unpacks after it received, this one."""

    peer: int
    first: int  # row of the bucket that it begins with
    data: torch.Tensor  # what travels: uint8, one-dimensional
    row: int = 0  # of the table of headers
    packed: list[torch.Tensor] = field(default_factory=list)
    loose: list[torch.Tensor] = field(default_factory=list)
    words: torch.Tensor | None = None  # of ``data``; None where it is not aligned
    rest: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.data_ptr() % 8 == 0 and self.data.storage_offset() % 8 == 0:
            self.words, self.rest = _rows(self.data)

    def check(self, checksum: Checksum, out: torch.Tensor) -> None:
        """Writes the checksum of what ``data`` holds to ``out``."""
        words, rest = (self.words, self.rest) if self.words is not None else _rows(self.data.clone())
        if rest is not None and words is not None:
            checksum(words, rest, self.first, out)


def _rows(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = data.numel() // ROW * ROW
    return data[:whole].view(torch.int64).view(-1, ROW // 8), data[whole:]


@dataclass
class Round:
    """The k-th messages of all buckets of a round travel together: they are ``steps[k]``. ``after`` is the last round
    that must be over before this one may use its memory, -1 if none."""

    after: int
    steps: list[list[Message]]

    def __post_init__(self) -> None:
        self.posts = [[(message.peer, message.data) for message in step] for step in self.steps]


class Ring:
    """Staging memory for two rounds, and which rounds exclude one another in it. Known before any tensor is.

    :ivar rounds: bucket numbers of each round that has any
    :ivar after: for each round, the last one that must be over before it may begin
    :ivar size: bytes of staging memory
    """

    def __init__(self, program: Program) -> None:
        b = program.buckets
        self.rounds: list[list[int]] = [[] for _ in range(program.rounds)]
        for number, r in enumerate(b.round.tolist()):
            self.rounds[r].append(number)
        self.rounds = [numbers for numbers in self.rounds if numbers]
        room = np.where(b.direct == 0, -(-b.nbytes // ROW) * ROW, 0)
        staged = [int(room[numbers].sum()) for numbers in self.rounds]
        travels = [int(b.nbytes[numbers].sum()) for numbers in self.rounds]
        self.size = min(2 * max(staged, default=0), sum(staged))
        # Without staging nothing but the network's buffers needs a bound: as many bytes as two full rounds.
        budget = 2 * max(travels, default=0)
        self.starts: list[int | None] = [None] * len(b)
        self.after: list[int] = []
        taken: list[tuple[int, int]] = []  # start and end of each round's part of the ring
        head = flying = 0
        done = -1
        for r, numbers in enumerate(self.rounds):
            if head + staged[r] > self.size:
                head = 0
            start, end = head, head + staged[r]
            flying += travels[r]
            over = done
            while over + 1 < r and (r - over > MOST_ROUNDS or flying > budget):
                over += 1
                flying -= travels[over]
            for other in range(over + 1, r):
                if taken[other][0] < end and start < taken[other][1] and staged[r] and staged[other]:
                    flying -= sum(travels[over + 1 : other + 1])
                    over = other
            done = over
            self.after.append(over)
            taken.append((start, end))
            for number in numbers:
                if room[number]:
                    self.starts[number] = head
                    head += int(room[number])


class Bound:
    """A program's buckets over the tensors as they are now.

    :param unpack: this rank receives: a copy belongs to the message that completes it, not to the one that begins it
    :ivar headers: ``(bucket id, first byte, bytes)`` of every message, those of one peer together
    :ivar peers: for each peer, its first row of the headers and the row after its last one
    """

    def __init__(
        self,
        program: Program,
        fills: Fills,
        ring: Ring,
        staging: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        *,
        unpack: bool,
    ) -> None:
        self._program, self._staging, self._unpack = program, staging, unpack
        self._live = [t.detach() for t in tensors]
        self._most = message_bytes(staging.device)
        self._heads: list[tuple[int, int, int]] = []
        self._order: list[Message] = []
        c = program.copies
        order = np.lexsort((c.at, c.bucket))
        bounds = np.searchsorted(c.bucket[order], np.arange(len(program.buckets) + 1))
        self._rows = [order[bounds[n] : bounds[n + 1]] for n in range(len(program.buckets))]
        self.bytes = int(c.nbytes.sum())
        self.rounds = [
            self._round(numbers, after, ring.starts) for numbers, after in zip(ring.rounds, ring.after, strict=True)
        ]
        self.headers, self.peers = self._number()
        self.zeros, self.fills = self._fill_views(fills)

    def _number(self) -> tuple[list[tuple[int, int, int]], dict[int, tuple[int, int]]]:
        """Gives every message its row of the headers: by peer, then in the order of travel."""
        peers = np.array([message.peer for message in self._order], np.int64)
        order = np.argsort(peers, kind="stable")
        for row, n in enumerate(order.tolist()):
            self._order[n].row = row
        found, first = np.unique(peers[order], return_index=True)
        ends = [*first[1:].tolist(), len(order)]
        return (
            [self._heads[n] for n in order.tolist()],
            {int(p): (int(a), int(b)) for p, a, b in zip(found, first, ends, strict=False)},
        )

    def _round(self, numbers: list[int], after: int, starts: list[int | None]) -> Round:
        buckets = [self._bucket(number, starts[number]) for number in numbers]
        most = max(len(messages) for messages in buckets)
        return Round(after, [[messages[k] for messages in buckets if k < len(messages)] for k in range(most)])

    def _bucket(self, number: int, start: int | None) -> list[Message]:
        b, c = self._program.buckets, self._program.copies
        rows, nbytes, peer = self._rows[number], int(b.nbytes[number]), int(b.peer[number])
        loose = [self._view(row) for row in rows.tolist()]
        if start is None:
            payload = loose[0].reshape(-1).view(torch.uint8)
        else:
            payload = self._staging[start : start + nbytes]
        size = self._most or nbytes
        messages = [Message(peer, at // ROW, payload[at : at + size]) for at in range(0, nbytes, size)]
        self._heads += [(int(b.id[number]), at, min(size, nbytes - at)) for at in range(0, nbytes, size)]
        self._order += messages
        if start is not None:
            edge = c.at[rows] + (c.nbytes[rows] - 1 if self._unpack else 0)
            for row, view, m in zip(rows.tolist(), loose, (edge // size).tolist(), strict=True):
                at, dtype = int(c.at[row]), getattr(torch, DTYPES[int(c.dtype[row])])
                messages[m].packed.append(payload[at : at + view.numel() * dtype.itemsize].view(dtype).view(view.shape))
                messages[m].loose.append(view)
        return messages

    def _view(self, row: int) -> torch.Tensor:
        c = self._program.copies
        shape, stride = simplify(c.size[row].tolist(), c.stride[row].tolist())
        tensor = self._live[int(c.param[row])]
        return tensor.as_strided(shape, stride, tensor.storage_offset() + int(c.offset[row]))

    def _fill_views(self, f: Fills) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, float]]]:
        zeros, others = [], []
        for n in range(len(f)):
            tensor = self._live[int(f.param[n])]
            start = tensor.storage_offset() + int(f.offset[n])
            view = tensor.as_strided(f.size[n].tolist(), f.stride[n].tolist(), start)
            value = float(f.value[n])
            if value == 0.0 and not np.signbit(value):
                zeros.append(view)
            else:
                others.append((view, value))
        return zeros, others


def simplify(size: list[int], stride: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
