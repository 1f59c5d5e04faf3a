"""What a benchmark measured, as data and as a table: weightlink and its reference side by side, from one run."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks of a benchmark.

    :param size: scale of the problem; 1.0 is what the published figures were made with
    :param runs: measured runs per case; None leaves it to the benchmark
    :param cases: only these cases; all of them if empty
    :param max_peers: buckets that a rank sends, or receives, in one round; 0 is no bound, None the default setting
    :param timeout: seconds for one benchmark
    :param svg: file for the curve of a benchmark that has one
    """

    size: float = 1.0
    runs: int | None = None
    cases: tuple[str, ...] = ()
    max_peers: int | None = None
    timeout: float = 1800.0
    svg: str | None = None

    def wants(self, case: str) -> bool:
        """The case is among those asked for."""
        return not self.cases or case in self.cases


class Spread(msgspec.Struct, frozen=True):
    """The least, the middle and the greatest of several measurements."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(min(values), statistics.median(values), max(values))


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One measured case beside its reference.

    :param value: weightlink's median, in ``unit``
    :param reference: the reference's median in the same unit, measured in the same run
    :param ratio: above 1 when weightlink is better than the reference
    :param runs: measurements behind each median
    :param variant: what tells apart several lines of one case, such as ``2+2``
    :param detail: what else was measured, by name
    """

    case: str
    value: float
    reference: float
    ratio: float
    unit: str
    runs: int
    variant: str = ""
    values: Spread | None = None
    references: Spread | None = None
    ratios: Spread | None = None
    detail: dict[str, float | int | str] = {}

    @classmethod
    def paired(
        cls,
        case: str,
        values: Sequence[float],
        references: Sequence[float],
        *,
        unit: str,
        more_is_better: bool = False,
        variant: str = "",
        detail: Mapping[str, float | int | str] | None = None,
    ) -> Case:
        """From measurements that were made in turns, ``values[n]`` next to ``references[n]``."""
        ratios = [v / r if more_is_better else r / v for v, r in zip(values, references, strict=True)]
        value, reference = statistics.median(values), statistics.median(references)
        return cls(
            case=case,
            value=value,
            reference=reference,
            ratio=value / reference if more_is_better else reference / value,
            unit=unit,
            runs=len(values),
            variant=variant,
            values=Spread.of(values),
            references=Spread.of(references),
            ratios=Spread.of(ratios),
            detail=dict(detail or {}),
        )


class Report(msgspec.Struct, frozen=True):
    """All cases of one benchmark, and the machine that they were measured on."""

    bench: str
    machine: dict[str, float | int | str]
    results: list[Case]


def machine() -> dict[str, float | int | str]:
    """What the figures depend on, the load of the last minute included."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def table(report: Report) -> Table:
    """One row per case: medians with their range, and the ratio."""
    shown = Table(
        title=f"{report.bench}: median (least to greatest)",
        caption=", ".join(f"{name} {value}" for name, value in report.machine.items()),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("case")
    for name in ("weightlink", "reference", "unit", "ratio", "runs"):
        shown.add_column(name, justify="right")
    for row in report.results:
        shown.add_row(
            f"{row.case} {row.variant}".strip(),
            _ranged(row.value, row.values),
            _ranged(row.reference, row.references),
            row.unit,
            _ranged(row.ratio, row.ratios),
            str(row.runs),
        )
    return shown


def details(report: Report) -> list[str]:
    """A line for every case that has more to say."""
    return [
        f"{row.case} {row.variant}".strip() + ": " + ", ".join(f"{n} {_short(v)}" for n, v in row.detail.items())
        for row in report.results
        if row.detail
    ]


def _ranged(value: float, spread: Spread | None) -> str:
    around = f" ({_short(spread.min)} to {_short(spread.max)})" if spread is not None else ""
    return f"{_short(value)}{around}"


def _short(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
