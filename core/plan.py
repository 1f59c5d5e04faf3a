"""The plan: who sends which regions to whom, in which bucket and round. Pure arithmetic on layouts, in numpy.

Equal source boxes on several trainer ranks are replicas; each piece is taken from the replica that has sent the fewest
bytes so far. The plan is deterministic: the same layouts give the same plan on every machine.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from weightlink.converters.boxes import Boxes, overlaps, union_volume
from weightlink.converters.coverage import (
    Violations,
    delivered,
    may_own,
    prove_destination,
    prove_reads,
    prove_sources,
)
from weightlink.hooks.errors import LayoutError
from weightlink.hooks.geometry import CASTABLE, Int64, Layout, Regions, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.program import (
    ALIGN,
    COVERAGE_REMEDY,
    DTYPE_NUMBER,
    ITEMSIZES,
    Buckets,
    Copies,
    Program,
    manifest_digest,
    require_plain,
)
from weightlink.schedule import colour_rounds


@dataclass(frozen=True)
class EngineLayouts:
    """One engine: a name for messages, its ranks' layouts over the manifest, whether it loaded its own weights, and
    the local names (patterns) that the user declared to be its own business."""

    name: str
    layouts: Sequence[Layout]
    owns_weights: bool = True
    declared: tuple[str, ...] = ()


@dataclass
class EnginePlan:
    """All copies into one engine. ``src`` is a trainer rank, ``dst`` an engine rank; ``bucket`` numbers buckets in the
    order of their rounds. ``owned`` are names that nothing writes, ``opaque`` names and reasons of what goes through
    the engine's own loader, ``staged_bytes`` the memory that the rank that needs most of it holds for that."""

    name: str
    world: int
    src: Int64
    dst: Int64
    bucket: Int64
    at: Int64
    tensor: Int64
    dtype: Int64
    lo: Int64
    size: Int64
    step: Int64
    src_param: Int64
    src_offset: Int64
    src_stride: Int64
    dst_param: Int64
    dst_offset: Int64
    dst_stride: Int64
    bucket_src: Int64
    bucket_dst: Int64
    bucket_round: Int64
    bucket_bytes: Int64
    bucket_direct: Int64
    owned: tuple[str, ...] = ()
    opaque: tuple[tuple[str, str], ...] = ()
    staged_bytes: int = 0

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(self.bucket_round.max(initial=-1)) + 1

    @property
    def nbytes(self) -> Int64:
        """Wire bytes per copy."""
        nbytes: Int64 = self.size.prod(axis=1) * ITEMSIZES[self.dtype]
        return nbytes


@dataclass
class Plan:
    """A full update over one trainer and any number of engines."""

    manifest: tuple[TensorSpec, ...]
    trainers: int
    engines: list[EnginePlan]
    wire: WireSettings
    manifest_digest: str = ""
    digest: str = ""
    sent_bytes: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def total_bytes(self) -> int:
        """Wire bytes of one update, all engines together."""
        return int(self.sent_bytes.sum())

    def send_program(self, engine: int, rank: int) -> Program:
        """What trainer rank ``rank`` does for engine ``engine``."""
        e = self.engines[engine]
        return self._program(e, e.bucket_src == rank, self.trainers + e.bucket_dst, sending=True)

    def receive_program(self, engine: int, rank: int) -> Program:
        """What rank ``rank`` of engine ``engine`` does."""
        e = self.engines[engine]
        return self._program(e, e.bucket_dst == rank, e.bucket_src, sending=False)

    def _program(self, e: EnginePlan, mine: Int64, peer: Int64, *, sending: bool) -> Program:
        ids = np.flatnonzero(mine)
        local = np.full(len(mine), -1, np.int64)
        local[ids] = np.arange(len(ids))
        rows = np.flatnonzero(mine[e.bucket]) if len(e.bucket) else np.zeros(0, np.int64)
        param, offset, stride = (
            (e.src_param, e.src_offset, e.src_stride) if sending else (e.dst_param, e.dst_offset, e.dst_stride)
        )
        copies = Copies(
            local[e.bucket[rows]].astype(np.int32),
            e.at[rows],
            e.tensor[rows].astype(np.int32),
            param[rows].astype(np.int32),
            e.dtype[rows].astype(np.int32),
            e.lo[rows],
            e.size[rows],
            e.step[rows],
            offset[rows],
            stride[rows],
        )
        buckets = Buckets(
            ids,
            peer[ids].astype(np.int32),
            e.bucket_round[ids].astype(np.int32),
            e.bucket_bytes[ids],
            e.bucket_direct[ids].astype(np.int32),
        )
        return Program(self.digest, self.manifest_digest, e.rounds, copies, buckets)


