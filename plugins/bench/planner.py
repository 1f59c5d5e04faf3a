"""``weightlink bench planner``: the plan beside awex 0.9.0's, on the same tensors with the same cuts.

Time counts from what every rank knows of every other (weightlink's survey, awex's metadata) to what one rank does; in
``1t-rank`` weightlink's survey is first taken out of the bytes that it travels in. The global plan begins with the
boxes of all ranks, from which rank 0 makes the survey. weightlink's time includes the proof that every element has a
source, and the rounds of all buckets; awex makes neither.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from weightlink.hooks.errors import ConfigError, WeightlinkError
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, make_plan, survey_of
from weightlink.plugins.bench import cuts
from weightlink.plugins.bench.curve import Point, draw
from weightlink.plugins.bench.results import Case, Options
from weightlink.plugins.simulate.figures import ideal_load, needed_bytes
from weightlink.survey import Survey

CASES = {
    "awex-global": "400 tensors, 16-way trainer, 8 engines of 16 ranks: the plan of all ranks",
    "awex-pruned": "the same: what one rank does, of a trainer and of an engine",
    "1t-rank": "a mixture of experts of 1T parameters, 256 to 128 ranks: one rank's seconds and peak MiB",
    "balance": "bytes of the most loaded sender over the least possible ones",
    "bytes": "bytes moved over those that no plan can do without",
    "curve": "seconds over the number of tensors; --svg draws them",
}
TAKES = frozenset({"size", "svg"})
NEEDS = ("awex==0.9.0",)
RUNS = 5
_SIZES = (100, 200, 400, 800, 1600)


def measure(options: Options, console: Console) -> list[Case]:
    """Every wanted case."""
    _quiet_awex()
    runs = options.runs or RUNS
    tensors = max(4, round(400 * options.size))
    found: list[Case] = []
    if any(map(options.wants, ("awex-global", "awex-pruned", "balance", "bytes"))):
        found += _against_awex(options, _Both(cuts.matrices(tensors, 16, 1, 16, 8)), tensors, runs)
    if options.wants("1t-rank"):
        console.print("1t-rank: making layouts of 384 ranks", style="dim", highlight=False)
        found += _trillion(options, runs)
    if options.wants("curve"):
        found += _curve(options, runs)
    return found


class _Both:
    """One case as both planners are given it."""

    def __init__(self, case: cuts.Case) -> None:
        from awex.transfer.transfer_plan import TransferPlanBuilder

        self.case = case
        self.trainers, self.engine = case.layouts()
        self.engines = [EngineLayouts(f"engine {n}", self.engine) for n in range(case.engines)]
        self.wire = WireSettings(relay=False)  # the other planner has no relays: equal work
        self.survey = survey_of(self.trainers, self.engines)
        self.packed = self.survey.pack()
        sides = (self.survey.trainers, *self.survey.engines)
        self.held = [[side[rank] for rank in range(len(side))] for side in sides]
        self.infer, self.train = case.metadata()
        self.builder = TransferPlanBuilder(case.ranks * case.engines, case.trainers, case.engines)

    def plan(self) -> Plan:
        """weightlink's plan of all ranks, to the rounds of all buckets."""
        survey = Survey.of(self.survey.manifest, self.held[0], self.held[1:])
        plan = make_plan(survey, self.wire, names=[e.name for e in self.engines])
        for engine in plan.engines:
            _ = engine.bucket_round  # worked out when asked for
        return plan

    def operations(self) -> list[Any]:
        """awex's."""
        found: list[Any] = self.builder.build_weights_mapping_operations(self.infer, self.train)
        return found

    def surveys(self, count: int) -> Iterator[Survey]:
        """As many, of which nothing has been looked at yet."""
        return iter([Survey.unpack(self.packed) for _ in range(count)])

    def ours(self, rank: int, survey: Survey | None = None) -> int:
        """One rank's program, of a trainer, or behind the trainers of the first engine; the number of its copies.

        :param survey: unpacked if left out"""
        survey = survey or Survey.unpack(self.packed)
        plan = make_plan(survey, self.wire, names=[e.name for e in self.engines])
        if rank < self.case.trainers:
            programs = [plan.send_program(n, rank, self.trainers[rank]) for n in range(self.case.engines)]
            return sum(len(program.copies) for program in programs)
        rank -= self.case.trainers
        return len(plan.receive_program(0, rank, self.engine[rank]).copies)

    def theirs(self, rank: int) -> int:
        """awex's local plan of the same rank, which it numbers behind the engines'."""
        infer = self.case.ranks * self.case.engines
        number = infer + rank if rank < self.case.trainers else rank - self.case.trainers
        plan = self.builder.build_local_transfer_plan(self.infer, self.train, number)
        return sum(len(ops) for ops in plan.inter_operations.values())


