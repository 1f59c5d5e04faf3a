"""The ``weightlink`` command. Plugins add commands of their own through the hook ``weightlink_cli_commands``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from weightlink.hooks.errors import ConfigError, WeightlinkError
from weightlink.hooks.manager import PluginManager

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; '-' is the standard output.")
]

ENTRY_POINTS = "sglang.srt.plugins"
NAME = "weightlink"


def write_json(target: str, data: object) -> None:
    """Write ``data`` to a file, or to the standard output for ``-``. Raises :class:`ConfigError`."""
    text = msgspec.json.format(msgspec.json.encode(data), indent=2)
    if target == "-":
        sys.stdout.buffer.write(text + b"\n")
        sys.stdout.flush()
        return
    try:
        Path(target).write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def require_writable(*targets: str | Path | None) -> None:
    """Each file, where one is given, can be written: told before the work. Raises :class:`ConfigError`."""
    for target in targets:
        if target is None or target == "-":
            continue
        path = Path(target)
        folder = path.parent
        if path.is_dir():
            fault = "it is a folder"
        elif not folder.is_dir():
            fault = f"{folder} is no folder"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            fault = "permission denied"
        else:
            continue
        raise ConfigError(f"cannot write {path}: {fault}")


class Finding(msgspec.Struct, frozen=True):
    """One line of ``weightlink doctor``. ``absent`` is no fault: not every machine has both frameworks."""

    subject: str
    status: Literal["ok", "absent", "untested", "fault"]
    found: str
    remedy: str = ""


def diagnose(env: Mapping[str, str]) -> Iterator[Finding]:
    """What can be told without importing a framework. Never raises a :class:`WeightlinkError`: it is a finding."""
    yield Finding("python", "ok", platform.python_version())
    for name in (NAME, "torch"):
        yield Finding(name, "ok", importlib.metadata.version(name))
    for requirement in _frameworks():
        yield _framework(requirement)
    yield _registered()
    yield _listed(env)
    try:
        for name, origin, hooks in PluginManager().plugins():
            yield Finding(f"plugin {name}", "ok", f"{origin}: {', '.join(hooks)}")
    except WeightlinkError as error:
        yield Finding("plugins", "fault", error.message, error.remedy)


def _frameworks() -> list[Requirement]:
    """The frameworks with the versions that our own extras of their names ask for."""
    listed = [Requirement(line) for line in importlib.metadata.requires(NAME) or ()]
    extras = [r for r in listed if r.marker and any(r.marker.evaluate({"extra": e}) for e in ("sglang", "megatron"))]
    return sorted(extras, key=lambda requirement: requirement.name)


def _framework(requirement: Requirement) -> Finding:
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, "absent", "not installed")
    if requirement.specifier.contains(found, prereleases=True):
        return Finding(requirement.name, "ok", found)
    return Finding(
        requirement.name, "untested", found, f"weightlink's tests ran with {requirement.name}{requirement.specifier}"
    )


def _registered() -> Finding:
    """SGLang finds weightlink by an entry point of the installed distribution."""
    subject = f"entry point {ENTRY_POINTS}"
    points = list(importlib.metadata.entry_points(group=ENTRY_POINTS, name=NAME))
    if len(points) == 1:
        return Finding(subject, "ok", points[0].value)
    found = "missing" if not points else f"{len(points)} times: " + ", ".join(point.value for point in points)
    return Finding(subject, "fault", found, "uninstall weightlink and install it once more, into SGLang's environment")


def _listed(env: Mapping[str, str]) -> Finding:
    """SGLang loads every plugin, or those that a variable lists."""
    value = env.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        return Finding("SGLANG_PLUGINS", "ok", "not set: SGLang loads every plugin")
    if NAME in names:
        return Finding("SGLANG_PLUGINS", "ok", value)
    return Finding("SGLANG_PLUGINS", "fault", value, f"SGLang skips weightlink: add it, SGLANG_PLUGINS={value},{NAME}")


def build(plugins: PluginManager | None) -> typer.Typer:
    """The application.

    :param plugins: adds the plugins' commands; None leaves ``doctor`` able to say why there are none
    """
    app = typer.Typer(
        name=NAME,
        help="Moves model weights from RL trainers into running SGLang engines.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root() -> None:
        """Moves model weights from RL trainers into running SGLang engines."""

    @app.command("plugins")
    def list_plugins(json: JsonOption = None) -> None:
        """List plugins, the distributions that they come from, and their hooks."""
        rows = (plugins or PluginManager()).plugins()
        if json is not None:
            write_json(json, [{"name": name, "origin": origin, "hooks": hooks} for name, origin, hooks in rows])
        if json != "-":
            table = Table("plugin", "from", "hooks")
            for name, origin, hooks in rows:
                table.add_row(escape(name), escape(origin), "\n".join(hooks))
            Console().print(table)

    @app.command()
    def doctor(json: JsonOption = None) -> None:
        """Say what weightlink finds on this machine, and what to do about it. Exit code 1 if something is at fault."""
        findings = list(diagnose(os.environ))
        if json is not None:
            write_json(json, findings)
        if json != "-":
            table = Table("subject", "status", "found")
            colours = {"ok": "green", "absent": "dim", "untested": "yellow", "fault": "red"}
            for item in findings:
                found = item.found + (f"\nremedy: {item.remedy}" if item.remedy else "")
                table.add_row(escape(item.subject), f"[{colours[item.status]}]{item.status}[/]", escape(found))
            Console().print(table)
        if any(item.status == "fault" for item in findings):
            raise typer.Exit(1)

    if plugins is not None:
        plugins.add_cli_commands(app)
    return app


def main() -> None:
    """The console script: an error of ours is text and exit code 1, never a traceback."""
    try:
        # The doctor must be able to tell about a broken plugin.
        plugins = None if sys.argv[1:2] == ["doctor"] else PluginManager()
        build(plugins)()
    except WeightlinkError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:  # while plugins are imported; commands end by themselves
        sys.exit(130)


if __name__ == "__main__":
    main()
