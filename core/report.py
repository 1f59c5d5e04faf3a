"""What an update did: one record per update, as data."""

from __future__ import annotations

import msgspec
from weightlink.hooks.errors import ErrorInfo


class EngineLink(msgspec.Struct, frozen=True, kw_only=True):
    """What a link found out about one engine.

    :param owned: the engine's own tensors that no update writes
    :param opaque: destinations and canonical names that go through the engine's own loader, each with the reason
    :param staged: bytes that a rank holds for that during an update, at most
    """

    name: str
    owned: tuple[str, ...] = ()
    opaque: tuple[tuple[str, str], ...] = ()
    staged: int = 0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's part. Seconds are the slowest rank's; ``bytes`` is the payload that its ranks received, ``staged``
    the memory that the rank which needed most of it held for tensors that go through the engine's own loader."""

    name: str
    committed: bool
    version: int | None = None
    bytes: int = 0
    staged: int = 0
    wait: float = 0.0
    wire: float = 0.0
    apply: float = 0.0
    finalize: float = 0.0
    pause: float = 0.0
    failures: tuple[ErrorInfo, ...] = ()


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One update.

    :param seconds: from the call of ``push`` to its return on rank 0
    :param plan: seconds that the plan took when it was made (once per connect)
    :param prepare: seconds until every engine was paused and ready to receive
    :param transfer: seconds from there until every engine had applied
    :param commit: seconds for the commit round
    :param sent: payload bytes per trainer rank
    """

    link: str
    update: str
    version: int
    seconds: float
    plan: float
    prepare: float
    transfer: float
    commit: float
    sent: tuple[int, ...]
    engines: tuple[EngineReport, ...]

    @property
    def bytes(self) -> int:
        """Payload bytes of all engines."""
        return sum(engine.bytes for engine in self.engines)

    @property
    def failures(self) -> tuple[ErrorInfo, ...]:
        """What failed on any engine."""
        return tuple(failure for engine in self.engines for failure in engine.failures)

    def json(self) -> str:
        """The record as JSON."""
        return msgspec.json.encode(self).decode()
