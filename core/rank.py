"""One engine rank: the state of its link and an owner thread that does everything that may block.

The engine's main thread calls :meth:`EngineRank.handle`, which never blocks and never raises. Results go to the
:class:`~weightlink.board.Board`, where rank 0 picks them up when the front process polls.
"""

from __future__ import annotations

import logging
import platform
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import torch
from weightlink.handshake import handshake
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConflictError, ErrorInfo, LayoutMoved, PlanMismatch, WeightlinkError, describe
from weightlink.hooks.manager import PluginManager
from weightlink.hops import Hops, join_hops
from weightlink.plan import make_plan
from weightlink.program import Program, verify_receive
from weightlink.relays import NOBODY
from weightlink.rendezvous import connect, local_address_towards
from weightlink.survey import Survey
from weightlink.wire import Receiver

if TYPE_CHECKING:
    from weightlink.board import Board
    from weightlink.hooks.geometry import Layout
    from weightlink.hooks.protocols import Channel, InferenceAdapter


logger = logging.getLogger("weightlink")


class Envelope(msgspec.Struct, frozen=True, tag=True):
    """A command for every rank. ``receive`` starts the receive work of the update that was begun."""

    seq: int
    request: m.Request
    receive: bool = False


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Asks each replica's rank 0 whether every rank of the replica has answered ``seq``."""

    seq: int


class Answer(msgspec.Struct, frozen=True):
    """A replica's rank 0's answer: the packed :class:`RankReply` of every rank of the replica, or none yet; or why it
    can never give one."""

    seq: int
    replies: tuple[bytes, ...] = ()
    error: ErrorInfo | None = None


_encode = msgspec.msgpack.Encoder().encode
_commands = msgspec.msgpack.Decoder(Envelope | Poll)
_answers = msgspec.msgpack.Decoder(Answer)


def encode_command(command: Envelope | Poll) -> bytes:
    """A command as bytes for the engine's control path."""
    return _encode(command)


def decode_answer(data: bytes) -> Answer:
    """Rank 0's answer."""
    return _answers.decode(data)


@dataclass(frozen=True)
class _Observed:
    """A layout, what was asked for it, and the fingerprint under which it holds."""

    request: m.Observe
    fingerprint: str
    layout: Layout

    def answers(self, request: m.Observe, fingerprint: str) -> bool:
        """The layout holds and would be the same for ``request``."""
        mine, theirs = ((r.tensors, r.layout_kind, r.selector) for r in (self.request, request))
        return mine == theirs and self.fingerprint == fingerprint


@dataclass
class _Link:
    """One epoch of a link on this rank."""

    id: str
    epoch: int
    plan_digest: str
    channel: Channel
    receiver: Receiver
    hops: Hops
    observed: _Observed  # what the plan was proven against; another trainer may have asked for a layout since

    @property
    def layout(self) -> Layout:
        return self.observed.layout

    def abort(self) -> None:
        self.channel.abort()
        self.hops.abort()


@dataclass
class _Update:
    """The update that is open on this rank."""

    id: str
    version: int
    mode: str
    step: str = "begun"
    phases: m.Phases = field(default_factory=m.Phases)
    staging: dict[int, torch.Tensor] = field(default_factory=dict)
    """Memory of the layout's staged parameters, by position, while the update is received."""


