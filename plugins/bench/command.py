"""``weightlink bench``: measures weightlink beside a reference, in one run on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Annotated, Protocol, cast

import msgspec
import typer
from packaging.requirements import Requirement
from rich.console import Console
from weightlink.cli import JsonOption, require_writable, write_json
from weightlink.hooks.errors import ConfigError
from weightlink.plugins.bench.results import Case, Options, Report, details, machine, table
from weightlink.plugins.demo.processes import interruptible

#: Benchmarks by name; the modules are imported when they are asked for.
BENCHES = {
    "wire": "weightlink.plugins.bench.wire",
    "fanout": "weightlink.plugins.bench.fanout",
    "planner": "weightlink.plugins.bench.planner",
    "overhead": "weightlink.plugins.bench.overhead",
    "memory": "weightlink.plugins.bench.memory",
    "update": "weightlink.plugins.bench.update",
}
#: Options that not every benchmark has a meaning for.
_PARTICULAR = frozenset({"size", "max_peers", "timeout", "svg"})


def bench(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help=f"Any of: {', '.join(BENCHES)}.")],
    json: JsonOption = None,
    size: Annotated[float, typer.Option(help="Scale of the problem; 1.0 is what the docs show.", min=1e-4)] = 1.0,
    runs: Annotated[int | None, typer.Option(help="Measured runs per case.", min=1)] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    max_peers: Annotated[
        int | None, typer.Option(help="Buckets that a rank sends, or receives, per round; 0 is no bound.", min=0)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each benchmark.")] = 1800.0,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the cost curve into this file.")] = None,
) -> None:
    """Measure weightlink beside a reference, in turns, in one run on this machine.

    A ratio above 1 means better than the reference. The JSON is an object for one NAME, a list of such for several.
    """
    console = Console(stderr=json == "-")
    options = Options(size=size, runs=runs, cases=tuple(case or ()), max_peers=max_peers, timeout=timeout, svg=svg)
    modules = {name: _find(name) for name in dict.fromkeys(names)}
    known = [name for module in modules.values() for name in module.CASES]
    for asked in options.cases:
        if asked not in known:
            raise ConfigError("no such case", expected=", ".join(known), found=asked)
    for option in msgspec.structs.fields(Options):
        unset = getattr(options, option.name) == option.default
        if not unset and option.name in _PARTICULAR and not any(option.name in m.TAKES for m in modules.values()):
            takers = ", ".join(name for name in BENCHES if option.name in _find(name).TAKES)
            flag = "--" + option.name.replace("_", "-")
            raise ConfigError(f"{flag} means nothing to this benchmark", expected=takers, found=" ".join(modules))
    for name, module in modules.items():
        for need in module.NEEDS:
            _require(need, name)
    require_writable(json, svg)
    reports = []
    with interruptible():
        for name, module in modules.items():
            about = machine()  # before the benchmark is a load of its own
            reports.append(Report(name, about, module.measure(options, console)))
            console.print(table(reports[-1]), highlight=False)
            for line in details(reports[-1]):
                console.print(line, style="dim", highlight=False, soft_wrap=True)
    if json is not None:
        write_json(json, reports[0] if len(reports) == 1 else reports)


class Bench(Protocol):
    """A benchmark's module.

    ``CASES`` is a table of its cases with a line of help each. ``TAKES`` are the particular options that it has a
    meaning for, ``NEEDS`` the requirements that it has beyond weightlink's own.
    """

    CASES: Mapping[str, str]
    TAKES: frozenset[str]
    NEEDS: tuple[str, ...]

    def measure(self, options: Options, console: Console) -> list[Case]:
        """All wanted cases. May print to ``console`` what it is about."""


def _find(name: str) -> Bench:
    if name not in BENCHES:
        raise ConfigError("no such benchmark", expected=", ".join(BENCHES), found=name)
    return cast(Bench, importlib.import_module(BENCHES[name]))


def _require(need: str, bench: str) -> None:
    wanted = Requirement(need)
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        found = "nothing"
    if found == "nothing" or not wanted.specifier.contains(found, prereleases=True):
        remedy = f"pip install {need}"
        raise ConfigError(f"bench {bench} runs beside {wanted.name}", expected=need, found=found, remedy=remedy)
