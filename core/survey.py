"""What every rank must know of every other to plan: which boxes of which tensors it holds or takes, and in which dtype.

Local addresses stay with their rank: they matter to nobody else. A survey is therefore small, travels as packed
columns, and from it every rank computes the same plan and keeps its own part of it.

It speaks of one tensor per kind (:mod:`weightlink.kinds`), which rank 0 finds out once for all: a message of tables of
kinds, and the kind of every tensor. A rank that is not what its kinds say notices when it binds its part of the plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt
from weightlink.hooks.errors import LayoutError, PlanMismatch
from weightlink.hooks.geometry import DIMS, Int32, Int64, Layout, TensorSpec, pad
from weightlink.kinds import Table
from weightlink.program import DTYPE_NUMBER, DTYPES, manifest_digest

_BOX = 3 * DIMS


@dataclass
class Holding:
    """The boxes of one rank, in the order of its layout's regions.

    :param rank: who it is, for messages
    :param host: name of its machine; empty if it is not known
    :param tensor: position in the manifest, per box
    :param dtype: position in :data:`~weightlink.program.DTYPES` of the rank's own parameter
    :param box: ``lo``, ``size`` and ``step`` (1 where there is one element), :data:`DIMS` columns each
    """

    rank: str
    tensor: Int32
    dtype: Int32
    box: Int64
    host: str = ""

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, layout: Layout, numbers: Int64, host: str = "") -> Holding:
        """A layout without its addresses.

        :param numbers: manifest position of each of the layout's tensors
        Raises :class:`LayoutError` for a parameter whose dtype cannot travel."""
        r = layout.regions
        dtypes = np.array([DTYPE_NUMBER.get(p.dtype, -1) for p in layout.params] or [-1], np.int32)[r.param]
        if (dtypes < 0).any():
            bad = int(np.flatnonzero(dtypes < 0)[0])
            spec = layout.params[int(r.param[bad])]
            raise LayoutError(
                "a parameter has a dtype that cannot travel",
                tensor=layout.tensors[int(r.tensor[bad])].name,
                rank=layout.rank,
                expected=", ".join(DTYPES),
                found=f"{spec.name}: {spec.dtype}",
            )
        box = np.concatenate([r.lo, r.size, np.where(r.size == 1, 1, r.step)], axis=1)
        return cls(layout.rank, numbers[r.tensor].astype(np.int32), dtypes, box, host)


@dataclass(frozen=True, eq=False)
class Side(Sequence[Holding]):
    """All ranks of a trainer, or of an engine: their names, their machines (empty where unknown), and their boxes."""

    ranks: tuple[str, ...]
    hosts: tuple[str, ...]
    table: Table

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, rank: int) -> Holding: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[Holding]: ...

    def __getitem__(self, rank: int | slice) -> Holding | Sequence[Holding]:
        if isinstance(rank, slice):
            return [self[n] for n in range(len(self))[rank]]
        number = range(len(self))[rank]
        rows, tensor = self.table.of_rank(number)
        dtype = self.table.dtype[rows].astype(np.int32)
        return Holding(self.ranks[number], tensor.astype(np.int32), dtype, self.table.box[rows], self.hosts[number])


def same_boxes(a: Side, b: Side) -> bool:
    """Whether two engines have the same boxes on the same ranks. Those of one survey then share their table."""
    return len(a) == len(b) and (a.table is b.table or a.table.equals(b.table))


def _columns(holdings: Sequence[Holding]) -> tuple[Int64, Int64, Int64, Int64]:
    """Tensor, rank, dtype and box of every rank's boxes."""
    return (
        np.concatenate([np.zeros(0, np.int64), *(h.tensor for h in holdings)]),
        np.repeat(np.arange(len(holdings)), [len(h) for h in holdings]),
        np.concatenate([np.zeros(0, np.int64), *(h.dtype for h in holdings)]),
        np.concatenate([np.zeros((0, _BOX), np.int64), *(h.box for h in holdings)]),
    )


def _shapes(manifest: Sequence[TensorSpec]) -> Int64:
    """A number per tensor, equal for equal shapes."""
    numbers: dict[tuple[int, ...], int] = {}
    return np.array([numbers.setdefault(spec.shape, len(numbers)) for spec in manifest], np.int64)


