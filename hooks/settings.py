"""Every setting in one place, each with one owner. Wire settings live on the trainer and are shipped at connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta
from weightlink.hooks.errors import ConfigError

PauseMode = Literal["abort", "retract", "in_place"]
Selector = Literal["target", "draft", "all"]
"""Which of an engine's models: the one that it serves, those that draft for speculative decoding, or all of them."""

T = TypeVar("T")


class WireSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What both ends of a link must agree on; owned by the trainer, part of the attach message.

    :param transport: name of the transport plugin
    :param bucket_bytes: payload bytes of one bucket; bounds staging memory: a rank holds ``2 * max_peers`` of them per
        engine that it sends to, and as many where it receives
    :param direct_bytes: copies of at least this many bytes have a bucket to themselves, and are not packed where an end
        has them in one run of memory
    :param max_peers: buckets that one rank sends, or receives, in a round, over all engines
    :param relay: engines of equal layout pass on to one another what they receive, where the trainer's ranks would
        otherwise send more than any engine rank receives. When an engine fails, those behind it fail with it; so with
        ``min_engines`` none does
    :param coalesce: NCCL posts a round as one operation. False posts message by message, in an order that cannot
        deadlock: slower, for systems where grouped sends and receives hang. Gloo knows no difference
    """

    transport: str = "p2p"
    bucket_bytes: Annotated[int, Meta(ge=4096, le=1 << 31)] = 32 << 20
    direct_bytes: Annotated[int, Meta(ge=1)] = 4 << 20
    max_peers: Annotated[int, Meta(ge=1, le=1024)] = 1
    relay: bool = True
    coalesce: bool = True


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a link, given to :func:`weightlink.connect`.

    :param timeout: seconds for connect, and for each push unless it is given its own
    :param token: bearer token that the engines expect
    :param host: address of trainer rank 0 that engines can reach; found from the route to the first engine if None
    :param selector: which models of an engine the trainer's tensors are for. Parameters of draft models are named with
        the prefix ``draft.``; with ``all``, each tensor goes to every model that takes it
    :param pause_mode: how engines are paused; None picks ``retract``, or ``abort`` for engines with pipeline stages
    :param strict: one failed engine keeps every engine from committing
    :param min_engines: engines that must commit for a push to count as successful; None means all of them
    :param family: model family by name, if the engine's architecture should not decide
    :param exclude: the trainer's own names, or patterns with ``*``, of parameters that are not sent (frozen ones)
    :param ignore: canonical names, or patterns with ``*``, that no engine rank needs to consume
    :param engine_owned: an engine's own names, or patterns, for parameters that its loader never touches and that it
        has loaded itself; without it such a parameter is taken for one that the trainer forgot
    """

    timeout: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    token: str | None = None
    host: str | None = None
    selector: Selector = "all"
    pause_mode: PauseMode | None = None
    strict: bool = False
    min_engines: Annotated[int, Meta(ge=1)] | None = None
    family: str | None = None
    exclude: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    engine_owned: tuple[str, ...] = ()
    wire: WireSettings = WireSettings()


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process tree, from its server flags or, for ``Engine`` and Ray, its environment.

    :param enabled: weightlink is active in this engine
    :param token: bearer token that every control request must carry (read from ``--weightlink-token-file``)
    :param serve_unready: answer generation requests although no version was ever committed (demos, debugging)
    :param max_message_bytes: larger control requests are refused before they are parsed
    """

    enabled: bool = False
    token: str | None = None
    serve_unready: bool = False
    max_message_bytes: Annotated[int, Meta(ge=1024)] = 256 << 20

    ENV: ClassVar[str] = "WEIGHTLINK_ENGINE_SETTINGS"

    def to_env(self) -> str:
        """One environment value that child processes and ``Engine`` users share; never logged (it holds the token)."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> EngineSettings:
        """From ``WEIGHTLINK_ENGINE_SETTINGS`` (JSON), or from the short form ``WEIGHTLINK_ENABLE=1`` with
        ``WEIGHTLINK_TOKEN_FILE`` and ``WEIGHTLINK_SERVE_UNREADY``. Raises :class:`ConfigError` on anything else."""
        packed = env.get(cls.ENV)
        if packed:
            return convert(cls, packed)
        enable = env.get("WEIGHTLINK_ENABLE", "")
        if enable not in ("", "0", "1"):
            raise ConfigError("WEIGHTLINK_ENABLE is a switch", expected="0 or 1", found=enable)
        if enable != "1":
            return cls()
        path = env.get("WEIGHTLINK_TOKEN_FILE")
        return cls(
            enabled=True,
            token=read_token(path) if path else None,
            serve_unready=env.get("WEIGHTLINK_SERVE_UNREADY") == "1",
        )


def read_token(path: str) -> str:
    """The token in a file, without surrounding space; raises :class:`ConfigError` if unreadable or too short."""
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if len(token) < 16:
        raise ConfigError(
            f"the token in {path} is too short",
            expected="at least 16 characters",
            found=f"{len(token)} characters",
            remedy="python -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE",
        )
    return token


def convert(cls: type[T], data: str) -> T:
    """JSON text as ``cls``; raises :class:`ConfigError` naming the offending field."""
    try:
        return msgspec.json.decode(data, type=cls)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"invalid {cls.__name__}: {error}") from error
