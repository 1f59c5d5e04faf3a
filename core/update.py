"""One update as a transaction: prepare, begin, transfer, apply, commit. Every rank's result is collected; an engine
commits only when all of its ranks have applied, and the trainer's ranks all return or all raise."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
from weightlink.client import EngineClient, fan_out, raise_failures
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ErrorInfo, LayoutMoved, UpdateFailed, WeightlinkError, describe
from weightlink.report import EngineReport, UpdateReport

if TYPE_CHECKING:
    import torch
    from weightlink.attach import Attachment, Leg
    from weightlink.group import TrainerGroup
    from weightlink.hooks.protocols import TrainingAdapter
    from weightlink.hooks.settings import LinkSettings


#: Seconds for telling an engine that an update is over: the caller's own time may have run out by then.
ABORT_SECONDS = 3.0


class _Plan(msgspec.Struct, frozen=True):
    """What rank 0 tells the others before the transfer: the update and the engines that take part, by position."""

    update: str
    live: tuple[int, ...]


class Outcome(msgspec.Struct, frozen=True):
    """How the update ended, the same on every trainer rank."""

    report: UpdateReport
    error: str = ""


class Update:
    """Carries one update out over an attachment."""

    def __init__(
        self,
        *,
        link: str,
        group: TrainerGroup,
        adapter: TrainingAdapter,
        clients: Sequence[EngineClient],
        settings: LinkSettings,
        attachment: Attachment,
        version: int,
        deadline: Deadline,
    ) -> None:
        self.link, self.group, self.adapter, self.clients = link, group, adapter, clients
        self.settings, self.attachment, self.version, self.deadline = settings, attachment, version, deadline
        self.id = secrets.token_hex(8)
        self._started = time.monotonic()
        self._marks = dict.fromkeys(("prepare", "transfer", "commit"), 0.0)
        self._failed: dict[str, list[ErrorInfo]] = {}
        self._last: dict[str, m.Reply] = {}
        self._begun: list[EngineClient] = []

    def run(self) -> Outcome:
        """Collective. Raises, the same on every rank, only while no engine has been touched or after all were told."""
        what, mark = "the trainer's weights to be readable", f"version {self.version}"
        tensors = self.group.together(self._ready, self.deadline, what, mark=mark)
        self.group.lead(self._prepare, self.deadline, "the engines to accept the update")
        try:
            plan = _plans.decode(self.group.lead(self._begin, self.deadline, "the engines to be ready"))
            legs = [self.attachment.legs[n] for n in plan.live]
            errors = self._transfer(legs, tensors, plan.update)
            packed = msgspec.msgpack.encode([errors.get(n) for n in range(len(legs))])
            everyone = self.group.gather(packed, self.deadline, "every trainer rank to send")
            data = self.group.lead(lambda: self._finish(plan, everyone), self.deadline, "the engines to commit")
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        return _outcomes.decode(data)

    def _ready(self) -> Sequence[torch.Tensor]:
        self.adapter.make_readable(self.deadline)
        self.adapter.synchronize()
        tensors = self.attachment.tensors(self.adapter)
        for leg in self.attachment.legs:
            leg.sender.prepare(tensors)  # now, while the engines still serve
        return tensors

    def _prepare(self) -> bytes:
        """Rank 0: every engine agrees before anything is paused anywhere."""
        budget = self.deadline.check("the engines to accept the update")
        prepare = m.Prepare(
            budget, self.link, self.attachment.epoch, self.id, self.version, self.attachment.plan.digest
        )
        _, failures = fan_out(self.clients, lambda c: c.send(prepare, self.deadline))
        self._exclude(failures, "accept the update")
        return b""

    def _begin(self) -> bytes:
        """Rank 0: pause and open. An engine that cannot be paused is as it was."""
        started = time.monotonic()
        live = [c for c in self.clients if c.name not in self._failed]
        begin = m.Begin(
            self.deadline.check("the engines to pause"), self.link, self.id, self.version, self.settings.pause_mode
        )
        self._begun = live
        _, failures = fan_out(live, lambda c: c.send(begin, self.deadline))
        self._exclude(failures, "begin the update")
        self._begun = [c for c in live if c.name not in self._failed]
        self._marks["prepare"] = time.monotonic() - started
        numbers = tuple(n for n, c in enumerate(self.clients) if c in self._begun)
        return msgspec.msgpack.encode(_Plan(self.id, numbers))

    def _exclude(self, failures: dict[str, ErrorInfo], what: str) -> None:
        """Leave failed engines out if the settings allow it, else raise."""
        for name, info in failures.items():
            self._failed.setdefault(name, []).append(info)
        moved = {name: info for name, info in failures.items() if info.kind == LayoutMoved.__name__}
        if moved and len(moved) == len(failures):
            raise_failures(moved, what)  # nothing is wrong with these engines: the link only has to look at them again
        if failures and (self.settings.strict or len(self.clients) - len(self._failed) < self._least()):
            raise_failures(failures, what)

    def _least(self) -> int:
        return self.settings.min_engines or len(self.clients)

    def _transfer(self, legs: Sequence[Leg], tensors: Sequence[torch.Tensor], update: str) -> dict[int, ErrorInfo]:
        """Send to every engine at once; they share no fate. Errors by position."""
        started = time.monotonic()
        errors: dict[int, ErrorInfo] = {}

        def send(number: int) -> None:
            leg = legs[number]
            try:
                leg.channel.barrier(f"every rank to be ready for update {update}", self.deadline)
                leg.sender.run(tensors, leg.channel, update, self.deadline)
                leg.channel.barrier(f"every rank to have applied update {update}", self.deadline)
            except Exception as error:  # noqa: BLE001 - collected for rank 0, which decides per engine
                leg.channel.abort()
                errors[number] = describe(error, rank=self.group.name)

        if len(legs) == 1:
            send(0)
        elif legs:
            with ThreadPoolExecutor(len(legs), "weightlink-send") as pool:
                list(pool.map(send, range(len(legs))))
        self._marks["transfer"] = time.monotonic() - started
        return errors

    def _finish(self, plan: _Plan, everyone: Sequence[bytes]) -> bytes:
        """Rank 0: hear every engine out, commit those that are whole, and say how it ended."""
        started = time.monotonic()
        for data in everyone:
            for number, info in zip(plan.live, _errors.decode(data), strict=True):
                if info is not None:
                    self._failed.setdefault(self.clients[number].name, []).append(info)
        replies, failures = fan_out(self._begun, self._await_applied)
        self._last.update(replies)
        for name, info in failures.items():
            self._failed.setdefault(name, []).insert(0, info)
        for name, reply in replies.items():
            if not reply.applied:
                own = [self._client(name).located(f) for f in reply.failures]
                self._failed.setdefault(name, [])[:0] = own or [
                    ErrorInfo("UpdateFailed", f"the engine is {reply.state} and has not applied the update", rank=name)
                ]
        whole = [c for c in self._begun if c.name not in self._failed]
        enough = bool(whole) and len(whole) >= (self.settings.min_engines or 1)
        if self._failed and self.settings.strict:
            enough = False
        self._marks["transfer"] += time.monotonic() - started
        started = time.monotonic()
        if enough:
            commit = m.Commit(self.deadline.check("the engines to commit"), self.link, self.id)
            replies, failures = fan_out(whole, lambda c: c.send(commit, self.deadline))
            self._last.update(replies)
            for name, info in failures.items():
                if not self._committed_all_the_same(name):
                    self._failed.setdefault(name, []).append(info)
        self._marks["commit"] = time.monotonic() - started
        self._abort([c for c in self._begun if c.name in self._failed or not enough], "another part failed")
        committed = [c.name for c in whole if enough and c.name not in self._failed]
        report = self._report(committed)
        short = len(committed) < self._least()
        error = f"update {self.id} (version {self.version}) did not commit on every engine" if short else ""
        return msgspec.msgpack.encode(Outcome(report, error))

    def _committed_all_the_same(self, name: str) -> bool:
        """The answer to a commit may be lost, or late, although the commit was done. Asking again is safe."""
        try:
            again = m.Commit(ABORT_SECONDS, self.link, self.id)
            self._last[name] = self._client(name).send(again, Deadline.after(ABORT_SECONDS), grace=0.0)
        except WeightlinkError:
            return False
        return True

    def _await_applied(self, client: EngineClient) -> m.Reply:
        """Until every rank of the engine has applied, or one has failed. A failed sender ends the wait by an abort."""
        if client.name in self._failed:
            abort = m.Abort(ABORT_SECONDS, self.link, self.id, self._failed[client.name][0].message)
            return client.send(abort, Deadline.after(ABORT_SECONDS), grace=0.0)
        while True:
            left = self.deadline.check(f"{client.name} to apply update {self.id}")
            reply = client.send(m.Status(left, min(1.0, left)), self.deadline)
            if reply.update != self.id or reply.applied or reply.state is not m.EngineState.UPDATING:
                return reply

    def _abort(self, clients: Sequence[EngineClient], reason: str) -> None:
        """Tell engines that the update is over; what they cannot hear they learn from their own deadline."""
        _, failures = fan_out(
            clients,
            lambda c: c.send(
                m.Abort(ABORT_SECONDS, self.link, self.id, reason), Deadline.after(ABORT_SECONDS), grace=0.0
            ),
        )
        for name, info in failures.items():
            self._failed.setdefault(name, []).append(info)

    def _give_up(self, reason: str) -> None:
        """Something failed between begin and commit: peers must not wait, and engines must hear of it."""
        for leg in self.attachment.legs:
            leg.channel.abort()
        self._abort(self._begun, reason)

    def _client(self, name: str) -> EngineClient:
        return next(c for c in self.clients if c.name == name)

    def _report(self, committed: Sequence[str]) -> UpdateReport:
        engines = []
        for client in self.clients:
            reply = self._last.get(client.name)
            phases = [status.phases for status in reply.ranks] if reply is not None else []
            engines.append(
                EngineReport(
                    name=client.name,
                    committed=client.name in committed,
                    version=reply.version if reply is not None else None,
                    bytes=sum(p.bytes for p in phases),
                    staged=max((p.staged for p in phases), default=0),
                    wait=max((p.wait for p in phases), default=0.0),
                    wire=max((p.wire for p in phases), default=0.0),
                    apply=max((p.apply for p in phases), default=0.0),
                    finalize=max((p.finalize for p in phases), default=0.0),
                    pause=reply.pause_seconds if reply is not None else 0.0,
                    failures=tuple(self._failed.get(client.name, ())),
                )
            )
        return UpdateReport(
            link=self.link,
            update=self.id,
            version=self.version,
            seconds=time.monotonic() - self._started,
            plan=self.attachment.plan_seconds,
            prepare=self._marks["prepare"],
            transfer=self._marks["transfer"],
            commit=self._marks["commit"],
            sent=tuple(self.attachment.plan.sent_bytes.tolist()),
            engines=tuple(engines),
        )


def failure(outcome: Outcome) -> WeightlinkError:
    """The error of an update that did not commit where it had to, naming each failed rank."""
    return UpdateFailed(
        outcome.error,
        causes=outcome.report.failures,
        remedy="failed engines are unready and keep their old version label; the next push re-forms the link and heals"
        " them with a full update",
    )


_plans = msgspec.msgpack.Decoder(_Plan)
_outcomes = msgspec.msgpack.Decoder(Outcome)
_errors = msgspec.msgpack.Decoder(list[ErrorInfo | None])
