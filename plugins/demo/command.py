"""``weightlink demo``: plays the story and shows it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from weightlink.cli import JsonOption, require_writable, write_json
from weightlink.hooks.deadline import Deadline
from weightlink.plugins.demo.checkpoint import cache_folder
from weightlink.plugins.demo.processes import interruptible
from weightlink.plugins.demo.story import Demo, Result
from weightlink.report import UpdateReport


def demo(
    json: JsonOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds for everything together.")] = 900.0,
    cache: Annotated[
        Path | None, typer.Option(help="Where the model is kept; ~/.cache/weightlink if left out.")
    ] = None,
) -> None:
    """Update a real SGLang server from a real Megatron-Core trainer, with a small language model, on this CPU.

    Exit code 0 means that every check held.
    """
    require_writable(json)
    console = Console(stderr=json == "-")
    folder = Path(tempfile.mkdtemp(prefix="weightlink-demo-"))
    deadline = Deadline.after(timeout)
    try:
        with interruptible():
            result = Demo(console, cache or cache_folder(), folder, deadline).play()
    finally:
        console.print(f"[dim]logs: {folder}[/dim]", highlight=False)
    console.print(table(result.updates))
    failed = [check.name for check in result.checks if not check.held]
    console.print(
        f"{len(result.checks) - len(failed)} of {len(result.checks)} checks held, {result.seconds:.0f} s",
        style="bold red" if failed else "bold green",
        highlight=False,
    )
    if json is not None:
        write_json(json, summary(result))
    if not result.held:
        raise typer.Exit(1)


def summary(result: Result) -> dict[str, object]:
    """The result with what is derived from it."""
    return {"held": result.held, **msgspec.structs.asdict(result)}


def table(updates: list[UpdateReport]) -> Table:
    """Phases, bytes and bandwidth, one row per update."""
    shown = Table(
        title="updates, times in ms",
        caption="GB/s: bytes / (wire + apply); the plan is made once per link",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("version", "plan", "wire", "apply", "finalize", "pause", "whole push", "MB", "GB/s"):
        shown.add_column(name, justify="right")
    for number, update in enumerate(updates):
        (engine,) = update.engines
        moving = engine.wire + engine.apply
        seconds = [engine.wire, engine.apply, engine.finalize, engine.pause, update.seconds]
        shown.add_row(
            f"{update.version}",
            f"{update.plan * 1e3:.0f}" if number == 0 else "",
            *(f"{value * 1e3:.0f}" for value in seconds),
            f"{update.bytes / 1e6:.0f}",
            f"{update.bytes / moving / 1e9:.2f}" if moving else "",
        )
    return shown
