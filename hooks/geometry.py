"""The data types of the one geometry: regions, fills, parameters and layouts, as packed numpy columns.

A *region* ties a lattice box of a canonical tensor to an affine view of local storage. For ``0 <= k_d < size_d`` the
canonical index ``lo_d + k_d*step_d`` lives at local element ``offset + sum(k_d*stride_d)``, the offset being relative
to the parameter's first element. Unused trailing dimensions have ``lo=0, size=1, step=1, stride=0``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from weightlink.hooks.errors import LayoutError

DIMS = 5
"""Most canonical dimensions that a region can have."""

#: Wire and storage dtypes by the name used in messages; the value is the element size in bytes.
ITEMSIZE: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
}

#: The dtypes among which a copy may cast. Anything else is an encoder's business, or refused.
CASTABLE = frozenset({"float32", "float16", "bfloat16"})

#: Dtypes that stand for something else than their numbers: a scale, kept elsewhere, belongs to them.
QUANTISED = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "int16", "int32"})

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class TensorSpec(msgspec.Struct, frozen=True):
    """A canonical tensor: HF checkpoint name, global shape in elements, logical dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ParamSpec(msgspec.Struct, frozen=True):
    """A local tensor that regions point into.

    :param name: the owner's name for it (``model.layers.0.mlp.gate_up_proj.weight``)
    :param shape: local shape in elements
    :param dtype: storage dtype name
    :param storage: number of the underlying storage on this rank; equal for aliases (tied weights)
    :param start: first element of the parameter within its storage, in elements
    :param stride: element stride per dimension of ``shape``
    :param loaded: False when nothing but the engine itself can fill it (non-persistent buffers), or
        when it belongs to a model that is not part of the update
    :param staged: memory that exists during an update only, for the whole canonical tensor ``name``, which the engine's
        own loader then takes
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: int
    start: int
    stride: tuple[int, ...]
    loaded: bool = True
    staged: bool = False


def pad(values: Sequence[int], filler: int) -> list[int]:
    """``values`` extended to :data:`DIMS` entries; raises :class:`LayoutError` when there are more."""
    if len(values) > DIMS:
        raise LayoutError(f"a region has at most {DIMS} dimensions", found=list(values))
    return list(values) + [filler] * (DIMS - len(values))


@dataclass
class Regions:
    """``n`` regions as columns. ``tensor`` and ``param`` index the owning layout's tables."""

    tensor: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    param: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    lo: Int64 = field(default_factory=lambda: np.zeros((0, DIMS), np.int64))
    size: Int64 = field(default_factory=lambda: np.zeros((0, DIMS), np.int64))
    step: Int64 = field(default_factory=lambda: np.zeros((0, DIMS), np.int64))
    offset: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    stride: Int64 = field(default_factory=lambda: np.zeros((0, DIMS), np.int64))

    COLUMNS = ("tensor", "param", "lo", "size", "step", "offset", "stride")

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Regions:
        """The regions at ``index`` (positions or mask), in that order."""
        return Regions(*(getattr(self, name)[index] for name in self.COLUMNS))

    @classmethod
    def concat(cls, parts: Iterable[Regions]) -> Regions:
        """All regions of ``parts`` in order."""
        listed = list(parts) or [cls()]
        return cls(*(np.concatenate([getattr(part, name) for part in listed]) for name in cls.COLUMNS))

    @property
    def numel(self) -> Int64:
        """Elements per region."""
        numel: Int64 = self.size.prod(axis=1)
        return numel


