"""One process of ``weightlink bench wire``: a trainer's or an engine's rank with its weights, nothing else of either.

Sender and receiver are those of an update, over the channel of an update. The bare reference runs between the same
processes, over a process group of torch's own.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from weightlink.handshake import handshake
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, describe
from weightlink.hooks.geometry import Layout, ParamSpec
from weightlink.hooks.protocols import Channel
from weightlink.plugins.bench import talk
from weightlink.plugins.transports.p2p import P2P
from weightlink.program import Program
from weightlink.rendezvous import connect
from weightlink.wire import Receiver, Sender

_IN_FLIGHT = 2
_CPU = torch.device("cpu")
C = TypeVar("C")
T = TypeVar("T", contravariant=True)


@dataclass
class _Flow:
    """All bytes between this member and one peer, in flat memory."""

    peer: int
    data: torch.Tensor


class Member:
    """This process's rank after :class:`talk.Setup`."""

    def __init__(self, setup: talk.Setup) -> None:
        self._setup = setup
        self._sends = setup.rank < setup.trainers
        deadline = Deadline.after(setup.timeout)
        layout, program = Layout.unpack(setup.layout), Program.unpack(setup.program)
        self._tensors = [weights(param, setup.rank if self._sends else -1) for param in layout.params]
        store = connect(setup.host, setup.port, deadline)
        self._channel: Channel = P2P().open(
            store, key=setup.key, rank=setup.rank, size=setup.world, host=setup.host, device=_CPU,
            wire=setup.wire, deadline=deadline,
        )  # fmt: skip
        handshake(self._channel, program.pair_digests(), _CPU, deadline)
        self._held = _resident("VmRSS")
        self._side: Sender | Receiver
        if self._sends:
            self._side = Sender(program, setup.wire, _CPU)
        else:
            self._side = Receiver(program, layout.fills, setup.wire, _CPU)
        self._flows: list[_Flow] = []
        if setup.bare:
            self._join_bare(program, deadline)

    def _join_bare(self, program: Program, deadline: Deadline) -> None:
        setup, sizes = self._setup, program.buckets.nbytes
        self._flows = [
            _Flow(peer, torch.full((int(sizes[program.buckets.peer == peer].sum()),), setup.rank, dtype=torch.uint8))
            for peer in program.peers()
        ]
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("bare", connect(setup.host, setup.port, deadline)),
            rank=setup.rank,
            world_size=setup.world,
        )

    def wire(self, command: talk.Wire) -> talk.Done:
        """One update as trainer and engine ranks run it, from the barrier before to the barrier after, checked."""
        deadline = Deadline.after(self._setup.timeout)
        if command.memory:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        started = time.perf_counter()
        if isinstance(self._side, Sender):
            self._side.prepare(self._tensors)
        prepared = time.perf_counter() - started
        self._channel.barrier("the update's start", deadline)
        started, used = time.perf_counter(), cpu_seconds()
        moved = self._side.run(self._tensors, self._channel, command.update, deadline)
        self._channel.barrier("the update's end", deadline)
        if isinstance(self._side, Receiver):
            self._side.check()
        seconds = time.perf_counter() - started
        extra = _resident("VmHWM") - self._held if command.memory else 0
        return talk.Done(seconds, moved.bytes, moved.apply, cpu_seconds() - used, extra, prepared)

    def raw(self, command: talk.Raw) -> talk.Done:
        """The same bytes between the same pairs by ``isend`` and ``irecv`` on flat memory."""
        deadline = Deadline.after(self._setup.timeout)
        staging = [torch.empty_like(flow.data) for flow in self._flows] if command.copies == "apart" else []
        slots = torch.empty((len(self._flows), _IN_FLIGHT, command.chunk), dtype=torch.uint8)
        self._channel.barrier("the reference's start", deadline)
        started, used = time.perf_counter(), cpu_seconds()
        if staging:
            self._apart(staging, command.chunk)
        else:
            self._in_turn(slots, command.chunk, copies=command.copies == "overlapped")
        self._channel.barrier("the reference's end", deadline)
        total = sum(flow.data.numel() for flow in self._flows)
        return talk.Done(time.perf_counter() - started, total, 0.0, cpu_seconds() - used)

    def _post(self, data: torch.Tensor, peer: int) -> dist.Work | None:
        return dist.isend(data, peer) if self._sends else dist.irecv(data, peer)

    def _apart(self, staging: list[torch.Tensor], chunk: int) -> None:
        if self._sends:
            for flow, copy in zip(self._flows, staging, strict=True):
                copy.copy_(flow.data)
        works = [
            self._post(piece, flow.peer)
            for pieces in _across([copy.split(chunk) for copy in staging])
            for flow, piece in ((self._flows[n], piece) for n, piece in pieces)
        ]
        for work in works:
            _finish(work)
        if not self._sends:
            for flow, copy in zip(self._flows, staging, strict=True):
                flow.data.copy_(copy)

    def _in_turn(self, slots: torch.Tensor, chunk: int, *, copies: bool) -> None:
        """At most two chunks per peer on their way."""
        flying: list[list[tuple[dist.Work | None, torch.Tensor, torch.Tensor]]] = []

        def land() -> None:
            for work, slot, piece in flying.pop(0):
                _finish(work)
                if copies and not self._sends:
                    piece.copy_(slot)

        for turn, pieces in enumerate(_across([flow.data.split(chunk) for flow in self._flows])):
            if len(flying) == _IN_FLIGHT:
                land()
            posted = []
            for n, piece in pieces:
                slot = slots[n, turn % _IN_FLIGHT, : piece.numel()] if copies else piece
                if copies and self._sends:
                    slot.copy_(piece)
                posted.append((self._post(slot, self._flows[n].peer), slot, piece))
            flying.append(posted)
        while flying:
            land()

    def obey(self, command: talk.Command) -> talk.Done:
        """Carry out one command after the first."""
        match command:
            case talk.Wire():
                return self.wire(command)
            case talk.Raw():
                return self.raw(command)
            case _:
                raise ConfigError("the member is set up already")

    def close(self) -> None:
        """Leave the groups."""
        self._channel.close()
        if self._setup.bare:
            dist.destroy_process_group()


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _across(flows: list[tuple[torch.Tensor, ...]]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """The k-th piece of every flow that has one, for all k."""
    for k in range(max((len(pieces) for pieces in flows), default=0)):
        yield [(n, pieces[k]) for n, pieces in enumerate(flows) if k < len(pieces)]


def weights(param: ParamSpec, rank: int) -> torch.Tensor:
    """Memory of a parameter, every page of it touched; a sender's has bytes of its own, a receiver's none."""
    tensor = torch.zeros(param.shape, dtype=getattr(torch, param.dtype))
    if rank >= 0:
        numbers = tensor.view(-1).view(torch.int16)
        torch.arange(numbers.numel(), dtype=torch.int16, out=numbers) if numbers.numel() < 1 << 15 else _cycle(numbers)
        numbers += rank
    return tensor


def _cycle(numbers: torch.Tensor) -> None:
    pattern = torch.arange(30011, dtype=torch.int16)  # a prime: shifted rows differ
    whole = numbers.numel() // len(pattern) * len(pattern)
    numbers[:whole].view(-1, len(pattern)).copy_(pattern)
    numbers[whole:].copy_(pattern[: numbers.numel() - whole])


def _resident(which: str) -> int:
    """Bytes of this process in memory, now (``VmRSS``) or at most (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == which:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"/proc/self/status has no {which}")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Obedient(Protocol[T]):
    """What carries out a member's commands after the first."""

    def obey(self, command: T) -> talk.Done: ...

    def close(self) -> None: ...


def serve(commands: msgspec.json.Decoder[C], start: Callable[[C], Obedient[C]]) -> int:
    """Read commands from the input and answer each on the output. Exit code 0 after the end of the input; raises after
    a failure that was reported."""
    # Libraries print to the output; what they print must not land between the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    member: Obedient[C] | None = None
    try:
        for line in sys.stdin.buffer:
            command = commands.decode(line)
            if member is None:
                member, answer = start(command), talk.Done()
            else:
                answer = member.obey(command)
            out.write(talk.line(answer))
        if member is not None:
            member.close()
    except Exception as error:
        out.write(talk.line(talk.Failed(describe(error))))
        raise
    return 0


def _start(command: talk.Command) -> Member:
    if not isinstance(command, talk.Setup):
        raise ConfigError("the member is not set up yet")
    return Member(command)


if __name__ == "__main__":
    sys.exit(serve(talk.commands, _start))
