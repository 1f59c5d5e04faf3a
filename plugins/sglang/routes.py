"""weightlink's routes on SGLang's own HTTP app: one for trainers (msgpack), one for people (JSON)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from weightlink.hooks import messages as m
from weightlink.hooks.errors import ConfigError, ConflictError, ErrorInfo

if TYPE_CHECKING:
    from fastapi import FastAPI
    from weightlink.front import EngineFront
    from weightlink.plugins.sglang.front import Control

PREFIX = "/weightlink/v1"
MSGPACK = "application/msgpack"


def add(app: FastAPI, engine: Control) -> None:
    """Add the routes. SGLang's keys guard them like its own weight routes; our token is checked here."""
    front, settings = engine.front, engine.settings

    async def control(request: Request) -> Response:
        if not authorised(request, settings.token):
            return unauthorised()
        try:
            body = await read(request, settings.max_message_bytes)
        except ConfigError as error:
            return reply(rejected(front, error.info()), 413)
        try:
            message = m.decode_request(body)
        except msgspec.MsgspecError as error:
            return reply(rejected(front, ErrorInfo("ConfigError", f"malformed request: {error}")), 400)
        answer = await front.handle(message)
        conflict = answer.error is not None and answer.error.kind == ConflictError.__name__
        return reply(answer, 409 if conflict else 200)

    async def status(request: Request) -> Response:
        if not authorised(request, settings.token):
            return unauthorised()
        return JSONResponse(
            {
                "state": front.state.value,
                "serving": front.serving,
                "version": front.version,
                "update": front.update,
                "epoch": front.epoch,
            }
        )

    _route(app, "/control", "POST", control)
    _route(app, "/status", "GET", status)


def _route(app: FastAPI, path: str, method: str, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
    marked: Any = auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)
    app.add_route(PREFIX + path, marked, methods=[method], include_in_schema=False)


def authorised(request: Request, token: str | None) -> bool:
    """The request carries the token, if there is one. Compared in constant time."""
    if token is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())


def unauthorised() -> Response:
    """The same answer that SGLang gives for its own keys; says nothing about the engine."""
    return JSONResponse({"error": "Unauthorized"}, status_code=401)


async def read(request: Request, limit: int) -> bytes:
    """The body, never more than ``limit`` bytes of it; raises :class:`ConfigError` for a larger one."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limit:
        raise _too_large(declared, limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large("more", limit)
    return bytes(body)


def _too_large(found: str, limit: int) -> ConfigError:
    return ConfigError(
        "the request is larger than this engine accepts",
        expected=f"at most {limit} bytes",
        found=f"{found} bytes",
        remedy="start the engine with a larger --weightlink-max-message-bytes",
    )


def rejected(front: EngineFront, error: ErrorInfo) -> m.Reply:
    """A reply to a request that never reached the state machine."""
    return m.Reply(state=front.state, version=front.version, epoch=front.epoch, error=error)


def reply(message: m.Reply, status: int) -> Response:
    """A reply as an HTTP response."""
    return Response(m.encode(message), status_code=status, media_type=MSGPACK)
