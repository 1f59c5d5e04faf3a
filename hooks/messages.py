"""Every message that crosses a process boundary: typed, bounded, msgpack, never pickle.

Requests travel trainer rank 0 -> engine (HTTP) -> every scheduler rank (as one ``bytes`` field of the engine's own
envelope). Each rank answers with a :class:`RankReply`; the engine's front process combines them into a :class:`Reply`.
Times are seconds that remain, never absolute: clocks of two machines are not compared.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from weightlink.hooks.errors import ErrorInfo, PlanMismatch
from weightlink.hooks.geometry import TensorSpec
from weightlink.hooks.settings import PauseMode, Selector, WireSettings

PROTOCOL = 3
"""Version of this message set; both ends must agree."""

STATUS_BYTES = 4096
"""Size of a packed :class:`RankReply` status, whatever it says."""

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Budget = Annotated[float, Meta(gt=0, le=86400)]
Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]
LayoutKind = Literal["megatron", "hf"]


class EngineState(enum.StrEnum):
    """What an engine serves, seen from outside."""

    PENDING = "pending"  #: started without weights; nothing was ever committed
    READY = "ready"  #: serves the committed version
    UPDATING = "updating"  #: an update is open
    DIRTY = "dirty"  #: an update failed half way: paused, unready, needs a full update


class RankPlace(msgspec.Struct, frozen=True):
    """Where an engine rank stands: ``rank = (dp_rank * pp_size + pp_rank) * tp_size + tp_rank``.

    ``dp`` counts replicas of the whole model behind one front; attention data parallelism lies inside ``tp``.
    """

    rank: int
    world: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def at(
        cls, *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, dp_rank: int = 0, dp_size: int = 1
    ) -> RankPlace:
        """The place with these coordinates."""
        rank = (dp_rank * pp_size + pp_rank) * tp_size + tp_rank
        return cls(rank, dp_size * pp_size * tp_size, tp_rank, tp_size, pp_rank, pp_size, dp_rank, dp_size)

    @property
    def replica_rank(self) -> int:
        """The rank within its replica."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def replica_world(self) -> int:
        """Ranks of one replica."""
        return self.pp_size * self.tp_size

    def __str__(self) -> str:
        replica = f", dp {self.dp_rank}" if self.dp_size > 1 else ""
        return f"rank {self.rank} (tp {self.tp_rank}, pp {self.pp_rank}{replica})"


class EngineContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine tells the trainer before either side builds its layout.

    :param engine: kind of engine, e.g. ``"sglang"``
    :param hf_config: the model's Hugging Face configuration as plain data
    :param architecture: ``hf_config["architectures"][0]``
    :param dtype: dtype in which the engine loads the model
    :param device: ``"cpu"`` or ``"cuda"``
    :param versions: versions of what must agree, e.g. torch and nccl
    :param owns_weights: the engine loaded its weights itself, so that tensors it owns are valid
    :param version: last committed version, None before the first
    :param refusal: why this engine cannot be updated online at all; empty if it can
    """

    protocol: int
    engine: str
    engine_version: str
    weightlink_version: str
    hf_config: dict[str, Any]
    architecture: str
    dtype: str
    quantization: str = ""
    tp_size: int
    pp_size: int
    dp_size: int = 1
    world: int
    device: str
    versions: dict[str, str] = {}
    transports: tuple[str, ...] = ()
    load_format: str = ""
    owns_weights: bool = True
    state: EngineState = EngineState.READY
    version: int | None = None
    epoch: int = 0
    refusal: str = ""


# --- requests -------------------------------------------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Ask for the :class:`EngineContext`."""

    budget: Budget


