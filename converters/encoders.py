"""From a trainer rank's layout to the layout of what it sends to an engine that keeps some tensors quantised.

Every region of such a tensor gives way to regions of its derived parts (values, scales), which live in buffers of the
sender and are made anew from the resident weights before every push. A quantised number depends on its whole block, so
that a rank must hold every block that it encodes: pieces that lie next to one another in the canonical tensor are put
together first, wherever they are in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from weightlink.hooks.errors import ConfigError, LayoutError, PluginError
from weightlink.hooks.geometry import (
    ITEMSIZE,
    EncodedPart,
    Layout,
    ParamSpec,
    Quantised,
    RegionBuilder,
    Regions,
    TensorSpec,
)
from weightlink.hooks.messages import EngineContext
from weightlink.hooks.protocols import Encoder, Encoding

Index = tuple[int, ...]


def quantised_names(layouts: Sequence[Layout]) -> dict[str, str]:
    """Canonical tensors that the engine ranks keep quantised, with the dtype of their parameters.

    Raises :class:`LayoutError` for a tensor that is kept in several such dtypes."""
    found: dict[str, Quantised] = {}
    for layout in layouts:
        for item in layout.quantised:
            if found.setdefault(item.name, item) != item:
                raise LayoutError(
                    "an engine keeps one tensor in several quantised dtypes",
                    tensor=item.name,
                    rank=layout.rank,
                    expected=found[item.name].dtype,
                    found=item.dtype,
                )
    return {name: item.dtype for name, item in found.items()}


def choose_encoding(encoders: Mapping[str, Encoder], context: EngineContext) -> tuple[str, Encoding] | None:
    """The one encoder that knows the engine's format, and what it says; None if there is none.

    Raises :class:`ConfigError` when two encoders claim the engine."""
    answers = [(name, encoding) for name, e in encoders.items() if (encoding := e.encoding(context)) is not None]
    if len(answers) > 1:
        raise ConfigError(
            "two encoders claim the engine's format",
            found=", ".join(name for name, _ in answers),
            remedy="uninstall one of their plugins",
        )
    return answers[0] if answers else None


@dataclass(frozen=True)
class _Piece:
    """A region as a box of its canonical tensor: the row in the trainer's layout, and where the box lies."""

    row: int
    lo: Index
    size: Index
    step: Index


@dataclass(frozen=True)
class _Job:
    """One box that is encoded as a whole: where its numbers come from and where its parts go."""

    spec: TensorSpec
    lo: Index
    size: Index
    pieces: tuple[_Piece, ...]
    params: tuple[int, ...]


@dataclass
class Encoded:
    """What a trainer rank sends, and how it is made. ``layout.params`` are the trainer's own, then the derived ones.

    The derived tensors that are really sent are allocated by the first :meth:`tensors` and stay for the link's life.
    For block FP8 that is one byte per element and four per block: about half of what the rank's share takes in bf16.
    """

    layout: Layout
    encoding: Encoding
    source: Layout
    jobs: list[_Job] = field(default_factory=list)
    _derived: dict[int, torch.Tensor] = field(default_factory=dict)

    def tensors(self, live: Sequence[torch.Tensor], used: Set[int]) -> list[torch.Tensor]:
        """The live tensors followed by the derived ones, encoded now.

        :param live: the tensors of the trainer's own layout, in the order of its params
        :param used: params of :attr:`layout` that the rank's programs read; the others stay empty
        """
        with torch.no_grad():
            for job in self.jobs:
                if not used.isdisjoint(job.params):
                    parts = [self._buffer(p, live[0].device) for p in job.params]
                    self.encoding.encode(self._gathered(job, live), parts)
        nothing = torch.empty(0)
        own = len(self.source.params)
        return [*live, *(self._derived.get(p, nothing) for p in range(own, len(self.layout.params)))]

    @property
    def nbytes(self) -> int:
        """Memory of the derived tensors that were allocated."""
        return sum(t.nbytes for t in self._derived.values())

    def _buffer(self, param: int, device: torch.device) -> torch.Tensor:
        if param not in self._derived:
            spec = self.layout.params[param]
            self._derived[param] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        return self._derived[param]

    def _gathered(self, job: _Job, live: Sequence[torch.Tensor]) -> torch.Tensor:
        """The box in canonical order and dtype, contiguous."""
        r, dims = self.source.regions, len(job.size)
        whole = torch.empty(job.size, dtype=getattr(torch, job.spec.dtype), device=live[0].device)
        for piece in job.pieces:
            tensor = live[int(r.param[piece.row])]
            start = tensor.storage_offset() + int(r.offset[piece.row])
            view = tensor.as_strided(piece.size, r.stride[piece.row, :dims].tolist(), start)
            index = tuple(
                slice(lo - origin, lo - origin + (n - 1) * step + 1, step)
                for lo, origin, n, step in zip(piece.lo, job.lo, piece.size, piece.step, strict=True)
            )
            whole[index].copy_(view)
        return whole