class EngineRank:
    """The weightlink side of one engine rank.

    :param adapter: the engine's model on this rank
    :param board: where answers are left
    :param plugins: transports come from here; a fresh manager if None
    """

    def __init__(self, adapter: InferenceAdapter, board: Board, plugins: PluginManager | None = None) -> None:
        self._adapter = adapter
        self._board = board
        self._plugins = plugins or PluginManager()
        self._place = adapter.place
        self._observed: _Observed | None = None
        self._link: _Link | None = None
        self._offer: tuple[m.Attach, Program, _Observed] | None = None  # proven, groups not formed yet
        self._update: _Update | None = None
        self._session = False  # destinations are in the load layout: begin() ran, finish() did not
        self._written = False  # a resident weight may differ from the committed version
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._own, name="weightlink-owner", daemon=True)
        self._thread.start()

    # --- main thread ------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """This rank answers for its replica."""
        return self._board.rank == 0

    @property
    def busy(self) -> bool:
        """Work is queued, running, or an update is open: a paused engine need not spin."""
        return self._pending > 0 or self._update is not None

    def handle(self, data: bytes) -> bytes:
        """Take a command; returns at once and never raises (it would end the engine). Only the answer of a rank that
        :attr:`leads` is used."""
        try:
            return _encode(self._take(_commands.decode(data)))
        except Exception as error:
            logger.exception("a control command failed on %s", self._place)
            return _encode(Answer(-1, error=describe(error, rank=str(self._place))))

    def _take(self, command: Envelope | Poll) -> Answer:
        if isinstance(command, Poll):
            replies = self._board.collect(command.seq) if self.leads else None
            return Answer(command.seq, tuple(replies or ()))
        request = command.request
        if isinstance(request, m.Commit):
            self._run(command.seq, lambda: self._commit(request))
        elif isinstance(request, m.Begin) and not command.receive:
            self._begin_in_main(command.seq, request)
        else:
            if isinstance(request, m.Abort) and self._link is not None and self._holds(request):
                self._link.abort()  # now, from this thread: the owner thread may be waiting in it
            self._enqueue(command)
        return Answer(command.seq)

    def _begin_in_main(self, seq: int, request: m.Begin) -> None:
        """Only the main thread can tell that no batch is running; what follows may block."""
        try:
            self._adapter.require_idle(request.pause_mode or "retract")
        except WeightlinkError as error:
            self._post(seq, error=describe(error, rank=str(self._place)))
            return
        self._enqueue(Envelope(seq, request))

    def _enqueue(self, command: Envelope) -> None:
        with self._lock:
            self._pending += 1
        self._jobs.put(lambda: self._run(command.seq, lambda: self._work(command)))

    # --- owner thread -----------------------------------------------------------------------------------------------

    def _own(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # Only leaving the result can fail here. The caller meets its deadline; the next command must still run.
                logger.exception("the owner thread of %s could not report", self._place)
            finally:
                with self._lock:
                    self._pending -= 1

    def _run(self, seq: int, work: Callable[[], bytes]) -> None:
        """Run one command and leave its result, or its error, on the board."""
        try:
            layout = work()
        except Exception as error:
            if not isinstance(error, WeightlinkError):
                logger.exception("unexpected error on %s", self._place)
            self._post(seq, error=describe(error, rank=str(self._place)))
        else:
            self._post(seq, layout=layout)

    def _post(self, seq: int, *, error: ErrorInfo | None = None, layout: bytes = b"") -> None:
        update = self._update
        status = m.RankStatus(
            rank=self._place.rank,
            seq=seq,
            update=update.id if update else "",
            step=update.step if update else "idle",
            written=self._written,
            phases=update.phases if update else m.Phases(),
            error=error,
        )
        self._board.post(seq, m.pack_status(status) + layout)

    def _work(self, command: Envelope) -> bytes:
        request = command.request
        match request:
            case m.Observe():
                return self._observe(request)
            case m.Attach():
                return self._attach(request)
            case m.Join():
                return self._join(request)
            case m.Prepare():
                return self._prepare(request)
            case m.Begin():
                return self._receive(request) if command.receive else self._begin(request)
            case m.Abort():
                return self._abort(request)
            case m.Detach():
                return self._detach(request)
            case _:
                raise PlanMismatch("not a command for ranks", found=type(request).__name__)

    def _observe(self, request: m.Observe) -> bytes:
        fingerprint = self._adapter.fingerprint(request.selector)
        if self._observed is None or not self._observed.answers(request, fingerprint):
            self._observed = None
            layout = self._adapter.observe(request.tensors, request.layout_kind, request.selector)
            self._observed = _Observed(request, fingerprint, replace(layout, host=platform.node()))
        return self._observed.layout.pack()

    def _attach(self, request: m.Attach) -> bytes:
        """Prove the offered program before anything is opened: whatever is wrong shows without a wait."""
        observed = self._observed
        if observed is None:
            raise PlanMismatch("attach before observe", rank=str(self._place), remedy="connect again")
        survey = Survey.unpack(request.survey)
        if survey.manifest != tuple(observed.layout.tensors) or len(survey.trainers) != request.trainers:
            raise PlanMismatch(
                "the plan is for other tensors or another trainer than the offer",
                rank=str(self._place),
                expected=f"{len(observed.layout.tensors)} tensors, as observed, and {request.trainers} trainer ranks",
                found=f"{len(survey.manifest)} tensors and {len(survey.trainers)} ranks",
                remedy="connect again",
            )
        ranks = len(survey.engines[request.engine]) if request.engine < len(survey.engines) else 0
        if request.world != request.trainers + self._place.world or ranks != self._place.world:
            raise PlanMismatch(
                "the link's world size does not match this engine",
                rank=str(self._place),
                expected=f"{request.trainers} trainer ranks + {self._place.world} engine ranks",
                found=f"world {request.world} with {ranks} engine ranks in the plan",
                remedy="connect again: the engine was restarted with another size, or the plan is another engine's",
            )
        # Whether the engine takes all that the trainer has is the trainer's business.
        plan = make_plan(survey, request.wire, ignore=("*",))
        neighbours = plan.engines[request.engine].relay, plan.passes_to(request.engine)
        if [n != NOBODY for n in neighbours] != [bool(request.upstream), bool(request.downstream)]:
            raise PlanMismatch("the offer and the plan name other neighbours", rank=str(self._place), found=neighbours)
        program = plan.receive_program(request.engine, self._place.rank, observed.layout)
        verify_receive(
            program,
            observed.layout,
            plan_digest=request.plan_digest,
            rank=str(self._place),
            owns_weights=self._adapter.context().owns_weights,
            declared=request.engine_owned,
        )
        self._offer = (request, program, observed)
        return b""

    def _join(self, request: m.Join) -> bytes:
        offered = self._offer
        if offered is None or (offered[0].link, offered[0].epoch) != (request.link, request.epoch):
            raise ConflictError(f"link {request.link} epoch {request.epoch} was not attached", rank=str(self._place))
        offer, program, observed = offered
        self._close_link()
        deadline = Deadline.after(request.budget)
        transport = self._plugins.transport(offer.wire.transport)
        device = self._adapter.device
        channel = transport.open(
            connect(offer.host, offer.port, deadline),
            key=offer.key,
            rank=offer.trainers + self._place.rank,
            size=offer.world,
            host=local_address_towards(offer.host, offer.port),
            device=device,
            wire=offer.wire,
            deadline=deadline,
        )
        try:
            handshake(channel, {} if offer.upstream else program.pair_digests(), device, deadline)
            hops = join_hops(transport, offer, self._place.rank, program, device, deadline)
        except BaseException:
            channel.abort()
            channel.close()
            raise
        receiver = Receiver(program, observed.layout.fills, offer.wire, device)
        self._link = _Link(offer.link, offer.epoch, offer.plan_digest, channel, receiver, hops, observed)
        self._offer = None
        return b""

    def _prepare(self, request: m.Prepare) -> bytes:
        link = self._require_link(request.link)
        if (link.epoch, link.plan_digest) != (request.epoch, request.plan_digest):
            raise PlanMismatch(
                "the rank holds another plan",
                rank=str(self._place),
                expected=f"epoch {request.epoch}, plan {request.plan_digest[:12]}",
                found=f"epoch {link.epoch}, plan {link.plan_digest[:12]}",
                remedy="push again: the link re-forms its groups",
            )
        self._require_unmoved(link)
        return b""

    def _begin(self, request: m.Begin) -> bytes:
        link = self._require_link(request.link)
        if self._update is not None and self._update.id != request.update and not self._written:
            raise ConflictError(f"update {self._update.id} is open", rank=str(self._place))
        self._adapter.synchronize()  # the last forward may still be running on a stream of its own
        self._require_unmoved(link)  # it may have moved since it was asked: the engine was not paused then
        self._update = None  # what a failed update staged is freed before memory is asked for again
        staging = self._stage(link.layout)
        self._adapter.begin(link.layout.params)
        self._session = True
        self._update = _Update(request.update, request.version, request.pause_mode or "retract", staging=staging)
        return b""

    def _receive(self, request: m.Begin) -> bytes:
        """Transfer, copy, synchronize, then the control barrier; then the engine's post-load processing."""
        link, update = self._require_link(request.link), self._update
        if update is None or update.id != request.update:
            raise ConflictError(f"update {request.update} was not begun", rank=str(self._place))
        deadline = Deadline.after(request.budget)
        started = time.monotonic()
        try:
            link.channel.barrier(f"every rank to be ready for update {update.id}", deadline)
            ready = time.monotonic()
            update.step = "receiving"
            self._written = True
            tensors = self._live(link.layout, update.staging)
            moved = link.receiver.run(tensors, link.channel, update.id, deadline, link.hops)
            self._adapter.synchronize()
            link.channel.barrier(f"every rank to have applied update {update.id}", deadline)
            arrived = time.monotonic()
            link.receiver.check()
            if link.layout.opaque:
                params = link.layout.params
                self._adapter.load([(params[n].name, tensor) for n, tensor in update.staging.items()])
            self._adapter.finish()
            self._session = False
            self._adapter.synchronize()
        except BaseException:
            # Nothing can be received over a channel that stopped half way: peers must notice, now.
            link.abort()
            raise
        finally:
            if update.staging:
                update.staging = {}
                link.receiver.unbind()
        update.step = "applied"
        update.phases = m.Phases(
            wait=ready - started,
            wire=arrived - ready - moved.apply,
            apply=moved.apply,
            finalize=time.monotonic() - arrived,
            bytes=moved.bytes,
            staged=link.layout.staged_bytes,
        )
        return b""

    def _commit(self, request: m.Commit) -> bytes:
        """Main thread: the scheduler's own structures are touched."""
        update = self._update
        if update is None or update.id != request.update or update.step not in ("applied", "committed"):
            raise ConflictError(
                f"update {request.update} cannot be committed",
                rank=str(self._place),
                expected="an applied update",
                found=f"update {update.id}, {update.step}" if update else "no open update",
            )
        if update.step == "applied":
            self._adapter.commit(update.version, flush=update.mode != "in_place")
            update.step = "committed"
        self._written = False
        self._update = None
        return b""

    def _abort(self, request: m.Abort) -> bytes:
        """Queued behind whatever the owner thread does: when this is answered, the thread is free."""
        if self._holds(request):
            self._close_link()
        if self._session and not self._written:
            self._adapter.finish()  # nothing arrived: back to the layout that the engine serves with
            self._session = False
        self._update = None
        return b""

    def _detach(self, request: m.Detach) -> bytes:
        if self._link is not None and self._link.id == request.link:
            self._close_link()
        return b""

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _stage(self, layout: Layout) -> dict[int, torch.Tensor]:
        """Memory for whole canonical tensors: before the session is opened, so that a lack of it changes nothing."""
        staging: dict[int, torch.Tensor] = {}
        for n, param in enumerate(layout.params):
            if param.staged:
                staging[n] = torch.empty(param.shape, dtype=getattr(torch, param.dtype), device=self._adapter.device)
        return staging

    def _live(self, layout: Layout, staging: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all parameters, in order; without ``staging``, of those that are the engine's own."""
        own = [n for n, param in enumerate(layout.params) if not param.staged]
        found = dict(zip(own, self._adapter.tensors([layout.params[n] for n in own]), strict=True)) | staging
        return [found[n] for n in sorted(found)]

    def _holds(self, request: m.Abort) -> bool:
        return self._link is not None and self._link.id == request.link

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.channel.close()
            self._link.hops.close()
            self._link = None

    def _require_link(self, link: str) -> _Link:
        if self._link is None or self._link.id != link:
            raise ConflictError(
                f"link {link} is not attached",
                rank=str(self._place),
                found=f"link {self._link.id}" if self._link else "no link",
                remedy="push again: the link re-forms its groups",
            )
        return self._link

    def _require_unmoved(self, link: _Link) -> None:
        now, then = self._adapter.fingerprint(link.observed.request.selector), link.observed.fingerprint
        if now != then:
            raise LayoutMoved(
                "the engine's layout may have changed since it was observed",
                rank=str(self._place),
                expected=f"fingerprint {then[:12]}",
                found=now[:12],
                remedy="push again: the link observes the engine again",
            )

    def close(self) -> None:
        """Stop the owner thread once its queue is empty."""
        self._jobs.put(None)