class RegionBuilder:
    """Collects regions one at a time and packs them."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, list[int], list[int], list[int], int, list[int]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        tensor: int,
        param: int,
        *,
        lo: Sequence[int],
        size: Sequence[int],
        offset: int,
        stride: Sequence[int],
        step: Sequence[int] | None = None,
    ) -> None:
        """Appends one region; all sequences have one entry per canonical dimension."""
        steps = [1] * len(lo) if step is None else list(step)
        if not len(lo) == len(size) == len(stride) == len(steps):
            raise LayoutError("a region's lo, size, step and stride differ in length", found=(lo, size, steps, stride))
        self._rows.append((tensor, param, pad(lo, 0), pad(size, 1), pad(steps, 1), offset, pad(stride, 0)))

    def build(self) -> Regions:
        """The collected regions."""
        if not self._rows:
            return Regions()
        tensor, param, lo, size, step, offset, stride = zip(*self._rows, strict=True)
        return Regions(
            np.array(tensor, np.int32),
            np.array(param, np.int32),
            np.array(lo, np.int64),
            np.array(size, np.int64),
            np.array(step, np.int64),
            np.array(offset, np.int64),
            np.array(stride, np.int64),
        )


@dataclass
class Fills:
    """``n`` constants that the engine's loader writes: an affine box of a parameter and its value."""

    param: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    offset: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    size: Int64 = field(default_factory=lambda: np.zeros((0, DIMS), np.int64))
    stride: Int64 = field(default_factory=lambda: np.zeros((0, DIMS), np.int64))
    value: Float64 = field(default_factory=lambda: np.zeros(0, np.float64))

    COLUMNS = ("param", "offset", "size", "stride", "value")

    def __len__(self) -> int:
        return len(self.param)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, Sequence[int], Sequence[int], float]]) -> Fills:
        """Fills from ``(param, offset, size, stride, value)`` rows."""
        listed = list(rows)
        if not listed:
            return cls()
        param, offset, size, stride, value = zip(*listed, strict=True)
        return cls(
            np.array(param, np.int32),
            np.array(offset, np.int64),
            np.array([pad(s, 1) for s in size], np.int64),
            np.array([pad(s, 0) for s in stride], np.int64),
            np.array(value, np.float64),
        )


class Opaque(msgspec.Struct, frozen=True):
    """A destination or a canonical name that the replay could not follow.

    :param reason: why
    :param param: number of the parameter, if it is one
    :param delivered: the engine's own loader is proven to take care of it when it is called with the staged tensors
    """

    name: str
    reason: str
    param: int | None = None
    delivered: bool = False


class Quantised(msgspec.Struct, frozen=True):
    """A canonical tensor of plain numbers that the engine's loader would cast to a dtype of :data:`QUANTISED`.

    :param name: the canonical tensor
    :param dtype: dtype of the engine's parameter
    """

    name: str
    dtype: str


class EncodedPart(msgspec.Struct, frozen=True):
    """A tensor that is derived from a canonical one and takes its place in the manifest.

    :param spec: name, shape and dtype of the derived tensor; as many dimensions as the canonical one
    :param cell: elements of the canonical tensor, per dimension, that one element stands for; a shard must not cut it
    """

    spec: TensorSpec
    cell: tuple[int, ...]


