"""Cuts a box of a Megatron tensor into boxes of Hugging Face tensors, as the family's rule says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weightlink.converters.families.rules import Match, Part, value
from weightlink.hooks.errors import LayoutError


class Box(Protocol):
    """A local tensor's place in a global one. What is used of Megatron's ``ShardedTensor``."""

    key: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    allow_shape_mismatch: bool


@dataclass(frozen=True)
class Piece:
    """A canonical box of a local tensor: all of its columns, and some of its rows.

    :param name: the HF name
    :param shape: of the whole HF tensor
    :param lo: first index in each of its dimensions; ``size`` and ``step`` likewise
    :param first: the local row that holds the first one
    """

    name: str
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]
    first: int


def pieces(box: Box, match: Match, sizes: Mapping[str, int], rank: str) -> Iterator[Piece]:
    """Every canonical box of a local tensor. A name whose rows lie wholly on other ranks is left out.

    Raises :class:`NameMapError` for symbols that ``sizes`` does not have, :class:`LayoutError` when the rule's rows do
    not add up to the tensor's.
    """
    rule = match.rule
    columns = (box.global_offset[1:], box.local_shape[1:], box.global_shape[1:])
    stacked = value(rule.stack, sizes, box.key, rank) if rule.stack else 0
    if stacked and match.index >= stacked:
        raise LayoutError(
            "a parameter's number is beyond the stacked dimension",
            tensor=box.key, rank=rank, expected=f"below {stacked}", found=match.index,
        )  # fmt: skip
    for name, total, lo, count, step, first in _runs(box, match, sizes, rank):
        offset, size, shape = ((row, *rest) for row, rest in zip((lo, count, total), columns, strict=True))
        steps: tuple[int, ...] = (step, *[1] * len(columns[0]))
        if rule.transpose:
            offset, size, shape, steps = offset[::-1], size[::-1], shape[::-1], steps[::-1]
        if stacked:
            offset, size, shape, steps = (match.index, *offset), (1, *size), (stacked, *shape), (1, *steps)
        yield Piece(name, shape, offset, size, steps, first)


def _runs(box: Box, match: Match, sizes: Mapping[str, int], rank: str) -> Iterator[tuple[str, int, int, int, int, int]]:
    """``(HF name, its rows, first canonical row, count, step, first local row)``."""
    start, end = box.global_offset[0], box.global_offset[0] + box.local_shape[0]
    if not match.parts[0].rows:
        yield match.parts[0].name, box.global_shape[0], start, end - start, 1, 0
        return
    parts = [_Sized.of(part, match, sizes, box, rank) for part in match.parts]
    groups = value(match.rule.groups, sizes, box.key, rank) if match.rule.groups else 1
    per_group = sum(part.length for part in parts)
    _require_rows(box, parts, groups, rank)
    # Only the groups that the local rows touch: one at least is cut when there are fewer groups than ranks.
    for group in range(start // per_group, min(groups, -(-end // per_group))):
        section = group * per_group
        for part in parts:
            low, high = max(start, section), min(end, section + part.length)
            if low < high:
                total = part.size or groups * part.units * part.every
                for row, count, step, skip in part.canonical(group, low - section, high - section):
                    yield part.name, total, row, count, step, low - start + skip
            section += part.length


@dataclass(frozen=True)
class _Sized:
    """A part whose expressions are numbers."""

    name: str
    rows: int
    units: int
    every: int
    at: int
    size: int

    @classmethod
    def of(cls, part: Part, match: Match, sizes: Mapping[str, int], box: Box, rank: str) -> _Sized:
        rows, units, at = (value(text, sizes, box.key, rank) for text in (part.rows, part.units, part.at))
        every = value(part.every, sizes, box.key, rank) if part.every else rows
        size = value(part.size, sizes, box.key, rank) if part.size else 0
        return cls(part.name, rows, units, every, at, size)

    @property
    def length(self) -> int:
        """Rows of the part in one group."""
        return self.rows * self.units

    def canonical(self, group: int, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """``(first canonical row, count, step, rows skipped)`` of the part's rows ``low`` to ``high`` in a group."""
        base = group * self.units * self.every + self.at
        if self.every == self.rows:
            yield base + low, high - low, 1, 0
        elif self.rows == 1:
            yield base + low * self.every, high - low, self.every, 0
        else:
            for unit in range(low // self.rows, -(-high // self.rows)):
                first, last = max(low, unit * self.rows), min(high, (unit + 1) * self.rows)
                yield base + unit * self.every + first - unit * self.rows, last - first, 1, first - low


def _require_rows(box: Box, parts: Sequence[_Sized], groups: int, rank: str) -> None:
    total, found = groups * sum(part.length for part in parts), box.global_shape[0]
    # Only entries that Megatron itself marks as padded (the vocabulary) may have rows beyond the true ones.
    if total > found or (total < found and not box.allow_shape_mismatch):
        raise LayoutError(
            "a parameter's rows do not match its rule",
            tensor=box.key,
            rank=rank,
            expected=f"{total} rows (" + " + ".join(f"{part.name}: {part.length}" for part in parts) + ")",
            found=f"{found} rows",
            remedy="compare the trainer's configuration with the checkpoint's config.json",
        )
