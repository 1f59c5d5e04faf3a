"""``weightlink bench wire``: the wire phase of a full update beside bare Gloo, between the same processes, in turns.

Measured from the barrier that an update's ranks pass before the first byte to the one after the last, with the check
of every bucket. What senders prepare before it, while engines still serve, is not part of it and printed beside it
(``prepared``, seconds of the slowest rank). The reference moves equally many bytes between the same pairs from flat
memory to flat memory, in the messages of the size that is fastest here. Where tensors must be packed it copies every
byte once at each end.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import Iterator

import msgspec
from rich.console import Console
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ErrorInfo
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, build_plan
from weightlink.plugins.bench import talk
from weightlink.plugins.bench.members import Members
from weightlink.plugins.bench.results import Case, Options
from weightlink.plugins.bench.shapes import LARGE, MIXED, Dims, shape
from weightlink.rendezvous import Rendezvous, new_key

CASES = {
    "large": "a dense model: large matrices, most of which need no packing",
    "mixed": "a mixture of experts: many small tensors, which do",
}
TAKES = frozenset({"size", "max_peers", "timeout"})
NEEDS: tuple[str, ...] = ()
RUNS = 9
HOST = "127.0.0.1"
UNBOUNDED = 1024
_WORLDS = ((1, 1), (2, 2))
_DIMS = {"large": LARGE, "mixed": MIXED}
#: Bytes of a message that the reference may use; it gets the fastest.
_CHUNKS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)


def measure(options: Options, console: Console) -> list[Case]:
    """Every wanted case with 1+1 and 2+2 processes (senders + receivers)."""
    deadline = Deadline.after(options.timeout)
    return [
        _case(name, trainers, engines, options, console, deadline)
        for name in CASES
        if options.wants(name)
        for trainers, engines in _WORLDS
    ]


def wire_settings(options: Options) -> WireSettings:
    """The defaults but for what the command line says."""
    if options.max_peers is None:
        return WireSettings()
    return WireSettings(max_peers=options.max_peers or UNBOUNDED)


@contextlib.contextmanager
def group(
    dims: Dims, trainers: int, engines: int, wire: WireSettings, deadline: Deadline, *, bare: bool = True
) -> Iterator[tuple[Plan, Members[talk.Done]]]:
    """Processes of a trainer and an engine of that shape, with their weights, connected by one plan."""
    made = shape(dims, trainers, engines)
    plan = build_plan(made.trainers, [EngineLayouts("engine", made.engines)], wire)
    programs = [plan.send_program(0, rank) for rank in range(trainers)]
    programs += [plan.receive_program(0, rank) for rank in range(engines)]
    layouts = [*made.trainers, *made.engines]
    world = trainers + engines
    meeting = Rendezvous.listen(HOST, deadline)
    try:
        with Members("weightlink.plugins.bench.member", world, _decode) as members:
            key, port, left = new_key(), meeting.port, deadline.remaining()
            setups = [
                talk.Setup(
                    rank, world, trainers, HOST, port, key, layout.pack(), program.pack(), plan.wire, left, bare
                )
                for rank, (layout, program) in enumerate(zip(layouts, programs, strict=True))
            ]  # fmt: skip
            members.ask([talk.line(setup) for setup in setups], deadline)
            yield plan, members
    finally:
        meeting.close()


def _case(name: str, trainers: int, engines: int, options: Options, console: Console, deadline: Deadline) -> Case:
    variant = f"{trainers}+{engines}"
    with group(_DIMS[name].scaled(options.size), trainers, engines, wire_settings(options), deadline) as (
        plan,
        members,
    ):
        console.print(
            f"{name} {variant}: {plan.total_bytes / 1e9:.2f} GB, {len(plan.manifest)} tensors,"
            f" {len(plan.engines[0].bucket_bytes)} buckets in {plan.engines[0].rounds} rounds",
            style="dim",
            highlight=False,
        )
        return _turns(name, variant, members, trainers + engines, options.runs or RUNS, deadline)


def _turns(name: str, variant: str, members: Members[talk.Done], world: int, runs: int, deadline: Deadline) -> Case:
    """weightlink and the reference in turns, after one run of each that does not count."""

    def run(command: talk.Command) -> list[talk.Done]:
        return members.ask([talk.line(command)] * world, deadline)

    def slowest(answers: list[talk.Done]) -> float:
        return max(answer.seconds for answer in answers)

    def ours() -> list[talk.Done]:
        return run(talk.Wire(secrets.token_hex(8)))

    ways = ("none",) if name == "large" else ("apart", "overlapped")
    ours()
    for way in ways:
        run(talk.Raw(_CHUNKS[0], way))
    best = min(
        (talk.Raw(chunk, way) for chunk in _CHUNKS for way in ways),
        key=lambda command: min(slowest(run(command)) for _ in range(2)),
    )
    mine: list[list[talk.Done]] = []
    bare: list[list[talk.Done]] = []
    for _ in range(runs):
        mine.append(ours())
        bare.append(run(best))
    last = mine[-1]
    return Case.paired(
        name,
        [slowest(answers) for answers in mine],
        [slowest(answers) for answers in bare],
        unit="s",
        variant=variant,
        detail={
            "GB/s": statistics.median(_bytes(a) / slowest(a) for a in mine) / 1e9,
            "reference": f"{best.chunk >> 20} MiB messages, copies {best.copies}",
            "cpu": _cores(mine),
            "reference cpu": _cores(bare),
            "apply": max(answer.apply for answer in last),
            "prepared": statistics.median(max(a.prepared for a in answers) for answers in mine),
        },
    )


def _bytes(answers: list[talk.Done]) -> int:
    """What all senders sent, which is what all receivers received."""
    return sum(answer.bytes for answer in answers) // 2


def _cores(runs: list[list[talk.Done]]) -> float:
    """Cores that all members together kept busy."""
    return statistics.median(sum(a.cpu for a in answers) / max(a.seconds for a in answers) for answers in runs)


_events = msgspec.json.Decoder(talk.Event)


def _decode(line: bytes) -> talk.Done | ErrorInfo:
    event = _events.decode(line)
    return event.error if isinstance(event, talk.Failed) else event
