"""A channel: one payload group and one control group, and the names that their failures are given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import (
    ConfigError,
    DeadlineExceeded,
    ErrorInfo,
    PlanMismatch,
    TransferError,
    WeightlinkError,
    rebuild,
)
from weightlink.hooks.settings import WireSettings
from weightlink.plugins.transports.backends import (
    Backend,
    GlooBackend,
    NcclBackend,
    Started,
    Transfer,
    backend_name,
    backend_version,
    milliseconds,
)


class _Hello(msgspec.Struct, frozen=True):
    """What each member says of itself before any group forms."""

    backend: str
    version: str
    coalesce: bool


class _Verdict(msgspec.Struct, frozen=True):
    """What rank 0 made of all of them."""

    coalesce: bool = False
    error: ErrorInfo | None = None


class P2PChannel:
    """Implements :class:`weightlink.hooks.protocols.Channel`. Posting and waiting are one thread's business; ``abort``
    and ``close`` may come from another.

    Any failure, a passed deadline included, aborts the whole channel: Gloo closes its connections anyway, and the other
    members learn of it at once instead of at their own deadline.
    """

    def __init__(self, rank: int, size: int, device: torch.device, payload: Backend, control: Backend) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._groups: tuple[Backend, Backend] | None = (payload, control)
        self._aborted = False

    def post(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        deadline: Deadline,
    ) -> PendingRound:
        """Posts one round. The tensors must be contiguous, on the channel's device, and left alone until the wait is
        over. Both ends must agree on the size of every message: no backend reports a difference. On Gloo it ends in
        ``DeadlineExceeded``, on NCCL the result is undefined."""
        payload, _ = self._open_groups()
        transfers = [self._transfer(payload, *receive, sending=False) for receive in receives]
        transfers += [self._transfer(payload, *send, sending=True) for send in sends]
        return self._start(payload, transfers, deadline, "")

    def barrier(self, what: str, deadline: Deadline) -> None:
        """Rank 0 hears from every member, then releases them. Raises ``DeadlineExceeded`` naming ``what`` and, on rank
        0, the members that are missing."""
        _, control = self._open_groups()
        others = range(1, self.size) if self.rank == 0 else (0,)
        arrivals, releases = (
            [Transfer(peer, torch.zeros(1, dtype=torch.uint8), sending) for peer in others]
            for sending in (self.rank != 0, self.rank == 0)
        )
        self._start(control, arrivals, deadline, what).wait(deadline)
        self._start(control, releases, deadline, what).wait(deadline)

    def abort(self) -> None:
        self._aborted = True
        for group in self._groups or ():
            group.abort()

    def close(self) -> None:
        self.abort()
        self._groups = None

    @property
    def _me(self) -> str:
        return f"group rank {self.rank}"

    def _open_groups(self) -> tuple[Backend, Backend]:
        groups = self._groups
        if groups is None or self._aborted:
            raise TransferError(
                f"the channel is {'closed' if groups is None else 'aborted'}",
                rank=self._me,
                remedy="connect again: a channel that failed once is not used any more",
            )
        return groups

    def _transfer(self, payload: Backend, peer: int, tensor: torch.Tensor, *, sending: bool) -> Transfer:
        what = f"the tensor to {'send to' if sending else 'receive from'} rank {peer}"
        found = f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype}, {tensor.device}"
        if not 0 <= peer < self.size or (peer == self.rank and not payload.to_itself):
            raise ConfigError(
                f"rank {peer} is not a peer of rank {self.rank}", rank=self._me, expected=f"0 to {self.size - 1}"
            )
        if not tensor.is_contiguous():
            raise ConfigError(f"{what} is not contiguous", rank=self._me, expected="contiguous", found=found)
        if tensor.device != self._device:
            raise ConfigError(f"{what} is elsewhere", rank=self._me, expected=self._device, found=found)
        # Plain bytes: no backend needs to know the dtype.
        return Transfer(peer, tensor.detach().view(-1).view(torch.uint8), sending)

    def _start(self, group: Backend, transfers: list[Transfer], deadline: Deadline, what: str) -> PendingRound:
        try:
            started = group.start(transfers) if transfers else []
        except RuntimeError as error:
            raise self._failure(error, transfers, deadline, what) from error
        return PendingRound(self, group, started, what)

    def _failure(
        self, cause: RuntimeError, unfinished: Sequence[Transfer], deadline: Deadline, what: str
    ) -> WeightlinkError:
        """The named error for torch's ``cause``. Aborts the channel."""
        by_us, late = self._aborted, deadline.expired
        self.abort()
        waited = f"{what} ({_listed(unfinished)})" if what else _listed(unfinished)
        if by_us:
            return TransferError(f"the channel was aborted while waiting for {waited}", rank=self._me)
        if late:
            return deadline.exceeded(waited, rank=self._me)
        return TransferError(
            f"lost the connection while waiting for {waited}",
            rank=self._me,
            found=str(cause).partition("\n")[0],
            remedy="look at the logs of these ranks: one died, or gave up first",
        )


