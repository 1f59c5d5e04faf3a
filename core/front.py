"""The engine's front process: one state machine per engine, and the gate that keeps foreign calls out of an update."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import msgspec
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import (
    ConflictError,
    DeadlineExceeded,
    ErrorInfo,
    LayoutMoved,
    NotIdle,
    UpdateFailed,
    VersionError,
    WeightlinkError,
    describe,
    rebuild,
)
from weightlink.hooks.settings import EngineSettings, PauseMode
from weightlink.rank import Answer, Envelope, Poll, decode_answer, encode_command

logger = logging.getLogger("weightlink")

#: Seconds between two polls of the ranks: short at first, never above one, since the engine's health depends on it.
POLL_FIRST, POLL_MOST = 0.002, 0.1


#: An update is given up when its deadline may have passed already, so this has a clock of its own.
ABORT_SECONDS = 30.0


class FrontPort(Protocol):
    """What the state machine needs from the engine."""

    @property
    def paused(self) -> bool:
        """Generation is paused, by whomever."""

    async def ask(self, data: bytes) -> list[bytes]:
        """Deliver a command to every rank; the answer of each replica's rank 0, in the replicas' order. Never waits for
        the command to finish."""

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation."""

    async def resume(self) -> None:
        """Continue generation."""

    async def committed(self, version: int) -> None:
        """Show ``version`` as the engine's weight version."""

    def default_pause_mode(self) -> PauseMode:
        """How this engine is paused when the caller does not care."""

    def check_pause_mode(self, mode: PauseMode) -> None:
        """Raises ``ConfigError`` when the engine cannot be updated safely under ``mode``."""

    async def context(self) -> m.EngineContext:
        """The engine's context, without ``state``, ``version`` and ``epoch``."""


