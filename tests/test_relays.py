"""Fan-out: who relays to whom, that every engine of a chain gets and checks what the trainer sent, and who fails with
whom. Real Gloo groups; ranks are threads."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
import weightlink.bound
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import random_side, random_tensors
from rig import LONG, load
from test_wire import CPU, DIMS, Boxes, Case
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, PlanMismatch, TransferError, UpdateFailed
from weightlink.hooks.geometry import Fills
from weightlink.hooks.settings import WireSettings
from weightlink.hops import DOWNSTREAM, UPSTREAM, Hops
from weightlink.link import _settings
from weightlink.plan import EngineLayouts, build_plan
from weightlink.plugins.bench.shapes import shape
from weightlink.relays import NOBODY, WORTH, choose_relays, source_of
from weightlink.wire import Receiver

# --- who relays to whom ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_every_engine_is_in_one_chain_of_its_kind(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    twins = [kinds.index(kind) for kind in kinds]
    hosts = [[rng.choice("abc")] for _ in kinds]
    received = rng.randint(1, 100)
    sent = rng.randint(1, 100 * len(kinds))
    relay = choose_relays(twins, hosts, sent, received)
    if sent <= received * WORTH:
        assert relay == [NOBODY] * len(kinds)
        return
    assert max(Counter(n for n in relay if n != NOBODY).values(), default=0) <= 1  # one passes on to one
    for engine, before in enumerate(relay):
        assert before == NOBODY or twins[before] == twins[engine]
        assert relay[source_of(relay, engine)] == NOBODY
    for kind in set(kinds):
        mine = [n for n, k in enumerate(kinds) if k == kind]
        heads = [n for n in mine if relay[n] == NOBODY]
        # What the trainer still sends is no more than a rank receives, unless one chain is all that is left.
        assert len(heads) == 1 or len(heads) * sent <= len(mine) * received
        # Neighbours are on other machines no more often than they must be.
        changes = sum(hosts[n] != hosts[relay[n]] for n in mine if relay[n] != NOBODY)
        assert changes <= len({hosts[n][0] for n in mine}) - 1


def planned(trainers: int, engines: int, world: int, *, relay: bool = True):
    rng = random.Random(7)
    tensors = random_tensors(rng, 40)
    side = random_side(rng, "rank", tensors, world, padding=True, replicas=False)
    # Every trainer rank has everything: so many replicas are there.
    replica = random_side(random.Random(1), "trainer", tensors, 1, padding=False, replicas=False)[0]
    plan = build_plan(
        [replica] * trainers,
        [EngineLayouts(f"e{n}", side) for n in range(engines)],
        WireSettings(bucket_bytes=4096, direct_bytes=512, relay=relay),
    )
    return plan, replica


def test_the_trainer_sends_once_what_four_equal_engines_take() -> None:
    plan, replica = planned(1, 4, 1)
    alone, _ = planned(1, 4, 1, relay=False)
    assert [e.relay for e in plan.engines] == [NOBODY, 0, 1, 2]
    assert alone.sent_bytes.tolist() == [4 * n for n in plan.sent_bytes.tolist()]
    assert plan.total_bytes == alone.total_bytes
    assert [e.relay for e in alone.engines] == [NOBODY] * 4
    assert len(plan.send_program(0, 0, replica).copies)
    for number in range(1, 4):
        assert not len(plan.send_program(number, 0, replica).copies)
        assert plan.receive_program(number, 0).digest() == plan.receive_program(0, 0).digest()
    assert plan.digest != alone.digest


@pytest.mark.parametrize(("trainers", "heads"), [(1, 1), (2, 2), (4, 4), (5, 4)])
def test_as_many_engines_are_served_as_there_are_replicas(trainers: int, heads: int) -> None:
    plan, _ = planned(trainers, 4, 1)
    assert sum(e.relay == NOBODY for e in plan.engines) in (heads, heads - 1)
    assert (trainers >= 4) == (heads == 4 and all(e.relay == NOBODY for e in plan.engines))


def test_engines_that_differ_do_not_relay() -> None:
    rng = random.Random(3)
    tensors = random_tensors(rng, 20)
    sides = [random_side(rng, "rank", tensors, 2, padding=True, replicas=True) for _ in range(3)]
    trainer = random_side(rng, "trainer", tensors, 1, padding=False, replicas=False)
    plan = build_plan(
        trainer,
        [EngineLayouts(f"e{n}", sides[k]) for n, k in enumerate([0, 1, 0, 2])],
        WireSettings(bucket_bytes=4096, direct_bytes=512),
    )
    assert [e.relay for e in plan.engines] == [NOBODY, NOBODY, 0, NOBODY]


# --- the wire -------------------------------------------------------------------------------------------------------


class Late:
    """A neighbour that takes every message at the last moment: as late as the sender waits for it."""

    def __init__(self, boxes: Boxes, me: int) -> None:
        self.boxes, self.me = boxes, me

    def post(self, sends, receives, deadline):
        return _Later(self, list(sends), list(receives))


class _Later:
    def __init__(self, late: Late, sends, receives) -> None:
        self.late, self.sends, self.receives = late, sends, receives

    def wait(self, deadline) -> None:
        for peer, tensor in self.sends:
            self.late.boxes.setdefault((self.late.me, peer), deque()).append(tensor.clone())
        for peer, tensor in self.receives:
            tensor.copy_(self.late.boxes[(peer, self.late.me)].popleft())


@pytest.mark.parametrize("peers", [1, 2])
def test_staging_memory_is_kept_until_the_next_engine_has_it(peers: int) -> None:
    case = Case(shape(DIMS, 2, 1), WireSettings(bucket_bytes=32768, direct_bytes=6000, max_peers=peers))
    hop: Boxes = {}
    run, deadline = Receiver.run, Deadline.after(60)
    (layout,), (receiver,) = case.made.engines, case.receivers
    assert receiver.staging_bytes < int(receiver.program.buckets.nbytes[receiver.program.buckets.direct == 0].sum())
    receiver.run = lambda tensors, channel, update, left: run(  # type: ignore[method-assign]
        receiver, tensors, channel, update, left, Hops(None, Late(hop, UPSTREAM))
    )
    for seed in (1, 2):
        case.push(seed)
        case.require_arrival()
        case.targets = [case.memory(layout)]  # a second engine's, poisoned
        second = Receiver(receiver.program, Fills(), case.plan.wire, CPU)
        second.run(case.targets[0], None, "update", deadline, Hops(Late(hop, DOWNSTREAM), None))  # type: ignore[arg-type]
        second.check()
        case.require_arrival()
        assert not any(hop.values())


def test_what_a_relay_spoils_the_next_engine_finds() -> None:
    """The trainer's checksums travel along: a relay cannot vouch for bytes that it has changed."""
    case = Case(shape(DIMS, 1, 1))
    hop: Boxes = {}
    run, receiver = Receiver.run, case.receivers[0]
    receiver.run = lambda tensors, channel, update, left: run(  # type: ignore[method-assign]
        receiver, tensors, channel, update, left, Hops(None, Late(hop, UPSTREAM))
    )
    case.push(1)
    hop[(UPSTREAM, DOWNSTREAM)][2][-1] ^= 1
    second = Receiver(receiver.program, Fills(), case.plan.wire, CPU)
    targets = case.memory(case.made.engines[0])
    second.run(targets, None, "update", Deadline.after(60), Hops(Late(hop, DOWNSTREAM), None))  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=r"1 of .* buckets did not arrive as they were sent"):
        second.check()


