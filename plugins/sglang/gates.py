"""What foreign callers may not do, and when: one table for SGLang's HTTP routes and for Python ``Engine`` calls."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from starlette.responses import JSONResponse
from weightlink.hooks.errors import ConflictError, EngineUnavailable, WeightlinkError
from weightlink.hooks.messages import EngineState

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from weightlink.plugins.sglang.front import Control


def _never(_request: Any) -> bool:
    return False


def _always(_request: Any) -> bool:
    return True


def _weights(request: Any) -> bool:
    return not request.tags or "weights" in request.tags


#: Control calls that are refused while an update is open or the engine is dirty, by the name that the tokenizer
#: manager's method and the HTTP route share; and whether one such request leaves other weights behind.
CONTROL: dict[str, Callable[[Any], bool]] = {
    "continue_generation": _never,
    "begin_weight_update": _never,
    "end_weight_update": _always,
    "update_weights_from_disk": _always,
    "update_weights_from_tensor": _always,
    "update_weights_from_distributed": _always,
    "update_weights_from_ipc": _always,
    "update_weight_version": _never,
    "init_weights_update_group": _never,
    "destroy_weights_update_group": _never,
    "init_weights_send_group_for_remote_instance": _never,
    "send_weights_to_remote_instance": _never,
    "release_memory_occupation": _never,
    "resume_memory_occupation": _weights,
    "load_lora_adapter": _never,
    "load_lora_adapter_from_tensors": _never,
}

#: Routes that answer with what the weights produce. Requests are held back while there are no weights to serve.
GENERATION = frozenset(
    {
        "/generate",
        "/encode",
        "/classify",
        "/invocations",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/audio/transcriptions",
        "/v1/score",
        "/v1/decisions",
        "/v1/responses",
        "/v1/rerank",
        "/v1/messages",
        "/v1/systemone",
        os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
        os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
        os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),
    }
)

_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("weightlink_call", default=False)


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Calls of SGLang's methods inside are weightlink's own and pass the gates."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def unready(control: Control) -> EngineUnavailable | None:
    """Why generation requests cannot be answered, or None."""
    if control.front.serving:
        return None
    if control.front.state is EngineState.DIRTY:
        why = "an update failed half way and the engine holds mixed weights: it needs a full update"
    else:
        why = "the engine started on dummy weights and no version was committed yet"
    return EngineUnavailable(f"not ready: {why}", remedy="push from the trainer")


async def guarded(name: str, writes: bool, manager: Any, call: Callable[[], Awaitable[Any]]) -> Any:
    """Run a foreign control call; raises :class:`ConflictError` when it must not run now."""
    control: Control = manager.weightlink
    if _ours.get():
        return await call()
    refusal = control.front.refusal(name)
    if refusal is not None:
        raise refusal
    control.foreign.append(name)
    try:
        return await call()
    finally:
        control.foreign.remove(name)
        if writes:  # also after a failure: SGLang may have written a part
            control.front.note_foreign_write(name)


def control_hook(name: str, writes: Callable[[Any], bool]) -> Callable[..., Awaitable[Any]]:
    """The hook around the tokenizer manager's method ``name``."""

    async def hook(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, *rest: Any, **named: Any) -> Any:
        result = await guarded(name, writes(obj), manager, lambda: original(manager, obj, *rest, **named))
        if name == "update_weights_from_disk" and result[0]:
            manager.weightlink.front.note_checkpoint_loaded()
        if name == "release_memory_occupation" and _weights(obj) and not manager.server_args.enable_weights_cpu_backup:
            manager.weightlink.front.note_weights_lost(name)
        return result

    return hook


async def check_weights(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, *rest: Any) -> Any:
    """Around ``check_weights``: reading is always allowed, ``reset_tensors`` is a write like any other."""
    if obj.action != "reset_tensors":
        return await original(manager, obj, *rest)
    return await guarded("reset_tensors", True, manager, lambda: original(manager, obj, *rest))


def generate_request(original: Callable[..., Any], manager: Any, obj: Any, *rest: Any, **named: Any) -> Any:
    """Around ``generate_request``: raises :class:`EngineUnavailable` for Python callers while nothing can be served."""
    health = isinstance(obj.rid, str) and obj.rid.startswith(HEALTH_CHECK_RID_PREFIX)  # liveness is not readiness
    refusal = None if health or manager.weightlink.warming_up else unready(manager.weightlink)
    if refusal is not None:
        raise refusal
    return original(manager, obj, *rest, **named)


def is_ready(_result: bool, manager: Any) -> bool | None:
    """After ``is_ready``: not before there is something to serve."""
    return None if manager.weightlink.front.serving else False


class Gate:
    """ASGI middleware: 409 for control calls that an open update forbids, 503 for generation without weights.

    The hooks on the tokenizer manager would refuse too, but SGLang's handlers turn what they raise into 400 or, for
    streams, into an answer that has begun.
    """

    def __init__(self, app: ASGIApp, control: Control) -> None:
        self._app = app
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = self._refuse(scope["path"].removeprefix(scope.get("root_path", "")))
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, path: str) -> JSONResponse | None:
        name, control = path.removeprefix("/"), self._control
        if name in CONTROL and (taken := control.front.refusal(name)) is not None:
            return refused(taken, 409)
        if path in GENERATION and not control.warming_up and (why := unready(control)) is not None:
            return refused(why, 503)
        return None


def refused(error: WeightlinkError, status: int) -> JSONResponse:
    """The error in the form that SGLang's control routes and OpenAI clients both read."""
    body = {"success": False, "message": str(error), "error": {"message": str(error), "type": type(error).__name__}}
    return JSONResponse(body, status_code=status)


async def answer(_request: Any, error: Exception) -> JSONResponse:
    """SGLang's answer when one of its handlers lets an error of ours through."""
    if not isinstance(error, WeightlinkError):
        raise error
    return refused(error, 409 if isinstance(error, ConflictError) else 503)
