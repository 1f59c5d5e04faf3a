"""An engine's layout, observed: its own weight loader is run over tensors without data, and every copy is recorded.

Nothing resident changes: writes to memory that existed before are not executed, attributes and bindings are put back,
and pointers and digests are compared before and after.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weightlink.converters import affine
from weightlink.converters.affine import Affine, TooComplex
from weightlink.converters.operators import RULES, rule_of
from weightlink.converters.operators import tensors as tensors_in
from weightlink.converters.provenance import CONSTANT, Piece, Tracker, Write, key
from weightlink.converters.snapshot import Held, Snapshot
from weightlink.hooks.errors import LayoutError, ReplayError
from weightlink.hooks.geometry import DIMS, ITEMSIZE, Fills, Layout, Opaque, ParamSpec, RegionBuilder, TensorSpec

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


def observe(
    *,
    rank: str,
    tensors: Sequence[TensorSpec],
    load: Load,
    modules: Sequence[tuple[str, torch.nn.Module]],
    retries: int = 16,
) -> Layout:
    """The layout of one engine rank.

    :param rank: who it describes, for messages
    :param tensors: the manifest; every tensor is offered to the loader once, in this order, on the meta device
    :param load: the engine's own loader, e.g. ``model.load_weights``; called in this thread
    :param modules: ``(prefix, root module)`` pairs whose parameters, buffers and tensor attributes are the destinations
    :param retries: names that may raise in the loader; each becomes opaque and the replay is run again without it

    The layout's ``params`` are all parameters and buffers, and those tensor attributes that the loader fills. What
    could not be followed is in ``opaque``: destinations, and the canonical names that went into them; their regions and
    fills are left out.

    Raises :class:`ReplayError` when a resident weight changed, when another thread took part, or when the loader fails
    for more than ``retries`` names; :class:`LayoutError` for a tensor of unknown dtype.
    """
    for spec in tensors:
        if spec.dtype not in ITEMSIZE:
            raise LayoutError("unknown dtype", tensor=spec.name, expected=", ".join(ITEMSIZE), found=spec.dtype)
    with torch.inference_mode(False), torch.no_grad():
        snapshot = Snapshot(modules)
    # Weights that were made in inference mode can be written, also by a recorded write, in that mode only.
    inference = any(held.tensor.is_inference() for held in snapshot.held)
    with torch.inference_mode(inference), torch.no_grad():
        before = snapshot.digests()
        try:
            tracker, left, failed = _run(rank, tensors, load, snapshot, frozenset(before), retries)
        except ReplayError as error:
            _prove_unchanged(rank, snapshot, before, error)
            raise
        _prove_unchanged(rank, snapshot, before, None)
    return _Builder(rank, tensors, snapshot.held, tracker, left, failed).build()


class _Left(NamedTuple):
    """What the loader left on the modules: a tensor under ``name`` that was not there before."""

    name: str
    kind: str
    sources: frozenset[int]


def _run(
    rank: str, specs: Sequence[TensorSpec], load: Load, snapshot: Snapshot, resident: frozenset[int], retries: int
) -> tuple[Tracker, list[_Left], dict[int, str]]:
    failed: dict[int, str] = {}
    while True:
        tracker = Tracker(specs, resident, rank)
        feed = _Feed(tracker, [i for i in range(len(specs)) if i not in failed])
        try:
            with _guarded_threads(tracker), tracker:
                load(iter(feed))
        except Exception as error:
            if tracker.foreign is not None:
                raise tracker.foreign from error
            culprit = tracker.touched if feed.done and tracker.touched is not None else feed.last
            if culprit is None or culprit in failed:
                raise ReplayError(
                    f"the loader failed: {type(error).__name__}: {error}",
                    rank=rank,
                    tensor=", ".join(specs[i].name for i in failed),
                    found="; ".join(failed.values()),
                ) from error
            failed[culprit] = f"the loader raised {type(error).__name__}: {error}"
            if len(failed) > retries:
                raise ReplayError(
                    f"the loader failed for more than {retries} names",
                    rank=rank,
                    tensor=", ".join(specs[i].name for i in failed),
                    found=failed[culprit],
                ) from error
            continue
        finally:
            tracker.closed = True
            left = [_Left(name, kind, tracker.contents(tensor)) for name, kind, tensor in snapshot.rebound()]
            left += [_Left(name, "param", frozenset()) for name in snapshot.missing()]
            snapshot.restore()
        if tracker.foreign is not None:
            raise tracker.foreign
        return tracker, left, failed


class _Feed:
    """The canonical tensors as the loader's input; knows which one was taken last."""

    def __init__(self, tracker: Tracker, indices: Sequence[int]) -> None:
        self._tracker = tracker
        self._items = [(i, tracker.canonical(i)) for i in indices]
        self.last: int | None = None
        self.done = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, tensor in self._items:
            self._tracker.check_thread()
            self._tracker.next_name()
            self.last = index
            yield self._tracker.specs[index].name, tensor
        self.done = True


