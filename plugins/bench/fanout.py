"""``weightlink bench fanout``: one trainer rank updates four equal engines, which relay to one another or do not.

The reference is weightlink itself without relays: the trainer sends everything four times. Both run between the same
processes, in turns, checked.
"""

from __future__ import annotations

import secrets

import msgspec
from rich.console import Console
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.geometry import Layout
from weightlink.hooks.messages import Attach
from weightlink.plan import EngineLayouts, Plan, build_plan
from weightlink.plugins.bench import fanout_member as member
from weightlink.plugins.bench import talk
from weightlink.plugins.bench.members import Members
from weightlink.plugins.bench.results import Case, Options
from weightlink.plugins.bench.shapes import LARGE, shape
from weightlink.plugins.bench.wire import HOST, wire_settings
from weightlink.relays import NOBODY
from weightlink.rendezvous import Rendezvous, new_key

CASES = {"relayed": "one trainer rank to four equal engines, relaying; the reference sends to each of them"}
TAKES = frozenset({"size", "max_peers", "timeout"})
NEEDS: tuple[str, ...] = ()
RUNS = 7
ENGINES = 4
#: The share of the wire benchmark's model: five processes hold it.
_SHARE = 0.25


def measure(options: Options, console: Console) -> list[Case]:
    """The one case."""
    if not options.wants("relayed"):
        return []
    deadline = Deadline.after(options.timeout)
    made = shape(LARGE.scaled(_SHARE * options.size), 1, 1)
    engines = [EngineLayouts(f"engine {n}", made.engines) for n in range(ENGINES)]
    wire = wire_settings(options)
    plans = [build_plan(made.trainers, engines, msgspec.structs.replace(wire, relay=relay)) for relay in (True, False)]
    console.print(
        f"{plans[0].sent_bytes[0] / 1e9:.2f} GB to each of {ENGINES} engines: the trainer sends"
        f" {' or '.join(f'{plan.sent_bytes[0] / 1e9:.2f} GB' for plan in plans)}",
        style="dim",
        highlight=False,
    )
    meeting = Rendezvous.listen(HOST, deadline)
    try:
        with Members("weightlink.plugins.bench.fanout_member", 1 + ENGINES, member.decode) as members:
            setups = _setups(plans, made.trainers[0], made.engines[0], meeting.port, deadline)
            members.ask([msgspec.json.encode(setup) + b"\n" for setup in setups], deadline)
            return [_turns(members, options.runs or RUNS, plans, deadline)]
    finally:
        meeting.close()


def _setups(plans: list[Plan], trainer: Layout, engine: Layout, port: int, deadline: Deadline) -> list[member.Setup]:
    offers = [_offers(plan, port, deadline.remaining()) for plan in plans]
    setups = []
    for rank in range(1 + ENGINES):
        legs: list[tuple[member.Leg, ...]] = []
        for plan, offered in zip(plans, offers, strict=True):
            if rank == 0:
                programs = [plan.send_program(n, 0) for n in range(ENGINES)]
                legs.append(tuple(member.Leg(o, p.pack()) for o, p in zip(offered, programs, strict=True)))
            else:
                legs.append((member.Leg(offered[rank - 1], plan.receive_program(rank - 1, 0).pack()),))
        layout = engine if rank else trainer
        setups.append(member.Setup(rank, layout.pack(), tuple(legs), deadline.remaining()))
    return setups


def _offers(plan: Plan, port: int, seconds: float) -> list[Attach]:
    hops = {n: new_key() for n, engine in enumerate(plan.engines) if engine.relay != NOBODY}
    return [
        Attach(
            seconds, "bench", 1, HOST, port, new_key(), 1, 2, plan.wire, plan.digest, b"", n,
            upstream=hops.get(n, ""), downstream=hops.get(plan.passes_to(n), ""),
        )
        for n in range(ENGINES)
    ]  # fmt: skip


def _turns(members: Members[talk.Done], runs: int, plans: list[Plan], deadline: Deadline) -> Case:
    def run(plan: int) -> tuple[float, float]:
        command = msgspec.json.encode(member.Update(plan, secrets.token_hex(8))) + b"\n"
        answers = members.ask([command] * (1 + ENGINES), deadline)
        return max(a.seconds for a in answers), answers[0].cpu

    for plan in (0, 1):
        run(plan)
    relayed, direct = [], []
    for _ in range(runs):
        relayed.append(run(0))
        direct.append(run(1))
    return Case.paired(
        "relayed",
        [seconds for seconds, _ in relayed],
        [seconds for seconds, _ in direct],
        unit="s",
        variant=f"1+{ENGINES}",
        detail={
            "GB sent by the trainer": float(plans[0].sent_bytes[0]) / 1e9,
            "GB without relays": float(plans[1].sent_bytes[0]) / 1e9,
            "trainer's processor seconds": min(cpu for _, cpu in relayed),
            "without relays": min(cpu for _, cpu in direct),
        },
    )
