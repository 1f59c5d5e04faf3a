"""A trainer and engines that are plain torch modules: real store, real Gloo groups, real owner threads and front; only
the serving engine is left out. Every rank is a thread of this process."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import numpy as np
import torch
from layouts import canonical, local_values, random_side, random_tensors
from weightlink.attach import attach
from weightlink.board import Board
from weightlink.front import EngineFront
from weightlink.group import TrainerGroup
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import (
    NotIdle,
    WeightlinkError,
)
from weightlink.hooks.geometry import Layout, ParamSpec, TensorSpec
from weightlink.hooks.manager import PluginManager
from weightlink.hooks.settings import EngineSettings, LinkSettings, PauseMode, WireSettings
from weightlink.rank import EngineRank
from weightlink.update import Update, failure

LONG = 30.0


class TorchEngine:
    """One rank of an engine that is nothing but tensors: implements the inference adapter over a given layout."""

    def __init__(self, place: m.RankPlace, layout: Layout, dtype: str, log: list[str]) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self.layout, self.dtype, self.log = layout, dtype, log
        self.params = [torch.full(p.shape, torch.nan, dtype=getattr(torch, p.dtype)) for p in layout.params]
        self.idle = True
        self.shape = "as built"
        self.fail: dict[str, Exception] = {}

    def _note(self, what: str) -> None:
        self.log.append(f"{self.place.rank} {what}")
        if what in self.fail:
            raise self.fail.pop(what)

    def context(self) -> m.EngineContext:
        return m.EngineContext(
            protocol=m.PROTOCOL, engine="torch", engine_version="0", weightlink_version="0", hf_config={},
            architecture="Toy", dtype=self.dtype, tp_size=self.place.tp_size, pp_size=1, world=self.place.world,
            device="cpu", transports=("p2p",), owns_weights=False,
        )  # fmt: skip

    def fingerprint(self, selector: str) -> str:
        return f"{selector} {self.shape}"

    def observe(self, tensors: Sequence[TensorSpec], kind: str, selector: str) -> Layout:
        self._note("observe")
        known = {t.name: n for n, t in enumerate(self.layout.tensors)}
        order = {known[t.name]: n for n, t in enumerate(tensors) if t.name in known}
        regions = self.layout.regions.take(np.isin(self.layout.regions.tensor, list(order)))
        regions.tensor = np.array([order[int(t)] for t in regions.tensor], np.int32)
        return Layout(str(self.place), tuple(tensors), self.layout.params, regions, self.layout.fills)

    def tensors(self, params: Sequence[ParamSpec]) -> Sequence[torch.Tensor]:
        return self.params

    def require_idle(self, mode: PauseMode) -> None:
        if not self.idle:
            raise NotIdle("a batch is running", rank=str(self.place))

    def begin(self, params: Sequence[ParamSpec]) -> None:
        self._note("begin")

    def synchronize(self) -> None:
        self._note("synchronize")

    def finish(self) -> None:
        self._note("finish")

    def commit(self, version: int, *, flush: bool) -> None:
        self._note(f"commit {version}")


class Port:
    """The front's way to the ranks."""

    paused = False

    def __init__(self, ranks: list[EngineRank], context: m.EngineContext) -> None:
        self.ranks, self._context = ranks, context
        self.shown: list[int] = []
        self.log: list[str] = []

    async def ask(self, data: bytes) -> list[bytes]:
        return [answer for rank, answer in [(rank, rank.handle(data)) for rank in self.ranks] if rank.leads]

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        self.log.append(f"pause {mode}")

    async def resume(self) -> None:
        self.paused = False
        self.log.append("resume")

    async def committed(self, version: int) -> None:
        self.shown.append(version)

    def default_pause_mode(self) -> PauseMode:
        return "retract"

    def check_pause_mode(self, mode: PauseMode) -> None:
        pass

    async def context(self) -> m.EngineContext:
        return self._context