class _PackedTable(msgspec.Struct, frozen=True, array_like=True):
    """Dimensions that no box uses are left out, and columns are as narrow as their largest number.

    ``rows`` counts those of each kind."""

    dims: int
    kind: tuple[str, bytes]
    rows: tuple[str, bytes]
    rank: tuple[str, bytes]
    dtype: tuple[str, bytes]
    box: tuple[str, bytes]


class _PackedSide(msgspec.Struct, frozen=True, array_like=True):
    ranks: tuple[str, ...]
    hosts: tuple[str, ...]
    table: int


class _PackedSurvey(msgspec.Struct, frozen=True, array_like=True):
    manifest: tuple[TensorSpec, ...]
    tables: tuple[_PackedTable, ...]
    sides: tuple[_PackedSide, ...]


def _narrow(array: npt.NDArray[np.integer]) -> tuple[str, bytes]:
    most = int(array.max(initial=0))
    kind = next(k for k, limit in _WIDTHS.items() if most <= limit)
    return kind, np.ascontiguousarray(array, kind).tobytes()


_WIDTHS = {"<u1": 0xFF, "<u2": 0xFFFF, "<u4": 0xFFFFFFFF, "<i8": (1 << 63) - 1}


def _widen(column: tuple[str, bytes]) -> Int64:
    kind, data = column
    if kind not in _WIDTHS:
        raise ValueError(f"unknown column type {kind!r}")
    return np.frombuffer(data, kind).astype(np.int64)


def _pack(table: Table) -> _PackedTable:
    parts = table.box.reshape(len(table), 3, DIMS)
    used = np.flatnonzero(((parts[:, 0] != 0) | (parts[:, 1] != 1)).any(axis=0))
    dims = int(used[-1]) + 1 if len(used) else 0
    columns = (table.kind, np.diff(table.start), table.rank, table.dtype, parts[:, :, :dims])
    return _PackedTable(dims, *map(_narrow, columns))


def _unpack(packed: _PackedTable, manifest: Sequence[TensorSpec], shape: Int64) -> Table:
    """Raises :class:`ValueError` or :class:`LayoutError` for a table that no :meth:`Table.of` makes, before anything is
    counted or allocated by what it says."""
    dims = packed.dims
    if not 0 <= dims <= DIMS:
        raise ValueError(f"{dims} dimensions")
    columns = list(map(_widen, (packed.kind, packed.rows, packed.rank, packed.dtype, packed.box)))
    if min(int(column.min(initial=0)) for column in columns) < 0:
        raise ValueError("a number below zero")
    kind, count, rank, dtype, flat = columns
    n = len(rank)
    # No count above ``n``, so that their sum cannot wrap.
    if not (len(kind) == len(shape) and len(dtype) == n and int(count.max(initial=0)) <= n == int(count.sum())):
        raise ValueError("columns of different length")
    box = np.zeros((n, 3, DIMS), np.int64)
    box[:, 1:] = 1
    box[:, :, :dims] = flat.reshape(n, 3, dims)
    if int(kind.max(initial=-1)) >= len(count):
        raise ValueError("a kind without rows")
    table = Table(kind, np.append(0, np.cumsum(count)), rank, dtype, box.reshape(n, _BOX))
    in_order = len(table.first) == len(count) and np.array_equal(kind[table.first], np.arange(len(count)))
    if not (in_order and np.array_equal(shape[table.first][kind], shape)):
        raise ValueError("kinds that are not numbered in order, or of tensors of different shape")
    inside = np.array([pad(manifest[k].shape, 1) for k in table.first.tolist()], np.int64).reshape(-1, DIMS)
    inside = inside[table.row_kind]
    lo, size, step = box[:, 0], box[:, 1], box[:, 2]
    # Compared without a product that could wrap: the shape bounds every factor.
    ok = (lo < inside) & (size >= 1) & (size <= inside) & (step >= 1) & ((step <= inside) | (size == 1))
    ok &= size - 1 <= (inside - 1 - lo) // np.maximum(step, 1)
    if int(dtype.max(initial=0)) >= len(DTYPES) or not ok.all():
        raise ValueError("an unknown dtype, or a box that is not inside its tensor")
    return table