def merge_manifest(trainers: Sequence[Layout]) -> tuple[TensorSpec, ...]:
    """The canonical tensors of all trainer ranks, each once, in order of appearance.

    Raises :class:`LayoutError` when two ranks disagree about a tensor's shape or dtype."""
    seen: dict[str, tuple[TensorSpec, str]] = {}
    for layout in trainers:
        for spec in layout.tensors:
            known, who = seen.setdefault(spec.name, (spec, layout.rank))
            if known != spec:
                raise LayoutError(
                    "trainer ranks disagree about a tensor",
                    tensor=spec.name,
                    rank=f"{who} and {layout.rank}",
                    expected=f"{known.shape} {known.dtype}",
                    found=f"{spec.shape} {spec.dtype}",
                )
    return tuple(spec for spec, _ in seen.values())


def build_plan(
    trainers: Sequence[Layout], engines: Sequence[EngineLayouts], wire: WireSettings, *, ignore: Sequence[str] = ()
) -> Plan:
    """The plan of a full update; raises before any byte moves when coverage cannot be proven on either side.

    :param trainers: one layout per trainer rank
    :param engines: the engines' layouts over :func:`merge_manifest` of the trainers
    :param ignore: names, or ``prefix*``, that no engine rank needs to consume
    """
    manifest = merge_manifest(trainers)
    numbers = {spec.name: n for n, spec in enumerate(manifest)}
    maps = [np.array([numbers[t.name] for t in layout.tensors], np.int64) for layout in trainers]
    regions = Regions.concat(layout.regions for layout in trainers)
    rank = np.repeat(np.arange(len(trainers)), [len(layout.regions) for layout in trainers])
    tensor = np.concatenate([m[t.regions.tensor] for m, t in zip(maps, trainers, strict=True)])
    sources = Boxes(tensor, regions.lo, regions.size, regions.step)
    _prove_trainers(manifest, trainers, sources, regions, rank)
    first, inverse = sources.unique()
    holders = _holders(inverse, len(first))
    whole = sources.take(first)

    drafts = [_Draft(engine, manifest, whole) for engine in engines]
    violations = Violations()
    for draft in drafts:
        draft.prove_arrival(violations, ignore)
    violations.raise_if_any("the trainer's tensors and the engines' do not match", COVERAGE_REMEDY)
    sent = _assign(drafts, holders, rank)
    dtypes = [np.array([DTYPE_NUMBER.get(p.dtype, -1) for p in layout.params] or [-1], np.int64) for layout in trainers]
    plans = [draft.finish(regions, rank, trainers, dtypes, wire) for draft in drafts]
    plan = Plan(manifest, len(trainers), plans, wire, manifest_digest(manifest), sent_bytes=sent)
    plan.digest = _digest(plan)
    for engine, layouts in zip(plan.engines, engines, strict=True):
        engine.owned = tuple(prove_engine(engine, layouts))
        engine.opaque = tuple(dict.fromkeys((o.name, o.reason) for t in layouts.layouts for o in t.opaque))
        engine.staged_bytes = max((t.staged_bytes for t in layouts.layouts), default=0)
    return plan


def prove_engine(plan: EnginePlan, engine: EngineLayouts) -> list[str]:
    """Every element of every rank's parameters is written once, by a copy or a fill; names of engine-owned ones.

    Raises :class:`CoverageError` listing every missing, doubled or misplaced element range."""
    found, owned = Violations(), set()
    for number, layout in enumerate(engine.layouts):
        rows, fills = np.flatnonzero(plan.dst == number), layout.fills
        owned.update(
            prove_destination(
                layout.params,
                np.concatenate([plan.dst_param[rows], fills.param.astype(np.int64)]),
                np.concatenate([plan.dst_offset[rows], fills.offset]),
                np.concatenate([plan.size[rows], fills.size]),
                np.concatenate([plan.dst_stride[rows], fills.stride]),
                rank=f"{engine.name} {layout.rank}",
                owned=may_own(layout, engine.owns_weights, engine.declared),
                found=found,
                delivered=delivered(layout, f"{engine.name} {layout.rank}"),
            )
        )
    found.raise_if_any("the plan does not cover the engine's weights exactly once", COVERAGE_REMEDY)
    return sorted(owned)


