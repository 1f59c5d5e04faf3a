"""The plan: who sends which boxes to whom, in which bucket and round. Pure arithmetic on a survey, in numpy.

A plan is deterministic: from the same survey every rank computes the same one, and binds its own part of it to its own
memory (:meth:`Plan.send_program`, :meth:`Plan.receive_program`). Nobody needs anybody else's addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
from weightlink.balance import Parts, choose_senders
from weightlink.converters.coverage import Violations, delivered, may_own, prove_reads, prove_single_memory
from weightlink.hooks.errors import LayoutError, PlanMismatch
from weightlink.hooks.geometry import CASTABLE, DIMS, Int64, Layout, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.kinds import UInt64, hash_rows, turns
from weightlink.pieces import Pieces, Sources, pieces_of
from weightlink.program import (
    COVERAGE_REMEDY,
    DTYPE_NUMBER,
    DTYPES,
    Buckets,
    Copies,
    Program,
    require_plain,
    verify_receive,
)
from weightlink.relays import NOBODY, choose_relays, source_of
from weightlink.survey import Holding, Side, Survey, merge_manifest, same_boxes
from weightlink.traffic import Load, Schedule, Traffic


@dataclass(frozen=True)
class EngineLayouts:
    """One engine: a name for messages, its ranks' layouts over the manifest, whether it loaded its own weights, and
    the local names (patterns) that the user declared to be its own business."""

    name: str
    layouts: Sequence[Layout]
    owns_weights: bool = True
    declared: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnginePlan:
    """What goes into one engine. ``received`` are wire bytes per engine rank, without alignment.

    Where ``relay`` is the number of another engine, the buckets are that one's: each rank passes on to the rank of the
    same number here what it received, in the same order."""

    name: str
    world: int
    pieces: Pieces
    sources: Sources
    traffic: Traffic
    received: Int64
    relay: int = NOBODY

    @property
    def bucket_src(self) -> Int64:
        """See :class:`Traffic`."""
        return self.traffic.bucket_src

    @property
    def bucket_dst(self) -> Int64:
        """See :class:`Traffic`."""
        return self.traffic.bucket_dst

    @property
    def bucket_round(self) -> Int64:
        """See :class:`Traffic`."""
        return self.traffic.bucket_round

    @property
    def bucket_bytes(self) -> Int64:
        """See :class:`Traffic`."""
        return self.traffic.bucket_bytes

    @property
    def bucket_alone(self) -> Int64:
        """See :class:`Traffic`."""
        return self.traffic.bucket_alone

    @property
    def rounds(self) -> int:
        """Up to its last one; not all of them need have a bucket for this engine."""
        return int(self.bucket_round.max(initial=-1)) + 1


@dataclass(frozen=True)
class Plan:
    """A full update over one trainer and any number of engines.

    ``sent_bytes`` are wire bytes per trainer rank, all engines together; what engines relay is not among them.
    ``layouts`` are kept by :func:`build_plan` only, which knows those of every rank."""

    survey: Survey
    wire: WireSettings
    engines: tuple[EnginePlan, ...]
    sent_bytes: Int64
    digest: str
    layouts: tuple[Sequence[Layout], tuple[Sequence[Layout], ...]] | None = None
    _own: dict[tuple[int, int, int], _Own] = field(default_factory=dict, repr=False, compare=False)

    @property
    def manifest(self) -> tuple[TensorSpec, ...]:
        """The canonical tensors."""
        return self.survey.manifest

    @property
    def trainers(self) -> int:
        """Number of trainer ranks."""
        return len(self.survey.trainers)

    @property
    def total_bytes(self) -> int:
        """Wire bytes that one update brings to all engines together."""
        return sum(int(engine.received.sum()) for engine in self.engines)

    def passes_to(self, engine: int) -> int:
        """The engine that this one relays to, or :data:`~weightlink.relays.NOBODY`."""
        return next((n for n, e in enumerate(self.engines) if e.relay == engine), NOBODY)

    def send_program(self, engine: int, rank: int, layout: Layout | None = None) -> Program:
        """What trainer rank ``rank``, whose layout this is, does for engine ``engine``.

        Raises :class:`LayoutError` where it would have to cast what cannot be cast."""
        e = self.engines[engine]
        layout = self._layout(layout, 0, 0, rank)
        own = self._find(
            self.survey.trainers, rank, layout, lambda: [self.survey.numbers.get(t.name, -1) for t in layout.tensors]
        )
        mine = np.flatnonzero((e.bucket_src == rank) & (e.relay == NOBODY))
        program = self._program(e, mine, self.trainers + e.bucket_dst[mine], own, sending=True)
        _check_casts(program.copies, layout)
        return program

    def receive_program(self, engine: int, rank: int, layout: Layout | None = None) -> Program:
        """What rank ``rank`` of engine ``engine``, whose layout this is, does."""
        e = self.engines[engine]
        layout = self._layout(layout, 1, engine, rank)
        own = self._find(self.survey.engines[engine], rank, layout, lambda: range(len(layout.tensors)))
        mine = np.flatnonzero(e.bucket_dst == rank)
        return self._program(e, mine, e.bucket_src[mine], own, sending=False)

    def _layout(self, layout: Layout | None, side: int, engine: int, rank: int) -> Layout:
        if layout is not None:
            return layout
        if self.layouts is None:
            raise PlanMismatch("a plan made from a survey needs the rank's own layout to bind to")
        return self.layouts[1][engine][rank] if side else self.layouts[0][rank]

    def _find(self, side: Side, rank: int, layout: Layout, numbers: Callable[[], Sequence[int]]) -> _Own:
        """What a rank has, looked up once for all engines that it serves."""
        key = id(side.table), rank, id(layout)
        if key not in self._own:
            self._own[key] = _Own.of(side, rank, layout, np.array(numbers(), np.int64))
        return self._own[key]

    def _program(self, e: EnginePlan, mine: Int64, peer: Int64, own: _Own, *, sending: bool) -> Program:
        """Bind copies to this rank's regions; the buckets' copies are direct where its own memory is one run."""
        p = e.pieces
        load = e.traffic.load
        bucket, part, number, at = load.packing.copies(e.traffic.order[mine])
        run = load.parts.run[part]
        tensor = p.members[p.start[run] + load.parts.first[part] + number]
        piece = p.piece[run]
        lo, size, step, dtype = p.lo[piece], p.size[piece], p.step[piece], p.dtype[piece]
        region = own.read(tensor, e.sources.key[p.source[piece]]) if sending else (
            own.written(tensor, p.target_key[piece], p.turn[run])
        )  # fmt: skip
        r = own.layout.regions
        index = (lo - r.lo[region]) // r.step[region]
        stride = r.stride[region]
        offset = r.offset[region] + (index * stride).sum(axis=1)
        stride = np.where(size > 1, stride * (step // r.step[region]), 0)
        param = r.param[region]
        kept = np.array([DTYPE_NUMBER[spec.dtype] for spec in own.layout.params] or [0], np.int64)[param]
        direct = (e.bucket_alone[mine[bucket]] == 1) & contiguous(size, stride) & (kept == dtype)
        is_direct = np.zeros(len(mine), np.int32)
        is_direct[bucket[direct]] = 1
        copies = Copies(
            bucket.astype(np.int32),
            at,
            tensor.astype(np.int32),
            param.astype(np.int32),
            dtype.astype(np.int32),
            lo,
            size,
            step,
            offset,
            stride,
        )
        buckets = Buckets(
            mine,
            peer.astype(np.int32),
            e.bucket_round[mine].astype(np.int32),
            e.bucket_bytes[mine],
            is_direct,
        )
        return Program(self.digest, self.survey.manifest_digest, e.rounds, copies, buckets)


@dataclass(frozen=True, eq=False)
class _Own:
    """The regions of one rank, to be found by tensor and box."""

    layout: Layout
    holding: Holding

    @classmethod
    def of(cls, side: Side, rank: int, layout: Layout, numbers: Int64) -> _Own:
        """Raises :class:`PlanMismatch` unless the survey speaks of this rank as it is."""
        told, own = side[rank], Holding.of(layout, numbers)
        a, b = (np.argsort(hash_rows(h.tensor, h.dtype, h.box), kind="stable") for h in (told, own))
        same = len(a) == len(b) and all(
            np.array_equal(getattr(told, name)[a], getattr(own, name)[b]) for name in ("tensor", "dtype", "box")
        )
        if not same:
            raise PlanMismatch(
                "the plan was made for another layout of this rank",
                rank=layout.rank,
                expected=f"{len(own)} regions, as observed",
                found=f"{len(told)} regions of {told.rank}",
                remedy="connect again",
            )
        return cls(layout, own)

    def read(self, tensor: Int64, key: UInt64) -> Int64:
        """The regions of these tensors with these boxes; the first where memory has two names."""
        return self._locate(self._to_read, hash_rows(key, tensor))

    def written(self, tensor: Int64, key: UInt64, turn: Int64) -> Int64:
        """The regions of these tensors with these boxes in these dtypes, by their turn where several are equal."""
        return self._locate(self._to_write, hash_rows(key, tensor, turn))

    @cached_property
    def _to_read(self) -> tuple[UInt64, Int64]:
        return _sorted(hash_rows(hash_rows(self.holding.box), self.holding.tensor))

    @cached_property
    def _to_write(self) -> tuple[UInt64, Int64]:
        h = self.holding
        key = hash_rows(h.box, h.dtype)
        return _sorted(hash_rows(key, h.tensor, turns(hash_rows(key, h.tensor))))

    def _locate(self, have: tuple[UInt64, Int64], want: UInt64) -> Int64:
        values, order = have
        found = np.searchsorted(values, want)
        if len(want) and (not len(order) or (values[np.minimum(found, len(order) - 1)] != want).any()):
            raise PlanMismatch("the plan names a box that this rank does not have", rank=self.layout.rank)
        return order[found]


def _sorted(values: UInt64) -> tuple[UInt64, Int64]:
    order = np.argsort(values, kind="stable")
    return values[order], order


def contiguous(size: Int64, stride: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which views are one run of memory in canonical order."""
    expected = np.ones(len(size), np.int64)
    ok = np.ones(len(size), bool)
    for dim in range(DIMS - 1, -1, -1):
        ok &= (size[:, dim] == 1) | (stride[:, dim] == expected)
        expected = expected * size[:, dim]
    return ok


