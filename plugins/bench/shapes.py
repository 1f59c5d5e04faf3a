"""Model shapes for benchmarks: layouts of both sides as Megatron-Core and SGLang cut such models, without a model.

Sizes are in elements of bfloat16. No matrix is square, so that a transposed piece cannot pass unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec

DTYPE = "bfloat16"


@dataclass
class Shape:
    """Layouts of every rank of both sides."""

    trainers: list[Layout]
    engines: list[Layout]


class Dims(msgspec.Struct, frozen=True):
    """A decoder. ``experts`` 0 is a dense one; ``inter`` is then that of the only MLP."""

    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    experts: int = 0

    def scaled(self, size: float) -> Dims:
        """About ``size`` times the bytes: fewer layers first, so that matrices keep their size while they can."""
        layers = max(1, round(self.layers * size))
        width = min(1.0, math.sqrt(size * self.layers / layers))

        def cut(n: int, multiple: int) -> int:
            return max(multiple, round(n * width / multiple) * multiple)

        return msgspec.structs.replace(
            self,
            layers=layers,
            hidden=cut(self.hidden, 16) + (16 if cut(self.hidden, 16) == cut(self.inter, 16) else 0),
            inter=cut(self.inter, 16),
            head=cut(self.head, 8),
            vocab=cut(self.vocab, 16),
        )


#: A dense decoder of 1.1 GB: matrices of 2 to 130 MB.
LARGE = Dims(layers=8, hidden=2048, inter=8192, heads=16, kv_heads=4, head=128, vocab=32000)
#: A mixture of experts of 1.1 GB: 1440 matrices of 0.7 MB among a few large ones and many norms.
MIXED = Dims(layers=8, hidden=1024, inter=352, heads=8, kv_heads=2, head=128, vocab=32000, experts=60)


class _Side:
    """One rank's layout while it is put together."""

    def __init__(self, who: str, manifest: tuple[TensorSpec, ...]) -> None:
        self._who, self._manifest = who, manifest
        self._numbers = {spec.name: n for n, spec in enumerate(manifest)}
        self._params: list[ParamSpec] = []
        self._regions = RegionBuilder()

    def param(self, name: str, *shape: int) -> Callable[..., None]:
        """A contiguous parameter; returns what puts rows and columns of a canonical tensor at one of its rows."""
        number, width = len(self._params), math.prod(shape[1:])
        stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        self._params.append(ParamSpec(name, shape, DTYPE, number, 0, stride))

        def put(tensor: str, at: int, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> None:
            spec = self._manifest[self._numbers[tensor]]
            start, stop = columns or (0, math.prod(spec.shape[1:]))
            matrix = len(spec.shape) > 1
            self._regions.add(
                self._numbers[tensor],
                number,
                lo=[rows[0], start] if matrix else [rows[0]],
                size=[rows[1] - rows[0], stop - start] if matrix else [rows[1] - rows[0]],
                offset=at * (stop - start if matrix else width),
                stride=[stop - start, 1] if matrix else [1],
            )

        return put

    def build(self) -> Layout:
        return Layout(self._who, self._manifest, tuple(self._params), self._regions.build())


def _manifest(d: Dims) -> tuple[TensorSpec, ...]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (d.vocab, d.hidden), "lm_head": (d.vocab, d.hidden)}
    for n in range(d.layers):
        shapes[f"{n}.q"] = (d.heads * d.head, d.hidden)
        shapes[f"{n}.k"] = shapes[f"{n}.v"] = (d.kv_heads * d.head, d.hidden)
        shapes[f"{n}.o"] = (d.hidden, d.heads * d.head)
        for norm in ("norm1", "norm2", "q_norm", "k_norm"):
            shapes[f"{n}.{norm}"] = (d.head if norm.endswith("_norm") else d.hidden,)
        if d.experts:
            shapes[f"{n}.router"] = (d.experts, d.hidden)
        for mlp in _mlps(d, n):
            shapes[f"{mlp}.gate"] = shapes[f"{mlp}.up"] = (d.inter, d.hidden)
            shapes[f"{mlp}.down"] = (d.hidden, d.inter)
    return tuple(TensorSpec(name, shape, DTYPE) for name, shape in shapes.items())


def _mlps(d: Dims, layer: int) -> list[str]:
    return [f"{layer}.expert{e}" for e in range(d.experts)] if d.experts else [f"{layer}.mlp"]


def _part(length: int, rank: int, world: int) -> tuple[int, int]:
    return length * rank // world, length * (rank + 1) // world


