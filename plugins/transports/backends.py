"""The seam between devices: how bytes move on Gloo (CPU memory) and on NCCL (CUDA memory).

Both are built directly, on a store prefix of their own. Neither is registered anywhere in torch.distributed, so the
frameworks' groups never see them.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from weightlink.bounded import bounded
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError

#: Given to groups as their own limit, so that only the deadline of each call counts.
LONGEST = timedelta(hours=24)


@dataclass(frozen=True)
class Transfer:
    """One message: ``data`` is a flat view of its bytes, on the backend's device."""

    peer: int
    data: torch.Tensor
    sending: bool

    def __str__(self) -> str:
        return f"rank {self.peer} to {'receive' if self.sending else 'send'} {self.data.numel()} bytes"


#: A handle of torch and the transfers that it covers.
Started = tuple[Any, Sequence[Transfer]]


class Backend(Protocol):
    """One group of one device kind. Failures are torch's own ``RuntimeError``; the channel gives them a name."""

    name: str
    to_itself: bool  #: a rank may send to itself

    def start(self, transfers: Sequence[Transfer]) -> list[Started]:
        """Posts at least one message. Between one pair they arrive in the order of posting."""

    def wait(self, work: Any, deadline: Deadline) -> None:
        """Until ``work`` is complete; raises when it failed, was aborted, or is not complete by the deadline."""

    def abort(self) -> None:
        """Wakes local waiters and peers. Never waits; safe from any thread, safe to repeat."""


def backend_name(device: torch.device) -> str:
    """The backend that moves memory of ``device``; raises :class:`ConfigError` when there is none."""
    names = {"cpu": "gloo", "cuda": "nccl"}
    if device.type not in names:
        raise ConfigError(f"no backend moves {device.type} memory", expected=" or ".join(names), found=device)
    return names[device.type]


def backend_version(name: str) -> str:
    """What has to be equal on all members for ``name`` to work between them."""
    return ".".join(map(str, torch.cuda.nccl.version())) if name == "nccl" else ""


class GlooBackend:
    """Gloo over TCP sockets of one address.

    What Gloo does, measured: a handle does not know whether it is complete before ``wait``; a wait that runs out closes
    every connection of the group for good; ``abort`` and ``shutdown`` of the group wake nobody.
    """

    name = "gloo"
    to_itself = False

    #: The tag of a message is its size modulo a prime; messages of one tag arrive in the order of posting. Without the
    #: size, Gloo takes a shorter message for a longer one, and a longer one ends the receiving process.
    _SIZES = (1 << 30) - 35
    _ABORT = (1 << 31) - 1

    def __init__(self, store: dist.Store, rank: int, size: int, interface: Any, deadline: Deadline) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [interface]
        options._threads = 1  # for collectives, which we do not use
        options._timeout = milliseconds(deadline)  # limits the forming of the group; waits are given their own
        self._others = [peer for peer in range(size) if peer != rank]
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    @staticmethod
    def interface(host: str) -> Any:
        """The network interface of ``host``, whose sockets are bound to that address alone. One may serve several
        groups. Raises :class:`ConfigError` when ``host`` is not an address of this machine."""
        try:
            return dist.ProcessGroupGloo.create_device(hostname=host)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot open sockets on {host!r}", expected="an address of this machine", found=_first_line(error)
            ) from error

    def start(self, transfers: Sequence[Transfer]) -> list[Started]:
        return [(self._post(transfer), (transfer,)) for transfer in transfers]

    def _post(self, transfer: Transfer) -> Any:
        post = self._group.send if transfer.sending else self._group.recv
        return post([transfer.data], transfer.peer, transfer.data.numel() % self._SIZES)

    def wait(self, work: Any, deadline: Deadline) -> None:
        work.wait(milliseconds(deadline))

    def abort(self) -> None:
        # The one thing that wakes everybody, here and there: a wait that runs out, for a message that is never sent.
        # It closes all connections, but only if its own is still open; so each peer's is tried.
        for peer in self._others:
            with contextlib.suppress(RuntimeError):  # running out is the point; or that connection is closed already
                never = torch.empty(1, dtype=torch.uint8)
                self._group.recv([never], peer, self._ABORT).wait(timedelta(milliseconds=1))