def _prove_trainers(
    manifest: Sequence[TensorSpec], trainers: Sequence[Layout], sources: Boxes, regions: Regions, rank: Int64
) -> None:
    found = Violations()
    names = [layout.rank for layout in trainers]
    prove_sources(manifest, sources, [names[r] for r in rank], found)
    for layout in trainers:
        prove_reads(layout, found)
    # Equal boxes on different ranks are replicas; twice on one rank they must be one piece of memory.
    storages = [np.array([(p.storage, p.start) for p in t.params] or [(0, 0)], np.int64) for t in trainers]
    address = np.array(
        [storages[r][p].tolist() for r, p in zip(rank.tolist(), regions.param.tolist(), strict=True)], np.int64
    ).reshape(-1, 2)
    _, box = sources.unique()
    order = np.lexsort((rank, box))
    again = (box[order][1:] == box[order][:-1]) & (rank[order][1:] == rank[order][:-1])
    for a, b in zip(order[:-1][again], order[1:][again], strict=True):
        same = (address[a] == address[b]).all() and regions.offset[a] == regions.offset[b]
        if not same:
            layout = trainers[int(rank[a])]
            found.add(
                manifest[int(sources.group[a])].name,
                layout.rank,
                f"given twice, by {layout.params[int(regions.param[a])].name}"
                f" and by {layout.params[int(regions.param[b])].name}",
            )
    found.raise_if_any("the trainer's tensors are not complete", "check the trainer's model and its name rules")


def _holders(inverse: Int64, count: int) -> list[Int64]:
    """Region rows that hold each unique box."""
    order = np.argsort(inverse, kind="stable")
    bounds = np.searchsorted(inverse[order], np.arange(count + 1))
    return [order[bounds[n] : bounds[n + 1]] for n in range(count)]