class Observe(msgspec.Struct, frozen=True, tag=True):
    """Ask every rank for its layout over this manifest. The engine pauses while its loader is replayed; a rank whose
    layout cannot have moved since it was last asked the same answers without a replay."""

    budget: Budget
    tensors: tuple[TensorSpec, ...]
    layout_kind: LayoutKind
    pause_mode: PauseMode | None = None
    selector: Selector = "all"


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Offer one link epoch: every rank proves its program against its own layout. No group is formed yet.

    :param survey: what the plan follows from; every rank computes it for itself
    :param engine: this engine's number in the survey
    :param plan_digest: digest of the whole plan, hexadecimal
    :param host, port: where trainer rank 0's store listens
    :param key: unguessable prefix of this epoch's keys in that store
    :param engine_owned: local names, or patterns, that the trainer's user leaves to the engine
    :param trainers: trainer ranks; they are group ranks ``0 .. trainers-1``, engine rank r is ``trainers + r``
    :param upstream, downstream: prefixes of the keys of the channels to the engine that relays to this one, and to the
        one that this one relays to; empty where there is none
    """

    budget: Budget
    link: Id
    epoch: int
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: Id
    trainers: Annotated[int, Meta(ge=1)]
    world: Annotated[int, Meta(ge=1)]
    wire: WireSettings
    plan_digest: str
    survey: bytes
    engine: Annotated[int, Meta(ge=0)] = 0
    engine_owned: tuple[str, ...] = ()
    upstream: Annotated[str, Meta(max_length=64)] = ""
    downstream: Annotated[str, Meta(max_length=64)] = ""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Form the payload and control groups of the attached epoch and shake hands, together with the trainer."""

    budget: Budget
    link: Id
    epoch: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Would this update be accepted? Changes nothing."""

    budget: Budget
    link: Id
    epoch: int
    update: Id
    version: Version
    plan_digest: str
    kind: Literal["full"] = "full"


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Pause, open the update and start to receive. Answered when every rank is ready to receive."""

    budget: Budget
    link: Id
    update: Id
    version: Version
    pause_mode: PauseMode | None = None


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Make the applied version visible: flush, record the version, resume."""

    budget: Budget
    link: Id
    update: Id


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Give an open update up. The engine becomes dirty if a byte may have been written."""

    budget: Budget
    link: Id
    update: Id
    reason: str = ""


class Status(msgspec.Struct, frozen=True, tag=True):
    """State and per-rank progress. Answered at once, or within ``wait`` seconds when the open update moves on."""

    budget: Budget
    wait: Annotated[float, Meta(ge=0, le=10)] = 0.0


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Tear the link's groups down. Safe to repeat."""

    budget: Budget
    link: Id


Request = Describe | Observe | Attach | Join | Prepare | Begin | Commit | Abort | Status | Detach


# --- replies --------------------------------------------------------------------------------------------------------


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one rank spent per phase of an update, the payload bytes that it moved, and the bytes of memory that
    it held for tensors that went through the engine's own loader."""

    wait: float = 0.0
    wire: float = 0.0
    apply: float = 0.0
    finalize: float = 0.0
    bytes: int = 0
    staged: int = 0


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's answer to command ``seq``; packs to exactly :data:`STATUS_BYTES`.

    :param step: what the rank finished last: ``idle``, ``receiving``, ``applied``, ``committed``, ``aborted``
    :param written: a resident weight may have changed since the last commit
    """

    rank: int
    seq: int
    update: str = ""
    step: str = "idle"
    written: bool = False
    phases: Phases = Phases()
    error: ErrorInfo | None = None


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's status with, for ``Observe``, its packed layout. Travels as the packed status followed by the layout."""

    status: RankStatus
    layout: bytes = b""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer to a request.

    :param applied: the open update has arrived on every rank and waits to be committed
    :param error: why the request was refused; None when it was carried out
    :param failures: one per failed rank
    :param pause_seconds: how long generation stood still for the last pause that has ended
    """

    state: EngineState
    version: int | None = None
    update: str = ""
    epoch: int = 0
    applied: bool = False
    error: ErrorInfo | None = None
    failures: tuple[ErrorInfo, ...] = ()
    context: EngineContext | None = None
    layouts: tuple[bytes, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    pause_seconds: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_statuses = msgspec.msgpack.Decoder(RankStatus)


def encode(message: Request | Reply) -> bytes:
    """Any message as msgpack bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """A request; raises ``msgspec.MsgspecError`` on anything that is not one."""
    try:
        return _requests.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def decode_reply(data: bytes) -> Reply:
    """A reply; raises ``msgspec.MsgspecError`` on anything that is not one."""
    try:
        return _replies.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def pack_status(status: RankStatus) -> bytes:
    """A status in exactly :data:`STATUS_BYTES` bytes: length (4, little endian), msgpack, zeros."""
    body = _encoder.encode(status)
    limit = 512
    while len(body) > STATUS_BYTES - 4 and status.error is not None and limit >= 32:
        body = _encoder.encode(msgspec.structs.replace(status, error=status.error.bounded(limit)))
        limit //= 2
    if len(body) > STATUS_BYTES - 4:
        raise PlanMismatch("a rank's status does not fit its message", expected=STATUS_BYTES - 4, found=len(body))
    return (len(body).to_bytes(4, "little") + body).ljust(STATUS_BYTES, b"\0")


def unpack_status(data: bytes) -> RankStatus:
    """The inverse of :func:`pack_status`; raises :class:`PlanMismatch` on a wrong size."""
    if len(data) != STATUS_BYTES:
        raise PlanMismatch("a rank's status has the wrong size", expected=STATUS_BYTES, found=len(data))
    return _statuses.decode(data[4 : 4 + int.from_bytes(data[:4], "little")])