@contextlib.contextmanager
def _guarded_threads(tracker: Tracker) -> Iterator[None]:
    """While open, threads that start do so under a :class:`_Guard`: a dispatch mode is local to its thread."""

    def started(frame: FrameType, event: str, argument: Any) -> None:
        # Called inside the new thread, by its first call.
        sys.setprofile(None)
        if not tracker.closed:
            _Guard(tracker).__enter__()

    before: Any = threading.getprofile()
    threading.setprofile(started)
    try:
        yield
    finally:
        threading.setprofile(before)


class _Guard(TorchDispatchMode):  # type: ignore[misc]
    """Refuses, in another thread, to write a weight and to touch a tensor of the replay."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._tracker.closed:
            rule = RULES.get(func) or rule_of(func)
            if rule.kind == "write" and any(key(t) in self._tracker.resident for t in rule.targets(args, kwargs)):
                self._tracker.check_thread()
            if any(key(t) in self._tracker.cells for t in tensors_in(args, kwargs)):
                self._tracker.check_thread()
        return func(*args, **kwargs)


def _prove_unchanged(
    rank: str, snapshot: Snapshot, before: dict[int, tuple[str, tuple[int, int, int]]], cause: Exception | None
) -> None:
    after = snapshot.digests()
    for storage, (name, state) in before.items():
        if after[storage][1] != state:
            raise ReplayError(
                "a loader replay changed a resident weight",
                tensor=name,
                rank=rank,
                expected=f"(address, bytes, digest) {state}",
                found=after[storage][1],
                remedy="reload this engine's weights; its loader writes where the dispatcher does not see it",
            ) from cause


# --- from writes to a layout ----------------------------------------------------------------------------------------


class _Builder:
    """Assigns writes to parameters and puts them into the canonical form."""

    def __init__(
        self,
        rank: str,
        specs: Sequence[TensorSpec],
        held: Sequence[Held],
        tracker: Tracker,
        left: Sequence[_Left],
        failed: dict[int, str],
    ) -> None:
        self._rank = rank
        self._specs = specs
        self._writes: dict[int, list[Write]] = {}
        for write in tracker.writes:
            self._writes.setdefault(write.storage, []).append(write)
        self._params: list[ParamSpec] = []
        self._numbers: dict[int, int] = {}
        self._places: dict[int, list[int]] = {}
        self._opaque: dict[str, str] = {specs[i].name: reason for i, reason in failed.items()}
        self._lost: set[int] = set()
        self._index: dict[str, int] = {}
        self._list(held)
        for name, kind, sources in left:
            if kind != "attribute":
                self._lose(self._index.get(name), name, "the loader rebinds it", sources)
            elif sources:
                self._lose(None, name, "the loader assigns it", sources)

    def _list(self, held: Sequence[Held]) -> None:
        seen: dict[tuple[Any, ...], int] = {}
        for item in held:
            data = item.data
            storage = key(data)
            if item.kind == "attribute" and not (storage not in self._places and self._carries(storage)):
                continue
            identity = (storage, data.storage_offset(), data.shape, data.stride(), data.dtype)
            if identity not in seen:
                seen[identity] = len(self._params)
                self._places.setdefault(storage, []).append(len(self._params))
                self._params.append(
                    ParamSpec(
                        item.name,
                        tuple(data.shape),
                        str(data.dtype).removeprefix("torch."),
                        self._numbers.setdefault(storage, len(self._numbers)),
                        data.storage_offset(),
                        tuple(data.stride()),
                        item.loaded,
                    )
                )
            self._index.setdefault(item.name, seen[identity])

    def _carries(self, storage: int) -> bool:
        """Whether canonical data went into this storage. What the engine derives from its weights is its own affair."""
        return any(
            bool(write.lost.sources) if write.lost else any(p.source != CONSTANT for p in write.pieces)
            for write in self._writes.get(storage, ())
        )

    def _lose(self, param: int | None, name: str, reason: str, sources: frozenset[int]) -> None:
        if param is not None:
            self._lost.add(param)
            name = self._params[param].name
        self._opaque.setdefault(name, reason)
        for source in sorted(sources):
            self._opaque.setdefault(self._specs[source].name, f"goes into {name}: {reason}")

    def build(self) -> Layout:
        """Raises :class:`LayoutError` if the manifest itself cannot be described."""
        placed: dict[int, list[Piece]] = {}
        for storage, writes in self._writes.items():
            self._place(storage, writes, placed)
        regions, fills = RegionBuilder(), []
        for param in sorted(placed):
            if param in self._lost:
                self._drop(param, placed[param])
                continue
            try:
                rows, constants = self._describe(param, _settle(placed[param]))
            except TooComplex:
                self._lose(param, "", "moved in too many pieces", frozenset())
                self._drop(param, placed[param])
                continue
            for source, box in rows:
                regions.add(
                    source, param, lo=box.lo, size=box.size, step=box.step, offset=box.offset, stride=box.stride
                )
            fills += constants
        layout = Layout(
            self._rank,
            tuple(self._specs),
            tuple(self._params),
            regions.build(),
            Fills.of(fills),
            tuple(Opaque(name, reason) for name, reason in self._opaque.items()),
        )
        layout.validate()
        return layout

    def _drop(self, param: int, pieces: list[Piece]) -> None:
        """Names whose regions are left out with a parameter's."""
        sources = frozenset(piece.source for piece in pieces if piece.source != CONSTANT)
        name = self._params[param].name
        self._lose(param, name, self._opaque[name], sources)

    def _place(self, storage: int, writes: list[Write], placed: dict[int, list[Piece]]) -> None:
        spans = [(param, *_bounds(self._params[param])) for param in self._places.get(storage, ())]
        for write in writes:
            sources = write.lost.sources if write.lost else frozenset(p.source for p in write.pieces) - {CONSTANT}
            if not spans:
                if sources:
                    self._lose(None, "(memory of no module)", "written by the loader", sources)
                continue
            dtype = str(write.dtype).removeprefix("torch.")
            owner = next(
                (
                    p
                    for p, low, high in spans
                    if low <= write.low and write.high <= high and self._params[p].dtype == dtype
                ),
                None,
            )
            if write.lost is None and owner is not None:
                start = self._params[owner].start
                placed.setdefault(owner, []).extend(
                    piece._replace(map=piece.map._replace(at=piece.map.at - start)) for piece in write.pieces
                )
                continue
            reason = write.lost.reason if write.lost else f"written as {dtype}, across parameters or out of bounds"
            for param, low, high in spans:
                # Addresses of another dtype's view cannot be compared, so that every parameter there is concerned.
                if self._params[param].dtype != dtype or (write.low <= high and low <= write.high):
                    self._lose(param, "", reason, sources)

    def _describe(
        self, param: int, pieces: list[Piece]
    ) -> tuple[list[tuple[int, affine.Box]], list[tuple[int, int, Sequence[int], Sequence[int], float]]]:
        rows: list[tuple[int, affine.Box]] = []
        constants: list[tuple[int, int, Sequence[int], Sequence[int], float]] = []
        for piece in pieces:
            if piece.source == CONSTANT:
                dims = _coalesced(piece.map)
                if len(dims) > DIMS:
                    raise TooComplex
                constants.append((param, piece.map.at, [d[0] for d in dims], [d[1] for d in dims], piece.value))
            else:
                if len(self._specs[piece.source].shape) > DIMS:
                    raise TooComplex
                rows += [(piece.source, box) for box in affine.boxes(piece.map, self._specs[piece.source].shape)]
        return rows, constants


