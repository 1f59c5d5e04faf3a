"""Tensors that lie on the ranks in the same way are one *kind*, and are compared once for all of them.

The layers of a model repeat, and so do its experts: a model of fifty thousand tensors has a few thousand kinds. What is
worked out per kind (overlaps, proofs, pieces) costs no more for a deeper model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from weightlink.converters.boxes import Boxes
from weightlink.hooks.geometry import DIMS, Int32, Int64
from weightlink.survey import Holding

UInt64 = npt.NDArray[np.uint64]

_KEYS = np.random.Generator(np.random.PCG64(0x574C)).integers(0, 1 << 63, (2, 3 * DIMS + 4), np.uint64) | np.uint64(1)


def _mix(x: UInt64) -> UInt64:
    """A bijection of 64 bits in which every bit of the argument moves every bit of the value."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def hash_rows(*columns: npt.NDArray[np.integer], variant: int = 0) -> UInt64:
    """One number per row of the columns given side by side (one- or two-dimensional)."""
    total: UInt64 = np.zeros(len(columns[0]), np.uint64)
    at = 0
    for column in columns:
        table = column[:, None] if column.ndim == 1 else column
        for k in range(table.shape[1]):
            total += table[:, k].astype(np.uint64) * _KEYS[variant, at]
            at += 1
    return _mix(total)


@dataclass
class Rows:
    """The boxes of all ranks of one side. ``turn`` counts equal boxes of one rank: each is memory of its own."""

    tensor: Int64
    rank: Int32
    turn: Int32
    dtype: Int32
    box: Int64
    key: UInt64  # of the box and its dtype, whoever holds it

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, holdings: Sequence[Holding], *, by_dtype: bool) -> Rows:
        """All boxes in the order of the ranks.

        :param by_dtype: boxes of different dtype are different: what arrives differs
        """
        counts = [len(h) for h in holdings]
        tensor = np.concatenate([h.tensor for h in holdings] or [np.zeros(0, np.int32)]).astype(np.int64)
        dtype = np.concatenate([h.dtype for h in holdings] or [np.zeros(0, np.int32)])
        box = np.concatenate([h.box for h in holdings] or [np.zeros((0, 3 * DIMS), np.int64)])
        rank = np.repeat(np.arange(len(holdings), dtype=np.int32), counts)
        key = hash_rows(box, dtype if by_dtype else np.zeros_like(dtype))
        place = hash_rows(key, tensor, rank)
        order = np.argsort(place, kind="stable")
        same = np.zeros(len(order), bool)
        same[1:] = place[order][1:] == place[order][:-1]
        turn = np.zeros(len(order), np.int32)
        if same.any():
            start = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
            turn[order] = np.arange(len(order)) - start
        return cls(tensor, rank, turn, dtype, box, key)

    def boxes(self, index: Int64, group: Int64) -> Boxes:
        """The boxes at ``index`` as members of ``group``."""
        box = self.box[index]
        return Boxes(group, box[:, :DIMS], box[:, DIMS : 2 * DIMS], box[:, 2 * DIMS :])


def kinds_of(rows: Rows, tensors: int) -> Int64:
    """A number per tensor, equal for tensors that the same ranks hold in the same boxes."""
    signs = [hash_rows(rows.key, rows.rank, rows.turn, variant=v) for v in (0, 1)]
    table = np.zeros((tensors, 3), np.uint64)
    order = np.argsort(rows.tensor, kind="stable")
    if len(order):
        sorted_tensor = rows.tensor[order]
        starts = np.flatnonzero(np.concatenate([[True], sorted_tensor[1:] != sorted_tensor[:-1]]))
        for column, sign in enumerate(signs):
            # A sum does not depend on the order of the rows.
            table[sorted_tensor[starts], column] = np.add.reduceat(sign[order], starts)
        table[sorted_tensor[starts], 2] = np.diff(np.append(starts, len(order))).astype(np.uint64)
    _, kind = np.unique(hash_rows(table), return_inverse=True)
    return kind.reshape(-1).astype(np.int64)


def joint(*kinds: Int64) -> tuple[Int64, Int64]:
    """``(kind, first)``: tensors that are of one kind in every respect, and the first tensor of each."""
    if not len(kinds[0]):
        empty = np.zeros(0, np.int64)
        return empty, empty
    _, first, kind = np.unique(np.stack(kinds, axis=1), axis=0, return_index=True, return_inverse=True)
    return kind.reshape(-1).astype(np.int64), first.astype(np.int64)