class NcclBackend:
    """NCCL over one communicator that is formed when the group is.

    The group is built in blocking-wait mode: torch then starts no watchdog thread, which would end the whole process
    (an engine, a trainer) when an operation takes too long.
    """

    name = "nccl"
    to_itself = True

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        max_peers: int,
        coalesce: bool,
        deadline: Deadline,
    ) -> None:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigError("NCCL needs a CUDA build of torch and a visible device", found=device)
        self._rank = rank
        self._device = device
        self._coalesce = coalesce
        self._aborted = False
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LONGEST
        if hasattr(options.config, "max_p2p_peers"):  # newer NCCL only: how many peers share the channels of a rank
            options.config.max_p2p_peers = max(1, min(2 * max_peers, size - 1))
        with torch.cuda.device(device), _environment(TORCH_NCCL_BLOCKING_WAIT="1"):
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        # Formed now, by all members together: left to the first round, members without a part in it would be missing.
        try:
            bounded(self._form_communicator, deadline)
        except (RuntimeError, TimeoutError) as error:
            self.abort()
            raise RuntimeError(f"the NCCL communicator did not form: {error or 'out of time'}") from error

    def _form_communicator(self) -> None:
        with torch.cuda.device(self._device):
            self._group.eager_connect_single_device(self._device)

    def start(self, transfers: Sequence[Transfer]) -> list[Started]:
        with torch.cuda.device(self._device):
            if not self._coalesce:
                return [(self._post(transfer), (transfer,)) for transfer in common_order(self._rank, transfers)]
            self._group._start_coalescing()
            try:
                for transfer in transfers:
                    self._post(transfer)
            finally:
                # Also after a failure: an open NCCL group would swallow what the framework posts in this thread next.
                work = self._group._end_coalescing()
            return [(work, tuple(transfers))]

    def _post(self, transfer: Transfer) -> Any:
        post = self._group.send if transfer.sending else self._group.recv
        return post([transfer.data], transfer.peer, 0)

    def wait(self, work: Any, deadline: Deadline) -> None:
        # Streams alone would keep the order, without the host waiting for each round. But then all of an update would
        # be launched ahead, launches block once the device's queue is full, and with a lost peer nothing would look at
        # the deadline any more. The rounds that are under way besides this one keep the device busy meanwhile.
        with torch.cuda.device(self._device):
            pause = 2e-5
            while not work.is_completed():  # also true of a work that failed
                if self._aborted or deadline.expired:
                    raise RuntimeError("the NCCL operation is not complete")
                time.sleep(pause)
                pause = min(pause * 1.1, 2e-4)
            work.wait()  # orders the current stream after it, or raises NCCL's error

    def abort(self) -> None:
        # No peer is needed for it, so it also serves to close the group; a clean destruction would wait for peers.
        if not self._aborted:
            self._aborted = True
            self._group.abort()


def common_order(rank: int, transfers: Sequence[Transfer]) -> list[Transfer]:
    """The transfers of ``rank`` in one order of all messages that all ranks share. The first message that is not
    complete then has nothing before it at either end, so operations that block one by one cannot deadlock."""

    def place(transfer: Transfer) -> tuple[int, int, bool]:
        low, high = sorted((rank, transfer.peer))
        return low, high, transfer.sending == (rank == low)

    return sorted(transfers, key=place)


def milliseconds(deadline: Deadline) -> timedelta:
    """What remains, in whole milliseconds, rounded up: torch cuts fractions off and would time out too early."""
    return timedelta(milliseconds=max(1, math.ceil(deadline.remaining() * 1000)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_environment_lock = threading.Lock()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Sets variables that a torch constructor reads, and puts the old ones back."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
