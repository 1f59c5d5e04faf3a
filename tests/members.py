"""Groups of real processes for the transport tests: forked members, each with its own client of one store."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import WeightlinkError
from weightlink.hooks.protocols import Channel, Transport
from weightlink.hooks.settings import WireSettings
from weightlink.rendezvous import Rendezvous, connect

HOST = "127.0.0.1"
LONG = 120.0
"""Seconds of a deadline that must not pass: a test that comes near it has failed by ``LIMIT``."""
LIMIT = 40.0
"""Seconds after which a test's processes are killed."""


@dataclass
class Member:
    """One process of a test's group."""

    transport: Transport
    rank: int
    size: int
    store: dist.Store
    key: str
    opened: list[Channel] = field(default_factory=list)  #: kept, so that nothing is closed by being forgotten

    def open(self, *, key: str = "", seconds: float = LONG) -> Channel:
        channel = self.transport.open(
            self.store,
            key=key or self.key,
            rank=self.rank,
            size=self.size,
            host=HOST,
            device=torch.device("cpu"),
            wire=WireSettings(),
            deadline=Deadline.after(seconds),
        )
        self.opened.append(channel)
        return channel


Body = Callable[[Member], Any]
Run = Callable[[int, Body], list[Any]]


def _member(pipe: Connection, transport: Transport, rank: int, size: int, body: Body) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    port, key = pipe.recv()
    member = Member(transport, rank, size, connect(HOST, port, Deadline.after(LONG)), key)
    try:
        result = body(member)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        result = error
    pipe.send(result)
    pipe.recv()  # leave together: an exit looks like a death to the others
    os._exit(0)


@contextlib.contextmanager
def _processes(size: int, transport: Transport, body: Body) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_member, args=(theirs, transport, rank, size, body))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    rendezvous = Rendezvous.listen(HOST, Deadline.after(LIMIT))
    try:
        for pipe in pipes:
            pipe.send((rendezvous.port, "link-1"))
        yield pipes
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):  # that member is dead, as the test wanted
                pipe.send(None)
            pipe.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        rendezvous.close()


def run_members(transport: Transport, size: int, body: Body) -> list[Any]:
    """Runs ``body`` in ``size`` processes; returns what each returned, the error that it raised, or None if it died."""
    until = time.monotonic() + LIMIT
    results: list[Any] = []
    with _processes(size, transport, body) as pipes:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, until - time.monotonic())):
                pytest.fail(f"rank {rank} is still busy; before it: {results}")
            try:
                results.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                results.append(None)
    return results


def succeeded(results: list[Any]) -> list[Any]:
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise AssertionError(f"rank {rank} failed") from result
        assert result is not None, f"rank {rank} died"
    return results


def error_of(result: Any, kind: type[WeightlinkError]) -> str:
    assert type(result) is kind, repr(result)
    return str(result)


def pattern(source: int, destination: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Bytes that no other pair, shape or dtype has."""
    count = torch.Size(shape).numel()
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(source * 1000 + destination * 10 + count)
    raw = torch.randint(0, 256, (count * itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    return torch.full((torch.Size(shape).numel() * itemsize,), 0xA5, dtype=torch.uint8).view(dtype).view(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit: the patterns hold every NaN there is."""
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.shape == right.shape and bool(torch.equal(*bits))


DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool)
