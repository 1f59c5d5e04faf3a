"""The trainer's view of one engine: typed requests over HTTP, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from weightlink.hooks import messages as m
from weightlink.hooks.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    EngineUnavailable,
    ErrorInfo,
    UpdateFailed,
    WeightlinkError,
    describe,
    rebuild,
)

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline

T = TypeVar("T")
CONTROL_PATH = "/weightlink/v1/control"
_INSTALL = "install weightlink beside SGLang and start the server with --weightlink"


class EngineClient:
    """One engine's control routes.

    :param url: the engine's base URL
    :param token: bearer token, if the engine asks for one
    """

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("not an engine's URL", expected="http://HOST:PORT", found=url)
        self.name = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        headers = {"content-type": "application/msgpack"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._http = httpx.Client(headers=headers, trust_env=False)

    def send(self, request: m.Request, deadline: Deadline, *, grace: float = 5.0) -> m.Reply:
        """Carry out ``request``; the reply of an engine that did. Raises the engine's own error otherwise.

        :param grace: seconds beyond the deadline, so that an engine that meets it can still say what it waited for
        """
        timeout = deadline.check(f"{self.name} to answer {type(request).__name__}") + grace
        try:
            response = self._http.post(self.name + CONTROL_PATH, content=m.encode(request), timeout=timeout)
        except httpx.TimeoutException as error:
            raise deadline.exceeded(f"{self.name} to answer {type(request).__name__}") from error
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"cannot reach the engine at {self.name}: {error}",
                rank=self.name,
                remedy="check the URL and that the server is up",
            ) from error
        return self._read(response, request)

    def _read(self, response: httpx.Response, request: m.Request) -> m.Reply:
        if response.status_code in (401, 403):
            raise AuthError(
                f"{self.name} refused the token",
                rank=self.name,
                found=f"HTTP {response.status_code}",
                remedy="pass token= with the engine's weightlink token, or its SGLang admin or API key",
            )
        if response.status_code in (404, 405):
            raise EngineUnavailable(
                f"the engine at {self.name} runs without weightlink",
                rank=self.name,
                found=f"HTTP {response.status_code} for {CONTROL_PATH}",
                remedy=_INSTALL,
            )
        try:
            reply = m.decode_reply(response.content)
        except msgspec.MsgspecError as error:
            raise EngineUnavailable(
                f"{self.name} gave an answer that is not weightlink's (HTTP {response.status_code})",
                rank=self.name,
                found=response.text[:200],
                remedy="check that both sides run the same weightlink version",
            ) from error
        if reply.error is not None:
            raise self._error(reply, type(request).__name__.lower())
        return reply

    def _error(self, reply: m.Reply, what: str) -> WeightlinkError:
        info = reply.error or ErrorInfo("WeightlinkError", "unknown error")
        if info.kind == UpdateFailed.__name__:
            failures = tuple(self.located(failure) for failure in reply.failures)
            if len({(f.kind, f.message) for f in failures}) == 1 and failures[0].kind != ConflictError.__name__:
                return rebuild(failures[0])
            return UpdateFailed(f"{self.name}: {info.message}", rank=self.name, failures=failures)
        return rebuild(self.located(info))

    def located(self, info: ErrorInfo) -> ErrorInfo:
        """An engine's error with the engine's name in its rank."""
        if self.name in info.rank:
            return info
        return msgspec.structs.replace(info, rank=f"engine {self.name} {info.rank}".strip())

    def close(self) -> None:
        """Close the connections. Safe to repeat."""
        self._http.close()


def fan_out(
    clients: Sequence[EngineClient], work: Callable[[EngineClient], T]
) -> tuple[dict[str, T], dict[str, ErrorInfo]]:
    """Run ``work`` for every engine at once: results and errors by engine name."""
    results: dict[str, T] = {}
    failures: dict[str, ErrorInfo] = {}
    if not clients:
        return results, failures
    with ThreadPoolExecutor(len(clients), "weightlink-engine") as pool:
        for client, future in [(client, pool.submit(work, client)) for client in clients]:
            try:
                results[client.name] = future.result()
            except Exception as error:  # noqa: BLE001 - collected, and raised by the caller for all engines together
                failures[client.name] = client.located(describe(error))
    return results, failures


def raise_failures(failures: dict[str, ErrorInfo], what: str) -> None:
    """Raise one error for all engines that failed; a single one as it is."""
    if not failures:
        return
    listed = tuple(failures.values())
    if len(listed) == 1:
        raise rebuild(listed[0])
    raise UpdateFailed(f"{len(listed)} engines failed to {what}", failures=listed)