def _check_casts(copies: Copies, own: Layout) -> None:
    """The sender casts to the receiver's dtype, and only where that loses nothing but precision."""
    kept = np.array([DTYPE_NUMBER[p.dtype] for p in own.params] or [0], np.int64)[copies.param]
    castable = np.zeros(len(DTYPES), bool)
    castable[[DTYPE_NUMBER[name] for name in CASTABLE]] = True
    bad = np.flatnonzero((kept != copies.dtype) & ~(castable[kept] & castable[copies.dtype]))
    if len(bad):
        spec = own.params[int(copies.param[bad[0]])]
        raise LayoutError(
            "a copy may change the dtype only among fp32, bf16 and fp16",
            tensor=spec.name,
            rank=own.rank,
            expected=DTYPES[int(copies.dtype[bad[0]])],
            found=spec.dtype,
            remedy="quantised engines need an encoder",
        )


def make_plan(survey: Survey, wire: WireSettings, *, names: Sequence[str] = (), ignore: Sequence[str] = ()) -> Plan:
    """The plan of a full update; raises :class:`CoverageError` when the boxes of the trainer do not tile every tensor,
    or an engine rank wants what nobody has, or nobody wants what the trainer has.

    :param names: of the engines, for messages
    :param ignore: names, or patterns with ``*``, that no engine rank needs to take
    """
    found = Violations()
    sources = Sources.of(survey.manifest, survey.trainers, found)
    found.raise_if_any("the trainer's tensors are not complete", "check the trainer's model and its name rules")
    names = names or [f"engine {n}" for n in range(len(survey.engines))]
    every: list[Pieces] = []
    for number, (name, targets) in enumerate(zip(names, survey.engines, strict=True)):
        twin = next((n for n in range(number) if same_boxes(survey.engines[n], targets)), None)
        every.append(
            every[twin]
            if twin is not None
            else pieces_of(name, survey.manifest, sources, targets, wire.bucket_bytes, ignore, found)
        )
    found.raise_if_any("the trainer's tensors and the engines' do not match", COVERAGE_REMEDY)

    parts, relay = _assign(survey, sources, every, relays=wire.relay)
    received = [_received(p, len(targets)) for p, targets in zip(every, survey.engines, strict=True)]
    loads: list[Load] = []
    for n, chosen in parts.items():
        alike = (load for load in loads if load.pieces is every[n] and load.parts.equals(chosen))
        loads.append(next(alike, None) or Load(every[n], chosen, wire))
    schedule = Schedule(loads, [len(survey.engines[n]) for n in parts], wire.max_peers)
    served = {n: Traffic(load, schedule, k) for k, (n, load) in enumerate(zip(parts, loads, strict=True))}
    engines = tuple(
        EnginePlan(name, len(targets), every[n], sources, served[source_of(relay, n)], received[n], relay[n])
        for n, (name, targets) in enumerate(zip(names, survey.engines, strict=True))
    )
    sent = _sent(every, parts, len(survey.trainers))
    return Plan(survey, wire, engines, sent, survey.digest(msgspec.msgpack.encode(wire)))


