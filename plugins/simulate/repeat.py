"""A loader's replay over one layer of every kind, repeated for the other layers of that kind.

Layers are of one kind when the model shows the same modules and tensors in them, and the manifest the same tensors.
Whatever does not fit that picture (a loader that writes into another layer, tensors that it rebinds) is not repeated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from weightlink.hooks.geometry import Fills, Int64, Layout, Regions, TensorSpec

_LAYER = re.compile(r"^((?:.*?\.)?layers\.)(\d+)(\..*)?$")
_CODED = ("tensor", "param")

Kinds = Sequence[Sequence[int]]
"""Numbers of the layers of each kind, ascending."""
Held = Sequence[tuple[str, tuple[int, ...], str, str]]
"""Name, shape, dtype and sort of everything that a model holds."""


@dataclass(frozen=True)
class Repeated:
    """A layout over the whole manifest."""

    layout: Layout


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor or module belongs to, if any."""
    found = _LAYER.match(name)
    return int(found[2]) if found else None


def _in_layer(name: str) -> tuple[int | None, str]:
    """The layer's number, and the name with it left open."""
    found = _LAYER.match(name)
    return (int(found[2]), f"{found[1]}#{found[3] or ''}") if found else (None, name)


def kinds_of_layers(manifest: Sequence[TensorSpec], held: Held, model: torch.nn.Module) -> list[list[int]]:
    """The layers of the manifest by kind."""
    facts: dict[int, list[object]] = defaultdict(list)
    layers: set[int] = set()
    for spec in manifest:
        number, name = _in_layer(spec.name)
        if number is not None:
            layers.add(number)
            facts[number].append((name, spec.shape, spec.dtype))
    for path, module in model.named_modules(remove_duplicate=False):
        number, name = _in_layer(path)
        if number is not None:
            facts[number].append((name, type(module).__module__, type(module).__qualname__))
    for path, shape, dtype, sort in held:
        number, name = _in_layer(path)
        if number is not None:
            facts[number].append((name, shape, dtype, sort))
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number in sorted(layers):
        kinds[tuple(facts[number])].append(number)
    return list(kinds.values())


def reduced(manifest: Sequence[TensorSpec], kinds: Kinds, which: int) -> list[TensorSpec]:
    """The manifest with one layer of every kind: the first (0) or the last (-1)."""
    kept = {layers[which] for layers in kinds}
    return [spec for spec in manifest if (number := layer_of(spec.name)) is None or number in kept]


def repeat(layout: Layout, manifest: Sequence[TensorSpec], kinds: Kinds, which: int) -> Repeated | str:
    """``layout``, observed over :func:`reduced`, over the whole manifest; or why that cannot be said of it."""
    if layout.opaque or layout.quantised or any(param.staged for param in layout.params):
        return "tensors that go through the engine's own loader"
    tensors = {spec.name: n for n, spec in enumerate(manifest)}
    params = {param.name: n for n, param in enumerate(layout.params)}
    whole = np.array([tensors[spec.name] for spec in layout.tensors], np.int64)
    of_tensor = _layers(spec.name for spec in layout.tensors)
    of_param = _layers(param.name for param in layout.params)
    regions, fills = layout.regions, layout.fills
    home = of_tensor[regions.tensor]
    if (home != of_param[regions.param]).any():
        return "a tensor of one layer is written into another"
    made: list[tuple[Regions, Fills]] = []
    for layers in kinds:
        first = layers[which]
        mine, filled = np.flatnonzero(home == first), np.flatnonzero(of_param[fills.param] == first)
        for number in layers:
            if number == first:
                continue
            into = _renamed([t.name for t in layout.tensors], regions.tensor[mine], number, tensors)
            at = _renamed([p.name for p in layout.params], regions.param[mine], number, params)
            fill = _renamed([p.name for p in layout.params], fills.param[filled], number, params)
            if into is None or at is None or fill is None:
                return f"layer {number} lacks what layer {first} has"
            made.append(
                (
                    replace(_rows(regions, mine), tensor=into.astype(np.int32), param=at.astype(np.int32)),
                    Fills(
                        fill.astype(np.int32), fills.offset[filled], fills.size[filled], fills.stride[filled],
                        fills.value[filled],
                    ),
                )
            )  # fmt: skip
    own = replace(regions, tensor=whole[regions.tensor].astype(np.int32))
    every = Regions.concat([own, *(r for r, _ in made)])
    constants = [fills, *(f for _, f in made)]
    columns = {name: np.concatenate([getattr(f, name) for f in constants]) for name in Fills.COLUMNS}
    order = np.lexsort((every.offset, every.param, every.tensor))
    return Repeated(replace(layout, tensors=tuple(manifest), regions=_rows(every, order), fills=Fills(**columns)))


def same_regions(a: Layout, b: Layout) -> bool:
    """Whether two layouts over one manifest say the same, in whatever order."""
    named = [[param.name for param in layout.params] for layout in (a, b)]
    return named[0] == named[1] and all(
        len(x) == len(y) and (not len(x) or np.array_equal(_sorted(x), _sorted(y)))
        for x, y in ((a.regions, b.regions), (a.fills, b.fills))
    )


def _sorted(table: Regions | Fills) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rows = np.concatenate([np.asarray(getattr(table, c), np.float64).reshape(len(table), -1) for c in table.COLUMNS], 1)
    return rows[np.lexsort(rows.T[::-1])]


def _layers(names: Iterable[str]) -> Int64:
    assigned = [-1 if (number := layer_of(name)) is None else number for name in names]
    return np.array(assigned, np.int64)


def _renamed(names: Sequence[str], rows: np.ndarray, layer: int, known: Mapping[str, int]) -> Int64 | None:
    """The numbers that the names of ``rows`` have in another layer; None if one of them is missing there."""
    unique, inverse = np.unique(rows, return_inverse=True)
    moved = []
    for n in unique.tolist():
        found = _LAYER.match(names[n])
        number = known.get(f"{found[1]}{layer}{found[3] or ''}") if found else None
        if number is None:
            return None
        moved.append(number)
    return np.array(moved, np.int64)[inverse.reshape(-1)]


def _rows(regions: Regions, rows: Int64) -> Regions:
    return Regions(*(getattr(regions, name)[rows] for name in Regions.COLUMNS))
