"""weightlink in SGLang's front process: the engine's state machine, driven through the tokenizer manager."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.utils import TypeBasedDispatcher
from weightlink.front import EngineFront
from weightlink.hooks.errors import ConfigError, ConflictError, EngineUnavailable
from weightlink.hooks.messages import EngineContext
from weightlink.hooks.settings import PauseMode
from weightlink.plugins.sglang import flags, gates, routes
from weightlink.plugins.sglang.envelope import WeightlinkReqInput, WeightlinkReqOutput
from weightlink.plugins.sglang.install import Hook

logger = logging.getLogger("weightlink")


class SGLangPort:
    """:class:`weightlink.front.FrontPort` over one tokenizer manager. Used from its event loop only."""

    def __init__(self, manager: Any, foreign: list[str]) -> None:
        self._manager = manager
        self._foreign = foreign
        self._seq = 0
        self._replicas: int = get_parallel().dp_size
        self._waiting: dict[int, dict[int, asyncio.Future[bytes]]] = {}

    @property
    def paused(self) -> bool:
        """Generation is paused, by whomever."""
        return bool(self._manager.is_pause)

    async def ask(self, data: bytes) -> list[bytes]:
        """Deliver a command to every scheduler; the answer of each replica's rank 0. Answers are matched by number:
        SGLang's own communicator would hand the late answer of an abandoned call to the next one."""
        self._manager.auto_create_handle_loop()
        self._seq += 1
        seq, loop = self._seq, asyncio.get_running_loop()
        answers: list[asyncio.Future[bytes]] = [loop.create_future() for _ in range(self._replicas)]
        self._waiting[seq] = dict(enumerate(answers))
        try:
            await self._manager._async_dispatch_to_scheduler(WeightlinkReqInput(seq=seq, data=data))
            return [await answer for answer in answers]
        finally:
            del self._waiting[seq]

    def receive(self, reply: WeightlinkReqOutput) -> None:
        """An answer has arrived; one that nobody waits for any more is dropped."""
        answer = self._waiting.get(reply.seq, {}).get(reply.replica)
        if answer is not None and not answer.done():
            answer.set_result(reply.data)

    async def pause(self, mode: PauseMode) -> None:
        """Pause as ``/pause_generation`` does."""
        self._manager.auto_create_handle_loop()
        with gates.ours():
            await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        """Continue as ``/continue_generation`` does; emptying the allocator's cache would only cost time."""
        with gates.ours():
            await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def committed(self, version: int) -> None:
        """Show the version here too: the schedulers keep their own copy."""
        self._manager.record_config_updates("weightlink.commit", weight_version=str(version))

    def default_pause_mode(self) -> PauseMode:
        """Pipeline schedulers never look at the pause flag, so their requests are aborted."""
        return "abort" if get_parallel().pp_size > 1 else "retract"

    def check_pause_mode(self, mode: PauseMode) -> None:
        """Raises :class:`ConfigError` for a mode that would not stop the engine, and :class:`ConflictError` while a
        foreign weight call is under way."""
        if get_parallel().pp_size > 1 and mode != "abort":
            raise ConfigError(
                "an engine with pipeline stages can only be paused by aborting its requests",
                expected="pause_mode='abort'",
                found=mode,
            )
        if self._foreign:
            raise ConflictError(
                f"the engine is busy with {', '.join(sorted(set(self._foreign)))}",
                remedy="push again when it has ended",
            )

    async def context(self) -> EngineContext:
        """From engine rank 0, which has the model; replicas run the same one."""
        return msgspec.msgpack.decode((await self.ask(b""))[0], type=EngineContext)


class Control:
    """What weightlink keeps on a tokenizer manager, as its attribute ``weightlink``.

    :param front: the engine's state machine
    :param foreign: names of foreign weight calls that are under way
    :param http: SGLang's HTTP server runs on this engine
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.settings = flags.settings()
        self.foreign: list[str] = []
        self.http = False
        self.port = SGLangPort(manager, self.foreign)
        self.front = EngineFront(self.port, self.settings, owns_weights=get_model().load_format != "dummy")

    @property
    def warming_up(self) -> bool:
        """SGLang's HTTP server is still starting: its own warm-up request must be answered."""
        return self.http and self._manager.server_status == ServerStatus.Starting


def attach(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``TokenizerManager.__init__``."""
    manager.weightlink = Control(manager)
    manager._result_dispatcher += TypeBasedDispatcher([(WeightlinkReqOutput, manager.weightlink.port.receive)])


def check_launch(*args: Any, **kwargs: Any) -> None:
    """Before ``Engine._launch_subprocesses(cls, server_args, ...)``: the one door of servers and Python engines."""
    server_args = kwargs["server_args"] if "server_args" in kwargs else args[1]
    flags.check(server_args, flags.settings())


def mount(*args: Any, **kwargs: Any) -> None:
    """Before ``_setup_and_run_http_server(server_args, tokenizer_manager, ...)``."""
    from sglang.srt.entrypoints.http_server import app

    control = (kwargs["tokenizer_manager"] if "tokenizer_manager" in kwargs else args[1]).weightlink
    control.http = True
    routes.add(app, control)
    app.add_middleware(gates.Gate, control=control)
    for error in (ConflictError, EngineUnavailable):
        app.add_exception_handler(error, gates.answer)
    logger.info("weightlink is enabled")


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

HOOKS = [
    Hook("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", "before", check_launch),
    Hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", "before", mount),
    Hook(f"{_MANAGER}.__init__", "after", attach),
    Hook(f"{_MANAGER}.is_ready", "after", gates.is_ready),
    Hook(f"{_MANAGER}.generate_request", "around", gates.generate_request),
    Hook(f"{_MANAGER}.check_weights", "around", gates.check_weights),
    *(Hook(f"{_MANAGER}.{name}", "around", gates.control_hook(name, writes)) for name, writes in gates.CONTROL.items()),
]
