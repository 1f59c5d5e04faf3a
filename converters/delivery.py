"""What the replay cannot follow goes through the engine's own loader, in one call with whole canonical tensors.

Which tensors the call needs, and what it would write besides, is not guessed: the loader is replayed over them alone.
The call must write all of every opaque destination, from all that went into it, and must leave in every other
destination only what a load of the whole checkpoint leaves there. Tensors are added until both hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weightlink.converters import affine
from weightlink.converters.affine import TooComplex
from weightlink.converters.cells import CONSTANT, Piece
from weightlink.converters.writes import Contents, Loss
from weightlink.hooks.errors import ReplayError
from weightlink.hooks.geometry import CASTABLE, Fills, Layout, Opaque, ParamSpec, RegionBuilder, TensorSpec

Again = Callable[[frozenset[int]], Contents]
"""Replays the loader over some canonical tensors; raises :class:`ReplayError` when it does not accept them."""


@dataclass
class Delivery:
    """How opaque destinations are served.

    :param names: canonical tensors of the call
    :param lost: opaque parameters; more than the replay lost when a call with fewer names would disturb one
    :param strays: opaque destinations that are no parameter
    :param refused: why a destination cannot be served: parameters by number, others by name
    """

    names: frozenset[int]
    lost: dict[int, Loss]
    strays: dict[str, Loss]
    refused: dict[int | str, str] = field(default_factory=dict)


def decide(full: Contents, count: int, again: Again) -> Delivery:
    """The smallest call found that serves what ``full``, the replay of all ``count`` canonical tensors, has lost."""
    everything = frozenset(range(count)) - full.failed.keys()
    lost, strays = dict(full.lost), dict(full.strays)
    refused: dict[int | str, str] = {}
    for where, loss in _all(lost, strays):
        if loss.barred:
            refused[where] = loss.reason
    names = frozenset[int]().union(*(loss.sources for where, loss in _all(lost, strays) if where not in refused))
    if all(where in refused for where, _ in _all(lost, strays)):
        return Delivery(frozenset(), lost, strays, refused)
    while True:
        try:
            seen = again(names)
        except ReplayError as error:
            if names == everything:
                for where, loss in _all(lost, strays):
                    refused.setdefault(where, f"{loss.reason}; {error.message}")
                return Delivery(frozenset(), lost, strays, refused)
            names = everything
            continue
        wider = names
        short: list[tuple[int | str, Loss]] = []
        for where, loss in _all(lost, strays):
            if where in refused:
                continue
            wider |= loss.sources
            found = seen.strays.get(where) if isinstance(where, str) else seen.loss(where)
            if found is None or not loss.sources <= found.sources:
                short.append((where, loss))
        # Not written by this call: what its inputs were written from, what came with it, and then everything.
        for more in (
            frozenset[int]().union(*(loss.behind for _, loss in short)),
            frozenset[int]().union(*(loss.during for _, loss in short)),
            everything if short else names,
        ):
            if wider == names:
                wider |= more & everything
        disturbed = [p for p in seen.touched() if p not in lost and not _contained(seen, full, p)]
        for param in disturbed:
            lost[param] = Loss("a call of the loader with fewer names leaves other values", full.sources(param))
            wider |= full.sources(param)
        if wider == names and not disturbed:
            _refuse(seen, lost, strays, short, refused)
            return Delivery(names, lost, strays, refused)
        names = wider


def _all(lost: dict[int, Loss], strays: dict[str, Loss]) -> list[tuple[int | str, Loss]]:
    return [*lost.items(), *strays.items()]


def _refuse(
    seen: Contents,
    lost: dict[int, Loss],
    strays: dict[str, Loss],
    short: Sequence[tuple[int | str, Loss]],
    refused: dict[int | str, str],
) -> None:
    """What the final call would not do right."""
    for where, loss in short:
        refused[where] = f"{loss.reason}; a call with all tensors does not write it"
    for name, loss in seen.strays.items():
        if loss.barred and name not in strays:
            strays[name] = loss
            refused[name] = loss.reason
    for param, loss in lost.items():
        if param in refused:
            continue
        found = seen.lost.get(param)
        if found is not None and found.barred:
            refused[param] = found.reason
            continue
        try:
            missing = seen.unwritten(param)
        except TooComplex:
            refused[param] = f"{loss.reason}; it is too scattered to tell whether all of it is written"
            continue
        if missing:
            total = math.prod(seen.params[param].shape)
            refused[param] = f"{loss.reason}; the loader leaves {missing} of {total} elements as they were"


def _contained(seen: Contents, full: Contents, param: int) -> bool:
    """Whether everything that ``seen`` leaves in a parameter is what ``full`` leaves there."""
    if param in seen.lost:
        return False
    known = full.pieces.get(param, [])
    try:
        return all(piece in known or not _beyond(piece, known) for piece in seen.pieces[param])
    except TooComplex:
        return False


def _beyond(piece: Piece, known: Sequence[Piece]) -> bool:
    """Whether some element of ``piece`` is not in ``known`` with the same content."""
    rest = [piece.map]
    for other in known:
        if piece.source != other.source or not (piece.source != CONSTANT or _same(piece.value, other.value)):
            continue
        rest = [
            part
            for left in rest
            for part in (
                affine.subtract(left, other.map)
                if piece.source == CONSTANT or affine.agree(left, other.map)
                else [left]
            )
        ]
    return bool(rest)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def layout(rank: str, specs: Sequence[TensorSpec], full: Contents, delivery: Delivery) -> Layout:
    """The layout of a rank: regions and fills of what was followed, and staging for what goes through the loader.

    Raises :class:`~weightlink.hooks.errors.LayoutError` if the manifest itself cannot be described."""
    params, regions = list(full.params), RegionBuilder()
    for param in sorted(full.regions.keys() - delivery.lost.keys()):
        for source, box in full.regions[param]:
            regions.add(source, param, lo=box.lo, size=box.size, step=box.step, offset=box.offset, stride=box.stride)
    storage = 1 + max((p.storage for p in params), default=-1)
    for at, name in enumerate(sorted(delivery.names)):
        spec = specs[name]
        stride = affine.contiguous(spec.shape)
        dtype = _staged_dtype(name, spec, full, delivery)
        params.append(ParamSpec(spec.name, spec.shape, dtype, storage + at, 0, stride, staged=True))
        if math.prod(spec.shape):
            regions.add(name, len(params) - 1, lo=[0] * len(spec.shape), size=spec.shape, offset=0, stride=stride)
    made = Layout(
        rank,
        tuple(specs),
        tuple(params),
        regions.build(),
        Fills.of(row for row in full.fills if row[0] not in delivery.lost),
        tuple(_opaque(specs, full, delivery)),
    )
    made.validate()
    return made


def _staged_dtype(name: int, spec: TensorSpec, full: Contents, delivery: Delivery) -> str:
    """fp32 where the engine keeps in fp32 all that is made of the tensor: rounding it on the way would show."""
    into = {full.params[param].dtype for param, loss in delivery.lost.items() if name in loss.sources}
    return "float32" if into == {"float32"} and spec.dtype in CASTABLE else spec.dtype


def _opaque(specs: Sequence[TensorSpec], full: Contents, delivery: Delivery) -> list[Opaque]:
    """Destinations first, those that are refused before all others; then canonical tensors."""
    entries, why = [], dict(full.failed)
    for where, loss in sorted(_all(delivery.lost, delivery.strays), key=lambda row: row[0] not in delivery.refused):
        param = where if isinstance(where, int) else None
        name = full.params[where].name if isinstance(where, int) else where
        refusal = delivery.refused.get(where)
        entries.append(Opaque(name, refusal or loss.reason, param, refusal is None))
        for number in sorted(loss.sources):
            why.setdefault(number, f"goes into {name}: {refusal or loss.reason}")
    refused = {
        source
        for where, loss in _all(delivery.lost, delivery.strays)
        if where in delivery.refused
        for source in loss.sources
    }
    for number in sorted(delivery.names):
        why.setdefault(number, "the loader needs it in the same call")
    for source, reason in sorted(why.items(), key=lambda row: row[0] not in full.failed):
        done = source in delivery.names and source not in refused and source not in full.failed
        entries.append(Opaque(specs[source].name, reason, None, done))
    return entries
