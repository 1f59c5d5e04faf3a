"""The demo as a plugin: it adds ``weightlink demo`` through the same hook that third parties use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlink.hooks import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def weightlink_cli_commands(app: typer.Typer) -> None:
    """Adds the ``demo`` command."""
    from weightlink.plugins.demo.command import demo

    app.command()(demo)
