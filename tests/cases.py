"""Random layouts of every kind that the geometry can describe, and two plain judges of them that go element by element:
what a layout's memory must hold, and whether a set of layouts covers everything exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from layouts import contiguous, cuts
from weightlink.hooks.geometry import Fills, Layout, ParamSpec, RegionBuilder, TensorSpec

Index = tuple[int, ...]


def random_manifest(rng: random.Random, dtype: str = "float32") -> list[TensorSpec]:
    """One to three tensors of one to five dimensions and at most 120 elements."""
    tensors = []
    for n in range(rng.randint(1, 3)):
        shape: list[int] = []
        for _ in range(rng.randint(1, 5)):
            left = 120
            for size in shape:
                left //= size
            shape.append(rng.randint(1, min(7, left)))
        tensors.append(TensorSpec(f"t{n}", tuple(shape), dtype))
    return tensors


@dataclass
class _Rank:
    """One rank's layout while it is made."""

    params: list[ParamSpec] = field(default_factory=list)
    regions: RegionBuilder = field(default_factory=RegionBuilder)
    fills: list[tuple[int, int, list[int], list[int], float]] = field(default_factory=list)
    storages: int = 0


Piece = tuple[int, list[int], list[int], list[int]]
"""``(tensor, lo, size, step)``."""


def random_side(
    rng: random.Random, who: str, tensors: Sequence[TensorSpec], *, dtypes: Sequence[str], fill: bool
) -> list[Layout]:
    """Every tensor cut along several dimensions, in uneven blocks or with a step; each piece on one rank or several.

    A piece lies in memory of its own, transposed, padded at either end or with gaps, or is packed behind others into
    one flat tensor. With ``fill`` what is no piece's is a constant; otherwise it is nothing that anybody reads."""
    ranks = [_Rank() for _ in range(rng.randint(1, 4))]
    held: list[list[Piece]] = [[] for _ in ranks]
    for number, spec in enumerate(tensors):
        for piece in _cut(rng, number, spec.shape):
            for owner in rng.sample(range(len(ranks)), rng.choice([1, 1, rng.randint(1, len(ranks))])):
                held[owner].append(piece)
    for rank, pieces in zip(ranks, held, strict=True):
        packed = [piece for piece in pieces if rng.random() < 0.3]
        if packed:
            _pack(rng, rank, packed, rng.choice(dtypes), fill)
        for piece in pieces:
            if piece not in packed:
                _place(rng, rank, piece, rng.choice(dtypes), fill)
    return [
        Layout(f"{who} {n}", tuple(tensors), tuple(rank.params), rank.regions.build(), Fills.of(rank.fills))
        for n, rank in enumerate(ranks)
    ]


def _cut(rng: random.Random, number: int, shape: Sequence[int]) -> Iterator[Piece]:
    """The tensor as a grid of pieces."""
    axes = []
    for n in shape:
        kind = rng.choice(["whole", "whole", "blocks", "step"]) if n > 1 else "whole"
        if kind == "blocks":
            axes.append([(lo, size, 1) for lo, size in cuts(rng, n, rng.randint(2, 3))])
        elif kind == "step":
            count = rng.randint(2, min(3, n))
            axes.append([(lo, len(range(lo, n, count)), count) for lo in range(count)])
        else:
            axes.append([(0, n, 1)])
    for cell in itertools.product(*axes):
        yield number, [c[0] for c in cell], [c[1] for c in cell], [c[2] for c in cell]


def _place(rng: random.Random, rank: _Rank, piece: Piece, dtype: str, fill: bool) -> None:
    """A parameter for one piece."""
    number, lo, size, step = piece
    dims = range(len(size))
    before = [rng.choice([0, 0, 0, 1, 2]) for _ in dims]
    after = [rng.choice([0, 0, 0, 1]) for _ in dims]
    whole = [before[d] + size[d] + after[d] for d in dims]
    order = rng.sample(list(dims), len(size))  # the local tensor's dimensions, as canonical ones
    shape = [whole[d] for d in order]
    gaps = contiguous([n + rng.choice([0, 0, 1]) for n in shape])  # of a larger tensor that this one is a view of
    stride = [gaps[order.index(d)] for d in dims]
    start = rng.choice([0, rng.randint(0, 9)])
    param = len(rank.params)
    rank.params.append(ParamSpec(f"p{param}", tuple(shape), dtype, rank.storages, start, tuple(gaps)))
    rank.storages += 1
    offset = sum(before[d] * stride[d] for d in dims)
    rank.regions.add(number, param, lo=lo, size=size, step=step, offset=offset, stride=stride)
    if fill:
        # What is around the piece, one dimension after the other: slabs that do not touch one another.
        at, box = [0] * len(size), list(whole)
        for d in dims:
            for first, count in ((0, before[d]), (before[d] + size[d], after[d])):
                if count:
                    corner = sum((first if e == d else at[e]) * stride[e] for e in dims)
                    extent = [count if e == d else box[e] for e in dims]
                    rank.fills.append((param, corner, extent, stride, float(rng.randint(-3, 3))))
            at[d], box[d] = before[d], size[d]


