"""Control among the trainer's ranks: small messages over a store of our own, so that neither the trainer's groups nor
its device are used, and a missing rank is named.

The trainer's own process group is used once, to hand every rank the store's address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from weightlink.client import together
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import (
    ConfigError,
    DeadlineExceeded,
    ErrorInfo,
    PlanMismatch,
    TransferError,
    describe,
    rebuild,
)
from weightlink.rendezvous import Rendezvous, connect, new_key

T = TypeVar("T")
_INVITE_BYTES = 1024
#: Seconds beyond the caller's deadline in which the ranks agree on how a call ended.
VERDICT_SECONDS = 15.0


class _Invite(msgspec.Struct, frozen=True):
    """Where the store is, or why there is none."""

    host: str = ""
    port: int = 0
    key: str = ""
    error: ErrorInfo | None = None


class _Outcome(msgspec.Struct, frozen=True):
    """One rank's part of an agreement."""

    error: ErrorInfo | None = None
    mark: str = ""


class TrainerGroup:
    """The trainer's ranks. Every method is collective and ends by the caller's deadline."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, listener: Rendezvous | None, host: str, port: int
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.port = port
        self._listener = listener
        self._store: dist.Store = store
        self._call = 0
        self._turn = 0
        self._left = False
        self._told: list[str] = []

    @classmethod
    def form(cls, group: dist.ProcessGroup | None, choose_host: Callable[[], str], deadline: Deadline) -> TrainerGroup:
        """Form the group over the ranks of ``group`` (the default group if None; this process alone if there is none).

        :param choose_host: called on rank 0 only: the address that the store listens on
        """
        alone = group is None and not dist.is_initialized()
        rank, size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        listener: Rendezvous | None = None
        invite = _Invite()
        if rank == 0:
            try:
                listener = Rendezvous.listen(choose_host(), deadline)
                invite = _Invite(listener.host, listener.port, new_key())
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this message and must hear of it
                invite = _Invite(error=describe(error, rank="trainer 0"))
        if size > 1:
            invite = _broadcast_invite(invite, rank, group, deadline)
        if invite.error is not None:
            raise rebuild(invite.error)
        store = listener.store if listener is not None else connect(invite.host, invite.port, deadline)
        formed = cls(store, rank, size, listener, invite.host, invite.port)
        formed._store = dist.PrefixStore(f"{invite.key}/trainer", store)
        return formed

    @property
    def name(self) -> str:
        """This rank, for messages."""
        return f"trainer {self.rank}"

    def start(self) -> None:
        """A new collective call begins. Ranks count turns within a call: one that gave the last call up in the middle
        is in step again."""
        self._call += 1
        self._turn = 0

    def _next(self) -> str:
        self._turn += 1
        return f"{self._call}.{self._turn}"

    def gather(self, data: bytes, deadline: Deadline, what: str) -> list[bytes]:
        """Every rank's ``data`` in rank order on rank 0; an empty list elsewhere."""
        turn = self._next()
        with self._reached(what):
            self._store.set(f"g{turn}/{self.rank}", data)
            if self.rank != 0:
                return []
            keys = [f"g{turn}/{rank}" for rank in range(self.size)]
            self._wait(keys, deadline, what)
            answers = [self._store.get(key) for key in keys]
            # Whoever has answered has heard everything that was told before.
            for key in keys + self._told:
                self._store.delete_key(key)
            self._told = []
            return answers

    @contextlib.contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        """Names the loss of the store, which goes with the process that hosts it."""
        try:
            yield
        except RuntimeError as error:
            raise TransferError(
                f"lost trainer rank 0's store while waiting for {what}",
                rank=self.name,
                found=str(error).partition("\n")[0],
                remedy="look at trainer rank 0's log: its process has ended or cannot be reached",
            ) from error

    def broadcast(self, data: bytes, deadline: Deadline, what: str) -> bytes:
        """Rank 0's ``data`` on every rank."""
        turn = self._next()
        key = f"b{turn}"
        with self._reached(what):
            if self.rank == 0:
                self._store.set(key, data)
                self._told.append(key)
                return data
            self._wait([key], deadline, what)
            told: bytes = self._store.get(key)
            return told

    def agree(self, error: BaseException | None, deadline: Deadline, what: str, *, mark: str = "") -> None:
        """All ranks go on, or all raise: one rank's own error if only one kind occurred, else a list of them.

        :param mark: what the ranks must have in common; ranks that say something else than rank 0 are an error
        """
        # Ranks that failed at their deadline must still be able to say so, and to hear it of one another.
        deadline = Deadline.after(deadline.remaining() + VERDICT_SECONDS)
        mine = describe(error, rank=self.name) if error is not None else None
        packed = self.gather(msgspec.msgpack.encode(_Outcome(mine, mark)), deadline, what)
        outcomes = [_outcome.decode(data) for data in packed]
        failures = [o.error for o in outcomes if o.error is not None]
        for rank, outcome in enumerate(outcomes):
            if outcome.mark != outcomes[0].mark:
                differs = PlanMismatch(
                    "trainer ranks called with different arguments",
                    rank=f"trainer {rank}",
                    expected=outcomes[0].mark,
                    found=outcome.mark,
                    remedy="call connect and push with the same arguments on every rank",
                )
                failures.append(differs.info())
        verdict = msgspec.msgpack.encode(failures)
        failures = _failures.decode(self.broadcast(verdict, deadline, what))
        if not failures:
            return
        if error is not None and len(failures) == 1:
            raise error
        raise together(failures, f"{len(failures)} trainer ranks failed: {what}") from error

    def together(self, work: Callable[[], T], deadline: Deadline, what: str, *, mark: str = "") -> T:
        """Run ``work`` on every rank; its result, or on every rank the error of whichever failed."""
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - reported to all ranks, and raised there
            failed = error
        self.agree(failed, deadline, what, mark=mark)
        return result  # type: ignore[return-value]

    def lead(self, work: Callable[[], bytes], deadline: Deadline, what: str) -> bytes:
        """Run ``work`` on rank 0; its result on every rank, or its error on every rank."""
        data, failed = b"", None
        if self.rank == 0:
            try:
                data = work()
            except Exception as error:  # noqa: BLE001 - as above
                failed = error
        self.agree(failed, deadline, what)
        return self.broadcast(data, Deadline.after(deadline.remaining() + VERDICT_SECONDS), what)

    def flag(self, name: str) -> None:
        """Set a flag that every rank can see at once."""
        self._store.set(f"flag/{name}", b"1")

    def flagged(self, name: str) -> bool:
        """Whether some rank has set the flag. Never waits."""
        return bool(self._store.check([f"flag/{name}"]))

    def close(self, deadline: Deadline) -> None:
        """Leave; the rank that hosts the store leaves last. Safe to repeat."""
        if not self._left and self.size > 1:
            self._left = True
            self.start()
            self.gather(b"", deadline, "every trainer rank to leave the link")
        if self._listener is not None:
            self._listener.close()

    def _wait(self, keys: list[str], deadline: Deadline, what: str) -> None:
        try:
            self._store.wait(keys, deadline.timedelta(what))
        except (RuntimeError, DeadlineExceeded) as error:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
            raise DeadlineExceeded(
                f"deadline of {deadline.budget:g} s passed while waiting for {what}",
                rank=self.name,
                expected=f"trainer ranks {', '.join(missing[:20])}",
                found="no answer",
                remedy="look at the logs of these ranks; every trainer rank must call connect, push and close together",
            ) from error


_outcome = msgspec.msgpack.Decoder(_Outcome)
_failures = msgspec.msgpack.Decoder(list[ErrorInfo])
_invite = msgspec.msgpack.Decoder(_Invite)


def _broadcast_invite(invite: _Invite, rank: int, group: dist.ProcessGroup | None, deadline: Deadline) -> _Invite:
    """The one use of the trainer's own group: a fixed-size byte tensor from its rank 0."""
    device = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    body = msgspec.msgpack.encode(
        invite if invite.error is None else _Invite(error=invite.error.bounded(_INVITE_BYTES // 10))
    )
    if len(body) > _INVITE_BYTES - 4:
        raise ConfigError("the invitation does not fit its message", expected=_INVITE_BYTES - 4, found=len(body))
    packet = (len(body).to_bytes(4, "little") + body).ljust(_INVITE_BYTES, b"\0")
    tensor = torch.frombuffer(bytearray(packet), dtype=torch.uint8).to(device)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    work = dist.broadcast(tensor, src=source, group=group, async_op=True)
    if work is not None:
        work.wait(deadline.timedelta("trainer rank 0 to invite the others"))
    data = bytes(tensor.cpu().tolist())
    return _invite.decode(data[4 : 4 + int.from_bytes(data[:4], "little")])