#: Most elements of a tensor, so that a count of bytes fits into 64 bits.
_MOST_ELEMENTS = 1 << 48


def _require_manifest(manifest: Sequence[TensorSpec]) -> None:
    if len({spec.name for spec in manifest}) != len(manifest):
        raise ValueError("a tensor that comes twice")
    for shape in {spec.shape for spec in manifest}:
        if len(shape) > DIMS or min(shape, default=0) < 0 or math.prod(shape) > _MOST_ELEMENTS:
            raise ValueError(f"a tensor of shape {shape}")


@dataclass(frozen=True)
class Survey:
    """The boxes of all ranks: the trainer's, and per engine those of its ranks. Equal engines share their table."""

    manifest: tuple[TensorSpec, ...]
    trainers: Side
    engines: tuple[Side, ...] = ()

    @classmethod
    def of(
        cls, manifest: Sequence[TensorSpec], trainers: Sequence[Holding], engines: Sequence[Sequence[Holding]] = ()
    ) -> Survey:
        """From the boxes of every rank."""
        shape = _shapes(manifest)
        known: list[tuple[tuple[Int64, ...], Table]] = []
        sides = []
        for holdings in (trainers, *engines):
            columns = _columns(holdings)
            alike = (table for other, table in known if all(map(np.array_equal, columns, other)))
            table = next(alike, None)
            if table is None:
                table = Table.of(*columns, shape)
                known.append((columns, table))
            sides.append(Side(tuple(h.rank for h in holdings), tuple(h.host for h in holdings), table))
        return cls(tuple(manifest), sides[0], tuple(sides[1:]))

    def pack(self) -> bytes:
        """The survey as one message."""
        return self._packed[0]

    @cached_property
    def _packed(self) -> tuple[bytes, str]:
        """The message, and a digest of it."""
        sides = (self.trainers, *self.engines)
        tables: dict[int, tuple[int, Table]] = {}
        packed = [
            _PackedSide(side.ranks, side.hosts, tables.setdefault(id(side.table), (len(tables), side.table))[0])
            for side in sides
        ]
        message = _PackedSurvey(self.manifest, tuple(_pack(table) for _, table in tables.values()), tuple(packed))
        return _sealed(msgspec.msgpack.encode(message))

    @classmethod
    def unpack(cls, data: bytes) -> Survey:
        """The inverse of :meth:`pack`; raises :class:`PlanMismatch` on anything malformed."""
        try:
            packed = _decoder.decode(data)
            _require_manifest(packed.manifest)
            shape = _shapes(packed.manifest)
            tables = [_unpack(table, packed.manifest, shape) for table in packed.tables]
            first, *rest = (_side(side, tables) for side in packed.sides)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PlanMismatch(f"not a survey: {error}") from error
        survey = cls(packed.manifest, first, tuple(rest))
        survey.__dict__["_packed"] = _sealed(data)
        return survey

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Position in the manifest by name."""
        return {spec.name: n for n, spec in enumerate(self.manifest)}

    @cached_property
    def manifest_digest(self) -> str:
        """Hexadecimal digest of the canonical tensors."""
        return manifest_digest(self.manifest)

    def digest(self, *parts: bytes) -> str:
        """Hexadecimal digest of everything that the plan follows from; ``parts`` are added to it."""
        return hashlib.blake2b(self._packed[1].encode() + b"".join(parts), digest_size=16).hexdigest()


def _sealed(data: bytes) -> tuple[bytes, str]:
    return data, hashlib.blake2b(data, digest_size=16).hexdigest()


def _side(packed: _PackedSide, tables: Sequence[Table]) -> Side:
    if not 0 <= packed.table < len(tables) or len(packed.ranks) != len(packed.hosts):
        raise ValueError("a side without a table, or with hosts of other ranks")
    table = tables[packed.table]
    if int(table.rank.max(initial=-1)) >= len(packed.ranks):
        raise ValueError("a box of a rank that there is not")
    return Side(packed.ranks, packed.hosts, table)


_decoder = msgspec.msgpack.Decoder(_PackedSurvey)


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