def _assign(
    survey: Survey, sources: Sources, every: Sequence[Pieces], *, relays: bool
) -> tuple[dict[int, Parts], list[int]]:
    """The sending ranks of all copies into every engine that the trainer serves, and who serves the others."""
    relay = [NOBODY] * len(every)
    chosen = _choose(survey, sources, every, relay)
    twins = [next(k for k in range(n + 1) if every[k] is every[n]) for n in range(len(every))]
    if relays and len(set(twins)) < len(twins):
        sent = _sent(every, chosen, len(survey.trainers))
        received = max(int(_received(every[n], 0).max(initial=0)) for n in set(twins))
        hosts = [engine.hosts for engine in survey.engines]
        relay = choose_relays(twins, hosts, int(sent.max(initial=0)), received)
        if any(upstream != NOBODY for upstream in relay):
            chosen = _choose(survey, sources, every, relay)
    return chosen, relay


def _choose(survey: Survey, sources: Sources, every: Sequence[Pieces], relay: Sequence[int]) -> dict[int, Parts]:
    served = [n for n, upstream in enumerate(relay) if upstream == NOBODY]
    starts = np.cumsum([0, *(len(e) for e in survey.engines)]).tolist()
    parts = choose_senders(
        _joined([sources.holders[every[n].source[every[n].piece]] for n in served]),
        sources.sets,
        _joined([every[n].nbytes for n in served]),
        _joined([every[n].count for n in served]),
        _joined([starts[n] + every[n].dst for n in served]),
        len(survey.trainers),
        hosts=survey.trainers.hosts,
        receiver_hosts=[host for engine in survey.engines for host in engine.hosts],
    )
    runs = np.cumsum([0, *(len(every[n].count) for n in served)])
    ends = np.searchsorted(parts.run, runs).tolist()
    return {
        n: Parts(parts.run[a:b] - first, parts.first[a:b], parts.count[a:b], parts.sender[a:b])
        for n, a, b, first in zip(served, ends[:-1], ends[1:], runs.tolist(), strict=False)
    }