class _Draft:
    """One engine's copies while the plan is made."""

    def __init__(self, engine: EngineLayouts, manifest: Sequence[TensorSpec], whole: Boxes) -> None:
        self.engine, self.manifest = engine, manifest
        for layout in engine.layouts:
            if tuple(layout.tensors) != tuple(manifest):
                raise LayoutError(
                    "a layout was observed over another manifest", rank=f"{engine.name} {layout.rank}",
                    remedy="connect again",
                )  # fmt: skip
            require_plain(layout, f"{engine.name} {layout.rank}")
            delivered(layout, f"{engine.name} {layout.rank}")  # before the lists of what is missing because of it
        self.regions = Regions.concat(layout.regions for layout in engine.layouts)
        self.rank = np.repeat(np.arange(len(engine.layouts)), [len(layout.regions) for layout in engine.layouts])
        self.boxes = Boxes(self.regions.tensor.astype(np.int64), self.regions.lo, self.regions.size, self.regions.step)
        pairs = overlaps(whole, self.boxes)
        order = np.lexsort((pairs.a, pairs.b, self.boxes.group[pairs.b]))
        self.source, self.target = pairs.a[order], pairs.b[order]
        self.lo, self.size, self.step = pairs.lo[order], pairs.size[order], pairs.step[order]
        dtypes = [np.array([DTYPE_NUMBER.get(p.dtype, -1) for p in t.params] or [-1]) for t in engine.layouts]
        self.dtype = np.array(
            [dtypes[r][p] for r, p in zip(self.rank.tolist(), self.regions.param.tolist(), strict=True)], np.int64
        )[self.target]
        self.chosen = np.zeros(len(self.source), np.int64)

    @property
    def nbytes(self) -> Int64:
        nbytes: Int64 = self.size.prod(axis=1) * ITEMSIZES[self.dtype]
        return nbytes

    def prove_arrival(self, found: Violations, ignore: Sequence[str]) -> None:
        """Each destination region gets all its elements, and each tensor is consumed, whole."""
        if (self.dtype < 0).any():
            bad = int(np.flatnonzero(self.dtype < 0)[0])
            raise LayoutError(
                "a parameter has a dtype that cannot travel",
                tensor=self.manifest[int(self.boxes.group[self.target[bad]])].name,
                rank=self.engine.name,
            )
        arrives = np.zeros(len(self.boxes), np.int64)
        np.add.at(arrives, self.target, self.size.prod(axis=1))
        for row in np.flatnonzero(arrives != self.boxes.numel):
            layout = self.engine.layouts[int(self.rank[row])]
            found.add(
                self.manifest[int(self.boxes.group[row])].name,
                f"{self.engine.name} {layout.rank}",
                f"{int(arrives[row])} of {int(self.boxes.numel[row])} elements have a source"
                f" ({layout.params[int(self.regions.param[row])].name})",
            )
        consumed = union_volume(self.boxes, len(self.manifest))
        for number, spec in enumerate(self.manifest):
            volume = int(np.prod(spec.shape, dtype=np.int64))
            if consumed[number] < volume and not any(fnmatch.fnmatchcase(spec.name, p) for p in ignore):
                found.add(
                    spec.name,
                    self.engine.name,
                    f"the engine's loader takes {int(consumed[number])} of {volume} elements; "
                    "pass ignore=[...] if it may leave them out",
                )

    def finish(
        self,
        sources: Regions,
        source_rank: Int64,
        trainers: Sequence[Layout],
        source_dtypes: Sequence[Int64],
        wire: WireSettings,
    ) -> EnginePlan:
        """Split into pieces of at most one bucket, pack, and colour the rounds."""
        piece = _split(self.lo, self.size, self.step, ITEMSIZES[self.dtype], wire.bucket_bytes)
        copy, lo, size, step = piece
        held, target = self.chosen[copy], self.target[copy]
        src, dst = source_rank[held], self.rank[target]
        src_offset, src_stride = _address(sources, held, lo, size, step)
        dst_offset, dst_stride = _address(self.regions, target, lo, size, step)
        dtype = self.dtype[copy]
        src_dtype = np.array(
            [source_dtypes[r][p] for r, p in zip(src.tolist(), sources.param[held].tolist(), strict=True)], np.int64
        )
        self._check_casts(src_dtype, dtype, sources, held, src, trainers)
        nbytes = size.prod(axis=1) * ITEMSIZES[dtype]
        direct = (nbytes >= wire.direct_bytes) & (src_dtype == dtype)
        direct &= _contiguous(size, src_stride) & _contiguous(size, dst_stride)
        order = np.lexsort((np.arange(len(copy)), direct, dst, src))
        bucket, at, table = _pack(src[order], dst[order], nbytes[order], direct[order], wire.bucket_bytes)
        rounds = colour_rounds(table[:, 0], table[:, 1], wire.max_peers)
        number = np.lexsort((table[:, 1], table[:, 0], rounds))
        position = np.empty(len(number), np.int64)
        position[number] = np.arange(len(number))
        return EnginePlan(
            self.engine.name,
            len(self.engine.layouts),
            src=src[order],
            dst=dst[order],
            bucket=position[bucket],
            at=at,
            tensor=self.boxes.group[target][order],
            dtype=dtype[order],
            lo=lo[order],
            size=size[order],
            step=step[order],
            src_param=sources.param[held][order].astype(np.int64),
            src_offset=src_offset[order],
            src_stride=src_stride[order],
            dst_param=self.regions.param[target][order].astype(np.int64),
            dst_offset=dst_offset[order],
            dst_stride=dst_stride[order],
            bucket_src=table[number, 0],
            bucket_dst=table[number, 1],
            bucket_round=rounds[number],
            bucket_bytes=table[number, 2],
            bucket_direct=table[number, 3],
        )

    def _check_casts(
        self,
        src_dtype: Int64,
        dtype: Int64,
        sources: Regions,
        held: Int64,
        src: Int64,
        trainers: Sequence[Layout],
    ) -> None:
        castable = np.zeros(len(DTYPE_NUMBER) + 1, bool)
        castable[[DTYPE_NUMBER[name] for name in CASTABLE]] = True  # the last entry stays False: dtype -1 is unknown
        bad = np.flatnonzero((src_dtype != dtype) & ~(castable[src_dtype] & castable[dtype]))
        if len(bad):
            row = int(bad[0])
            spec = trainers[int(src[row])].params[int(sources.param[held[row]])]
            names = list(DTYPE_NUMBER)
            raise LayoutError(
                "a copy may change the dtype only among fp32, bf16 and fp16",
                tensor=spec.name,
                rank=trainers[int(src[row])].rank,
                expected=names[int(dtype[row])],
                found=spec.dtype,
                remedy="quantised engines need an encoder",
            )


