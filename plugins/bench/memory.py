"""``weightlink bench memory``: what an update needs besides the weights, measured as the process's peak memory."""

from __future__ import annotations

import secrets

from rich.console import Console
from weightlink.hooks.deadline import Deadline
from weightlink.plugins.bench import talk
from weightlink.plugins.bench.results import Case, Options, Spread
from weightlink.plugins.bench.shapes import MIXED
from weightlink.plugins.bench.wire import group, wire_settings

CASES = {"steady": "the most that any process holds beyond its weights, in buckets, over many updates"}
TAKES = frozenset({"size", "max_peers", "timeout"})
NEEDS: tuple[str, ...] = ()
RUNS = 100
#: Buckets per direction that the design allows.
ALLOWED = 2
#: The share of the wire benchmark's model that is updated; buckets keep their size.
_SHARE = 0.25


def measure(options: Options, console: Console) -> list[Case]:
    """The mixture of experts of the wire benchmark, 2+2 processes; every tensor is packed at one end at least."""
    if not options.wants("steady"):
        return []
    deadline = Deadline.after(options.timeout)
    wire = wire_settings(options)
    runs = options.runs or RUNS
    peaks: list[float] = []
    with group(MIXED.scaled(_SHARE * options.size), 2, 2, wire, deadline, bare=False) as (plan, members):
        largest = int(plan.engines[0].bucket_bytes.max())
        console.print(
            f"{plan.total_bytes / 1e6:.0f} MB, buckets of {largest / 2**20:.1f} MiB, {runs} updates",
            style="dim",
            highlight=False,
        )
        for _ in range(runs):
            command = talk.line(talk.Wire(secrets.token_hex(8), memory=True))
            answers = members.ask([command] * 4, deadline)
            peaks.append(max(answer.extra for answer in answers) / largest)
    worst = max(peaks)
    return [
        Case(
            case="steady",
            value=worst,
            reference=float(ALLOWED),
            ratio=ALLOWED / worst,
            unit="buckets",
            runs=runs,
            values=Spread.of(peaks),
            detail={
                "bucket MiB": largest / 2**20,
                "first update": peaks[0],
                "after a tenth": max(peaks[: max(1, runs // 10)]),
                "last update": peaks[-1],
            },
        )
    ]