@dataclass
class Layout:
    """All regions and fills of one rank.

    :param rank: who it describes, for messages (``"trainer 3"``, ``"rank 1 (tp 1, pp 0)"``)
    :param tensors: canonical tensors that the regions index
    :param params: local tensors that the regions and fills index
    :param opaque: what could not be followed; empty for a layout that can be written in place. No region or fill
        touches an opaque parameter
    :param quantised: what the engine keeps in another form than the manifest has it; an encoder's business
    :param host: name of the rank's machine; empty if it is not known
    :param excluded: the rank's own names for what the user declared not to be sent
    """

    rank: str
    tensors: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...]
    regions: Regions
    fills: Fills = field(default_factory=Fills)
    opaque: tuple[Opaque, ...] = ()
    quantised: tuple[Quantised, ...] = ()
    host: str = ""
    excluded: tuple[str, ...] = ()

    @property
    def staged_bytes(self) -> int:
        """Memory that an update needs for tensors that go through the engine's own loader."""
        return sum(math.prod(p.shape) * ITEMSIZE[p.dtype] for p in self.params if p.staged)

    def pack(self) -> bytes:
        """The layout as one message: tables as typed structs, columns as raw little-endian arrays."""
        return _ENCODER.encode(
            _PackedLayout(
                self.rank,
                self.tensors,
                self.params,
                tuple(_column(getattr(self.regions, name)) for name in Regions.COLUMNS),
                tuple(_column(getattr(self.fills, name)) for name in Fills.COLUMNS),
                self.opaque,
                self.quantised,
                self.host,
                self.excluded,
            )
        )

    @classmethod
    def unpack(cls, data: bytes) -> Layout:
        """The inverse of :meth:`pack`; raises :class:`LayoutError` on anything malformed."""
        try:
            packed = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise LayoutError(f"not a layout: {error}") from error
        regions = Regions(*_restore(packed.regions, Regions(), Regions.COLUMNS))
        fills = Fills(*_restore(packed.fills, Fills(), Fills.COLUMNS))
        rest = packed.opaque, packed.quantised, packed.host, packed.excluded
        layout = cls(packed.rank, packed.tensors, packed.params, regions, fills, *rest)
        layout.validate()
        return layout

    def validate(self) -> None:
        """Raises :class:`LayoutError` when an index or a box points outside the tables."""
        for what, index, limit in (
            ("tensor", self.regions.tensor, len(self.tensors)),
            ("param", self.regions.param, len(self.params)),
            ("param", self.fills.param, len(self.params)),
            ("param", np.array([o.param for o in self.opaque if o.param is not None], np.int64), len(self.params)),
        ):
            if len(index) and not (int(index.min()) >= 0 and int(index.max()) < limit):
                raise LayoutError(f"a layout's {what} index is out of range", rank=self.rank, expected=f"< {limit}")
        if len(self.fills) and int(self.fills.size.min()) < 1:
            raise LayoutError("a layout has a fill of nothing", rank=self.rank, expected="sizes of at least 1")
        if len(self.regions):
            shapes = np.array([pad(t.shape, 1) for t in self.tensors], np.int64)[self.regions.tensor]
            r = self.regions
            bad = ((r.lo < 0) | (r.size < 1) | (r.step < 1) | (r.lo + (r.size - 1) * r.step >= shapes)).any(axis=1)
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                raise LayoutError(
                    "a region lies outside its canonical tensor",
                    tensor=self.tensors[int(r.tensor[first])].name,
                    rank=self.rank,
                    expected=f"inside shape {self.tensors[int(r.tensor[first])].shape}",
                    found=f"lo {r.lo[first].tolist()} size {r.size[first].tolist()} step {r.step[first].tolist()}",
                )


class _PackedLayout(msgspec.Struct, frozen=True, array_like=True):
    rank: str
    tensors: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...]
    regions: tuple[bytes, ...]
    fills: tuple[bytes, ...]
    opaque: tuple[Opaque, ...]
    quantised: tuple[Quantised, ...]
    host: str
    excluded: tuple[str, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_PackedLayout)


def _column(array: npt.NDArray[np.generic]) -> bytes:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _restore(columns: tuple[bytes, ...], template: Regions | Fills, names: tuple[str, ...]) -> list[npt.NDArray[Any]]:
    if len(columns) != len(names):
        raise LayoutError("a packed layout has the wrong number of columns", expected=len(names), found=len(columns))
    arrays = []
    for data, name in zip(columns, names, strict=True):
        like = getattr(template, name)
        try:
            flat = np.frombuffer(data, like.dtype.newbyteorder("<")).astype(like.dtype)
            arrays.append(flat.reshape(-1, DIMS) if like.ndim == 2 else flat)
        except ValueError as error:
            raise LayoutError(f"a packed layout's column {name} is malformed: {error}") from error
    if len({len(a) for a in arrays}) != 1:
        raise LayoutError("a packed layout's columns differ in length", found=[len(a) for a in arrays])
    return arrays
