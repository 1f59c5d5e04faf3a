"""``weightlink bench update``: a whole update of a real server, by weightlink and by SGLang's own three ways.

Two Megatron-Core ranks and an SGLang server of two ranks, the same for all. Before anything is measured each way has to
prove, over tensors of noise, that it leaves the server with what the trainer has. Then all ways take turns; each brings
weights that were changed just before.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ErrorInfo, LayoutError, WeightlinkError
from weightlink.plugins.bench import update_talk as talk
from weightlink.plugins.bench.dense import MIDDLE, write
from weightlink.plugins.bench.members import Members
from weightlink.plugins.bench.results import Case, Options
from weightlink.plugins.demo.engine import PLATFORM, Engine

CASES = {
    "vs-distributed": "a push beside update_weights_from_distributed: Gloo broadcasts of flattened buckets",
    "vs-tensor": "a push beside update_weights_from_tensor: flattened buckets in shared memory",
    "vs-disk": "a push beside update_weights_from_disk: a safetensors file",
}
TAKES = frozenset({"size", "timeout"})
NEEDS = ("sglang", "megatron-core")
RUNS = 7
RANKS = 2
#: How references gather. The first is what trainers do; Gloo's collective is slower than plain sends to one rank, which
#: a reference that was made for these processors would use.
GATHERS = ("all-gather", "sends")
#: Of the references' buckets: here the whole model, which is faster than 64 or 256 MiB for the broadcast and no slower
#: for the others.
BUCKET_BYTES = 1 << 30
_SHOWN = 3


def measure(options: Options, console: Console) -> list[Case]:
    """The wanted cases, all from one server and one trainer."""
    ways = [_Way(case.removeprefix("vs-"), gather) for gather in GATHERS for case in CASES if options.wants(case)]
    if not ways:
        return []
    deadline = Deadline.after(options.timeout)
    folder = Path(tempfile.mkdtemp(prefix="weightlink-bench-"))
    console.print(f"logs: {folder}", style="dim", highlight=False)
    checkpoint = write(folder / "model", MIDDLE.scaled(options.size))
    engine = Engine(checkpoint, folder, tp=RANKS, flags=["--skip-tokenizer-init"])
    try:
        env = {"GLOO_SOCKET_IFNAME": "lo", "SGLANG_PLATFORM": PLATFORM, "HF_HUB_OFFLINE": "1"}
        with Members("weightlink.plugins.bench.update_member", RANKS, _decode, env) as members:
            stage = _Stage(engine, members, deadline)
            nbytes = stage.open(checkpoint, folder)
            console.print(f"{nbytes / 1e9:.2f} GB, {RANKS}+{RANKS} ranks", style="dim", highlight=False)
            stage.prove(ways)
            console.print("every way was proven to deliver the trainer's weights", style="dim")
            cases = _turns(stage, ways, options.runs or RUNS, nbytes)
    finally:
        engine.stop()
        for weights in (checkpoint, folder / "disk"):  # the logs stay behind after a failure
            shutil.rmtree(weights, ignore_errors=True)
    shutil.rmtree(folder)
    for gather in GATHERS:
        best = min((case for case in cases if case.detail["gather"] == gather), key=lambda case: case.reference)
        console.print(
            f"{gather}: weightlink {best.value:.3f} s, SGLang's fastest {best.reference:.3f} s"
            f" ({best.case.removeprefix('vs-')}), factor {best.ratio:.2f}",
            highlight=False,
        )
    return cases


class _Way(msgspec.Struct, frozen=True):
    """One way to update; see :class:`talk.Update`."""

    path: str
    gather: str = GATHERS[0]


OURS = _Way("weightlink")


class _Stage:
    """The server and the trainer's ranks."""

    def __init__(self, engine: Engine, members: Members[talk.Done], deadline: Deadline) -> None:
        self._engine, self._members, self._deadline = engine, members, deadline
        self._version = 0
        self._changes = 0

    def _all(self, command: talk.Command) -> list[talk.Done]:
        return self._members.ask([talk.line(command)] * RANKS, self._deadline)

    def open(self, checkpoint: Path, folder: Path) -> int:
        """Until everything is connected; the bytes of one copy of the model. Both sides then hold ``checkpoint``."""
        left, store = self._deadline.remaining(), str(folder / "trainers.store")
        setups = [talk.Setup(rank, RANKS, str(checkpoint), store, left) for rank in range(RANKS)]
        layouts = [done.layout for done in self._members.ask([talk.line(setup) for setup in setups], self._deadline)]
        self._engine.wait_up(self._deadline)
        self._engine.load(checkpoint, self._deadline)
        disk = folder / "disk"
        disk.mkdir()
        left = self._deadline.remaining()
        join = talk.Join(self._engine.url, self._engine.token, RANKS, layouts, str(disk), BUCKET_BYTES, left)
        return self._all(join)[0].nbytes

    def change(self) -> None:
        """Gives the trainer other weights."""
        self._changes += 1
        self._all(talk.Change(self._changes))

    def update(self, way: _Way) -> talk.Done:
        """Brings them to the server; what rank 0 saw."""
        self._version += 1
        return self._all(talk.Update(way.path, self._version, self._deadline.remaining(), way.gather))[0]

    def prove(self, ways: list[_Way]) -> None:
        """Raises :class:`LayoutError` for a way after which the server does not hold the trainer's weights.

        weightlink's update is compared with what SGLang's own loader loads; then each way with weightlink's update of
        weights that were changed for it, so that nothing left over from another way can pass.
        """
        last = self._engine.rank_checksums(self._deadline)
        self._require(OURS, last, "what SGLang's own loader loads from the checkpoint")
        for way in ways:
            self.change()
            self.update(OURS)
            changed = self._engine.rank_checksums(self._deadline)
            same = [name for a, b in zip(last, changed, strict=True) for name in a if a[name] == b[name]]
            if same:
                raise LayoutError("a change of all weights did not reach the server", tensor=", ".join(same[:_SHOWN]))
            self._require(way, changed, "what a push of the same weights brought")
            last = changed

    def _require(self, way: _Way, expected: list[dict[str, str]], what: str) -> None:
        self._engine.scramble(self._deadline)
        self.update(way)
        found = self._engine.rank_checksums(self._deadline)
        wrong = [n for a, b in zip(expected, found, strict=True) for n in a.keys() | b if a.get(n) != b.get(n)]
        if wrong or not all(found):
            raise LayoutError(
                f"the server does not hold the trainer's weights after an update by {way.path} ({way.gather})",
                tensor=", ".join(sorted(wrong)[:_SHOWN]),
                expected=what,
                found=f"{len(wrong)} tensors with other checksums",
            )


