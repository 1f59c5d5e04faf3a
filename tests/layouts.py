"""Random layouts for tests, and the slow, obvious way to use one: element by element, by the region's definition."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
from weightlink.hooks.geometry import Fills, Layout, ParamSpec, RegionBuilder, TensorSpec


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return tuple(strides)


def cuts(rng: random.Random, length: int, parts: int) -> list[tuple[int, int]]:
    """``length`` cut into ``parts`` uneven pieces (possibly fewer), as (start, size)."""
    marks = sorted({0, length, *(rng.randint(1, length) for _ in range(parts - 1))})
    return [(a, b - a) for a, b in itertools.pairwise(marks)]


def random_side(
    rng: random.Random, who: str, tensors: Sequence[TensorSpec], ranks: int, *, padding: bool, replicas: bool
) -> list[Layout]:
    """Every tensor cut along one dimension, in blocks or with a step, each piece on one rank or on several.

    With ``padding`` the local tensors are larger than their pieces and the rest is a fill. Tensors of one stem (the
    name up to its first dot) are cut alike, unless this side is one that tells them apart."""
    builders = [RegionBuilder() for _ in range(ranks)]
    params: list[list[ParamSpec]] = [[] for _ in range(ranks)]
    fills: list[list[tuple[int, int, list[int], list[int], float]]] = [[] for _ in range(ranks)]
    side, apart = rng.random(), rng.random() < 0.3
    for number, spec in enumerate(tensors):
        rng = random.Random(f"{side} {spec.name if apart else spec.name.partition('.')[0]}")
        dim = rng.randrange(len(spec.shape))
        if rng.random() < 0.3 and spec.shape[dim] > 1:
            count = rng.randint(2, min(3, spec.shape[dim]))
            pieces = [(start, len(range(start, spec.shape[dim], count)), count) for start in range(count)]
        else:
            pieces = [(lo, size, 1) for lo, size in cuts(rng, spec.shape[dim], rng.randint(1, 4))]
        for lo, size, step in pieces:
            owners = rng.sample(range(ranks), rng.randint(1, ranks) if replicas else 1)
            for rank in owners:
                box = [*spec.shape]
                box[dim] = size
                order = list(range(len(box)))
                rng.shuffle(order)  # local storage may be transposed
                local = [box[d] + (rng.randint(0, 2) if padding and d == dim else 0) for d in order]
                strides = contiguous(local)
                stride = [strides[order.index(d)] for d in range(len(box))]
                param = len(params[rank])
                params[rank].append(
                    ParamSpec(f"{spec.name}@{lo}", tuple(local), spec.dtype, param, 0, contiguous(local))
                )
                builders[rank].add(
                    number,
                    param,
                    lo=[lo if d == dim else 0 for d in range(len(box))],
                    size=box,
                    step=[step if d == dim else 1 for d in range(len(box))],
                    offset=0,
                    stride=stride,
                )
                extra = local[order.index(dim)] - size
                if extra:
                    pad = [extra if d == dim else box[d] for d in range(len(box))]
                    fills[rank].append((param, size * stride[dim], pad, stride, rng.randint(-3, 3)))
    return [
        Layout(f"{who} {rank}", tuple(tensors), tuple(params[rank]), builders[rank].build(), Fills.of(fills[rank]))
        for rank in range(ranks)
    ]


def random_tensors(rng: random.Random, count: int, dims: int = 3, dtype: str = "float32") -> list[TensorSpec]:
    """Small tensors of different, non-square shapes; of the smallest several of one stem."""
    found = []
    for n in range(count):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, dims)))
        again = rng.choice([0, 0, 2, 5]) if math.prod(shape) < 100 else 0
        found += [TensorSpec(f"t{n}", shape, dtype), *(TensorSpec(f"t{n}.{k}", shape, dtype) for k in range(again))]
    rng.shuffle(found)
    return found


def canonical(tensors: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Index-coded tensors: every element of every tensor has a value of its own."""
    values, start = {}, 1.0
    for spec in tensors:
        numel = int(np.prod(spec.shape))
        values[spec.name] = (np.arange(numel, dtype=np.float64) + start).reshape(spec.shape)
        start += numel
    return values


def local_values(layout: Layout, values: dict[str, np.ndarray], *, poison: float = np.nan) -> list[np.ndarray]:
    """What each parameter must hold, computed one element at a time."""
    arrays = [np.full(int(np.prod(p.shape)), poison) for p in layout.params]
    r = layout.regions
    for n in range(len(r)):
        source = values[layout.tensors[r.tensor[n]].name]
        rank = source.ndim
        for k in itertools.product(*(range(s) for s in r.size[n])):
            index = tuple(int(r.lo[n][d] + k[d] * r.step[n][d]) for d in range(rank))
            at = int(r.offset[n] + sum(k[d] * r.stride[n][d] for d in range(len(k))))
            arrays[r.param[n]][at] = source[index]
    f = layout.fills
    for n in range(len(f)):
        for k in itertools.product(*(range(s) for s in f.size[n])):
            at = int(f.offset[n] + sum(k[d] * f.stride[n][d] for d in range(len(k))))
            arrays[f.param[n]][at] = f.value[n]
    return [a.reshape(p.shape) for a, p in zip(arrays, layout.params, strict=True)]
