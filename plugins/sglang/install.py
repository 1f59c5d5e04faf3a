"""Installs weightlink's hooks in SGLang and makes a hook that does not apply fatal.

SGLang only logs a hook that fails: the engine would run on, without its gates. So every hook is looked for in the
patched function after SGLang has applied them, in every process, and the process dies with the list of those missing.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from weightlink.hooks.errors import PluginError


class Hook(NamedTuple):
    """One hook: the dotted name of SGLang's function, ``before``, ``after`` or ``around``, and ours."""

    target: str
    kind: str
    function: Callable[..., Any]


def hooks() -> list[Hook]:
    """The hooks of this process: every hook costs time, so SGLang's child processes get only those they need."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    role = getattr(target, "__name__", "")
    if role in ("run_detokenizer_process", "run_data_parallel_controller_process"):
        return []
    from weightlink.plugins.sglang import rank

    if role in ("run_scheduler_process", "run_scheduler_process_with_init_pipe"):
        return rank.HOOKS
    from weightlink.plugins.sglang import front

    return [*front.HOOKS, *rank.HOOKS]


def schedule(first: Callable[[], object]) -> None:
    """Install the hooks while SGLang loads plugins: when it applies everybody's, after ``first`` has passed.

    SGLang swallows what a plugin raises, but not what applying the hooks raises, so everything happens there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.apply_hooks

    def apply_and_verify() -> None:
        HookRegistry.apply_hooks = original
        first()
        _install(hooks())

    HookRegistry.apply_hooks = apply_and_verify


def now() -> None:
    """Install the hooks in a process whose plugins are loaded already."""
    _install([hook for hook in hooks() if not applied(hook.target, hook.function)])


def _install(chosen: list[Hook]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    for hook in chosen:
        HookRegistry.register(
            hook.target, hook.function, HookType(hook.kind), source=HookSource("weightlink", "weightlink")
        )
    HookRegistry.apply_hooks()
    verify(chosen)


def verify(expected: list[Hook]) -> None:
    """Raises :class:`PluginError` naming every hook that is not in place."""
    missing = [hook.target for hook in expected if not applied(hook.target, hook.function)]
    if missing:
        raise PluginError(
            "weightlink cannot run in this SGLang: its hooks do not apply to\n  " + "\n  ".join(missing),
            remedy="use a supported SGLang version; if another plugin hooks the same function, set WEIGHTLINK_ENABLE=1 "
            "in the environment so that both are applied together",
        )


def applied(target: str, function: Callable[..., Any]) -> bool:
    """``function`` is one of the wrappers around ``target``."""
    try:
        found: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    found = getattr(found, "__func__", found)
    while found is not None:
        if any(cell.cell_contents is function for cell in getattr(found, "__closure__", None) or ()):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