def _assign(drafts: Sequence[_Draft], holders: Sequence[Int64], rank: Int64) -> Int64:
    """Choose a holder for every copy: those without a choice first, then the largest to the least loaded rank."""
    load = np.zeros(int(rank.max(initial=-1)) + 1, np.int64)
    choices: list[tuple[int, int, int]] = []
    for number, draft in enumerate(drafts):
        nbytes = draft.nbytes
        for copy, source in enumerate(draft.source.tolist()):
            held = holders[source]
            if len(held) == 1:
                draft.chosen[copy] = held[0]
                load[rank[held[0]]] += nbytes[copy]
            else:
                choices.append((-int(nbytes[copy]), number, copy))
    choices.sort()
    for size, number, copy in choices:
        held = holders[int(drafts[number].source[copy])]
        best = held[int(np.argmin(load[rank[held]]))]
        drafts[number].chosen[copy] = best
        load[rank[best]] -= size
    return load


def _address(regions: Regions, row: Int64, lo: Int64, size: Int64, step: Int64) -> tuple[Int64, Int64]:
    """Local offset and stride of a box inside region ``row``."""
    at = (lo - regions.lo[row]) // regions.step[row]
    offset = regions.offset[row] + (at * regions.stride[row]).sum(axis=1)
    stride = np.where(size > 1, regions.stride[row] * (step // regions.step[row]), 0)
    return offset, stride


def _split(lo: Int64, size: Int64, step: Int64, itemsize: Int64, limit: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Cut boxes above ``limit`` bytes along their outermost dimensions into nearly equal pieces."""
    copy = np.arange(len(lo))
    for dim in range(lo.shape[1]):
        nbytes = size.prod(axis=1) * itemsize[copy]
        row_bytes = nbytes // np.maximum(size[:, dim], 1)
        most = np.maximum(limit // np.maximum(row_bytes, 1), 1)
        parts = np.where(nbytes > limit, -(-size[:, dim] // most), 1)
        per = -(-size[:, dim] // parts)
        parts = -(-size[:, dim] // per)
        repeat = np.repeat(np.arange(len(copy)), parts)
        k = np.arange(len(repeat)) - np.repeat(np.cumsum(parts) - parts, parts)
        copy, lo, size, step, per = copy[repeat], lo[repeat], size[repeat], step[repeat], per[repeat]
        start = k * per
        lo[:, dim] += start * step[:, dim]
        size[:, dim] = np.minimum(per, size[:, dim] - start)
    return copy, lo, size, np.where(size == 1, 1, step)


def _contiguous(size: Int64, stride: Int64) -> Int64:
    """Which views are one run of memory in canonical order."""
    expected = np.ones(len(size), np.int64)
    ok = np.ones(len(size), bool)
    for dim in range(size.shape[1] - 1, -1, -1):
        ok &= (size[:, dim] == 1) | (stride[:, dim] == expected)
        expected = expected * size[:, dim]
    return ok


def _pack(src: Int64, dst: Int64, nbytes: Int64, direct: Int64, limit: int) -> tuple[Int64, Int64, Int64]:
    """Fill buckets in order. Returns each copy's bucket and byte offset, and the table (src, dst, bytes, direct)."""
    bucket, at = np.zeros(len(src), np.int64), np.zeros(len(src), np.int64)
    table: list[list[int]] = []
    key: tuple[int, int, bool] | None = None
    used = 0
    for n, (s, d, size, alone) in enumerate(
        zip(src.tolist(), dst.tolist(), nbytes.tolist(), direct.tolist(), strict=True)
    ):
        start = -(-used // ALIGN) * ALIGN
        if alone or key != (s, d, alone) or start + size > limit:
            table.append([s, d, 0, int(alone)])
            key, start = (s, d, alone), 0
        bucket[n], at[n], used = len(table) - 1, start, start + size
        table[-1][2] = used
    return bucket, at, np.array(table, np.int64).reshape(-1, 4)


def _digest(plan: Plan) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(plan.manifest_digest.encode())
    digest.update(msgspec.msgpack.encode(plan.wire))
    for engine in plan.engines:
        for name in EnginePlan.__dataclass_fields__:
            value = getattr(engine, name)
            if isinstance(value, np.ndarray):
                digest.update(np.ascontiguousarray(value).astype("<i8").tobytes())
    return digest.hexdigest()
