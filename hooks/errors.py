"""The error hierarchy. Every message names what a person needs: tensor, rank, expected, found and remedy."""

from __future__ import annotations

from typing import Any

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as it crosses a process boundary: plain strings, never a class to import.

    ``kind`` is the name of one of the classes below; an unknown kind decodes to :class:`WeightlinkError`.
    """

    kind: str
    message: str
    tensor: str = ""
    rank: str = ""
    expected: str = ""
    found: str = ""
    remedy: str = ""
    causes: tuple[ErrorInfo, ...] = ()

    def bounded(self, limit: int) -> ErrorInfo:
        """The same error with every text cut to ``limit`` characters and no causes, for fixed-size messages."""

        def cut(text: str) -> str:
            return text if len(text) <= limit else text[: limit - 3] + "..."

        return ErrorInfo(
            self.kind,
            cut(self.message),
            cut(self.tensor),
            cut(self.rank),
            cut(self.expected),
            cut(self.found),
            cut(self.remedy),
        )


class WeightlinkError(Exception):
    """Base of every error that weightlink raises on purpose.

    :param message: what went wrong, in one sentence
    :param tensor: canonical or local tensor name, if one is concerned
    :param rank: which process, e.g. ``"trainer 3"`` or ``"engine http://h:30000 rank 1 (tp 1, pp 0)"``
    :param expected: what should have been there
    :param found: what was there
    :param remedy: what the reader can do
    :param causes: errors of other ranks or engines that belong to this one
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str = "",
        rank: str = "",
        expected: Any = "",
        found: Any = "",
        remedy: str = "",
        causes: tuple[ErrorInfo, ...] = (),
    ) -> None:
        self.message = message
        self.tensor = tensor
        self.rank = rank
        self.expected = str(expected)
        self.found = str(found)
        self.remedy = remedy
        self.causes = causes
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        for label in ("tensor", "rank", "expected", "found", "remedy"):
            value = getattr(self, label)
            if value:
                parts.append(f"{label}: {value}")
        for cause in self.causes:
            parts.append(f"- {cause.kind}: " + str(rebuild(cause)).replace("\n", "\n  "))
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.info()))

    def info(self) -> ErrorInfo:
        """The error as a plain message."""
        return ErrorInfo(
            type(self).__name__,
            self.message,
            self.tensor,
            self.rank,
            self.expected,
            self.found,
            self.remedy,
            self.causes,
        )


class ConfigError(WeightlinkError):
    """A setting, flag or argument that cannot be used."""


class PluginError(WeightlinkError):
    """A plugin that failed to load or to run; names the distribution it came from."""


class EngineUnavailable(WeightlinkError):
    """An engine that cannot be reached, or that runs without weightlink."""


class AuthError(WeightlinkError):
    """A control request refused for its token."""


class NameMapError(WeightlinkError):
    """A tensor name without a rule, or a rule without a tensor."""


class LayoutError(WeightlinkError):
    """A layout that cannot be described or that contradicts the manifest (shape, dtype)."""


class LayoutMoved(LayoutError):
    """An engine's layout may no longer be what was observed: it is to be observed again before anything is written."""


class CoverageError(LayoutError):
    """Destination or source elements that are missing, doubled or out of bounds. Lists every violation."""


class ReplayError(LayoutError):
    """A loader replay that broke one of its rules (a resident weight changed, a write from another thread)."""


class PlanMismatch(WeightlinkError):
    """Two ranks whose plans, settings or groups differ."""


class VersionError(WeightlinkError):
    """A version that does not follow the committed one."""


class ConflictError(WeightlinkError):
    """A request that the engine's present state does not allow (HTTP 409)."""


class NotIdle(ConflictError):
    """An engine rank that is not paused, or still runs a batch: it may be asked again."""


class DeadlineExceeded(WeightlinkError):
    """The caller's deadline passed; names what was waited for."""


class TransferError(WeightlinkError):
    """Bytes that did not arrive as planned: header, checksum, peer lost."""


class UpdateFailed(WeightlinkError):
    """An update that did not commit everywhere. :attr:`causes` holds one :class:`ErrorInfo` per failed rank."""


_KINDS: dict[str, type[WeightlinkError]] = {
    cls.__name__: cls
    for cls in (
        WeightlinkError,
        ConfigError,
        PluginError,
        EngineUnavailable,
        AuthError,
        NameMapError,
        LayoutError,
        LayoutMoved,
        CoverageError,
        ReplayError,
        PlanMismatch,
        VersionError,
        ConflictError,
        NotIdle,
        DeadlineExceeded,
        TransferError,
        UpdateFailed,
    )
}


def rebuild(info: ErrorInfo) -> WeightlinkError:
    """The exception for a received :class:`ErrorInfo`; looks the kind up in a closed table, never imports."""
    cls = _KINDS.get(info.kind, WeightlinkError)
    return _rebuild(cls, info)


def _rebuild(cls: type[WeightlinkError], info: ErrorInfo) -> WeightlinkError:
    return cls(
        info.message,
        tensor=info.tensor,
        rank=info.rank,
        expected=info.expected,
        found=info.found,
        remedy=info.remedy,
        causes=info.causes,
    )


def describe(error: BaseException, *, rank: str = "") -> ErrorInfo:
    """Any exception as an :class:`ErrorInfo`; foreign exceptions keep their type name in the message."""
    if isinstance(error, WeightlinkError):
        info = error.info()
    else:
        info = ErrorInfo(WeightlinkError.__name__, f"{type(error).__name__}: {error}")
    return _sendable(msgspec.structs.replace(info, rank=info.rank or rank))


def _sendable(info: ErrorInfo) -> ErrorInfo:
    """Whatever text an exception holds, it must survive its message."""

    def clean(text: str) -> str:
        return text.encode("utf-8", "backslashreplace").decode()

    texts = {n: clean(getattr(info, n)) for n in ErrorInfo.__struct_fields__ if n != "causes"}
    return ErrorInfo(**texts, causes=tuple(map(_sendable, info.causes)))
