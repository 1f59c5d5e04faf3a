"""The buckets into the engines that the trainer serves, and the rounds in which they travel: one schedule for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from weightlink.balance import Parts
from weightlink.buckets import Packing, pack
from weightlink.hooks.geometry import Int64
from weightlink.hooks.settings import WireSettings
from weightlink.pieces import Pieces
from weightlink.schedule import colour_rounds


@dataclass(frozen=True, eq=False)
class Load:
    """What the trainer sends to an engine: ``parts`` of the runs of ``pieces``. Engines that take the same pieces from
    the same senders share it."""

    pieces: Pieces
    parts: Parts
    wire: WireSettings

    @cached_property
    def packing(self) -> Packing:
        """The buckets in the order of their pairs; worked out when somebody asks."""
        run = self.parts.run
        src, dst, nbytes = self.parts.sender, self.pieces.dst[run], self.pieces.nbytes[run]
        return pack(src, dst, nbytes, self.parts.count, self.wire.bucket_bytes, self.wire.direct_bytes)


class Schedule:
    """The rounds of all buckets into all engines, so that a trainer rank that serves several of them has few peers at a
    time over all; worked out when somebody asks."""

    def __init__(self, loads: Sequence[Load], worlds: Sequence[int], max_peers: int) -> None:
        self._loads, self._worlds, self._max_peers = loads, worlds, max_peers

    @cached_property
    def rounds(self) -> list[Int64]:
        """Per engine a round per bucket of its packing."""
        packings = [load.packing for load in self._loads]
        starts = np.cumsum([0, *self._worlds]).tolist()
        none = np.zeros(0, np.int64)
        src, nbytes = (np.concatenate([none, *(getattr(p, name) for p in packings)]) for name in ("src", "nbytes"))
        dst = np.concatenate([none, *(p.dst + start for p, start in zip(packings, starts, strict=False))])
        ends = np.cumsum([len(p.src) for p in packings])[:-1]
        return np.split(colour_rounds(src, dst, nbytes, self._max_peers), ends)


@dataclass(frozen=True, eq=False)
class Traffic:
    """All buckets into one engine, numbered in the order of their rounds, of which some may have none."""

    load: Load
    schedule: Schedule
    number: int  # of the engine among those of the schedule

    @cached_property
    def _order(self) -> tuple[Int64, Int64]:
        """The buckets of the packing in the order of their numbers, and their rounds in that order."""
        p = self.load.packing
        rounds = self.schedule.rounds[self.number]
        ranks = [int(side.max(initial=0)) + 1 for side in (p.src, p.dst)]
        order = np.argsort((rounds * ranks[0] + p.src) * ranks[1] + p.dst, kind="stable")
        return order, rounds[order]

    @property
    def order(self) -> Int64:
        """The buckets of the packing in the order of their numbers."""
        return self._order[0]

    @property
    def bucket_round(self) -> Int64:
        """Per bucket."""
        return self._order[1]

    @cached_property
    def bucket_src(self) -> Int64:
        """Trainer rank per bucket."""
        return self.load.packing.src[self.order]

    @cached_property
    def bucket_dst(self) -> Int64:
        """Engine rank per bucket."""
        return self.load.packing.dst[self.order]

    @cached_property
    def bucket_bytes(self) -> Int64:
        """Payload per bucket."""
        return self.load.packing.nbytes[self.order]

    @cached_property
    def bucket_alone(self) -> Int64:
        """1 where a bucket holds one large copy."""
        return self.load.packing.alone[self.order]
