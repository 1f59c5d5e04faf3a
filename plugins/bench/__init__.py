"""The benchmarks as a plugin: it adds ``weightlink bench``.

A benchmark is a module with a table ``CASES`` (name to one line of help) and a function ``measure(options, console)``
that returns one :class:`~weightlink.plugins.bench.results.Case` per line of its result; it is listed in
:data:`~weightlink.plugins.bench.command.BENCHES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlink.hooks import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def weightlink_cli_commands(app: typer.Typer) -> None:
    """Adds the ``bench`` command."""
    from weightlink.plugins.bench.command import bench

    app.command()(bench)