# --- the transaction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainers", "world", "engines"), [(1, 1, 4), (1, 2, 3), (2, 2, 5)])
def test_a_chain_of_engines_is_updated_in_one_transaction(rigs, trainers: int, world: int, engines: int) -> None:
    rig, tensors = rigs(67, trainers, (world,) * engines, equal=True)
    rig.connect()
    plan = rig.attachments[0].plan
    assert any(e.relay != NOBODY for e in plan.engines)
    for version in (1, 2, 3):
        values = load(rig, tensors, factor=version / 4)
        for engine in rig.engines.values():
            engine.poison()
        report = rig.push(version)
        for engine in rig.engines.values():
            engine.expect(values)
            assert engine.front.version == version
        served = sum(int(e.received.sum()) for e in plan.engines if e.relay == NOBODY)
        assert sum(report.sent) == served
        assert [e.bytes for e in report.engines] == [int(plan.engines[0].received.sum())] * engines


def broken(rig, number: int, monkeypatch: pytest.MonkeyPatch, *, after: int = 1):
    """Let a rank of an engine fail once while it receives."""
    victim = list(rig.engines.values())[number].ranks[0]._link.receiver
    check, calls = weightlink.bound.Message.check, []

    def fail(self, checksum, out):
        if checksum is victim._checksum:
            calls.append(1)
            if len(calls) == after:
                raise RuntimeError("the receiver broke")
        return check(self, checksum, out)

    monkeypatch.setattr(weightlink.bound.Message, "check", fail)