def _pack(rng: random.Random, rank: _Rank, pieces: Sequence[Piece], dtype: str, fill: bool) -> None:
    """Several pieces behind one another in one flat parameter."""
    param, at = len(rank.params), 0
    for number, lo, size, step in pieces:
        hole = rng.choice([0, 0, 3])
        if hole and fill:
            rank.fills.append((param, at, [hole], [1], 7.0))
        at += hole
        order = rng.sample(range(len(size)), len(size))
        inner = contiguous([size[d] for d in order])
        stride = [inner[order.index(d)] for d in range(len(size))]
        rank.regions.add(number, param, lo=lo, size=size, step=step, offset=at, stride=stride)
        numel = 1
        for n in size:
            numel *= n
        at += numel
    rank.params.append(ParamSpec(f"p{param}", (at,), dtype, rank.storages, 0, (1,)))
    rank.storages += 1


# --- element by element ---------------------------------------------------------------------------------------------


def elements(layout: Layout, row: int) -> Iterator[tuple[Index, int]]:
    """``(canonical index, address)`` of every element of a region, by the definition of a region."""
    r = layout.regions
    rank = len(layout.tensors[int(r.tensor[row])].shape)
    lo, size, step, stride = (column[row].tolist() for column in (r.lo, r.size, r.step, r.stride))
    for k in itertools.product(*(range(n) for n in size)):
        index = tuple(lo[d] + k[d] * step[d] for d in range(rank))
        yield index, int(r.offset[row]) + sum(a * b for a, b in zip(k, stride, strict=True))


def fill_addresses(layout: Layout, row: int) -> Iterator[int]:
    """Every address that a fill writes."""
    f = layout.fills
    for k in itertools.product(*(range(n) for n in f.size[row].tolist())):
        yield int(f.offset[row]) + sum(a * b for a, b in zip(k, f.stride[row].tolist(), strict=True))


def own_addresses(param: ParamSpec) -> set[int]:
    """Addresses of a parameter's elements, relative to its first."""
    return {
        sum(a * b for a, b in zip(k, param.stride, strict=True))
        for k in itertools.product(*(range(n) for n in param.shape))
    }


def memory(layout: Layout) -> list[torch.Tensor]:
    """A live tensor per parameter, over poisoned storage."""
    tensors = []
    for p in layout.params:
        numel = p.start + 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride, strict=True)) + 2
        dtype = getattr(torch, p.dtype)
        base = torch.full((numel * dtype.itemsize,), 0x5B, dtype=torch.uint8).view(dtype)
        tensors.append(base.as_strided(p.shape, p.stride, p.start))
    return tensors


def put(layout: Layout, tensors: Sequence[torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """What the layout's regions and fills say, one element at a time. The values are cast to each parameter's dtype."""
    flat = [t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0) for t in tensors]
    for row in range(len(layout.regions)):
        spec, param = layout.tensors[int(layout.regions.tensor[row])], int(layout.regions.param[row])
        for index, at in elements(layout, row):
            flat[param][layout.params[param].start + at] = values[spec.name][index]
    for row in range(len(layout.fills)):
        param = int(layout.fills.param[row])
        for at in fill_addresses(layout, row):
            flat[param][layout.params[param].start + at] = float(layout.fills.value[row])


def contradicts(layout: Layout) -> bool:
    """Whether one address stands for two canonical elements, so that no memory can hold what the layout says."""
    seen: dict[tuple[int, int], tuple[int, Index]] = {}
    for row in range(len(layout.regions)):
        tensor, param = int(layout.regions.tensor[row]), int(layout.regions.param[row])
        for index, at in elements(layout, row):
            if seen.setdefault((param, at), (tensor, index)) != (tensor, index):
                return True
    return False


def complaints(trainers: Sequence[Layout], engines: Sequence[Layout]) -> list[str]:
    """Why a full update over these layouts would be wrong; empty if it would be right."""
    found = []
    supplied: dict[str, set[Index]] = {spec.name: set() for spec in trainers[0].tensors}
    consumed: dict[str, set[Index]] = {spec.name: set() for spec in trainers[0].tensors}
    for layout in trainers:
        own = [own_addresses(p) for p in layout.params]
        held: dict[tuple[str, Index], tuple[int, int]] = {}
        for row in range(len(layout.regions)):
            name, param = layout.tensors[int(layout.regions.tensor[row])].name, int(layout.regions.param[row])
            for index, at in elements(layout, row):
                supplied[name].add(index)
                if at not in own[param]:
                    found.append(f"{layout.rank} reads outside of {layout.params[param].name}")
                if held.setdefault((name, index), (param, at)) != (param, at):
                    found.append(f"{layout.rank} has two values of {name}{index}")
    for layout in engines:
        times = [dict.fromkeys(own_addresses(p), 0) for p in layout.params]
        for row in range(len(layout.regions)):
            name, param = layout.tensors[int(layout.regions.tensor[row])].name, int(layout.regions.param[row])
            for index, at in elements(layout, row):
                consumed[name].add(index)
                if index not in supplied[name]:
                    found.append(f"{name}{index} has no source")
                times[param][at] = times[param].get(at, 10) + 1
        for row in range(len(layout.fills)):
            for at in fill_addresses(layout, row):
                counts = times[int(layout.fills.param[row])]
                counts[at] = counts.get(at, 10) + 1
        found += [
            f"{layout.rank} writes an element of {p.name} {sorted(set(counts.values()))} times"
            for p, counts in zip(layout.params, times, strict=True)
            if set(counts.values()) != {1}
        ]
    for spec in trainers[0].tensors:
        whole = set(itertools.product(*(range(n) for n in spec.shape)))
        found += [f"{spec.name} is not supplied"] * (supplied[spec.name] != whole)
        found += [f"{spec.name} is not consumed"] * (consumed[spec.name] != whole)
    return found
