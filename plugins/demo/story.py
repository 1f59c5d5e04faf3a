"""The demo's story: noise, the checkpoint's answer, a learned answer, and the checks that each of them really came
over the link. The order is the story; what it needs lives in the neighbouring modules."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import WeightlinkError
from weightlink.plugins.demo import talk
from weightlink.plugins.demo.checkpoint import checkpoint
from weightlink.plugins.demo.engine import Engine, require_platform
from weightlink.plugins.demo.processes import uninterrupted
from weightlink.plugins.demo.trainers import Trainers
from weightlink.report import UpdateReport

PROMPT = "The capital of France is"
KNOWN = " Paris"
LEARNED = " Paris, and this sentence was learned a moment ago."
STAGES = 2
TOKENS = 24
#: The learned answer is sure at this loss; far fewer steps than this reach it.
LOSS, STEPS = 0.02, 60


class Check(msgspec.Struct, frozen=True):
    """One thing that had to hold."""

    name: str
    held: bool
    found: str


class Result(msgspec.Struct, kw_only=True):
    """The demo's outcome, as data. ``answers`` to the prompt: on random weights, of version 1, of version 2."""

    prompt: str = PROMPT
    seconds: float = 0.0
    answers: list[str] = []
    checks: list[Check] = []
    updates: list[UpdateReport] = []

    @property
    def held(self) -> bool:
        """Every check held, and there were some."""
        return bool(self.checks) and all(check.held for check in self.checks)


class Demo:
    """Plays the story once.

    :param folder: logs, the token and the ranks' meeting point
    """

    def __init__(self, console: Console, cache: Path, folder: Path, deadline: Deadline) -> None:
        self._console, self._cache, self._folder, self._deadline = console, cache, folder, deadline
        self.result = Result()

    def play(self) -> Result:
        """The result; raises :class:`WeightlinkError` when something could not even be tried."""
        started = time.monotonic()
        require_platform()
        with self._step("SmolLM2-135M-Instruct as a Hugging Face checkpoint"):
            path = checkpoint(self._cache, self._folder / "checkpoint.log", self._deadline)
        cleanup = contextlib.ExitStack()
        try:
            engine = Engine(path, self._folder)
            cleanup.callback(engine.stop)
            trainers = Trainers(path, self._folder, STAGES, self._deadline)
            cleanup.callback(trainers.stop)
            self._updates(path, engine, trainers)
        finally:
            with uninterrupted(), self._step("server and trainer stopped"):
                cleanup.close()
        self.result.seconds = time.monotonic() - started
        return self.result

    def _updates(self, path: Path, engine: Engine, trainers: Trainers) -> None:
        with self._step("SGLang server started with --load-format dummy"):
            engine.wait_up(self._deadline)
        with self._step(f"Megatron-Core trainer, {STAGES} pipeline stages, loaded the checkpoint"):
            trainers.wait(self._deadline)

        state = engine.status(self._deadline)["state"]
        self._check("before the first push the engine says that it has no version", state == "pending", state)
        noise = self._answer(engine)
        self._check("random weights answer with noise", "Paris" not in noise, noise)
        sums = [engine.checksums(self._deadline)]

        with self._step("connected: layouts observed, coverage proven, plan made"):
            trainers.ask(talk.Connect(engine.url, engine.token, self._left()), self._deadline)
        self._push(1, engine, trainers)
        first = self._answer(engine)
        self._check("version 1 answers like the checkpoint", first.startswith(KNOWN), first)
        sums.append(engine.checksums(self._deadline))

        with self._step("trained on one sentence") as say:
            done = trainers.ask(
                talk.Train(PROMPT, LEARNED, LOSS, STEPS, self._left()),
                self._deadline,
                lambda step: say(f"training: step {step.number}, loss {step.loss:.3f}"),
            )
        self._check("the trainer has learned it", done.loss < LOSS, f"loss {done.loss:.3f} after {done.steps} steps")
        self._push(2, engine, trainers)
        second = self._answer(engine)
        self._check("version 2 answers what the trainer learned", second == LEARNED, second)
        sums.append(engine.checksums(self._deadline))

        with self._step("trainer left"):
            trainers.leave(self._deadline)
        with self._step("SGLang loaded the checkpoint by its own loader"):
            engine.load(path, self._deadline)
            own = engine.checksums(self._deadline)
        equal = sum(own[name] == found for name, found in sums[1].items() if name in own)
        self._check(
            "version 1 was, bit for bit, what SGLang itself loads",
            bool(own) and own == sums[1],
            f"{equal} of {len(own)} tensors have equal checksums",
        )
        moved = [sum(a[name] != b[name] for name in a) for a, b in pairwise(sums)]
        self._check("each push changed the weights", all(moved), f"{moved[0]}, then {moved[1]} of {len(own)} tensors")

    def _push(self, version: int, engine: Engine, trainers: Trainers) -> None:
        with self._step(f"pushed version {version}"):
            report = trainers.ask(talk.Push(version, self._left()), self._deadline).report
        if report is None:
            raise WeightlinkError("the trainer gave no report of its push")
        self.result.updates.append(report)
        shown, status = engine.weight_version(self._deadline), engine.status(self._deadline)
        held = shown == str(version) and (status["state"], status["version"]) == ("ready", version)
        self._check(
            f"SGLang and weightlink agree on version {version}",
            held and all(engine.committed for engine in report.engines),
            f"weight_version {shown!r}, engine {status['state']} with version {status['version']}",
        )

    def _answer(self, engine: Engine) -> str:
        answer = engine.complete(PROMPT, TOKENS, self._deadline)
        self.result.answers.append(answer)
        self._say(f"        [bold]{escape(PROMPT)}[/bold] -> [cyan]{_printable(answer)}[/cyan]")
        return answer

    def _check(self, name: str, held: bool, found: str) -> None:
        self.result.checks.append(Check(name, held, found))
        mark = "[green]  ok[/green]" if held else "[red]FAIL[/red]"
        shown = "" if found in self.result.answers else f" [dim]({_printable(found)})[/dim]"
        self._say(f"  {mark}  {escape(name)}{shown}")

    @contextlib.contextmanager
    def _step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Shows that something is under way, then how long it took. Yields a way to say more meanwhile."""
        started = time.monotonic()
        with self._console.status(escape(title)) as status:
            yield lambda text: status.update(escape(text))
        self._say(f"[dim]{time.monotonic() - started:5.0f} s[/dim] {escape(title)}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _left(self) -> float:
        return self._deadline.check("the demo's next step")


def _printable(text: str) -> str:
    """On one line and without control characters: noise may hold anything."""
    return escape("".join(c if c.isprintable() else " " for c in text))
