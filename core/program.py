"""What one rank does in an update over one engine's group: copies in buckets, buckets in rounds, as packed columns.

The sender's and the receiver's programs come from one plan but are checked apart: each side proves its own against the
layout that it observed itself, and a digest per pair of ranks shows that both mean the same bytes in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from weightlink.converters.coverage import Violations, delivered, may_own, prove_destination
from weightlink.hooks.errors import LayoutError, PlanMismatch
from weightlink.hooks.geometry import DIMS, ITEMSIZE, Int32, Int64, Layout, TensorSpec

#: Bytes of a message's header.
HEADER = 64
#: Alignment of each copy inside a bucket, so that every dtype can be viewed in place.
ALIGN = 16
DTYPES = tuple(ITEMSIZE)
DTYPE_NUMBER = {name: number for number, name in enumerate(DTYPES)}
ITEMSIZES = np.array([ITEMSIZE[name] for name in DTYPES], np.int64)


def _long() -> Int64:
    return np.zeros(0, np.int64)


def _short() -> Int32:
    return np.zeros(0, np.int32)


def _box() -> Int64:
    return np.zeros((0, DIMS), np.int64)


@dataclass
class Copies:
    """``n`` copies of this rank. ``bucket`` is the position in the program's bucket table, ``at`` the byte offset in
    the payload, ``tensor`` the position in the manifest, ``dtype`` the wire dtype as position in :data:`DTYPES`."""

    bucket: Int32 = field(default_factory=_short)
    at: Int64 = field(default_factory=_long)
    tensor: Int32 = field(default_factory=_short)
    param: Int32 = field(default_factory=_short)
    dtype: Int32 = field(default_factory=_short)
    lo: Int64 = field(default_factory=_box)
    size: Int64 = field(default_factory=_box)
    step: Int64 = field(default_factory=_box)
    offset: Int64 = field(default_factory=_long)
    stride: Int64 = field(default_factory=_box)

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "bucket",
        "at",
        "tensor",
        "param",
        "dtype",
        "lo",
        "size",
        "step",
        "offset",
        "stride",
    )

    def __len__(self) -> int:
        return len(self.at)

    @property
    def nbytes(self) -> Int64:
        """Wire bytes per copy."""
        nbytes: Int64 = self.size.prod(axis=1) * ITEMSIZES[self.dtype]
        return nbytes


@dataclass
class Buckets:
    """``n`` buckets of this rank in the order of their rounds. ``id`` is the number in the whole plan, ``peer`` the
    other side's group rank, ``nbytes`` the payload, ``direct`` 1 where this rank sends a lone copy from, or
    receives it into, the parameter itself."""

    id: Int64 = field(default_factory=_long)
    peer: Int32 = field(default_factory=_short)
    round: Int32 = field(default_factory=_short)
    nbytes: Int64 = field(default_factory=_long)
    direct: Int32 = field(default_factory=_short)

    COLUMNS: ClassVar[tuple[str, ...]] = ("id", "peer", "round", "nbytes", "direct")

    def __len__(self) -> int:
        return len(self.id)


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    plan_digest: str
    manifest_digest: str
    rounds: int
    copies: tuple[bytes, ...]
    buckets: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(_Packed)


@dataclass
class Program:
    """One rank's part of a plan over one engine's group."""

    plan_digest: str
    manifest_digest: str
    rounds: int
    copies: Copies
    buckets: Buckets

    def pack(self) -> bytes:
        """The program as one message of raw columns."""
        return msgspec.msgpack.encode(
            _Packed(
                self.plan_digest,
                self.manifest_digest,
                self.rounds,
                _dump(self.copies, Copies.COLUMNS),
                _dump(self.buckets, Buckets.COLUMNS),
            )
        )

    @classmethod
    def unpack(cls, data: bytes) -> Program:
        """The inverse of :meth:`pack`; raises :class:`PlanMismatch` on anything malformed."""
        try:
            packed = _decoder.decode(data)
            copies = Copies(*_load(packed.copies, Copies(), Copies.COLUMNS))
            buckets = Buckets(*_load(packed.buckets, Buckets(), Buckets.COLUMNS))
        except (msgspec.MsgspecError, ValueError) as error:
            raise PlanMismatch(f"not a program: {error}") from error
        program = cls(packed.plan_digest, packed.manifest_digest, packed.rounds, copies, buckets)
        program.validate()
        return program

    def validate(self) -> None:
        """Raises :class:`PlanMismatch` unless every bucket's copies fit into it without touching one another."""
        c, b = self.copies, self.buckets
        if len(c) and not (int(c.bucket.min()) >= 0 and int(c.bucket.max()) < len(b)):
            raise PlanMismatch("a copy names a bucket that the program does not have")
        if len(c) and not (int(c.dtype.min()) >= 0 and int(c.dtype.max()) < len(DTYPES)):
            raise PlanMismatch("a copy names an unknown dtype")
        if len(c) and ((c.size < 1).any() or (c.at < 0).any()):
            raise PlanMismatch("a copy is empty or lies before its bucket")
        order = np.lexsort((c.at, c.bucket))
        bucket, at, end = c.bucket[order], c.at[order], (c.at + c.nbytes)[order]
        same = bucket[1:] == bucket[:-1]
        if (same & (at[1:] < end[:-1])).any():
            raise PlanMismatch("two copies of one bucket overlap on the wire")
        if (end > b.nbytes[bucket]).any():
            raise PlanMismatch("a copy reaches beyond its bucket")
        if (b.direct[bucket][1:][same] == 1).any():
            raise PlanMismatch("a direct bucket holds more than one copy")

    def peers(self) -> list[int]:
        """Group ranks that this rank exchanges payload with, sorted."""
        return sorted({int(p) for p in self.buckets.peer})

    def pair_digest(self, peer: int) -> bytes:
        """16 bytes over everything that this rank and ``peer`` must agree on: manifest, canonical boxes, order, dtype,
        position on the wire. Local addresses are not part of it, so that both ends compute the same."""
        return self._digest(np.flatnonzero(self.buckets.peer == peer))

    def pair_digests(self) -> dict[int, bytes]:
        """:meth:`pair_digest` of every peer."""
        return {peer: self.pair_digest(peer) for peer in self.peers()}

    def digest(self) -> bytes:
        """16 bytes over all of it but local addresses: equal on equal ranks of engines that relay to one another."""
        return self._digest(np.arange(len(self.buckets), dtype=np.int64))

    def _digest(self, mine: Int64) -> bytes:
        b, c = self.buckets, self.copies
        order = mine[np.argsort(b.id[mine], kind="stable")]
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.plan_digest.encode() + self.manifest_digest.encode())
        for column in (b.id, b.round, b.nbytes):
            digest.update(np.ascontiguousarray(column[order]).tobytes())
        chosen = np.flatnonzero(np.isin(c.bucket, mine))
        chosen = chosen[np.lexsort((c.at[chosen], b.id[c.bucket[chosen]]))]
        digest.update(np.ascontiguousarray(b.id[c.bucket[chosen]]).tobytes())
        for column in (c.at, c.tensor, c.dtype, c.lo, c.size, c.step):
            digest.update(np.ascontiguousarray(column[chosen]).tobytes())
        return digest.digest()


