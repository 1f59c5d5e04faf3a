"""What a plan costs: bytes, balance, rounds, messages and memory per rank, and the least that any plan would cost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from weightlink.converters.boxes import Boxes, overlaps
from weightlink.hooks.geometry import ITEMSIZE, Int64, Layout, Regions
from weightlink.plan import EngineLayouts, Plan
from weightlink.relays import NOBODY
from weightlink.survey import merge_manifest

IN_FLIGHT = 2
Floats = npt.NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True):
    """Over ranks."""

    least: int
    mean: float
    most: int

    @classmethod
    def of(cls, values: Int64) -> Spread:
        """Of any number of ranks."""
        if not len(values):
            return cls(0, 0.0, 0)
        return cls(int(values.min()), float(values.mean()), int(values.max()))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one plan. Bytes are wire bytes.

    :param regions: boxes that trainer ranks hold, and that engine ranks take
    :param total: of one update
    :param needed: the sum of what every engine rank must receive, each element once: no plan moves less
    :param balance: bytes of the most loaded sender over the least possible ones
    :param ideal: the least possible bytes of the most loaded trainer rank for the engines that the trainer serves,
        found by shifting between replicas
    :param relayed: engines that take their bytes from another one
    :param rounds: of each engine, up to its last one
    :param messages: buckets of all engines
    :param staging: memory beside the weights that a sender, and a receiver, needs at most
    :param weights: memory of the weights themselves, per trainer and engine rank
    """

    tensors: int
    regions: tuple[int, int]
    total: int
    needed: int
    sent: Spread
    received: Spread
    balance: float
    ideal: float
    rounds: tuple[int, ...]
    messages: int
    staging: tuple[int, int]
    weights: tuple[Spread, Spread]
    relayed: int = 0


def figures(plan: Plan, trainers: Sequence[Layout], engines: Sequence[EngineLayouts]) -> Figures:
    """All of them."""
    needed = [needed_bytes(layout) for engine in engines for layout in engine.layouts]
    received = np.array(needed, np.int64)
    turn = plan.wire.bucket_bytes * plan.wire.max_peers
    opaque = max((layout.staged_bytes for engine in engines for layout in engine.layouts), default=0)
    served = [engine for engine, made in zip(engines, plan.engines, strict=True) if made.relay == NOBODY]
    ideal = ideal_load(trainers, served)
    return Figures(
        tensors=len(plan.manifest),
        regions=(
            sum(len(layout.regions) for layout in trainers),
            sum(len(layout.regions) for engine in engines for layout in engine.layouts),
        ),
        total=plan.total_bytes,
        needed=sum(needed),
        sent=Spread.of(plan.sent_bytes),
        received=Spread.of(received),
        balance=float(plan.sent_bytes.max(initial=0)) / ideal if ideal else 1.0,
        ideal=ideal,
        rounds=tuple(engine.rounds for engine in plan.engines),
        messages=sum(len(engine.bucket_bytes) for engine in plan.engines),
        staging=(IN_FLIGHT * turn * len(served), IN_FLIGHT * turn + opaque),
        weights=(
            Spread.of(np.array([_weights(layout) for layout in trainers], np.int64)),
            Spread.of(np.array([_weights(layout) for engine in engines for layout in engine.layouts], np.int64)),
        ),
        relayed=len(engines) - len(served),
    )


def needed_bytes(layout: Layout) -> int:
    """Wire bytes that an engine rank cannot do without."""
    sizes = np.array([ITEMSIZE[param.dtype] for param in layout.params] or [0], np.int64)
    return int((layout.regions.size.prod(axis=1) * sizes[layout.regions.param]).sum())


def _weights(layout: Layout) -> int:
    """Memory of a rank's parameters, each storage once."""
    storages: dict[int, int] = {}
    for param in layout.params:
        if not param.staged:
            size = ITEMSIZE[param.dtype] * int(np.prod(param.shape, dtype=np.int64))
            storages[param.storage] = max(storages.get(param.storage, 0), size)
    return sum(storages.values())


