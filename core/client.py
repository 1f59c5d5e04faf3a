"""The trainer's view of one engine: typed requests over HTTP, and errors that say what to do."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
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
    EngineUnavailable,
    ErrorInfo,
    UpdateFailed,
    WeightlinkError,
    describe,
    rebuild,
)

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.protocols import LocalEngine

T = TypeVar("T")
CONTROL_PATH = "/weightlink/v1/control"
#: Usual seconds beyond the deadline in which an engine's own account of a time-out may arrive.
GRACE = 3.0
_INSTALL = "install weightlink beside SGLang and start the server with --weightlink"


class EngineClient(ABC):
    """One engine as the trainer's rank 0 sees it. ``name`` stands for it in reports and errors."""

    name: str

    @abstractmethod
    def exchange(self, request: m.Request, deadline: Deadline, grace: float) -> m.Reply:
        """Carry out ``request``; the engine's reply, whatever it says.

        :param grace: seconds beyond the deadline, so that an engine that meets it can still say what it waited for
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Safe to repeat."""

    def send(self, request: m.Request, deadline: Deadline, *, grace: float = GRACE) -> m.Reply:
        """Carry out ``request``; the reply of an engine that did. Raises the engine's own error otherwise."""
        reply = self.exchange(request, deadline, grace)
        if reply.error is None:
            return reply
        if reply.error.kind != UpdateFailed.__name__:
            raise rebuild(self.located(reply.error))
        raise together(
            [self.located(failure) for failure in reply.failures], f"{self.name}: {reply.error.message}", self.name
        )

    def located(self, info: ErrorInfo) -> ErrorInfo:
        """An engine's error with the engine's name in its rank."""
        if self.name in info.rank:
            return info
        return msgspec.structs.replace(info, rank=f"engine {self.name} {info.rank}".strip())


class LocalClient(EngineClient):
    """An engine that lives in this process."""

    def __init__(self, name: str, engine: LocalEngine) -> None:
        self.name, self._engine = name, engine
        self._turn = threading.Lock()

    def exchange(self, request: m.Request, deadline: Deadline, grace: float) -> m.Reply:
        what = f"{self.name} to answer {type(request).__name__}"
        loop = self._engine.loop
        if not loop.is_running():  # the engine runs its loop only inside its own calls: lend it this thread
            with self._turn:
                return loop.run_until_complete(self._engine.handle(request))
        future = asyncio.run_coroutine_threadsafe(self._handle(request), loop)
        try:
            return future.result(deadline.check(what) + grace)
        except TimeoutError as error:
            future.cancel()
            raise deadline.exceeded(what) from error

    async def _handle(self, request: m.Request) -> m.Reply:
        return await self._engine.handle(request)

    def close(self) -> None:
        return


class HttpClient(EngineClient):
    """An engine behind its control routes.

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

    def exchange(self, request: m.Request, deadline: Deadline, grace: float) -> m.Reply:
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
        return self._read(response)

    def _read(self, response: httpx.Response) -> m.Reply:
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
            return m.decode_reply(response.content)
        except msgspec.MsgspecError as error:
            raise EngineUnavailable(
                f"{self.name} gave an answer that is not weightlink's (HTTP {response.status_code})",
                rank=self.name,
                found=response.text[:200],
                remedy="check that both sides run the same weightlink version",
            ) from error

    def close(self) -> None:
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


def together(failures: Sequence[ErrorInfo], message: str, rank: str = "") -> WeightlinkError:
    """One error for several: the first with the others as its causes if all are of one kind, else a list under
    ``message``."""
    kinds = {failure.kind for failure in failures}
    if len(kinds) != 1:
        return UpdateFailed(message, rank=rank, causes=tuple(failures))
    first, rest = failures[0], failures[1:]
    others = tuple(f for f in rest if (f.message, f.tensor) != (first.message, first.tensor))
    return rebuild(msgspec.structs.replace(first, causes=(*first.causes, *others)))


def raise_failures(failures: dict[str, ErrorInfo], what: str) -> None:
    """Raise one error for all engines that failed; a single one as it is."""
    if not failures:
        return
    raise together(list(failures.values()), f"{len(failures)} engines failed to {what}")