def _sent(every: Sequence[Pieces], chosen: Mapping[int, Parts], ranks: int) -> Int64:
    """Bytes per trainer rank."""
    sent = np.zeros(ranks, np.int64)
    for n, parts in chosen.items():
        sent += np.bincount(parts.sender, every[n].nbytes[parts.run] * parts.count, ranks).astype(np.int64)
    return sent


def _received(pieces: Pieces, world: int) -> Int64:
    """Bytes per engine rank."""
    return np.bincount(pieces.dst, pieces.nbytes * pieces.count, world).astype(np.int64)


def _joined(parts: Sequence[Int64]) -> Int64:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def survey_of(trainers: Sequence[Layout], engines: Sequence[EngineLayouts]) -> Survey:
    """What the ranks must know of one another, from the layouts of all.

    Raises :class:`LayoutError` or :class:`CoverageError` for a layout that is wrong by itself."""
    manifest = merge_manifest(trainers)
    numbers = {spec.name: n for n, spec in enumerate(manifest)}
    found = Violations()
    held = []
    for layout in trainers:
        prove_reads(layout, found)
        prove_single_memory(layout, found)
        tensor_of = np.array([numbers[t.name] for t in layout.tensors], np.int64)
        held.append(Holding.of(layout, tensor_of, layout.host))
    found.raise_if_any("the trainer's tensors are not complete", "check the trainer's model and its name rules")
    taken = []
    for engine in engines:
        for layout in engine.layouts:
            _require_usable(layout, manifest, engine.name)
        every = np.arange(len(manifest), dtype=np.int64)
        taken.append([Holding.of(layout, every, layout.host) for layout in engine.layouts])
    return Survey.of(manifest, held, taken)


