"""Updates without machines: layouts of every rank from the frameworks' own models without data, a plan over them, and
the time that it would take. Adds ``weightlink plan`` and ``weightlink simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlink.hooks import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def weightlink_cli_commands(app: typer.Typer) -> None:
    """Adds the ``plan`` and ``simulate`` commands."""
    from weightlink.plugins.simulate.command import plan, simulate

    app.command()(plan)
    app.command()(simulate)
