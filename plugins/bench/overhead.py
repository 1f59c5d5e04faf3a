"""``weightlink bench overhead``: a whole push of a tiny model to a real server, beside what SGLang itself needs.

Two Megatron-Core ranks push to an SGLang server of two ranks. In turns with the pushes the same server pauses, flushes
its cache and continues by its own routes, as it must around any update; the rest of a push is weightlink's own.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import WeightlinkError
from weightlink.plugins.bench.results import Case, Options, Spread
from weightlink.plugins.bench.tiny import write
from weightlink.plugins.demo import talk
from weightlink.plugins.demo.engine import Engine
from weightlink.plugins.demo.trainers import Trainers
from weightlink.report import UpdateReport

CASES = {"cached": "a push over a link that has its plan; the reference is SGLang's own pause, flush and continue"}
TAKES = frozenset({"timeout"})
NEEDS = ("sglang", "megatron-core")
RUNS = 30
RANKS = 2
_PHASES = ("prepare", "transfer", "commit")


def measure(options: Options, console: Console) -> list[Case]:
    """The one case."""
    if not options.wants("cached"):
        return []
    deadline = Deadline.after(options.timeout)
    folder = Path(tempfile.mkdtemp(prefix="weightlink-bench-"))
    console.print(f"logs: {folder}", style="dim", highlight=False)
    checkpoint = write(folder / "model")
    engine = Engine(checkpoint, folder, tp=RANKS, flags=["--skip-tokenizer-init"])
    try:
        trainers = Trainers(checkpoint, folder, RANKS, deadline)
        try:
            trainers.wait(deadline)
            engine.wait_up(deadline)
            trainers.ask(talk.Connect(engine.url, engine.token, deadline.remaining()), deadline)
            case = _turns(engine, trainers, options.runs or RUNS, deadline)
            trainers.leave(deadline)
        finally:
            trainers.stop()
    finally:
        engine.stop()
    shutil.rmtree(folder)
    return [case]


def _turns(engine: Engine, trainers: Trainers, runs: int, deadline: Deadline) -> Case:
    pushes: list[UpdateReport] = []
    own: list[float] = []
    for version in range(1, runs + 3):  # the first two make the plan and warm up
        pushes.append(_push(trainers, version, deadline))
        started = time.perf_counter()
        engine.pause_flush_continue(deadline)
        own.append(time.perf_counter() - started)
    pushes, own = pushes[2:], own[2:]
    beyond = Spread.of([1e3 * (push.seconds - mine) for push, mine in zip(pushes, own, strict=True)])
    detail: dict[str, float | int | str] = {
        "ms beyond SGLang's own": beyond.median,
        "least": beyond.min,
        "greatest": beyond.max,
        "bytes": pushes[-1].bytes,
    }
    for phase in _PHASES:
        detail[f"{phase} ms"] = 1e3 * statistics.median(getattr(push, phase) for push in pushes)
    for phase in ("wait", "wire", "apply", "finalize", "pause"):
        detail[f"engine {phase} ms"] = 1e3 * statistics.median(getattr(push.engines[0], phase) for push in pushes)
    milliseconds = [1e3 * push.seconds for push in pushes]
    return Case.paired("cached", milliseconds, [1e3 * mine for mine in own], unit="ms", variant="2+2", detail=detail)


def _push(trainers: Trainers, version: int, deadline: Deadline) -> UpdateReport:
    report = trainers.ask(talk.Push(version, deadline.remaining()), deadline).report
    if report is None:
        raise WeightlinkError("the trainer did not report its push")
    return report