def _require_usable(layout: Layout, manifest: Sequence[TensorSpec], engine: str) -> None:
    if tuple(layout.tensors) != tuple(manifest):
        raise LayoutError(
            "a layout was observed over another manifest", rank=f"{engine} {layout.rank}", remedy="connect again"
        )
    require_plain(layout, f"{engine} {layout.rank}")
    delivered(layout, f"{engine} {layout.rank}")  # before the lists of what is missing because of it


def owned_names(engine: EngineLayouts) -> tuple[str, ...]:
    """Parameters of an engine that nothing writes, since they are its own business."""
    names = {
        layout.params[n].name
        for layout in engine.layouts
        for n in may_own(layout, engine.owns_weights, engine.declared)
    }
    return tuple(sorted(names))


def build_plan(
    trainers: Sequence[Layout], engines: Sequence[EngineLayouts], wire: WireSettings, *, ignore: Sequence[str] = ()
) -> Plan:
    """The plan over layouts of all ranks in one process, with the proof of every rank.

    :param trainers: one layout per trainer rank
    :param engines: the engines' layouts over :func:`merge_manifest` of the trainers
    :param ignore: names, or patterns with ``*``, that no engine rank needs to take
    """
    plan = make_plan(survey_of(trainers, engines), wire, names=[e.name for e in engines], ignore=ignore)
    plan = replace(plan, layouts=(trainers, tuple(e.layouts for e in engines)))
    for number, engine in enumerate(engines):
        for rank in range(len(trainers)):
            plan.send_program(number, rank)
        prove_engine(plan, number, engine)
    return plan


def prove_engine(plan: Plan, number: int, engine: EngineLayouts) -> None:
    """Every element of every rank's parameters is written once: the proof that each rank makes for itself.

    Raises :class:`CoverageError` or :class:`PlanMismatch`."""
    for rank, layout in enumerate(engine.layouts):
        verify_receive(
            plan.receive_program(number, rank, layout),
            layout,
            plan_digest=plan.digest,
            rank=f"{engine.name} {layout.rank}",
            owns_weights=engine.owns_weights,
            declared=engine.declared,
        )