class EngineFront:
    """State of one engine and the commands that change it. Used from one event loop.

    :param port: the engine
    :param settings: the engine's settings
    :param owns_weights: the engine loaded a checkpoint itself; False after a dummy start
    """

    def __init__(self, port: FrontPort, settings: EngineSettings, *, owns_weights: bool) -> None:
        self._port = port
        self._settings = settings
        self.owns_weights = owns_weights
        self.state = m.EngineState.READY if owns_weights else m.EngineState.PENDING
        self.version: int | None = None
        self.epoch = 0
        self.update = ""
        self._link = ""
        self._proven_owned = owns_weights  # when the link was proven, parameters of the engine's own held good values
        self._last_update = ""  # the committed one, so that a repeated commit is safe
        self._update_version = 0
        self._before = self.state  # to return to when an update ends before a byte was written
        self._expires: Deadline | None = None
        self._applied = False
        self._failures: tuple[ErrorInfo, ...] = ()
        self._ranks: tuple[m.RankStatus, ...] = ()
        self._seq = int(time.time() * 1000) << 8  # never repeats over a front's restart within one engine
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._observing = False
        self._we_paused = False
        self._paused_at = 0.0
        self._pause_seconds = 0.0

    # --- gates ------------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Generation requests can be answered with weights that somebody vouches for."""
        if m.EngineState.DIRTY in (self.state, self._before if self.state is m.EngineState.UPDATING else self.state):
            return False
        return self.version is not None or self.owns_weights or self._settings.serve_unready

    def refusal(self, what: str) -> ConflictError | None:
        """Why a control call that is not ours must not run now, or None."""
        if self._observing:
            return ConflictError(f"{what} is refused while weightlink observes the engine's layout", remedy="try again")
        if self.state is m.EngineState.UPDATING:
            return ConflictError(
                f"{what} is refused while weightlink update {self.update} is open",
                remedy="wait for the update to end; GET /weightlink/v1/status shows its state",
            )
        if self.state is m.EngineState.DIRTY:
            return ConflictError(
                f"{what} is refused: update {self.update} failed half way and the engine holds mixed weights",
                remedy="push a full update from the trainer",
            )
        return None

    def note_foreign_write(self, what: str) -> None:
        """Weights changed by another path: what was known about them no longer holds."""
        self.epoch += 1

    def note_checkpoint_loaded(self) -> None:
        """The engine has loaded a whole checkpoint by its own means: there is something to serve."""
        self.owns_weights = True
        if self.state is m.EngineState.PENDING:
            self.state = m.EngineState.READY

    def note_weights_lost(self, what: str) -> None:
        """The weights' memory was given up without a backup: nothing is served before a full update, and what the
        engine had loaded for itself is gone for good."""
        self.epoch += 1
        self.owns_weights, self.version, self.state = False, None, m.EngineState.PENDING

    # --- commands ---------------------------------------------------------------------------------------------------

    async def handle(self, request: m.Request) -> m.Reply:
        """Carry one request out. Never raises a :class:`WeightlinkError`: it is in the reply."""
        try:
            deadline = Deadline.after(request.budget)
        except WeightlinkError as error:
            return self._reply(error=error)
        try:
            if isinstance(request, m.Status):
                return await self._status(request)
            if isinstance(request, m.Describe):
                return self._reply(context=await self._describe())
            # A caller that gives up must not leave half a request behind, such as an engine that stays paused.
            return await asyncio.shield(asyncio.create_task(self._in_turn(request, deadline)))
        except WeightlinkError as error:
            return self._reply(error=error)
        except Exception as error:
            logger.exception("%s failed", type(request).__name__)
            return self._reply(error=rebuild(describe(error)))

    async def _in_turn(self, request: m.Request, deadline: Deadline) -> m.Reply:
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self._turn.acquire()
        except TimeoutError as error:
            raise deadline.exceeded("the engine's earlier request to finish") from error
        try:
            return await self._exclusive(request, deadline)
        finally:
            self._turn.release()

    async def _exclusive(self, request: m.Request, deadline: Deadline) -> m.Reply:
        match request:
            case m.Observe():
                return await self._observe(request, deadline)
            case m.Attach():
                return await self._attach(request, deadline)
            case m.Join():
                return await self._join(request, deadline)
            case m.Prepare():
                return await self._prepare(request, deadline)
            case m.Begin():
                return await self._begin(request, deadline)
            case m.Commit():
                return await self._commit(request, deadline)
            case m.Abort():
                return await self._abort(request, deadline)
            case m.Detach():
                return await self._detach(request, deadline)
            case _:
                raise ConflictError(f"unknown request {type(request).__name__}")

    async def _describe(self) -> m.EngineContext:
        context = await self._port.context()
        return msgspec.structs.replace(
            context, state=self.state, version=self.version, epoch=self.epoch, owns_weights=self.owns_weights
        )

    async def _observe(self, request: m.Observe, deadline: Deadline) -> m.Reply:
        """Replay the loaders, under a short pause: a forward pass must not see what a replay does to attributes."""
        self._refuse_open("observe")
        mode = self._mode(request.pause_mode)
        self._observing = True
        try:
            await self._pause(mode, deadline)
            replies = await self._command(request, deadline, "every rank's layout")
        finally:
            self._observing = False
            if self.state is not m.EngineState.DIRTY:
                await self._resume()
        return self._reply(layouts=tuple(reply.layout for reply in replies))

    async def _attach(self, request: m.Attach, deadline: Deadline) -> m.Reply:
        self._refuse_open("attach")
        owned = self.owns_weights
        await self._command(request, deadline, "every rank to prove its part of the plan")
        self._proven_owned = owned
        return self._reply()

    async def _join(self, request: m.Join, deadline: Deadline) -> m.Reply:
        self._refuse_open("join")
        await self._command(request, deadline, "every rank to join the link's groups")
        self._link = request.link
        return self._reply()

    async def _prepare(self, request: m.Prepare, deadline: Deadline) -> m.Reply:
        if request.update == self._last_update:
            return self._reply()
        self._refuse_open("prepare")
        self._check_version(request.version)
        if self._proven_owned and not self.owns_weights:
            raise LayoutMoved(
                "the engine has given its weights' memory up since the link was proven",
                remedy="push again: the link proves anew that every parameter is sent",
            )
        await self._command(request, deadline, "every rank to accept the update")
        return self._reply()

    def _check_version(self, version: int) -> None:
        if self.version is not None and version <= self.version:
            raise VersionError(
                "a version must be higher than the committed one",
                expected=f"> {self.version}",
                found=version,
                remedy="push a higher version; the engine keeps serving the committed one",
            )

    async def _begin(self, request: m.Begin, deadline: Deadline) -> m.Reply:
        if self.update == request.update and self.state is m.EngineState.UPDATING:
            return self._reply()
        self._refuse_open("begin")
        self._check_version(request.version)
        mode = self._mode(request.pause_mode)
        pinned = msgspec.structs.replace(request, pause_mode=mode)
        self._before = self.state
        self.state, self.update, self._update_version = m.EngineState.UPDATING, request.update, request.version
        self._applied, self._failures, self._ranks, self._expires = False, (), (), deadline
        if self._heart is None or self._heart.done():
            self._heart = asyncio.create_task(self._beat())
        try:
            await self._pause(mode, deadline)
            await self._until_idle(pinned, deadline)
            seq = await self._send(pinned, deadline, "every rank to receive", receive=True)
        except BaseException as error:
            await self._roll_back(request, describe(error))
            raise
        self._watch = asyncio.create_task(self._follow(seq, request, deadline))
        return self._reply()

    async def _until_idle(self, request: m.Begin, deadline: Deadline) -> None:
        """Begin on every rank; a pause takes effect rank by rank, so a rank that is not idle yet is asked again."""
        wait, busy = POLL_FIRST, UpdateFailed("no rank has answered")
        while True:
            try:
                await self._command(request, deadline, "every rank to be paused and idle")
                return
            except UpdateFailed as failed:
                if any(f.kind != NotIdle.__name__ for f in failed.causes):
                    raise
                busy = failed
            except DeadlineExceeded as late:
                if busy.causes:
                    raise busy from late
                raise
            if deadline.remaining() < wait:
                raise busy
            await asyncio.sleep(wait)
            wait = min(wait * 2, POLL_MOST)

    async def _follow(self, seq: int, request: m.Begin, deadline: Deadline) -> None:
        """Watch the receive work; it ends by the request's own deadline on every rank."""
        try:
            replies = await self._collect(seq, deadline, "every rank to receive the update", grace=5.0)
            self._ranks = tuple(reply.status for reply in replies)
            self._failures = tuple(s.error for s in self._ranks if s.error is not None)
        except WeightlinkError as error:
            self._failures = (error.info(),)
        self._applied = not self._failures
        if self._failures:
            written = not self._ranks or any(status.written for status in self._ranks)
            if written:
                self.state = m.EngineState.DIRTY
            else:
                await self._roll_back(request, self._failures[0])
        self._moved.set()

    async def _roll_back(self, request: m.Begin, why: ErrorInfo) -> None:
        """End an update of which nothing was written: the engine serves its old version again."""
        abort = m.Abort(ABORT_SECONDS, request.link, request.update, why.message)
        try:
            replies = await self._command(abort, Deadline.after(ABORT_SECONDS), "every rank to give the update up")
        except WeightlinkError as error:
            self._failures = (*self._failures, error.info())
            self.state = m.EngineState.DIRTY
            return
        if any(reply.status.written for reply in replies):
            self.state = m.EngineState.DIRTY
            return
        self.state = self._before
        if self.state is not m.EngineState.DIRTY:
            await self._resume()

    async def _commit(self, request: m.Commit, deadline: Deadline) -> m.Reply:
        if request.update == self._last_update:
            await self._resume()  # the first time it may have failed
            return self._reply()
        if self.update != request.update or not self._applied or self.state is not m.EngineState.UPDATING:
            raise ConflictError(
                f"update {request.update} cannot be committed",
                expected="an update that every rank has applied",
                found=f"update {self.update or 'none'}, engine {self.state}",
            )
        try:
            await self._command(request, deadline, "every rank to commit")
        except WeightlinkError:
            self.state = m.EngineState.DIRTY
            raise
        self.version, self._last_update = self._update_version, request.update
        self.state = m.EngineState.READY
        await self._port.committed(self._update_version)
        await self._resume()
        return self._reply()

    async def _abort(self, request: m.Abort, deadline: Deadline) -> m.Reply:
        if self.update != request.update or self.state not in (m.EngineState.UPDATING, m.EngineState.DIRTY):
            return self._reply()
        # Also when the engine is dirty already: a rank may still be receiving.
        replies = await self._command(request, deadline, "every rank to give the update up")
        if self._watch is not None:
            await self._watch
        if self._applied or any(reply.status.written for reply in replies):
            self.state = m.EngineState.DIRTY
        elif self.state is m.EngineState.UPDATING:
            self.state = self._before
            await self._resume()
        self._moved.set()
        return self._reply()

    async def _detach(self, request: m.Detach, deadline: Deadline) -> m.Reply:
        if self._link == request.link:
            self._refuse_open("detach")
            await self._command(request, deadline, "every rank to leave the link")
            self._link = ""
        return self._reply()

    async def _status(self, request: m.Status) -> m.Reply:
        if request.wait > 0 and self.state is m.EngineState.UPDATING and not self._applied:
            self._moved.clear()
            try:
                async with asyncio.timeout(request.wait):
                    await self._moved.wait()
            except TimeoutError:
                return self._reply()
        return self._reply()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _mode(self, asked: PauseMode | None) -> PauseMode:
        mode = asked or self._port.default_pause_mode()
        self._port.check_pause_mode(mode)
        return mode

    def _refuse_open(self, what: str) -> None:
        """An open update blocks everything but its own end; one whose deadline passed long ago is given up."""
        if self.state is not m.EngineState.UPDATING:
            return
        if self._expires is not None and self._expires.expired and (self._watch is None or self._watch.done()):
            self.state = m.EngineState.DIRTY
            return
        raise ConflictError(
            f"{what} is refused while update {self.update} is open",
            remedy="wait for it, or abort it",
        )

    async def _beat(self) -> None:
        """Ask the ranks something once a second while the engine stands still: its own health check takes an engine
        whose schedulers say nothing for dead."""
        while self.state in (m.EngineState.UPDATING, m.EngineState.DIRTY):
            try:
                await self._ask(Poll(0), Deadline.after(ABORT_SECONDS), "the ranks' heartbeat")
            except WeightlinkError as error:
                logger.warning("the schedulers do not answer: %s", error)
            if self._applied and self._expires is not None and self._expires.expired:
                logger.error("nobody has committed update %s before its deadline", self.update)
                self.state = m.EngineState.DIRTY
            await asyncio.sleep(1.0)

    async def _pause(self, mode: PauseMode, deadline: Deadline) -> None:
        if not self._port.paused:
            self._we_paused, self._paused_at = True, time.monotonic()  # even a pause that fails may have taken hold
            try:
                async with asyncio.timeout(deadline.check("the engine to pause")):
                    await self._port.pause(mode)
            except TimeoutError as error:
                raise deadline.exceeded("the engine to pause") from error

    async def _resume(self) -> None:
        if self._we_paused:
            await self._port.resume()
            self._we_paused = False
            self._pause_seconds = time.monotonic() - self._paused_at

    async def _ask(self, command: Envelope | Poll, deadline: Deadline, what: str) -> list[Answer]:
        """Each replica's answer."""
        try:
            async with asyncio.timeout(max(0.001, deadline.remaining())):
                answers = [decode_answer(data) for data in await self._port.ask(encode_command(command))]
        except TimeoutError as error:
            raise deadline.exceeded(f"the engine's schedulers to answer, for {what}") from error
        for answer in answers:
            if answer.error is not None:
                raise rebuild(answer.error)
        return answers

    async def _send(self, request: m.Request, deadline: Deadline, what: str, *, receive: bool = False) -> int:
        """Number a request and hand it to every rank, with what is left of the caller's time."""
        self._seq += 1
        left = msgspec.structs.replace(request, budget=deadline.check(what))
        await self._ask(Envelope(self._seq, left, receive), deadline, what)
        return self._seq

    async def _command(self, request: m.Request, deadline: Deadline, what: str) -> list[m.RankReply]:
        """Run a request on every rank; raises :class:`UpdateFailed` listing each failed rank."""
        replies = await self._collect(await self._send(request, deadline, what), deadline, what)
        failures = tuple(reply.status.error for reply in replies if reply.status.error is not None)
        if failures:
            name = type(request).__name__.lower()
            raise UpdateFailed(f"{len(failures)} of {len(replies)} ranks failed to {name}", causes=failures)
        return replies

    async def _collect(self, seq: int, deadline: Deadline, what: str, grace: float = 0.0) -> list[m.RankReply]:
        """Poll until every rank has answered. ``grace`` lets ranks that share the deadline report it themselves."""
        wait, last = POLL_FIRST, Deadline.after(deadline.remaining() + grace + 0.001)
        replies: dict[int, tuple[bytes, ...]] = {}  # by replica: each hands its own over once
        while True:
            answers = await self._ask(Poll(seq), last, what)
            for replica, answer in enumerate(answers):
                if answer.seq == seq and answer.replies:
                    replies[replica] = answer.replies
            if len(replies) == len(answers):
                return [
                    m.RankReply(status=m.unpack_status(r[: m.STATUS_BYTES]), layout=r[m.STATUS_BYTES :])
                    for replica in sorted(replies)
                    for r in replies[replica]
                ]
            if last.expired:
                raise deadline.exceeded(what)
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, POLL_MOST)

    def _reply(
        self,
        *,
        error: WeightlinkError | None = None,
        context: m.EngineContext | None = None,
        layouts: tuple[bytes, ...] = (),
    ) -> m.Reply:
        failures = error.causes if isinstance(error, UpdateFailed) else self._failures
        return m.Reply(
            state=self.state,
            version=self.version,
            update=self.update,
            epoch=self.epoch,
            applied=self._applied,
            error=error.info() if error is not None else None,
            failures=failures,
            context=context,
            layouts=layouts,
            ranks=self._ranks,
            pause_seconds=self._pause_seconds,
        )