class PendingRound:
    """Implements :class:`weightlink.hooks.protocols.Pending`. Keeps the tensors alive until the wait is over."""

    def __init__(self, channel: P2PChannel, group: Backend, started: list[Started], what: str) -> None:
        self._channel = channel
        self._group = group
        self._started = started
        self._what = what

    def wait(self, deadline: Deadline) -> None:
        started, self._started = self._started, []
        for position, (work, transfers) in enumerate(started):
            try:
                self._group.wait(work, deadline)
            except RuntimeError as error:
                # All at once: after a failure nothing more arrives, so what is complete now is all that will be.
                unfinished = list(transfers)
                if deadline.expired:
                    unfinished += self._unfinished(started[position + 1 :])
                raise self._channel._failure(error, unfinished, deadline, self._what) from error
        if started and self._channel._aborted:
            # An aborted NCCL kernel ends like a finished one; its bytes are not to be believed.
            raise self._channel._failure(RuntimeError("aborted"), started[-1][1], deadline, self._what)

    def _unfinished(self, started: Sequence[Started]) -> list[Transfer]:
        now = Deadline.after(0.001)
        found: list[Transfer] = []
        for work, transfers in started:
            try:
                self._group.wait(work, now)
            except RuntimeError:
                found.extend(transfers)
        return found


def _listed(transfers: Sequence[Transfer], limit: int = 8) -> str:
    more = f" and {len(transfers) - limit} more" if len(transfers) > limit else ""
    return ", ".join(map(str, transfers[:limit])) + more


def open_channel(
    store: dist.Store,
    *,
    key: str,
    rank: int,
    size: int,
    host: str,
    device: torch.device,
    wire: WireSettings,
    coalesce: bool,
    deadline: Deadline,
) -> P2PChannel:
    """See :meth:`weightlink.plugins.transports.p2p.P2P.open`."""
    if not 0 <= rank < size:
        raise ConfigError("no such group rank", expected=f"0 to {size - 1}", found=rank)
    name = backend_name(device)
    if device.type == "cpu" or device.index is None:  # as tensors spell it
        device = torch.empty(0, device=device.type).device
    me = f"group rank {rank}"
    hello = _Hello(name, backend_version(name), coalesce and wire.coalesce)
    interface = GlooBackend.interface(host)
    formed: list[Backend] = []
    try:
        agreed = _agree(dist.PrefixStore(f"{key}/hello", store), rank, size, hello, deadline)
        control = GlooBackend(dist.PrefixStore(f"{key}/control", store), rank, size, interface, deadline)
        formed.append(control)
        own = dist.PrefixStore(f"{key}/payload", store)
        payload: Backend
        if name == "gloo":
            payload = GlooBackend(own, rank, size, interface, deadline)
        else:
            payload = NcclBackend(own, rank, size, device, max_peers=wire.max_peers, coalesce=agreed, deadline=deadline)
        formed.append(payload)
        channel = P2PChannel(rank, size, device, payload, control)
        channel.barrier("every member to join the group", deadline)
    except (RuntimeError, WeightlinkError) as error:
        for group in formed:
            group.abort()
        if isinstance(error, WeightlinkError):
            raise
        if deadline.expired:
            raise deadline.exceeded(f"the {name} group of {size} members to form", rank=me) from error
        raise TransferError(
            f"the {name} group of {size} members did not form", rank=me, found=str(error).partition("\n")[0]
        ) from error
    return channel


def _agree(store: dist.Store, rank: int, size: int, hello: _Hello, deadline: Deadline) -> bool:
    """Compares all members' hellos on rank 0, before anything can hang; returns whether rounds are coalesced."""
    store.set(str(rank), msgspec.json.encode(hello).decode())
    if rank == 0:
        try:
            verdict = _Verdict(_compare(store, size, hello, deadline))
        except (DeadlineExceeded, PlanMismatch) as error:
            store.set("verdict", msgspec.json.encode(_Verdict(error=error.info())).decode())
            raise
        store.set("verdict", msgspec.json.encode(verdict).decode())
        return verdict.coalesce
    data = _get(store, "verdict", deadline)
    if data is None:
        raise deadline.exceeded("rank 0 to hear from every member", rank=f"group rank {rank}")
    verdict = msgspec.json.decode(data, type=_Verdict)
    if verdict.error is not None:
        raise rebuild(verdict.error)
    return verdict.coalesce


def _compare(store: dist.Store, size: int, own: _Hello, deadline: Deadline) -> bool:
    coalesce = True
    for rank in range(size):
        data = _get(store, str(rank), deadline)
        if data is None:
            missing = [other for other in range(rank, size) if not store.check([str(other)])]
            names = ", ".join(f"rank {other}" for other in missing or [rank])
            raise deadline.exceeded(f"{names} to join the group", rank="group rank 0")
        hello = msgspec.json.decode(data, type=_Hello)
        coalesce &= hello.coalesce
        if msgspec.structs.replace(hello, coalesce=own.coalesce) != own:
            raise PlanMismatch(
                "members of one group must use the same backend",
                rank=f"group rank {rank}",
                expected=f"{own.backend} {own.version}".strip() + ", as on rank 0",
                found=f"{hello.backend} {hello.version}".strip(),
            )
    return coalesce


def _get(store: dist.Store, key: str, deadline: Deadline) -> bytes | None:
    """The value of ``key``, or None when it does not appear in time."""
    try:
        store.wait([key], milliseconds(deadline))
    except RuntimeError:
        if deadline.expired:
            return None
        raise
    data: bytes = store.get(key)
    return data
