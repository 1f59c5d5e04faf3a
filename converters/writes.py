"""From a loader's writes to the contents of parameters: which canonical elements, which constants, and what is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from weightlink.converters import affine
from weightlink.converters.affine import Affine, TooComplex
from weightlink.converters.cells import CONSTANT, Piece, Write, dtype_name, key
from weightlink.converters.provenance import Tracker
from weightlink.converters.snapshot import Held
from weightlink.hooks.geometry import DIMS, ITEMSIZE, ParamSpec, TensorSpec

RegionRow = tuple[int, affine.Box]
FillRow = tuple[int, int, Sequence[int], Sequence[int], float]


class Left(NamedTuple):
    """What the loader left on the modules: a tensor under ``name`` that was not there before, or in other memory.

    :param existed: there was a tensor under this name before
    """

    name: str
    kind: str
    sources: frozenset[int]
    existed: bool


class Loss(NamedTuple):
    """Why a destination cannot be followed.

    :param sources: the canonical tensors that went into it, as far as they are known
    :param behind: those that were written to the weights that it was computed from
    :param during: those that the loader had taken last when it wrote the destination
    :param barred: running the loader for real would not give the right value either
    """

    reason: str
    sources: frozenset[int] = frozenset()
    behind: frozenset[int] = frozenset()
    during: frozenset[int] = frozenset()
    barred: bool = False

    def joined(self, other: Loss) -> Loss:
        """Both; the first reason stays."""
        return Loss(
            self.reason,
            self.sources | other.sources,
            self.behind | other.behind,
            self.during | other.during,
            self.barred or other.barred,
        )


class Destinations:
    """The parameters of one replay and all that repeat it: parameters, buffers, and attributes that the loader fills.

    :param held: the modules' tensors
    :param tracker: the replay of the whole manifest
    """

    def __init__(self, held: Sequence[Held], tracker: Tracker) -> None:
        self.params: list[ParamSpec] = []
        self.places: dict[int, list[int]] = {}
        self.index: dict[str, int] = {}
        self.storages: dict[int, int] = {}
        self.derived: dict[int, str] = {}
        """Storages of attributes that hold what the engine computes from its weights, by one of their names."""
        carrying = {write.storage for write in tracker.writes if _sources(write)}
        seen: dict[tuple[Any, ...], int] = {}
        for item in held:
            data = item.data
            storage = key(data)
            if item.kind == "attribute" and (storage in self.places or storage not in carrying):
                if storage not in self.places:
                    self.derived.setdefault(storage, item.name)
                continue
            identity = (storage, data.storage_offset(), data.shape, data.stride(), data.dtype)
            if identity not in seen:
                seen[identity] = len(self.params)
                self.places.setdefault(storage, []).append(len(self.params))
                self.params.append(
                    ParamSpec(
                        item.name,
                        tuple(data.shape),
                        dtype_name(data.dtype),
                        self.storages.setdefault(storage, len(self.storages)),
                        data.storage_offset(),
                        tuple(data.stride()),
                        item.loaded,
                    )
                )
            self.index.setdefault(item.name, seen[identity])


class Contents:
    """What one run of the loader would leave in every destination.

    ``pieces`` of followed parameters (addresses from the parameter's first element), with their ``regions`` and
    ``fills``; ``lost`` parameters; ``strays``, lost destinations that are no parameter; ``derived``, tensor attributes
    that are computed from what is resident; ``failed`` canonical tensors.
    """

    def __init__(
        self,
        destinations: Destinations,
        specs: Sequence[TensorSpec],
        tracker: Tracker,
        left: Sequence[Left],
        failed: Mapping[int, str],
    ) -> None:
        self.params = destinations.params
        self.pieces: dict[int, list[Piece]] = {}
        self.lost: dict[int, Loss] = {}
        self.strays: dict[str, Loss] = {}
        self.derived: dict[str, Loss] = {}
        self.failed = dict(failed)
        self.regions: dict[int, list[RegionRow]] = {}
        self.fills: list[FillRow] = []
        self._specs = specs
        self._assigned: dict[int, list[Affine]] = {}
        for item in left:
            self._note(destinations, item)
        writes: dict[int, list[Write]] = {}
        for write in tracker.writes:
            writes.setdefault(write.storage, []).append(write)
        for storage, listed in writes.items():
            self._place(destinations.places.get(storage, ()), listed, destinations.derived.get(storage))
        for param in list(self.pieces):
            self._settle(param)

    def sources(self, param: int) -> frozenset[int]:
        """The canonical tensors that went into a parameter."""
        if param in self.lost:
            return self.lost[param].sources
        return frozenset(p.source for p in self.pieces.get(param, ())) - {CONSTANT}

    def expect(self, refreshed: Set[str]) -> None:
        """Derived attributes that nobody else refreshes after an update are destinations like others."""
        for name, loss in self.derived.items():
            if name not in refreshed:
                self._stray(name, loss)

    def touched(self) -> list[int]:
        """Parameters that the run writes."""
        return [*self.lost, *self.pieces]

    def loss(self, param: int) -> Loss | None:
        """The loss of a parameter, or what went into it all the same; None if the run does not write it."""
        if param in self.pieces:
            return Loss("", self.sources(param))
        return self.lost.get(param)

    def unwritten(self, param: int) -> int:
        """How many elements of a parameter the run leaves as they were. Raises :class:`TooComplex`."""
        rest, start = [_whole(self.params[param])], self.params[param].start
        followed = [p.map._replace(at=p.map.at + start, to=0) for p in self.pieces.get(param, ())]
        for over in [*self._assigned.get(param, ()), *followed]:
            rest = [part for left in rest for part in affine.subtract(left, over)]
        return sum(part.numel for part in rest)

    def _note(self, destinations: Destinations, item: Left) -> None:
        param = destinations.index.get(item.name)
        if item.kind != "attribute":
            loss = Loss("the loader rebinds it", item.sources, barred=True)
            if param is None:
                self._stray(item.name, loss)
            else:
                self._lose(param, loss)
        elif item.sources:
            self._stray(item.name, Loss("the loader assigns it", item.sources, barred=True))
        elif item.existed:
            self.derived[item.name] = Loss("the loader replaces it, and who holds the old one keeps that", barred=True)
        else:
            self.derived[item.name] = Loss("the loader makes it from weights")

    def _lose(self, param: int, loss: Loss) -> None:
        known = self.lost.get(param)
        self.lost[param] = known.joined(loss) if known else loss

    def _stray(self, name: str, loss: Loss) -> None:
        known = self.strays.get(name)
        self.strays[name] = known.joined(loss) if known else loss

    def _place(self, params: Sequence[int], writes: Sequence[Write], derived: str | None) -> None:
        """Gives every write to the parameter that contains it, or to the attribute ``derived``."""
        spans = [(param, *_bounds(self.params[param])) for param in params]
        for write in writes:
            during = frozenset(() if write.during is None else (write.during,))
            sources = _sources(write)
            if not spans:
                if sources:
                    barred = write.lost is not None and write.lost.barred
                    self._stray(
                        "(memory of no module)", Loss("written by the loader", sources, write.behind, during, barred)
                    )
                elif derived is not None:
                    loss = Loss("the loader computes it from weights", frozenset(), write.behind, during)
                    known = self.derived.get(derived)
                    self.derived[derived] = known.joined(loss) if known else loss
                continue
            dtype = dtype_name(write.dtype)
            owner = next(
                (p for p, low, high in spans
                 if low <= write.low and write.high <= high and self.params[p].dtype == dtype),
                None,
            )  # fmt: skip
            if write.lost is None and owner is not None:
                start = self.params[owner].start
                self.pieces.setdefault(owner, []).extend(
                    piece._replace(map=piece.map._replace(at=piece.map.at - start)) for piece in write.pieces
                )
                continue
            reason = write.lost.reason if write.lost else f"written as {dtype}, across parameters or out of bounds"
            loss = Loss(reason, sources, write.behind, during, write.lost is not None and write.lost.barred)
            for param, low, high in spans:
                # Addresses of another dtype's view cannot be compared, so that every parameter there is concerned.
                if self.params[param].dtype != dtype or (write.low <= high and low <= write.high):
                    self._lose(param, loss)
                    if write.lost is not None and write.span is not None:
                        over = _in_elements_of(self.params[param], write.span, write.dtype.itemsize)
                        self._assigned.setdefault(param, []).extend(over)

    def _settle(self, param: int) -> None:
        """The pieces of one parameter in the end, or its loss."""
        pieces = self.pieces[param]
        if param not in self.lost:
            try:
                settled = _settled(pieces)
                rows, fills = self._describe(param, settled)
            except TooComplex:
                self._lose(param, Loss("moved in too many pieces"))
            else:
                self.pieces[param], self.regions[param] = settled, rows
                self.fills += fills
                return
        self._lose(param, Loss("", frozenset(p.source for p in pieces) - {CONSTANT}))
        start = self.params[param].start
        self._assigned.setdefault(param, []).extend(p.map._replace(at=p.map.at + start, to=0) for p in pieces)
        del self.pieces[param]

    def _describe(self, param: int, pieces: Sequence[Piece]) -> tuple[list[RegionRow], list[FillRow]]:
        rows: list[RegionRow] = []
        constants: list[FillRow] = []
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


def _sources(write: Write) -> frozenset[int]:
    """The canonical tensors that a write carries."""
    return write.lost.sources if write.lost else frozenset(p.source for p in write.pieces) - {CONSTANT}


def _whole(param: ParamSpec) -> Affine:
    """A parameter's addresses in its storage."""
    return Affine(param.start, 0, tuple((n, s, 0) for n, s in zip(param.shape, param.stride, strict=True)))


def _bounds(param: ParamSpec) -> tuple[int, int]:
    return _whole(param).bounds()


def _in_elements_of(param: ParamSpec, over: Affine, itemsize: int) -> list[Affine]:
    """Addresses in elements of ``itemsize`` bytes as those of a parameter; what cannot be said is left out."""
    own = ITEMSIZE[param.dtype]
    if own == itemsize:
        return [over]
    low, high = over.bounds()
    if over.numel != high - low + 1:
        return []
    first, last = -(-low * itemsize // own), (high + 1) * itemsize // own
    return [Affine(first, 0, ((last - first, 1, 0),))] if last > first else []


def _coalesced(piece: Affine) -> list[tuple[int, int]]:
    """``(size, stride)`` of a constant's addresses, with dimensions joined where one continues another."""
    dims: list[tuple[int, int]] = []
    for n, stride, _ in sorted(piece.dims, key=lambda dim: -dim[1]):
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        elif n > 1:
            dims.append((n, stride))
    return dims


def _settled(pieces: list[Piece]) -> list[Piece]:
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
    settled: list[Piece] = []
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