def _dump(table: Any, names: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(np.ascontiguousarray(getattr(table, n)).astype(_little(getattr(table, n))).tobytes() for n in names)


def _little(array: npt.NDArray[Any]) -> np.dtype[Any]:
    return array.dtype.newbyteorder("<")


def _load(columns: Sequence[bytes], like: Any, names: Sequence[str]) -> list[npt.NDArray[Any]]:
    if len(columns) != len(names):
        raise ValueError(f"{len(columns)} columns instead of {len(names)}")
    arrays = []
    for data, name in zip(columns, names, strict=True):
        template = getattr(like, name)
        flat = np.frombuffer(data, _little(template)).astype(template.dtype)
        arrays.append(flat.reshape(-1, DIMS) if template.ndim == 2 else flat)
    if len({len(a) for a in arrays}) != 1:
        raise ValueError("columns of different length")
    return arrays


def manifest_digest(tensors: Sequence[TensorSpec]) -> str:
    """Hexadecimal digest of names, shapes and dtypes in order."""
    return hashlib.blake2b(msgspec.msgpack.encode(list(tensors)), digest_size=16).hexdigest()


def verify_local(program: Program, layout: Layout, tensor_of: Int64, *, rank: str) -> None:
    """Every copy must lie inside a region of this rank's own layout, at the address that the region gives.

    :param tensor_of: manifest position of each of the layout's tensors
    Raises :class:`PlanMismatch` naming the tensor.
    """
    c, r = program.copies, layout.regions
    if len(c) and not (int(c.param.min()) >= 0 and int(c.param.max()) < len(layout.params)):
        raise PlanMismatch("a copy names a parameter that this rank does not have", rank=rank)
    found = np.zeros(len(c), bool)
    # Regions of one (tensor, parameter) pair are few; match all copies against the k-th region of their pair.
    key_of_region = tensor_of[r.tensor] * (len(layout.params) + 1) + r.param if len(r) else np.zeros(0, np.int64)
    order = np.argsort(key_of_region, kind="stable")
    keys = key_of_region[order]
    want = c.tensor.astype(np.int64) * (len(layout.params) + 1) + c.param
    first = np.searchsorted(keys, want, side="left")
    count = np.searchsorted(keys, want, side="right") - first
    for k in range(int(count.max(initial=0))):
        rows = np.flatnonzero(~found & (count > k))
        region = order[first[rows] + k]
        index = c.lo[rows] - r.lo[region]
        at, off_lattice = index // r.step[region], index % r.step[region]
        last = at + (c.size[rows] - 1) * (c.step[rows] // r.step[region])
        multiple = np.where(c.size[rows] > 1, c.step[rows] % r.step[region], 0)
        ok = ((off_lattice == 0) & (multiple == 0) & (at >= 0) & (last < r.size[region])).all(axis=1)
        ok &= r.offset[region] + (at * r.stride[region]).sum(axis=1) == c.offset[rows]
        stride = r.stride[region] * (c.step[rows] // r.step[region])
        ok &= ((c.size[rows] == 1) | (stride == c.stride[rows])).all(axis=1)
        found[rows] |= ok
    if not found.all():
        bad = int(np.flatnonzero(~found)[0])
        raise PlanMismatch(
            "the plan contradicts this rank's own layout",
            rank=rank,
            tensor=layout.params[int(c.param[bad])].name,
            found=f"canonical tensor number {int(c.tensor[bad])}, lo {c.lo[bad].tolist()}, size {c.size[bad].tolist()}",
            remedy="connect again; if it persists, report it: the planner is wrong",
        )


def require_plain(layout: Layout, rank: str) -> None:
    """Raises :class:`LayoutError` for an engine layout in which plain numbers meet a quantised parameter: neither a
    copy nor the engine's own loader makes the scales that belong to it."""
    if layout.quantised:
        first = layout.quantised[0]
        raise LayoutError(
            f"{len(layout.quantised)} tensors of plain numbers would be cast to a quantised dtype",
            tensor=first.name,
            rank=rank,
            expected=first.dtype,
            remedy="quantised engines need an encoder",
        )


def verify_receive(
    program: Program,
    layout: Layout,
    *,
    plan_digest: str,
    rank: str,
    owns_weights: bool = True,
    declared: Sequence[str] = (),
) -> list[str]:
    """The receiver's own proof, before any byte: the program, the layout's fills and, for opaque parameters, the
    engine's own loader write every element exactly once.

    :returns: names of the engine-owned parameters
    Raises :class:`PlanMismatch` or :class:`CoverageError`.
    """
    if program.plan_digest != plan_digest:
        raise PlanMismatch("the program belongs to another plan", rank=rank, expected=plan_digest[:12])
    if program.manifest_digest != manifest_digest(layout.tensors):
        raise PlanMismatch("the program belongs to another manifest", rank=rank, remedy="connect again")
    require_plain(layout, rank)
    loaded = delivered(layout, rank)
    verify_local(program, layout, np.arange(len(layout.tensors), dtype=np.int64), rank=rank)
    c, f = program.copies, layout.fills
    wrong = np.array([DTYPE_NUMBER.get(p.dtype, -1) for p in layout.params] or [0], np.int64)[c.param] != c.dtype
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        spec = layout.params[int(c.param[bad])]
        raise PlanMismatch(
            "wire dtype differs from the receiver's", tensor=spec.name, rank=rank, expected=spec.dtype,
            found=DTYPES[int(c.dtype[bad])],
        )  # fmt: skip
    violations = Violations()
    owned = prove_destination(
        layout.params,
        np.concatenate([c.param, f.param]).astype(np.int64),
        np.concatenate([c.offset, f.offset]),
        np.concatenate([c.size, f.size]),
        np.concatenate([c.stride, f.stride]),
        rank=rank,
        owned=may_own(layout, owns_weights, declared),
        found=violations,
        delivered=loaded,
    )
    violations.raise_if_any("the plan does not cover the engine's weights exactly once", COVERAGE_REMEDY)
    return owned


COVERAGE_REMEDY = (
    "check that the trainer's model and the engine's checkpoint are the same model, and that no name rule is missing"
)
