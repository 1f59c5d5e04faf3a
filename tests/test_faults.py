"""What goes wrong in production: late and dead trainer ranks, engines that hang, two trainers, lost answers. The rig of
rig.py, with real links whose trainer group lives as long as they do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
from rig import LONG, Rig, load
from torch.distributed import PrefixStore
from weightlink.converters.coverage import Violations, prove_destination
from weightlink.group import TrainerGroup
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConflictError, UpdateFailed, VersionError, WeightlinkError, describe
from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.link import Link
from weightlink.rendezvous import connect
from weightlink.update import Update


def links(rig: Rig) -> list[Link]:
    """A link per trainer rank."""
    made = []
    for rank in range(len(rig.trainers)):
        store = connect("127.0.0.1", rig.listener.port, Deadline.after(LONG))
        group = TrainerGroup(store, rank, len(rig.trainers), None, "127.0.0.1", rig.listener.port)
        group._store = PrefixStore("links", store)
        link = object.__new__(Link)
        link.id, link.settings, link.version = "link", rig.settings, None
        link._plugins, link._epoch, link._attachment, link._closed = rig.plugins, 0, None, False
        link._clients, link._adapter, link._group = rig.clients(rank), rig.trainers[rank], group
        made.append(link)
    return made


def every(made: list[Link], work, delays=()):
    """``work(link)`` on every rank at once; results or errors."""
    results: list = [None] * len(made)

    def run(rank: int) -> None:
        time.sleep(dict(delays).get(rank, 0))
        try:
            results[rank] = work(made[rank])
        except BaseException as error:  # noqa: BLE001 - judged by the test
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def fine(results) -> bool:
    return not any(isinstance(result, BaseException) for result in results)


def test_a_late_trainer_rank_fails_one_push_and_not_the_link(rigs):
    rig, tensors = rigs(6)
    made = links(rig)
    load(rig, tensors)
    assert fine(every(made, lambda link: link.push(1)))
    late = every(made, lambda link: link.push(2, timeout=0.5), delays={1: 17.0}.items())
    assert isinstance(late[0], WeightlinkError)
    assert "trainer ranks 1" in str(late[0])
    values = load(rig, tensors, 3.0)
    assert fine(every(made, lambda link: link.push(3, timeout=20)))
    rig.engines["http://e0"].expect(values)


def test_an_engine_that_hangs_ends_the_push_on_every_rank_alike(rigs):
    rig, tensors = rigs(6)
    made = links(rig)
    load(rig, tensors)
    assert fine(every(made, lambda link: link.push(1)))
    engine = rig.engines["http://e0"]
    handle = engine.front.handle

    async def hung(request):
        if isinstance(request, m.Status | m.Commit | m.Abort):
            await asyncio.sleep(3600)
        return await handle(request)

    engine.front.handle = hung
    results = every(made, lambda link: link.push(2, timeout=2.0))
    assert all(isinstance(result, UpdateFailed) for result in results), results
    assert len({str(result) for result in results}) == 1
    engine.front.handle = handle
    values = load(rig, tensors, 3.0)
    assert fine(every(made, lambda link: link.push(3, timeout=20)))
    engine.expect(values)


def test_the_engines_own_reason_survives_the_deadline(rigs):
    rig, tensors = rigs(6)
    made = links(rig)
    load(rig, tensors)
    assert fine(every(made, lambda link: link.push(1)))
    engine = rig.engines["http://e0"]
    engine.adapters[1].idle = False
    results = every(made, lambda link: link.push(2, timeout=1.5))
    for result in results:
        assert "a batch is running" in str(result)
        assert "rank 1" in str(result)
    assert engine.front.state is m.EngineState.READY
    assert not engine.port.paused


def test_a_refusal_that_waiting_cannot_cure_is_not_waited_for(rigs):
    rig, tensors = rigs(6)
    rig.connect()
    load(rig, tensors)
    rig.push(1)
    engine = rig.engines["http://e0"]
    asked = []

    def refuse(mode):
        asked.append(mode)
        raise ConflictError("a session of the engine's own is open")

    engine.adapters[0].require_idle = refuse
    with pytest.raises(ConflictError, match="session of the engine's own"):
        rig.push(2)
    assert len(asked) == 1
    assert not engine.port.paused


@pytest.mark.parametrize("during", ["push", "connect"])
def test_a_pause_that_runs_out_is_taken_back(rigs, during):
    """SGLang marks itself paused first and then waits for its requests to go."""
    rig, tensors = rigs(3)
    rig.connect()
    load(rig, tensors)
    rig.push(1)
    engine = rig.engines["http://e0"]

    async def slow(mode):
        engine.port.paused = True
        await asyncio.sleep(3600)

    engine.port.pause = slow
    with pytest.raises(WeightlinkError, match="to pause"):
        rig.push(2, seconds=1.0) if during == "push" else rig.connect(seconds=1.0)
    assert engine.front.state is m.EngineState.READY
    assert not engine.port.paused


def test_an_update_that_nobody_commits_is_given_up_at_its_deadline(rigs, monkeypatch):
    rig, tensors = rigs(4)
    rig.connect()
    load(rig, tensors)
    rig.push(1)
    engine = rig.engines["http://e0"]

    def die(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Update, "_finish", die)
    monkeypatch.setattr(Update, "_give_up", lambda self, reason: None)  # a dead process tells nobody
    with pytest.raises((KeyboardInterrupt, WeightlinkError)):
        rig.push(2, seconds=2)
    end = time.monotonic() + 20
    while engine.front.state is m.EngineState.UPDATING and time.monotonic() < end:
        time.sleep(0.1)
    assert engine.front.state is m.EngineState.DIRTY
    assert not engine.front.serving
    monkeypatch.undo()
    values = load(rig, tensors, 3.0)
    rig.connect()
    rig.push(3)
    engine.expect(values)


def test_a_commit_whose_answer_is_lost_is_a_commit(rigs):
    rig, tensors = rigs(6)
    rig.connect()
    values = load(rig, tensors)
    engine = rig.engines["http://e0"]
    resume, calls = engine.port.resume, []

    async def once():
        calls.append(1)
        if len(calls) == 2:  # the first is connect's
            raise RuntimeError("the scheduler's socket is busy")
        await resume()

    engine.port.resume = once
    engine.port.paused = False
    assert rig.push(1).engines[0].committed
    engine.expect(values)
    assert engine.front.version == 1
    assert not engine.port.paused


def test_begin_checks_the_version_too(rigs):
    rig, tensors = rigs(5)
    rig.connect()
    load(rig, tensors)
    rig.push(7)
    with pytest.raises(VersionError):
        rig.engines["http://e0"].client.send(m.Begin(5.0, "link", "another", 7), Deadline.after(5))


def test_an_engine_that_is_being_healed_does_not_serve(rigs):
    rig, tensors = rigs(13)
    rig.connect()
    load(rig, tensors)
    rig.push(1)
    engine = rig.engines["http://e0"]
    engine.adapters[1].fail["finish"] = RuntimeError("kaboom")
    with pytest.raises(WeightlinkError):
        rig.push(2)
    rig.connect()
    seen = []
    engine.adapters[0].synchronize = lambda: seen.append(engine.front.serving)
    rig.push(3)
    assert seen
    assert not any(seen)
    assert engine.front.serving


def test_too_few_engines_commit_nothing(rigs):
    rig, tensors = rigs(19, 2, (1, 1, 1), min_engines=2)
    rig.connect()
    load(rig, tensors)
    first, second, third = rig.engines.values()
    for engine in (first, second):
        engine.adapters[0].fail["finish"] = RuntimeError("kaboom")
    with pytest.raises(UpdateFailed):
        rig.push(1)
    assert third.front.version is None


def plain(rank: str, names: list[str]) -> Layout:
    regions = RegionBuilder()
    for n in range(len(names)):
        regions.add(n, n, lo=[0, 0], size=[4, 3], offset=0, stride=[3, 1])
    params = tuple(ParamSpec(name, (4, 3), "float32", n, 0, (3, 1)) for n, name in enumerate(names))
    return Layout(rank, tuple(TensorSpec(name, (4, 3), "float32") for name in names), params, regions.build())


def test_a_second_trainers_questions_do_not_redirect_the_firsts_writes():
    """An engine may number its parameters differently for every manifest."""
    rig = Rig([plain("trainer 0", ["a", "b"])], {"http://e0": [plain("rank 0", ["a", "b"])]})
    try:
        engine = rig.engines["http://e0"]
        held = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}
        engine.adapters[0].observe = lambda tensors, kind, _: plain("rank 0", [t.name for t in tensors])
        engine.adapters[0].tensors = lambda params: [held[p.name] for p in params]
        rig.connect()
        for value, param in enumerate(rig.trainers[0].params, 1):
            param.fill_(value)
        other = (TensorSpec("b", (4, 3), "float32"), TensorSpec("a", (4, 3), "float32"))
        engine.client.send(m.Observe(5.0, other, "hf"), Deadline.after(5))
        rig.push(1)
        assert held["a"].eq(1).all()
        assert held["b"].eq(2).all()
    finally:
        rig.close()


def test_channels_of_a_join_that_fails_are_closed(rigs, monkeypatch):
    import weightlink.attach
    from weightlink.plugins.transports.channel import P2PChannel

    opened, closed = [], []
    init, close = P2PChannel.__init__, P2PChannel.close
    monkeypatch.setattr(P2PChannel, "__init__", lambda self, *a: (init(self, *a), opened.append(self))[0])
    monkeypatch.setattr(P2PChannel, "close", lambda self: (closed.append(self), close(self))[1])
    rig, _ = rigs(6)
    sender, failed = weightlink.attach.Sender, []

    def fail_once(*args):
        if not failed:
            failed.append(1)
            raise MemoryError("no staging memory")
        return sender(*args)

    monkeypatch.setattr(weightlink.attach, "Sender", fail_once)
    with pytest.raises((MemoryError, WeightlinkError), match="no staging memory"):
        rig.connect()
    assert [c.rank for c in opened if c.rank < 2 and c not in closed] == []


def test_a_view_far_outside_its_parameter_is_refused_and_not_followed():
    size = np.array([[2, 2, 1, 1, 1], [1 << 24, 1, 1, 1, 1]])
    stride = np.array([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])  # the first is no box, so that elements are counted
    found, spec = Violations(), ParamSpec("p", (6,), "float32", 0, 0, (1,))
    prove_destination([spec], np.zeros(2, int), np.array([0, 2]), size, stride, rank="r", owned=[], found=found)
    assert any("beyond the parameter" in line for line in found.lines)


def test_odd_messages_are_refused_as_messages():
    nested = b"\x91" * 200_000 + b"\x01"
    with pytest.raises(msgspec.MsgspecError):
        m.decode_request(b"\x83\xa4type\xa6Status\xa6budget\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa1x" + nested)
    status = m.RankStatus(rank=0, seq=1, error=describe(RuntimeError("half a \ud800 pair")))
    assert m.unpack_status(m.pack_status(status)) == status


def test_a_rank_that_loses_trainer_rank_0_gets_a_named_error(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        """
import os, sys, time
import torch.distributed as dist
from weightlink.group import TrainerGroup
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import TransferError

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
group = TrainerGroup.form(None, lambda: "127.0.0.1", Deadline.after(20))
group.together(lambda: 1, Deadline.after(20), "a step")
if rank == 0:
    time.sleep(1)
    os._exit(9)
try:
    group.lead(lambda: b"", Deadline.after(15), "the engines to commit")
except TransferError as error:
    print("NAMED", str(error).replace(chr(10), " "), flush=True)
os._exit(0)
"""
    )
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    out = ranks[1].communicate(timeout=90)[0]
    ranks[0].communicate(timeout=10)
    assert "NAMED lost trainer rank 0's store" in out