class Engine:
    """Ranks, boards and front of one engine, in threads. ``layouts`` are those of all its replicas' ranks in turn."""

    def __init__(
        self, name: str, layouts: Sequence[Layout], dtype: str, plugins: PluginManager, replicas: int = 1
    ) -> None:
        from weightlink.client import LocalClient

        self.log: list[str] = []
        tp = len(layouts) // replicas
        places = [
            m.RankPlace.at(tp_rank=r, tp_size=tp, pp_rank=0, pp_size=1, dp_rank=d, dp_size=replicas)
            for d in range(replicas)
            for r in range(tp)
        ]
        self.adapters = [TorchEngine(p, layout, dtype, self.log) for p, layout in zip(places, layouts, strict=True)]
        boards: list[Board] = []
        for _ in range(replicas):
            host = Board.host("127.0.0.1", tp, "k", Deadline.after(LONG))
            boards.append(host)
            boards += [Board.join("127.0.0.1", host.port, r, tp, "k", Deadline.after(LONG)) for r in range(1, tp)]
        self.boards = boards
        self.ranks = [EngineRank(a, b, plugins) for a, b in zip(self.adapters, boards, strict=True)]
        self.port = Port(self.ranks, self.adapters[0].context())
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.front = EngineFront(self.port, EngineSettings(enabled=True), owns_weights=False)
        self.client = LocalClient(name, self)

    async def handle(self, request: m.Request) -> m.Reply:
        return await self.front.handle(request)

    def poison(self) -> None:
        for adapter in self.adapters:
            for param in adapter.params:
                param.fill_(torch.nan)

    def expect(self, values: dict[str, np.ndarray]) -> None:
        for adapter in self.adapters:
            for have, want in zip(adapter.params, local_values(adapter.layout, values), strict=True):
                expected = torch.from_numpy(want).to(have.dtype)
                assert torch.equal(have, expected)

    async def _quiet(self) -> None:
        """End what the front still does by itself, its heartbeat above all."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._quiet(), self.loop).result(LONG)
        for rank in self.ranks:
            rank.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LONG)
        for board in reversed(self.boards):
            board.close()


class TorchTrainer:
    """One trainer rank that is nothing but tensors."""

    kind = "hf"
    device = torch.device("cpu")

    def __init__(self, layout: Layout, log: list[str]) -> None:
        self.own, self.log = layout, log
        self.params = [torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in layout.params]
        self.fail: Exception | None = None

    def load(self, values: dict[str, np.ndarray]) -> None:
        for param, value in zip(self.params, local_values(self.own, values, poison=0.0), strict=True):
            param.copy_(torch.from_numpy(value))

    def make_readable(self, deadline: Deadline) -> None:
        self.log.append("readable")

    def layout(self, context: m.EngineContext, family: str | None, exclude: Sequence[str] = ()) -> Layout:
        self.log.append(f"layout for {context.architecture}")
        if self.fail is not None:
            raise self.fail
        return self.own

    def tensors(self) -> Sequence[torch.Tensor]:
        return self.params

    def synchronize(self) -> None:
        pass


class Rig:
    """A trainer of several ranks and some engines."""

    def __init__(self, trainers: Sequence[Layout], engines: dict[str, Sequence[Layout]], **settings) -> None:
        from weightlink.rendezvous import Rendezvous

        self.plugins = PluginManager(entry_points=False, builtins=["weightlink.plugins.transports"])
        wire = WireSettings(bucket_bytes=4096, direct_bytes=512, max_peers=settings.pop("max_peers", 1))
        replicas = settings.pop("replicas", 1)
        self.settings = LinkSettings(wire=wire, timeout=LONG, **settings)
        self.log: list[str] = []
        self.trainers = [TorchTrainer(layout, self.log) for layout in trainers]
        self.engines = {
            name: Engine(
                name,
                layouts * replicas,
                layouts[0].params[0].dtype if layouts[0].params else "float32",
                self.plugins,
                replicas,
            )
            for name, layouts in engines.items()
        }
        self.listener = Rendezvous.listen("127.0.0.1", Deadline.after(LONG))
        self.attachments: list = []
        self.epoch = 0
        self.turn = 0

    def each(self, work, seconds: float = LONG):
        """Run ``work(rank, group, deadline)`` on every trainer rank; results, or the first error."""
        from torch.distributed import PrefixStore
        from weightlink.rendezvous import connect

        self.turn += 1
        results: list = [None] * len(self.trainers)
        deadline = Deadline.after(seconds)

        def run(rank: int) -> None:
            try:
                store = connect("127.0.0.1", self.listener.port, deadline)
                group = TrainerGroup(store, rank, len(self.trainers), None, "127.0.0.1", self.listener.port)
                group._store = PrefixStore(f"turn{self.turn}", store)
                results[rank] = work(rank, group, deadline)
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
                results[rank] = error

        threads = [threading.Thread(target=run, args=(r,)) for r in range(len(self.trainers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 20)
            assert not thread.is_alive(), "a trainer rank hangs beyond its deadline"
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            if isinstance(errors[0], WeightlinkError):
                assert len(errors) == len(results), f"only some ranks raised: {results}"
            raise errors[0]
        return results

    def clients(self, rank: int):
        return [engine.client for engine in self.engines.values()] if rank == 0 else []

    def connect(self, seconds: float = LONG) -> None:
        self.epoch += 1
        for attachment in self.attachments:
            attachment.close()
        self.attachments = self.each(
            lambda rank, group, deadline: attach(
                link="link", epoch=self.epoch, group=group, adapter=self.trainers[rank], clients=self.clients(rank),
                settings=self.settings, plugins=self.plugins, deadline=deadline,
            ),
            seconds,
        )  # fmt: skip

    def push(self, version: int, seconds: float = LONG):
        def work(rank, group, deadline):
            update = Update(
                link="link", group=group, adapter=self.trainers[rank], clients=self.clients(rank),
                settings=self.settings, attachment=self.attachments[rank], version=version, deadline=deadline,
            )  # fmt: skip
            outcome = update.run()
            if outcome.error:
                raise failure(outcome)
            return outcome.report

        reports = self.each(work, seconds)
        assert len({r.json() for r in reports}) == 1
        return reports[0]

    def close(self) -> None:
        for attachment in self.attachments:
            attachment.close()
        for engine in self.engines.values():
            engine.close()
        self.listener.close()


def make(
    seed: int, trainers: int = 2, engines: tuple[int, ...] = (2,), dtype: str = "float32", *, equal=False, **settings
):
    """Engines of the given numbers of ranks; ``equal`` ones all have the first one's layouts."""
    rng = random.Random(seed)
    tensors = random_tensors(rng, 6)
    sides = [random_side(rng, "trainer", tensors, trainers, padding=True, replicas=True)]
    wanted = [TensorSpec(t.name, t.shape, dtype) for t in tensors]
    for world in engines:
        sides.append(random_side(rng, "rank", wanted, world, padding=True, replicas=True))
    for layouts in sides[1:]:
        for layout in layouts:
            layout.tensors = tuple(tensors)
    if equal:
        sides[2:] = [sides[1]] * len(engines[1:])
    rig = Rig(sides[0], {f"http://e{n}": side for n, side in enumerate(sides[1:])}, **settings)
    return rig, tensors


def load(rig: Rig, tensors, factor: float = 1.0):
    values = {name: value * factor for name, value in canonical(tensors).items()}
    for trainer in rig.trainers:
        trainer.load(values)
    return values