def ideal_load(trainers: Sequence[Layout], engines: Sequence[EngineLayouts]) -> float:
    """The least possible bytes of the most loaded sender, were every byte divisible among those that hold it."""
    demand, sets = demands(trainers, engines)
    return least_possible(demand, sets, len(trainers)) if len(demand) else 0.0


def demands(trainers: Sequence[Layout], engines: Sequence[EngineLayouts]) -> tuple[Floats, list[tuple[int, ...]]]:
    """Wire bytes per set of trainer ranks that hold the same boxes."""
    manifest = merge_manifest(trainers)
    numbers = {spec.name: n for n, spec in enumerate(manifest)}
    maps = [np.array([numbers[spec.name] for spec in layout.tensors], np.int64) for layout in trainers]
    held = Regions.concat(layout.regions for layout in trainers)
    tensor = np.concatenate([m[layout.regions.tensor] for m, layout in zip(maps, trainers, strict=True)])
    rank = np.repeat(np.arange(len(trainers)), [len(layout.regions) for layout in trainers])
    sources = Boxes(tensor, held.lo, held.size, held.step)
    first, inverse = sources.unique()
    whole = sources.take(first)
    wanted = np.zeros(len(first))
    for layouts, count in _alike(engines):
        for layout in layouts:
            r = layout.regions
            pairs = overlaps(whole, Boxes(r.tensor.astype(np.int64), r.lo, r.size, r.step))
            sizes = np.array([ITEMSIZE[param.dtype] for param in layout.params] or [0], np.int64)[r.param]
            wanted += count * np.bincount(pairs.a, pairs.size.prod(axis=1) * sizes[pairs.b], len(first))
    # Bits of the ranks that hold each box, then bytes per set of ranks.
    holds = np.zeros((len(first), len(trainers)), bool)
    holds[inverse, rank] = True
    packed, group = np.unique(np.packbits(holds, axis=1), axis=0, return_inverse=True)
    grouped: Floats = np.bincount(group.reshape(-1), wanted, len(packed)).astype(np.float64)
    members = np.unpackbits(packed, axis=1, count=len(trainers)).astype(bool)
    return grouped, [tuple(np.flatnonzero(row).tolist()) for row in members]


def _alike(engines: Sequence[EngineLayouts]) -> list[tuple[Sequence[Layout], int]]:
    """Engines that share their layouts, once, and how many they are."""
    found: dict[int, tuple[Sequence[Layout], int]] = {}
    for engine in engines:
        layouts, count = found.get(id(engine.layouts), (engine.layouts, 0))
        found[id(engine.layouts)] = (layouts, count + 1)
    return list(found.values())


def least_possible(demand: Floats, sets: Sequence[tuple[int, ...]], ranks: int) -> float:
    """The smallest maximum load when each demand may be divided over its set: a bound by multiplicative weights.

    The dual of the balancing problem: for every weighting of the ranks that sums to one, the demands, each at the
    cheapest rank of its set, are a lower bound. The best of many weightings is returned, never more than the optimum.
    """
    flat = np.concatenate([np.array(s, np.int64) for s in sets])
    starts = np.cumsum([0, *(len(s) for s in sets)])[:-1]
    sizes = np.array([len(s) for s in sets])
    best = 0.0
    load = np.zeros(ranks)
    for turn in range(1, 401):
        # Fictitious play: demands go to the least loaded ranks so far, ranks are priced by what they carry.
        top = load.max(initial=0.0)
        price = np.exp((load - top) / max(top, 1e-30) * 50.0) if top else np.ones(ranks)
        price /= price.sum()
        cheapest = np.minimum.reduceat(price[flat], starts)
        best = max(best, float((demand * cheapest).sum()))
        chosen = np.isclose(price[flat], np.repeat(cheapest, sizes), rtol=1e-9)
        count = np.add.reduceat(chosen.astype(np.int64), starts)
        share = np.repeat(demand / count, sizes) * chosen
        load = (1 - 1 / turn) * load + 1 / turn * np.bincount(flat, share, ranks)
    return best
