"""What every rank must know of every other to plan: which boxes of which tensors it holds or takes, and in which dtype.

Local addresses stay with their rank: they matter to nobody else. A survey is therefore small, travels as packed
columns, and from it every rank computes the same plan and keeps its own part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
from weightlink.hooks.errors import LayoutError, PlanMismatch
from weightlink.hooks.geometry import DIMS, Int32, Int64, Layout, TensorSpec
from weightlink.program import DTYPE_NUMBER, DTYPES, manifest_digest

_BOX = 3 * DIMS


@dataclass
class Holding:
    """The boxes of one rank, in the order of its layout's regions.

    :param rank: who it is, for messages
    :param host: name of its machine; empty if it is not known
    :param tensor: position in the manifest, per box
    :param dtype: position in :data:`~weightlink.program.DTYPES` of the rank's own parameter
    :param box: ``lo``, ``size`` and ``step``, :data:`DIMS` columns each
    """

    rank: str
    tensor: Int32
    dtype: Int32
    box: Int64
    host: str = ""

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def lo(self) -> Int64:
        """First index per dimension."""
        return self.box[:, :DIMS]

    @property
    def size(self) -> Int64:
        """Elements per dimension."""
        return self.box[:, DIMS : 2 * DIMS]

    @property
    def step(self) -> Int64:
        """Distance of the indices per dimension; 1 where there is one element only."""
        return self.box[:, 2 * DIMS :]

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


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """Dimensions that no box uses are left out, and columns are as narrow as their largest number."""

    rank: str
    host: str
    count: int
    dims: int
    tensor: tuple[str, bytes]
    dtype: tuple[str, bytes]
    box: tuple[str, bytes]


class _PackedSurvey(msgspec.Struct, frozen=True, array_like=True):
    manifest: tuple[TensorSpec, ...]
    trainers: tuple[_Packed, ...]
    engines: tuple[tuple[_Packed, ...], ...]


def _narrow(array: npt.NDArray[np.integer]) -> tuple[str, bytes]:
    most = int(array.max(initial=0))
    kind = next(k for k in ("<u1", "<u2", "<u4", "<i8") if most <= np.iinfo(k).max)
    return kind, np.ascontiguousarray(array, kind).tobytes()


def _widen(column: tuple[str, bytes]) -> Int64:
    kind, data = column
    if kind not in ("<u1", "<u2", "<u4", "<i8"):
        raise ValueError(f"unknown column type {kind!r}")
    return np.frombuffer(data, kind).astype(np.int64)


def _pack(holding: Holding) -> _Packed:
    idle = (holding.lo == 0) & (holding.size == 1)
    used = np.flatnonzero(~idle.all(axis=0))
    dims = int(used[-1]) + 1 if len(used) else 0
    columns = [part[:, :dims] for part in (holding.lo, holding.size, holding.step)]
    return _Packed(
        holding.rank,
        holding.host,
        len(holding),
        dims,
        _narrow(holding.tensor),
        _narrow(holding.dtype),
        _narrow(np.concatenate(columns, axis=1)),
    )


def _unpack(packed: _Packed, tensors: int) -> Holding:
    n, dims = packed.count, packed.dims
    if not 0 <= dims <= DIMS:
        raise ValueError(f"{dims} dimensions")
    tensor, dtype, flat = (_widen(column) for column in (packed.tensor, packed.dtype, packed.box))
    box = np.zeros((n, 3, DIMS), np.int64)
    box[:, 1:] = 1
    box[:, :, :dims] = flat.reshape(n, 3, dims)
    if not (len(tensor) == len(dtype) == n) or (n and int(tensor.max()) >= tensors):
        raise ValueError("columns of different length, or a tensor that the manifest does not have")
    if n and (int(dtype.max()) >= len(DTYPES) or int(box[:, 1:].min()) < 1 or int(box.min()) < 0):
        raise ValueError("an unknown dtype, or a box without elements")
    return Holding(packed.rank, tensor.astype(np.int32), dtype.astype(np.int32), box.reshape(n, _BOX), packed.host)


@dataclass(frozen=True)
class Survey:
    """The boxes of all ranks: the trainer's, and per engine those of its ranks."""

    manifest: tuple[TensorSpec, ...]
    trainers: tuple[Holding, ...]
    engines: tuple[tuple[Holding, ...], ...] = ()

    def pack(self) -> bytes:
        """The survey as one message."""
        engines = tuple(tuple(_pack(h) for h in engine) for engine in self.engines)
        return msgspec.msgpack.encode(_PackedSurvey(self.manifest, tuple(_pack(h) for h in self.trainers), engines))

    @classmethod
    def unpack(cls, data: bytes) -> Survey:
        """The inverse of :meth:`pack`; raises :class:`PlanMismatch` on anything malformed."""
        try:
            packed = _decoder.decode(data)
            count = len(packed.manifest)
            return cls(
                packed.manifest,
                tuple(_unpack(h, count) for h in packed.trainers),
                tuple(tuple(_unpack(h, count) for h in engine) for engine in packed.engines),
            )
        except (msgspec.MsgspecError, ValueError) as error:
            raise PlanMismatch(f"not a survey: {error}") from error

    @cached_property
    def manifest_digest(self) -> str:
        """Hexadecimal digest of the canonical tensors."""
        return manifest_digest(self.manifest)

    def digest(self, *parts: bytes) -> str:
        """Hexadecimal digest of everything that the plan follows from; ``parts`` are added to it."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.manifest_digest.encode())
        for holdings in (self.trainers, *self.engines):
            digest.update(len(holdings).to_bytes(8, "little"))
            for h in holdings:
                digest.update(_encode(_pack(h)))
        for part in parts:
            digest.update(part)
        return digest.hexdigest()


_encode = msgspec.msgpack.Encoder().encode
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