@pytest.mark.parametrize(("number", "whole"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_who_fails_takes_those_behind_it_and_nobody_else(rigs, monkeypatch, number: int, whole: int) -> None:
    rig, tensors = rigs(71, 1, (1,) * 4, equal=True)
    rig.connect()
    assert [e.relay for e in rig.attachments[0].plan.engines] == [NOBODY, 0, 1, 2]
    load(rig, tensors)
    rig.push(1)
    values = load(rig, tensors, factor=2.0)
    broken(rig, number, monkeypatch)
    with pytest.raises(UpdateFailed, match="the receiver broke"):
        rig.push(2)
    every = list(rig.engines.values())
    assert [e.front.version == 2 for e in every] == [n < whole for n in range(4)]
    for engine in every[:whole]:
        engine.expect(values)
    for engine in every[whole:]:
        assert engine.front.state is m.EngineState.DIRTY
    monkeypatch.undo()
    rig.connect()
    for engine in every:
        engine.poison()
    rig.push(3)
    for engine in every:
        engine.expect(values)
        assert engine.front.state is m.EngineState.READY


def test_a_trainer_that_fails_ends_the_whole_chain(rigs, monkeypatch) -> None:
    from weightlink.wire import Sender

    rig, tensors = rigs(73, 1, (1,) * 3, equal=True)
    rig.connect()
    load(rig, tensors)
    monkeypatch.setattr(Sender, "run", lambda *args: (_ for _ in ()).throw(RuntimeError("sender broke")))
    with pytest.raises(UpdateFailed, match="sender broke"):
        rig.push(1)
    monkeypatch.undo()
    values = load(rig, tensors)
    rig.connect()
    rig.push(1)
    for engine in rig.engines.values():
        engine.expect(values)


def test_an_offer_that_contradicts_the_plan_is_refused(rigs) -> None:
    rig, _ = rigs(79, 1, (1,) * 3, equal=True)
    rig.connect()
    plan = rig.attachments[0].plan
    offer = m.Attach(
        5.0, "link", 2, "127.0.0.1", rig.listener.port, "k" * 32, 1, 2, plan.wire, plan.digest, plan.survey.pack(), 1
    )
    with pytest.raises(PlanMismatch, match="other neighbours"):
        list(rig.engines.values())[1].client.send(offer, Deadline.after(LONG))


def test_engines_that_may_fail_alone_do_not_relay() -> None:
    chosen = _settings({"min_engines": 1})
    assert not chosen.wire.relay
    assert _settings({}).wire.relay
    with pytest.raises(ConfigError, match="cannot relay"):
        _settings({"min_engines": 1, "relay": True})
