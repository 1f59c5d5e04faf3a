"""weightlink inside SGLang: an entry point of the group ``sglang.srt.plugins``.

SGLang calls :func:`register` in every process that it starts. The flags are always there; nothing else changes unless
weightlink is enabled. This module imports neither torch nor SGLang at its top, since every SGLang process imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlink.hooks import hookimpl
from weightlink.hooks.errors import EngineUnavailable

if TYPE_CHECKING:
    from weightlink.hooks.protocols import LocalEngine


def register() -> None:
    """Add the flags to SGLang's command line and, where the environment enables weightlink, install the hooks."""
    from weightlink.plugins.sglang import flags, install

    if flags.enabled():
        install.schedule(flags.settings)
    flags.register()


@hookimpl
def weightlink_local_engine(engine: object) -> LocalEngine | None:
    """An ``sglang.Engine``; raises :class:`EngineUnavailable` for one that was started without weightlink."""
    if not any(base.__module__.startswith("sglang.") for base in type(engine).__mro__):
        return None
    manager = getattr(engine, "tokenizer_manager", None)
    if not hasattr(manager, "weightlink"):
        raise EngineUnavailable(
            "this sglang.Engine runs without weightlink",
            remedy="set WEIGHTLINK_ENABLE=1 in the environment before the engine is created",
        )
    from weightlink.plugins.sglang.local import EngineInProcess

    return EngineInProcess(engine)