def encode_layout(layout: Layout, names: Collection[str], encoding: Encoding) -> Encoded:
    """A rank's layout with the tensors of ``names`` in encoded form.

    Raises :class:`LayoutError` for a tensor that the format cannot hold, and for a shard that cuts a block;
    :class:`PluginError` for parts that do not fit their tensor."""
    r = layout.regions
    tensors: list[TensorSpec] = []
    numbers: dict[int, int] = {}
    first: dict[int, tuple[int, Sequence[EncodedPart]]] = {}
    for n, spec in enumerate(layout.tensors):
        if spec.name in names:
            first[n] = (len(tensors), _parts(encoding, spec))
            tensors += [part.spec for part in first[n][1]]
        else:
            numbers[n] = len(tensors)
            tensors.append(spec)
    plain = np.flatnonzero(~np.isin(r.tensor, list(first)))
    kept = r.take(plain)
    kept.tensor = np.array([numbers[int(t)] for t in kept.tensor], np.int32)

    params = list(layout.params)
    storage = itertools.count(max((p.storage for p in params), default=-1) + 1)
    regions, jobs = RegionBuilder(), []
    for n, (at, parts) in first.items():
        spec = layout.tensors[n]
        block = tuple(math.lcm(*(part.cell[d] for part in parts)) for d in range(len(spec.shape)))
        for lo, size, pieces in _boxes(_pieces(layout, n), spec, block, layout.rank):
            mine = []
            for k, part in enumerate(parts):
                begin = tuple(a // cell for a, cell in zip(lo, part.cell, strict=True))
                extent = tuple(-(-(a + m) // c) - b for a, m, c, b in zip(lo, size, part.cell, begin, strict=True))
                stride = tuple(math.prod(extent[d + 1 :]) for d in range(len(extent)))
                mine.append(len(params))
                regions.add(at + k, len(params), lo=begin, size=extent, offset=0, stride=stride)
                params.append(
                    ParamSpec(f"{part.spec.name} from {begin}", extent, part.spec.dtype, next(storage), 0, stride)
                )
            jobs.append(_Job(spec, lo, size, tuple(pieces), tuple(mine)))
    encoded = Layout(
        layout.rank, tuple(tensors), tuple(params), Regions.concat([kept, regions.build()]), host=layout.host
    )
    encoded.validate()
    return Encoded(encoded, encoding, layout, jobs)


def _parts(encoding: Encoding, spec: TensorSpec) -> Sequence[EncodedPart]:
    """What the encoding makes of a tensor. Raises :class:`PluginError` for parts that are not made of its cells."""
    parts = encoding.parts(spec)
    for part in parts:
        whole = len(part.cell) == len(spec.shape) and all(cell > 0 for cell in part.cell)
        shape = tuple(-(-n // cell) for n, cell in zip(spec.shape, part.cell, strict=True)) if whole else None
        if part.spec.shape != shape or part.spec.dtype not in ITEMSIZE:
            raise PluginError(
                f"an encoding's part {part.spec.name!r} does not fit its tensor",
                tensor=spec.name,
                expected=f"a cell of {len(spec.shape)} positive sizes, one element for each cell of {spec.shape}, and a"
                f" dtype among {', '.join(ITEMSIZE)}",
                found=f"cell {part.cell}, shape {part.spec.shape}, {part.spec.dtype}",
            )
    if not parts:
        raise PluginError("an encoding makes nothing of a tensor", tensor=spec.name)
    return parts


def _pieces(layout: Layout, tensor: int) -> list[_Piece]:
    """The tensor's regions, each box once: equal ones are proven to be the same memory."""
    r, dims = layout.regions, len(layout.tensors[tensor].shape)
    found: dict[tuple[Index, Index, Index], _Piece] = {}
    for row in np.flatnonzero(r.tensor == tensor).tolist():
        lo, size, step = (tuple(column[row, :dims].tolist()) for column in (r.lo, r.size, r.step))
        found.setdefault((lo, size, step), _Piece(row, lo, size, step))
    return list(found.values())


_Box = tuple[Index, Index, list[_Piece]]


def _boxes(pieces: Sequence[_Piece], spec: TensorSpec, block: Index, rank: str) -> list[_Box]:
    """The pieces put together into boxes that cut no block. Raises :class:`LayoutError` naming what is cut."""
    if any(step > 1 and n > 1 for piece in pieces for n, step in zip(piece.size, piece.step, strict=True)):
        boxes = [_surrounding(pieces, spec, rank)]
    else:
        boxes = [(piece.lo, piece.size, [piece]) for piece in pieces]
        for dim in reversed(range(len(spec.shape))):
            boxes = _joined(boxes, dim, block[dim])
    for lo, size, _ in boxes:
        for dim, (a, n, b, whole) in enumerate(zip(lo, size, block, spec.shape, strict=True)):
            if a % b or ((a + n) % b and a + n != whole):
                raise LayoutError(
                    "a trainer rank's shard cuts through a block of a tensor that the engine keeps quantised",
                    tensor=spec.name,
                    rank=rank,
                    expected=f"edges at multiples of {b} in dimension {dim}, or at its end ({whole})",
                    found=f"{a} to {a + n}",
                    remedy="choose tensor- and expert-parallel sizes of the trainer that leave blocks whole",
                )
    return boxes


def _joined(boxes: Sequence[_Box], dim: int, block: int) -> list[_Box]:
    """Neighbours along ``dim`` made one wherever the edge between them cuts a block."""

    def others(box: _Box) -> tuple[Index, Index]:
        lo, size, _ = box
        return (*lo[:dim], *lo[dim + 1 :]), (*size[:dim], *size[dim + 1 :])

    result: list[_Box] = []
    for box in sorted(boxes, key=lambda box: (others(box), box[0][dim])):
        lo, size, pieces = box
        if result and others(result[-1]) == others(box):
            before, extent, earlier = result[-1]
            if before[dim] + extent[dim] == lo[dim] and lo[dim] % block:
                longer = (*extent[:dim], extent[dim] + size[dim], *extent[dim + 1 :])
                result[-1] = (before, longer, [*earlier, *pieces])
                continue
        result.append(box)
    return result


def _surrounding(pieces: Sequence[_Piece], spec: TensorSpec, rank: str) -> _Box:
    """The one box that interleaved pieces fill together; they are proven to be disjoint."""
    dims = range(len(spec.shape))
    lo = tuple(min(piece.lo[d] for piece in pieces) for d in dims)
    end = tuple(max(piece.lo[d] + (piece.size[d] - 1) * piece.step[d] + 1 for piece in pieces) for d in dims)
    size = tuple(b - a for a, b in zip(lo, end, strict=True))
    if math.prod(size) != sum(math.prod(piece.size) for piece in pieces):
        raise LayoutError(
            "a trainer rank holds interleaved parts of a tensor that the engine keeps quantised, but not all of them",
            tensor=spec.name,
            rank=rank,
            expected=f"all of {lo} to {end}",
            found=f"{sum(math.prod(piece.size) for piece in pieces)} of {math.prod(size)} elements",
            remedy="choose tensor-parallel sizes of the trainer that leave blocks whole",
        )
    return lo, size, list(pieces)
