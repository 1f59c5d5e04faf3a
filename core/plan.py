"""The plan: who sends which boxes to whom, in which bucket and round. Pure arithmetic on a survey, in numpy.

A plan is deterministic: from the same survey every rank computes the same one, and binds its own part of it to its own
memory (:meth:`Plan.send_program`, :meth:`Plan.receive_program`). Nobody needs anybody else's addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from weightlink.balance import choose_senders
from weightlink.buckets import Packing, pack
from weightlink.converters.coverage import Violations, delivered, may_own, prove_reads, prove_single_memory
from weightlink.hooks.errors import LayoutError, PlanMismatch
from weightlink.hooks.geometry import CASTABLE, DIMS, Int64, Layout, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.kinds import Rows, UInt64, hash_rows
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
from weightlink.schedule import colour_rounds
from weightlink.survey import Holding, Survey, merge_manifest


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
    """All buckets into one engine, numbered in the order of their rounds. ``bucket_src`` is a trainer rank,
    ``bucket_dst`` an engine rank; a bucket that is ``bucket_alone`` holds one large copy.

    Where ``relay`` is the number of another engine, the buckets are that one's: each rank passes on to the rank of the
    same number here what it received, in the same order."""

    name: str
    world: int
    pieces: Pieces
    sources: Sources
    packing: Packing
    number: Int64  # of each bucket of ``packing``
    bucket_src: Int64
    bucket_dst: Int64
    bucket_round: Int64
    bucket_bytes: Int64
    bucket_alone: Int64
    received: Int64
    """Wire bytes per engine rank, without alignment."""
    relay: int = NOBODY

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(self.bucket_round.max(initial=-1)) + 1

    @property
    def copies(self) -> int:
        """Number of copies."""
        return len(self.pieces)


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
        own = self._layout(layout, 0, 0, rank)
        numbers = {spec.name: n for n, spec in enumerate(self.manifest)}
        tensor_of = np.array([numbers[t.name] for t in own.tensors], np.int64)
        holding = self.survey.trainers[rank]
        _require_same(holding, Holding.of(own, tensor_of, holding.host))
        mine = np.flatnonzero((e.bucket_src == rank) & (e.relay == NOBODY))
        place, copy = self._own(e, mine)
        row = e.pieces.row[copy]
        key = e.sources.key[e.pieces.source[e.pieces.piece[row]]]
        region = _locate(e.sources.rows, rank, e.pieces.tensor[copy], key, np.zeros(len(row), np.int64))
        program = self._program(e, mine, self.trainers + e.bucket_dst[mine], place, own, region)
        _check_casts(program.copies, own)
        return program

    def receive_program(self, engine: int, rank: int, layout: Layout | None = None) -> Program:
        """What rank ``rank`` of engine ``engine``, whose layout this is, does."""
        e = self.engines[engine]
        own = self._layout(layout, 1, engine, rank)
        holding = self.survey.engines[engine][rank]
        _require_same(holding, Holding.of(own, np.arange(len(own.tensors)), holding.host))
        mine = np.flatnonzero(e.bucket_dst == rank)
        place, copy = self._own(e, mine)
        row = e.pieces.row[copy]
        key = e.pieces.target_key[e.pieces.piece[row]]
        region = _locate(e.pieces.rows, rank, e.pieces.tensor[copy], key, e.pieces.turn[row])
        return self._program(e, mine, e.bucket_src[mine], place, own, region)

    def _layout(self, layout: Layout | None, side: int, engine: int, rank: int) -> Layout:
        if layout is not None:
            return layout
        if self.layouts is None:
            raise PlanMismatch("a plan made from a survey needs the rank's own layout to bind to")
        return self.layouts[1][engine][rank] if side else self.layouts[0][rank]

    def _own(self, e: EnginePlan, mine: Int64) -> tuple[Int64, Int64]:
        """The copies of the buckets ``mine`` in the order of these: places in the packing, and numbers."""
        wanted = np.zeros(len(e.number), bool)
        wanted[mine] = True
        number = e.number[e.packing.bucket]
        place = np.flatnonzero(wanted[number])
        place = place[np.argsort(number[place], kind="stable")]
        return place, e.packing.order[place]

    def _program(self, e: EnginePlan, mine: Int64, peer: Int64, place: Int64, own: Layout, region: Int64) -> Program:
        """Bind copies to this rank's regions; the buckets' copies are direct where its own memory is one run."""
        copy = e.packing.order[place]
        piece = e.pieces.piece[e.pieces.row[copy]]
        lo, size, step, dtype = e.pieces.lo[piece], e.pieces.size[piece], e.pieces.step[piece], e.pieces.dtype[piece]
        r = own.regions
        at = (lo - r.lo[region]) // r.step[region]
        offset = r.offset[region] + (at * r.stride[region]).sum(axis=1)
        stride = np.where(size > 1, r.stride[region] * (step // r.step[region]), 0)
        param = r.param[region]
        bucket = np.searchsorted(mine, e.number[e.packing.bucket[place]])
        kept = np.array([DTYPE_NUMBER[p.dtype] for p in own.params] or [0], np.int64)[param]
        direct = (e.bucket_alone[mine[bucket]] == 1) & contiguous(size, stride) & (kept == dtype)
        is_direct = np.zeros(len(mine), np.int32)
        is_direct[bucket[direct]] = 1
        copies = Copies(
            bucket.astype(np.int32),
            e.packing.at[place],
            e.pieces.tensor[copy].astype(np.int32),
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


def _require_same(told: Holding, own: Holding) -> None:
    """The survey must speak of this rank as it is."""
    same = len(told) == len(own) and all(
        np.array_equal(getattr(told, name), getattr(own, name)) for name in ("tensor", "dtype", "box")
    )
    if not same:
        raise PlanMismatch(
            "the plan was made for another layout of this rank",
            rank=own.rank,
            expected=f"{len(own)} regions, as observed",
            found=f"{len(told)} regions of {told.rank}",
            remedy="connect again",
        )


def _locate(rows: Rows, rank: int, tensor: Int64, key: UInt64, turn: Int64) -> Int64:
    """The rank's regions that are these boxes of these tensors."""
    first = int(np.searchsorted(rows.rank, rank, side="left"))
    last = int(np.searchsorted(rows.rank, rank, side="right"))
    have = hash_rows(rows.key[first:last], rows.tensor[first:last], rows.turn[first:last])
    order = np.argsort(have, kind="stable")
    want = hash_rows(key, tensor, turn)
    found = np.searchsorted(have[order], want)
    region: Int64 = order[np.minimum(found, max(len(order) - 1, 0))] if len(order) else np.zeros(0, np.int64)
    if len(want) and (not len(order) or (have[region] != want).any()):
        raise PlanMismatch("the plan names a box that this rank does not have", rank=str(rank))
    return region


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

    chosen, relay = _assign(survey, sources, every, relays=wire.relay)
    served: dict[int, EnginePlan] = {
        n: _engine(name, len(targets), every[n], sources, chosen[n], wire)
        for n, (name, targets) in enumerate(zip(names, survey.engines, strict=True))
        if relay[n] == NOBODY
    }
    engines = tuple(replace(served[source_of(relay, n)], name=name, relay=relay[n]) for n, name in enumerate(names))
    sent = _sent(every, chosen, len(survey.trainers))
    return Plan(survey, wire, engines, sent, survey.digest(msgspec.msgpack.encode(wire)))


