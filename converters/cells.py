"""What is known about memory during a replay: pieces of canonical tensors, constants, or the reason why nothing is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from weightlink.converters.affine import Affine

CONSTANT = -1


class Piece(NamedTuple):
    """Elements of a storage (``at``) and what they hold: elements ``to`` of a canonical tensor, or one constant.

    :param source: index of the canonical tensor, or :data:`CONSTANT`
    :param value: the constant
    :param rounded: dtype that the values were rounded to on the way; None if they are still exact
    """

    source: int
    value: float
    rounded: torch.dtype | None
    map: Affine


class Lost(NamedTuple):
    """Why contents cannot be followed, and the canonical tensors that went into them.

    :param barred: running the loader for real would not give the right value either (a bare cast to a quantised dtype)
    """

    reason: str
    sources: frozenset[int] = frozenset()
    barred: bool = False


@dataclass(slots=True)
class Cell:
    """What is known about a storage that was made during the replay, in elements of ``dtype``.

    :param pieces: disjoint; elements outside them hold nothing that is known
    :param lost: why nothing is known; empty if the pieces hold
    :param barred: see :class:`Lost`
    :param sources: canonical tensors that went into it
    :param behind: canonical tensors that were written to the weights that it was computed from
    :param plain: its values are really there and depend on no weight
    """

    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    lost: str = ""
    barred: bool = False
    sources: frozenset[int] = frozenset()
    behind: frozenset[int] = frozenset()
    plain: bool = False
    alive: object = None

    def add(self, pieces: list[Piece]) -> None:
        """More contents."""
        self.pieces += pieces
        self.sources |= sources_of(pieces)

    def lose(self, lost: Lost) -> None:
        """From now on nothing is known."""
        self.lost = self.lost or lost.reason
        self.barred = self.barred or lost.barred
        self.sources |= lost.sources


class Write(NamedTuple):
    """One write to memory that existed before: pieces (``at`` is an address in it), or the reason why not.

    :param during: the canonical tensor that the loader had taken last, None before the first
    :param behind: canonical tensors that were written to the weights that were read for it
    :param span: for a lost write, the addresses that it assigns to; None if it changes only what was there
    """

    storage: int
    dtype: torch.dtype
    low: int
    high: int
    pieces: tuple[Piece, ...]
    lost: Lost | None
    during: int | None = None
    behind: frozenset[int] = frozenset()
    span: Affine | None = None


def key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while that is alive."""
    number: int = tensor.untyped_storage()._cdata
    return number


def dtype_name(dtype: torch.dtype) -> str:
    """The name used in messages, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def sources_of(found: list[Piece] | Lost) -> frozenset[int]:
    """The canonical tensors in it."""
    if isinstance(found, Lost):
        return found.sources
    return frozenset(piece.source for piece in found if piece.source != CONSTANT)
