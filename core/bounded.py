"""A bound for calls into libraries that take no timeout, or do not keep to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from weightlink.hooks.deadline import Deadline

T = TypeVar("T")


def bounded(call: Callable[[], T], deadline: Deadline) -> T:
    """What ``call`` returns, or the ``RuntimeError`` or ``OSError`` that it raises. Raises ``TimeoutError`` when the
    deadline passes first; the call then goes on in a thread of its own, which does not keep the process alive."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except (RuntimeError, OSError) as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="weightlink-bounded", daemon=True).start()
    return outcome.result(timeout=deadline.remaining())
