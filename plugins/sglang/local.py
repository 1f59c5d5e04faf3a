"""An ``sglang.Engine`` in the trainer's own process."""

from __future__ import annotations

import asyncio
from typing import Any

from weightlink.hooks.messages import Reply, Request


class EngineInProcess:
    """Implements :class:`weightlink.hooks.protocols.LocalEngine`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that SGLang runs inside the engine's own calls."""
        loop: asyncio.AbstractEventLoop = self._engine.loop
        return loop

    async def handle(self, request: Request) -> Reply:
        """Straight to the engine's state machine: there is no route in between, and no token."""
        reply: Reply = await self._engine.tokenizer_manager.weightlink.front.handle(request)
        return reply
