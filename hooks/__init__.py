"""The contract of weightlink: hooks, Protocols, messages, settings and errors. Imports nothing else of ours."""

from weightlink.hooks.specs import hookimpl, hookspec

__all__ = ["hookimpl", "hookspec"]