def _turns(stage: _Stage, ways: list[_Way], runs: int, nbytes: int) -> list[Case]:
    """All ways in every round, each round beginning with the next of them."""
    order = [OURS, *ways]
    seen: dict[_Way, list[talk.Done]] = {way: [] for way in order}
    for number in range(runs):
        first = number % len(order)
        for way in order[first:] + order[:first]:
            stage.change()
            seen[way].append(stage.update(way))
    seconds = {way: [done.seconds for done in answers] for way, answers in seen.items()}
    ours = _ours(seen[OURS])
    return [
        Case.paired(
            f"vs-{way.path}",
            seconds[OURS],
            seconds[way],
            unit="s",
            variant=f"{RANKS}+{RANKS}" + ("" if way.gather == GATHERS[0] else f" {way.gather}"),
            detail={
                "gather": way.gather,
                "GB": nbytes / 1e9,
                **(ours if way is ways[0] else {}),  # the same pushes in every line
                **_phases(seen[way]),
            },
        )
        for way in ways
    ]


def _ours(answers: list[talk.Done]) -> dict[str, float | int | str]:
    reports = [done.report for done in answers if done.report is not None]
    if len(reports) != len(answers):
        raise WeightlinkError("the trainer did not report its push")
    shown: dict[str, float | int | str] = {}
    for phase in ("prepare", "transfer", "commit"):
        shown[phase] = statistics.median(getattr(report, phase) for report in reports)
    for phase in ("wait", "wire", "apply", "finalize"):
        shown[f"engine {phase}"] = statistics.median(getattr(report.engines[0], phase) for report in reports)
    return shown


def _phases(answers: list[talk.Done]) -> dict[str, float | int | str]:
    return {
        f"reference {phase}": statistics.median(done.phases.get(phase, 0.0) for done in answers)
        for phase in answers[0].phases
    }


def _decode(line: bytes) -> talk.Done | ErrorInfo:
    event = talk.events.decode(line)
    return event.error if isinstance(event, talk.Failed) else event