def _assign(
    survey: Survey, sources: Sources, every: Sequence[Pieces], *, relays: bool
) -> tuple[dict[int, Int64], list[int]]:
    """The sending rank of every copy into every engine that the trainer serves, and who serves the others."""
    relay = [NOBODY] * len(every)
    chosen = _choose(survey, sources, every, relay)
    twins = [next(k for k in range(n + 1) if every[k] is every[n]) for n in range(len(every))]
    if relays and len(set(twins)) < len(twins):
        sent = _sent(every, chosen, len(survey.trainers))
        received = max(int(np.bincount(p.dst[p.row], p.nbytes).max(initial=0)) for p in every)
        hosts = [[h.host for h in engine] for engine in survey.engines]
        relay = choose_relays(twins, hosts, int(sent.max(initial=0)), received)
        if any(upstream != NOBODY for upstream in relay):
            chosen = _choose(survey, sources, every, relay)
    return chosen, relay


def _choose(survey: Survey, sources: Sources, every: Sequence[Pieces], relay: Sequence[int]) -> dict[int, Int64]:
    served = [n for n, upstream in enumerate(relay) if upstream == NOBODY]
    starts = np.cumsum([0, *(len(e) for e in survey.engines)]).tolist()
    sender = choose_senders(
        _joined([sources.holders[every[n].source[every[n].piece[every[n].row]]] for n in served]),
        sources.sets,
        _joined([every[n].nbytes for n in served]),
        _joined([starts[n] + every[n].dst[every[n].row] for n in served]),
        len(survey.trainers),
        hosts=[h.host for h in survey.trainers],
        receiver_hosts=[h.host for engine in survey.engines for h in engine],
    )
    ends = np.cumsum([len(every[n]) for n in served])
    return dict(zip(served, np.split(sender, ends[:-1]), strict=True)) if served else {}


def _sent(every: Sequence[Pieces], chosen: Mapping[int, Int64], ranks: int) -> Int64:
    """Bytes per trainer rank."""
    sent = np.zeros(ranks, np.int64)
    for n, sender in chosen.items():
        sent += np.bincount(sender, every[n].nbytes, ranks).astype(np.int64)
    return sent


def _joined(parts: Sequence[Int64]) -> Int64:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def same_boxes(a: Sequence[Holding], b: Sequence[Holding]) -> bool:
    """Whether two engines have the same boxes on the same ranks."""
    return len(a) == len(b) and all(
        len(x) == len(y)
        and np.array_equal(x.tensor, y.tensor)
        and np.array_equal(x.dtype, y.dtype)
        and np.array_equal(x.box, y.box)
        for x, y in zip(a, b, strict=True)
    )


def _engine(name: str, world: int, pieces: Pieces, sources: Sources, src: Int64, wire: WireSettings) -> EnginePlan:
    dst = pieces.dst[pieces.row]
    packing = pack(src, dst, pieces.nbytes, wire.bucket_bytes, wire.direct_bytes)
    rounds = colour_rounds(packing.src, packing.dst, wire.max_peers)
    order = np.lexsort((packing.dst, packing.src, rounds))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return EnginePlan(
        name,
        world,
        pieces,
        sources,
        packing,
        number,
        packing.src[order],
        packing.dst[order],
        rounds[order],
        packing.nbytes[order],
        packing.alone[order],
        np.bincount(dst, pieces.nbytes, world).astype(np.int64),
    )


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
        taken.append(tuple(Holding.of(layout, every, layout.host) for layout in engine.layouts))
    return Survey(manifest, tuple(held), tuple(taken))


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
