"""One process of ``weightlink bench fanout``: the trainer's rank, or an engine of one rank. It holds two plans of the
same update, with relays and without, over channels of their own."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from weightlink.handshake import handshake
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, ErrorInfo
from weightlink.hooks.geometry import Layout
from weightlink.hooks.messages import Attach
from weightlink.hooks.protocols import Channel
from weightlink.hops import Hops, join_hops
from weightlink.plugins.bench import talk
from weightlink.plugins.bench.member import cpu_seconds, serve, weights
from weightlink.plugins.transports.p2p import P2P
from weightlink.program import Program
from weightlink.rendezvous import connect
from weightlink.wire import Receiver, Sender

_CPU = torch.device("cpu")


class Leg(msgspec.Struct, frozen=True):
    """One engine of one plan as a member sees it. Its ``offer`` is what an engine's rank would be told."""

    offer: Attach
    program: bytes


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Form all groups, allocate the weights.

    :param rank: 0 for the trainer, engine number + 1 for an engine
    :param plans: the legs of each plan: all engines' for the trainer, its own one for an engine
    """

    rank: int
    layout: bytes
    plans: tuple[tuple[Leg, ...], ...]
    timeout: float


class Update(msgspec.Struct, frozen=True, tag=True):
    """Carry out one update by this plan, checked."""

    plan: int
    update: str


Command = Setup | Update
commands = msgspec.json.Decoder(Command)


class _Way:
    """One plan: a channel per leg, and what this rank does over it."""

    def __init__(self, setup: Setup, legs: Sequence[Leg], deadline: Deadline) -> None:
        self.legs: list[tuple[Channel, Sender | Receiver, Hops]] = []
        for leg in legs:
            offer, program = leg.offer, Program.unpack(leg.program)
            sends = setup.rank == 0
            channel = P2P().open(
                connect(offer.host, offer.port, deadline), key=offer.key, rank=0 if sends else 1, size=2,
                host=offer.host, device=_CPU, wire=offer.wire, deadline=deadline,
            )  # fmt: skip
            handshake(channel, {} if offer.upstream else program.pair_digests(), _CPU, deadline)
            if sends:
                self.legs.append((channel, Sender(program, offer.wire, _CPU), Hops()))
            else:
                fills = Layout.unpack(setup.layout).fills
                hops = join_hops(P2P(), offer, 0, program, _CPU, deadline)
                self.legs.append((channel, Receiver(program, fills, offer.wire, _CPU), hops))


class FanoutMember:
    """This process's rank."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        layout = Layout.unpack(setup.layout)
        self._tensors = [weights(param, -1 if setup.rank else 0) for param in layout.params]
        deadline = Deadline.after(setup.timeout)
        self._ways = [_Way(setup, legs, deadline) for legs in setup.plans]

    def obey(self, command: Command) -> talk.Done:
        """One update, from the barrier before it to the one after it."""
        if not isinstance(command, Update):
            raise ConfigError("the member is set up already")
        deadline = Deadline.after(self._setup.timeout)
        legs = self._ways[command.plan].legs
        started, used = time.perf_counter(), cpu_seconds()

        def run(leg: tuple[Channel, Sender | Receiver, Hops]) -> int:
            channel, side, hops = leg
            channel.barrier("the update's start", deadline)
            if isinstance(side, Sender):
                moved = side.run(self._tensors, channel, command.update, deadline)
            else:
                moved = side.run(self._tensors, channel, command.update, deadline, hops)
            channel.barrier("the update's end", deadline)
            if isinstance(side, Receiver):
                side.check()
            return moved.bytes

        with ThreadPoolExecutor(len(legs)) as pool:
            moved = sum(pool.map(run, legs))
        return talk.Done(time.perf_counter() - started, moved, 0.0, cpu_seconds() - used)

    def close(self) -> None:
        """Leave all groups."""
        for way in self._ways:
            for channel, _, hops in way.legs:
                channel.close()
                hops.close()


def _start(command: Command) -> FanoutMember:
    if not isinstance(command, Setup):
        raise ConfigError("the member is not set up yet")
    return FanoutMember(command)


def decode(line: bytes) -> talk.Done | ErrorInfo:
    """An answer, or the error that it reports."""
    event = talk.events.decode(line)
    return event.error if isinstance(event, talk.Failed) else event


if __name__ == "__main__":
    sys.exit(serve(commands, _start))