def _against_awex(options: Options, both: _Both, tensors: int, runs: int) -> list[Case]:
    found = []
    detail: dict[str, float | int | str] = {"tensors": tensors, "trainer ranks": both.case.trainers}
    detail |= {"engine ranks": both.case.ranks * both.case.engines}
    if options.wants("awex-global"):
        ours, theirs = _turns(both.plan, both.operations, runs)
        found.append(Case.paired("awex-global", ours, theirs, unit="s", detail=detail))
    if options.wants("awex-pruned"):
        for variant, rank in (("trainer", 0), ("engine", both.case.trainers)):
            fresh = both.surveys(runs + 1)
            ours, theirs = _turns(lambda r=rank, f=fresh: both.ours(r, next(f)), lambda r=rank: both.theirs(r), runs)  # type: ignore[misc]
            found.append(Case.paired("awex-pruned", ours, theirs, unit="s", variant=variant, detail=detail))
    spread = _Both(cuts.matrices(tensors, 4, 4, 16, 2)) if options.wants("balance") else both
    for name, judged in (("balance", spread), ("bytes", both)):
        if options.wants(name):
            found.append(_quality(name, judged))
    return found


def _quality(name: str, both: _Both) -> Case:
    plan, operations = both.plan(), both.operations()
    sent: Counter[int] = Counter()
    for op in operations:
        size = 2
        for length in op.overlap_shape:
            size *= length
        sent[op.send_rank] += size
    if name == "balance":
        ideal = ideal_load(both.trainers, both.engines)
        value, reference = float(plan.sent_bytes.max()) / ideal, max(sent.values()) / ideal
    else:
        needed = sum(needed_bytes(layout) for layout in both.engine) * both.case.engines
        value, reference = plan.total_bytes / needed, sum(sent.values()) / needed
    return Case(case=name, value=value, reference=reference, ratio=reference / value, unit="x least", runs=1)


def _turns(ours: Callable[[], object], theirs: Callable[[], object], runs: int) -> tuple[list[float], list[float]]:
    """Seconds of both in turns, after one of each that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs + 1):
        for which, function in enumerate((ours, theirs)):
            gc.collect()
            started = time.perf_counter()
            function()
            if turn:
                times[which].append(time.perf_counter() - started)
    return times


def _trillion(options: Options, runs: int) -> list[Case]:
    layers = max(8, round(61 * options.size))
    experts = 384 if options.size >= 1 else 128
    both = _Both(cuts.mixture(layers, experts))
    parameters = sum(_numel(cut.shape) for cut in both.case.cuts)
    detail: dict[str, float | int | str] = {
        "parameters": f"{parameters:.3g}",
        "tensors": len(both.case.cuts),
        "survey MB": len(both.packed) / 1e6,
    }
    found = []
    for variant, rank in (("trainer", 0), ("engine", both.case.trainers)):
        ours, theirs = [], []
        for _ in range(runs):
            ours.append(_apart(lambda r=rank: both.ours(r)))  # type: ignore[misc]
            theirs.append(_apart(lambda r=rank: both.theirs(r)))  # type: ignore[misc]
        for what, index, unit in ((variant, 0, "s"), (f"{variant} cpu", 2, "s"), (f"{variant} memory", 1, "MiB")):
            values, references = ([max(run[index], 1e-3) for run in side] for side in (ours, theirs))
            found.append(Case.paired("1t-rank", values, references, unit=unit, variant=what, detail=detail))
    return found


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _apart(function: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds, MiB beyond what was there before, and seconds of processor, in a process of its own."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(function, there))
    child.start()
    there.close()
    try:
        seconds, peak, cpu = here.recv()
    except EOFError as error:
        raise WeightlinkError("a measuring process died", found=child.exitcode) from error
    finally:
        child.join()
    return float(seconds), float(peak), float(cpu)


def _child(function: Callable[[], object], answer: Any) -> None:
    gc.freeze()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _status("VmRSS")
    started, used = time.perf_counter(), time.process_time()
    function()
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    answer.send((seconds, (_status("VmHWM") - before) / 1024, cpu))


def _status(name: str) -> int:
    """KiB from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise WeightlinkError(f"the kernel does not tell {name}")


def _curve(options: Options, runs: int) -> list[Case]:
    found, points = [], []
    for tensors in (max(4, round(size * options.size)) for size in _SIZES):
        both = _Both(cuts.matrices(tensors, 16, 1, 16, 8))
        fresh = both.surveys(runs + 1)
        ours, theirs = _turns(lambda b=both, f=fresh: b.ours(0, next(f)), lambda b=both: b.theirs(0), runs)  # type: ignore[misc]
        case = Case.paired("curve", ours, theirs, unit="s", variant=f"{tensors}")
        points.append(Point(tensors, case.value, case.reference))
        found.append(case)
    if options.svg:
        try:
            Path(options.svg).write_text(draw(points, "one trainer rank's plan: 16-way trainer, 8 engines of 16 ranks"))
        except OSError as error:
            raise ConfigError(f"cannot write {options.svg}: {error.strerror}") from error
    return found


def _quiet_awex() -> None:
    from awex import logging

    logging.setLevel("ERROR")  # it prints what it does
