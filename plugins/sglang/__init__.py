"""weightlink inside SGLang: an entry point of the group ``sglang.srt.plugins``.

SGLang calls :func:`register` in every process that it starts. The flags are always there; nothing else changes unless
weightlink is enabled. This module imports neither torch nor SGLang at its top, since every SGLang process imports it.
"""

from __future__ import annotations


def register() -> None:
    """Add the flags to SGLang's command line and, where the environment enables weightlink, install the hooks."""
    from weightlink.plugins.sglang import flags, install

    if flags.enabled():
        install.schedule(flags.settings)
    flags.register()
