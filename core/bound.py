"""Buckets bound to live memory: where each lies in the staging ring, and the messages that it travels in.

A bucket travels in messages of bounded size, so that one is packed, checked or unpacked while the next is on the wire,
and while it is still in the processor's cache. Where messages begin follows from the bucket's size alone: both ends
agree, whatever each of them stages. The copies of a message are put together where they lie regularly
(:mod:`weightlink.coalesce`). Everything here is made once; an update that follows only runs over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from weightlink.coalesce import Strided, coalesce
from weightlink.hooks.geometry import Fills, Int64
from weightlink.program import DTYPES, ITEMSIZES, Program

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
    # The raw stream is what every version of numpy has in common; the two ends need not have the same.
    return torch.from_numpy((np.random.PCG64(seed).random_raw(count) >> np.uint64(1)).astype(np.int64) | 1)


#: Equally long lists of views: of the staging memory, and of the parameters.
Moves = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass
class Message:
    """One message of one bucket. ``moves`` are the copies that this rank packs before it sends it, or unpacks after it
    received it: those of one list are moved by one call."""

    peer: int
    first: int  # row of the bucket that it begins with
    data: torch.Tensor  # what travels: uint8, one-dimensional
    in_place: bool = False  # it is the parameter's own memory
    row: int = 0  # of the table of headers
    moves: dict[object, Moves] = field(default_factory=dict)
    words: torch.Tensor | None = None  # of ``data``; None where it is not aligned
    rest: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.data_ptr() % 8 == 0 and self.data.storage_offset() % 8 == 0:
            self.words, self.rest = _rows(self.data)

    def add(self, packed: torch.Tensor, loose: torch.Tensor) -> None:
        """One more copy. CUDA fuses those of one list into few kernels if all are flat, and no dtype differs."""
        kind = (packed.dtype, loose.dtype) if packed.is_contiguous() and loose.is_contiguous() else None
        ours, theirs = self.moves.setdefault(kind, ([], []))
        ours.append(packed)
        theirs.append(loose)

    def pack(self) -> None:
        """Fills the staging memory from the parameters."""
        for packed, loose in self.moves.values():
            torch._foreach_copy_(packed, loose)

    def unpack(self) -> None:
        """Fills the parameters from the staging memory."""
        for packed, loose in self.moves.values():
            torch._foreach_copy_(loose, packed)

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
    :ivar messages: all of them, in the order of travel
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
        self.messages: list[Message] = []
        self._first = np.zeros(len(program.buckets), np.int64)  # each bucket's first message, in the order of travel
        self.bytes = int(program.copies.nbytes.sum())
        lone = np.zeros(len(program.buckets), np.int64)
        lone[program.copies.bucket] = np.arange(len(program.copies))
        self.rounds = [
            self._round(numbers, after, ring.starts, lone)
            for numbers, after in zip(ring.rounds, ring.after, strict=True)
        ]
        self._add_moves(np.array([-1 if start is None else start for start in ring.starts], np.int64))
        self.headers, self.peers = self._number()
        self.zeros, self.fills = self._fill_views(fills)

    def _number(self) -> tuple[list[tuple[int, int, int]], dict[int, tuple[int, int]]]:
        """Gives every message its row of the headers: by peer, then in the order of travel."""
        peers = np.array([message.peer for message in self.messages], np.int64)
        order = np.argsort(peers, kind="stable")
        for row, n in enumerate(order.tolist()):
            self.messages[n].row = row
        found, first = np.unique(peers[order], return_index=True)
        ends = [*first[1:].tolist(), len(order)]
        return (
            [self._heads[n] for n in order.tolist()],
            {int(p): (int(a), int(b)) for p, a, b in zip(found, first, ends, strict=False)},
        )

    def _round(self, numbers: list[int], after: int, starts: list[int | None], lone: Int64) -> Round:
        buckets = [self._bucket(number, starts[number], int(lone[number])) for number in numbers]
        most = max(len(messages) for messages in buckets)
        return Round(after, [[messages[k] for messages in buckets if k < len(messages)] for k in range(most)])

    def _bucket(self, number: int, start: int | None, row: int) -> list[Message]:
        """:param row: the bucket's copy, if it has but one"""
        b = self._program.buckets
        nbytes, peer = int(b.nbytes[number]), int(b.peer[number])
        payload = self._in_place(row) if start is None else self._staging[start : start + nbytes]
        size = self._most or nbytes
        messages = [Message(peer, at // ROW, payload[at : at + size], start is None) for at in range(0, nbytes, size)]
        self._first[number] = len(self.messages)
        self._heads += [(int(b.id[number]), at, min(size, nbytes - at)) for at in range(0, nbytes, size)]
        self.messages += messages
        return messages

    def _in_place(self, row: int) -> torch.Tensor:
        """The bytes of a copy that is one run of its parameter's memory."""
        c = self._program.copies
        tensor = self._live[int(c.param[row])]
        start = tensor.storage_offset() + int(c.offset[row])
        return tensor.as_strided((int(c.size[row].prod()),), (1,), start).view(torch.uint8)

    def _add_moves(self, starts: Int64) -> None:
        """Hands the messages the copies from and to staging memory, as few as there can be.

        :param starts: of each bucket in the staging memory; -1 for those in place
        """
        c, b = self._program.copies, self._program.buckets
        places, place, offset = _places(self._live)
        rows = np.flatnonzero(starts[c.bucket] >= 0)
        bucket, dtype, param = c.bucket[rows], c.dtype[rows].astype(np.int64), c.param[rows]
        edge = c.at[rows] + (c.nbytes[rows] - 1 if self._unpack else 0)
        message = self._first[bucket] + edge // (self._most or np.maximum(b.nbytes[bucket], 1))
        found = coalesce(
            Strided.of(
                (message * len(places) + place[param]) * len(DTYPES) + dtype,
                (starts[bucket] + c.at[rows]) // ITEMSIZES[dtype],
                offset[param] + c.offset[rows],
                c.size[rows],
                c.stride[rows],
            )
        )
        staged = [self._staging.view(getattr(torch, name)) for name in DTYPES]
        for group, wire, memory, dims, size, wire_stride, memory_stride in zip(
            *(column.tolist() for column in (found.group, found.wire, found.memory, found.dims)),
            *(column.tolist() for column in (found.size, found.wire_stride, found.memory_stride)),
            strict=True,
        ):
            number, kind = divmod(group, len(DTYPES))
            number, where = divmod(number, len(places))
            self.messages[number].add(
                staged[kind].as_strided(size[:dims], wire_stride[:dims], wire),
                places[where].as_strided(size[:dims], memory_stride[:dims], memory),
            )

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


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Int64, Int64]:
    """Tensors of one storage and dtype are one place: a trainer may keep all its parameters in a few flat buffers.

    :returns: a tensor of each place; each tensor's place; each tensor's first element in its storage"""
    found: dict[tuple[int, int, torch.dtype], int] = {}
    places: list[torch.Tensor] = []
    numbers = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        number = found.setdefault((storage.data_ptr(), storage.nbytes(), tensor.dtype), len(places))
        if number == len(places):
            places.append(tensor)
        numbers.append(number)
    return places, np.array(numbers, np.int64), np.array([t.storage_offset() for t in tensors], np.int64)