def _bounds(param: ParamSpec) -> tuple[int, int]:
    return Affine(param.start, 0, tuple((n, s, 0) for n, s in zip(param.shape, param.stride, strict=True))).bounds()


def _coalesced(piece: Affine) -> list[tuple[int, int]]:
    """``(size, stride)`` of a constant's addresses, with dimensions joined where one continues another."""
    dims: list[tuple[int, int]] = []
    for n, stride, _ in sorted(piece.dims, key=lambda dim: -dim[1]):
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        elif n > 1:
            dims.append((n, stride))
    return dims


def _settle(pieces: list[Piece]) -> list[Piece]:
    """What holds after all writes: a constant gives way to whatever is written after it and hides what was before; a
    repeated copy counts once; different sources of one element all stay, for the proof of coverage to report."""
    order = sorted(range(len(pieces)), key=lambda i: pieces[i].map.bounds())
    bounds = [piece.map.bounds() for piece in pieces]
    over: dict[int, list[int]] = {}
    active: list[int] = []
    for i in order:
        active = [j for j in active if bounds[j][1] >= bounds[i][0]]
        for j in active:
            over.setdefault(min(i, j), []).append(max(i, j))
        active.append(i)
    settled = []
    for i, piece in enumerate(pieces):
        parts = [piece.map]
        for j in sorted(over.get(i, ())):
            later = pieces[j]
            if CONSTANT in (piece.source, later.source):
                parts = [rest for part in parts for rest in affine.subtract(part, later.map)]
            elif piece.source == later.source:
                parts = [
                    rest
                    for part in parts
                    for rest in (affine.subtract(part, later.map) if affine.agree(part, later.map) else [part])
                ]
        settled += [piece._replace(map=part) for part in parts]
    return settled