def _shared(side: _Side, d: Dims, layer: int, rank: int, world: int) -> None:
    """What both frameworks cut alike: the output projection by columns; norms and the router whole."""
    start, stop = _part(d.heads * d.head, rank, world)
    side.param(f"{layer}.o", d.hidden, stop - start)(f"{layer}.o", 0, (0, d.hidden), (start, stop))
    for name in ("norm1", "norm2", "q_norm", "k_norm"):
        length = d.head if name.endswith("_norm") else d.hidden
        side.param(f"{layer}.{name}", length)(f"{layer}.{name}", 0, (0, length))
    if d.experts:
        side.param(f"{layer}.router", d.experts, d.hidden)(f"{layer}.router", 0, (0, d.experts))


def _ends(side: _Side, d: Dims, rank: int, world: int) -> None:
    start, stop = _part(d.vocab, rank, world)
    for name in ("embed", "lm_head"):
        side.param(name, stop - start, d.hidden)(name, 0, (start, stop))


def _mlp(side: _Side, d: Dims, mlp: str, rank: int, world: int) -> None:
    start, stop = _part(d.inter, rank, world)
    put = side.param(f"{mlp}.fc1", 2 * (stop - start), d.hidden)
    put(f"{mlp}.gate", 0, (start, stop))
    put(f"{mlp}.up", stop - start, (start, stop))
    side.param(f"{mlp}.fc2", d.hidden, stop - start)(f"{mlp}.down", 0, (0, d.hidden), (start, stop))


def _trainer(d: Dims, manifest: tuple[TensorSpec, ...], rank: int, world: int) -> Layout:
    """Megatron: tensor parallel, query groups interleaved in one matrix, whole experts on one rank each."""
    side = _Side(f"trainer {rank}", manifest)
    _ends(side, d, rank, world)
    per = d.heads // d.kv_heads
    first, last = _part(d.kv_heads, rank, world)
    for n in range(d.layers):
        put = side.param(f"{n}.qkv", (last - first) * (per + 2) * d.head, d.hidden)
        for group in range(first, last):
            at = (group - first) * (per + 2) * d.head
            put(f"{n}.q", at, (group * per * d.head, (group + 1) * per * d.head))
            put(f"{n}.k", at + per * d.head, (group * d.head, (group + 1) * d.head))
            put(f"{n}.v", at + (per + 1) * d.head, (group * d.head, (group + 1) * d.head))
        _shared(side, d, n, rank, world)
        if d.experts:
            for mlp in _mlps(d, n)[slice(*_part(d.experts, rank, world))]:
                _mlp(side, d, mlp, 0, 1)
        else:
            _mlp(side, d, f"{n}.mlp", rank, world)
    return side.build()


def _engine(d: Dims, manifest: tuple[TensorSpec, ...], rank: int, world: int) -> Layout:
    """SGLang: tensor parallel, query, key and value one after the other, all experts of a layer in two tensors."""
    side = _Side(f"engine {rank}", manifest)
    _ends(side, d, rank, world)
    for n in range(d.layers):
        parts = [(name, _part(heads * d.head, rank, world)) for name, heads in _qkv(d)]
        put, at = side.param(f"{n}.qkv", sum(b - a for _, (a, b) in parts), d.hidden), 0
        for name, (start, stop) in parts:
            put(f"{n}.{name}", at, (start, stop))
            at += stop - start
        _shared(side, d, n, rank, world)
        if not d.experts:
            _mlp(side, d, f"{n}.mlp", rank, world)
            continue
        start, stop = _part(d.inter, rank, world)
        width = stop - start
        first = side.param(f"{n}.w13", d.experts * 2 * width, d.hidden)
        second = side.param(f"{n}.w2", d.experts * d.hidden, width)
        for e, mlp in enumerate(_mlps(d, n)):
            first(f"{mlp}.gate", e * 2 * width, (start, stop))
            first(f"{mlp}.up", (e * 2 + 1) * width, (start, stop))
            second(f"{mlp}.down", e * d.hidden, (0, d.hidden), (start, stop))
    return side.build()


def _qkv(d: Dims) -> tuple[tuple[str, int], ...]:
    return ("q", d.heads), ("k", d.kv_heads), ("v", d.kv_heads)


def shape(dims: Dims, trainers: int, engines: int) -> Shape:
    """A tensor-parallel trainer (experts over its ranks) and one tensor-parallel engine of that shape."""
    manifest = _manifest(dims)
    return Shape(
        [_trainer(dims, manifest, rank, trainers) for rank in range(trainers)],
        [_engine(dims, manifest, rank, engines) for rank in range(engines)],
    )
