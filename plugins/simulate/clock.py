"""The time of an update on given links, by events: no byte is moved.

Every rank goes through its buckets in the order of the rounds, with two rounds of them in flight per direction and
engine, as senders and receivers do. A bucket is packed, starts when both ends have a place and the one before it of
this pair of ranks has left, shares its sender's and its receiver's links with what other pairs have on them, and is
unpacked. One that an engine relays starts when it has arrived there, and keeps its place until it has left. Ranks are
machines' devices in order, trainers first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from weightlink.hooks.geometry import Int64
from weightlink.plan import Plan
from weightlink.relays import NOBODY

#: Rounds of buckets that one side has under way.
IN_FLIGHT = 2
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """What moves bytes.

    :param intra: bytes per second and direction of a device within its machine
    :param inter: bytes per second and direction of a device to other machines
    :param copy: bytes per second of packing, and of unpacking, on a device
    :param latency: seconds before a message's first byte
    :param per_node: devices of one machine
    """

    intra: float = 300e9
    inter: float = 50e9
    copy: float = 1000e9
    latency: float = 20e-6
    per_node: int = 8


@dataclass(frozen=True)
class Timeline:
    """Start and end of every bucket in seconds, with its ranks (engine ranks numbered after the trainers)."""

    src: Int64
    dst: Int64
    nbytes: Int64
    local: Bools
    start: Floats
    end: Floats
    ranks: int
    trainers: int

    @property
    def seconds(self) -> float:
        """From the first bucket's packing to the last one's unpacking."""
        return float(self.end.max(initial=0.0))


@dataclass(frozen=True)
class Buckets:
    """All buckets in the order of the rounds. A trainer rank serves its engines at the same time, each in an order of
    its own; so does a rank that relays. ``origin`` is the bucket that a relay passes on, -1 where the trainer sends."""

    src: Int64
    dst: Int64
    nbytes: Int64
    engine: Int64
    origin: Int64


def buckets_of(plan: Plan) -> Buckets:
    """Of one update."""
    first = np.cumsum([plan.trainers, *(engine.world for engine in plan.engines)]).tolist()
    start = np.cumsum([0, *(len(engine.bucket_src) for engine in plan.engines)]).tolist()
    parts: list[tuple[Int64, ...]] = []
    for which, e in enumerate(plan.engines):
        count = len(e.bucket_src)
        relayed = e.relay != NOBODY
        parts.append(
            (
                first[e.relay] + e.bucket_dst if relayed else e.bucket_src,
                e.bucket_dst + first[which],
                e.bucket_bytes,
                np.full(count, which, np.int64),
                start[e.relay] + np.arange(count) if relayed else np.full(count, -1, np.int64),
                e.bucket_round,
            )
        )
    none = np.zeros(0, np.int64)
    src, dst, nbytes, engine, origin, turn = (np.concatenate([none, *column]) for column in zip(*parts, strict=True))
    order = np.lexsort((engine, turn))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    origin = np.where(origin >= 0, place[origin], -1)
    return Buckets(src[order], dst[order], nbytes[order], engine[order], origin[order])


def lower_bound(plan: Plan, links: Links) -> float:
    """Seconds below which no schedule of these bytes gets: the busiest link of any rank, at full speed."""
    buckets = buckets_of(plan)
    src, dst, nbytes = buckets.src, buckets.dst, buckets.nbytes
    local = src // links.per_node == dst // links.per_node
    ranks = plan.trainers + sum(engine.world for engine in plan.engines)
    worst = 0.0
    for where in (src, dst):
        for mask, speed in ((local, links.intra), (~local, links.inter)):
            worst = max(worst, float(np.bincount(where[mask], nbytes[mask], ranks).max(initial=0.0)) / speed)
    return worst


def run(plan: Plan, links: Links, advance: Callable[[int], None] = lambda done: None) -> Timeline:
    """Play the plan.

    :param advance: called now and then with the number of buckets that are done
    """
    buckets = buckets_of(plan)
    src, dst, nbytes = buckets.src, buckets.dst, buckets.nbytes
    ranks = plan.trainers + sum(engine.world for engine in plan.engines)
    local = src // links.per_node == dst // links.per_node
    clock = _Clock(buckets, local, ranks, links, IN_FLIGHT * plan.wire.max_peers)
    clock.play(advance)
    return Timeline(src, dst, nbytes, local, np.array(clock.start), np.array(clock.end), ranks, plan.trainers)


class _Clock:
    """Buckets between events. A link is a rank and a direction and, of these, within the machine or to others."""

    def __init__(self, buckets: Buckets, local: Bools, ranks: int, links: Links, places: int) -> None:
        src, dst, nbytes = buckets.src, buckets.dst, buckets.nbytes
        leg = buckets.engine * ranks + src
        self.links, self.places = links, places
        total = len(src)
        self.left = nbytes.astype(float).tolist()
        self.size = nbytes.astype(float).tolist()
        self.out = (2 * src + local).tolist()
        self.into = (2 * (dst + ranks) + local).tolist()
        self.speed = np.where(local, links.intra, links.inter).tolist()
        # The buckets of one side: of a receiver, or of a sender for one engine.
        self.sender, self.receiver = leg.tolist(), (dst + int(leg.max(initial=0)) + 1).tolist()
        sides = max(self.receiver, default=-1) + 1
        self.queue: list[list[int]] = [[] for _ in range(sides)]
        for n in range(total):
            self.queue[self.sender[n]].append(n)
            self.queue[self.receiver[n]].append(n)
        self.next, self.busy = [0] * sides, [0] * sides
        # What it waits for: a place at each end and, if it is relayed, its arrival at the relay.
        self.lacks = np.where(buckets.origin >= 0, 3, 2).tolist()
        # Who relays it further, and what its place at the receiver waits for: unpacking, and leaving again.
        self.relayed: list[list[int]] = [[] for _ in range(total)]
        for n in np.flatnonzero(buckets.origin >= 0).tolist():
            self.relayed[int(buckets.origin[n])].append(n)
        self.origin = buckets.origin.tolist()
        # One connection per pair of ranks: its buckets travel one after the other.
        self.pair = np.unique(leg * (2 * ranks) + dst, return_inverse=True)[1].reshape(-1).tolist()
        self.ready: list[deque[int]] = [deque() for _ in range(max(self.pair, default=-1) + 1)]
        self.kept = [1 + len(further) for further in self.relayed]
        self.start, self.end = [0.0] * total, [0.0] * total
        self.on: list[set[int]] = [set() for _ in range(4 * ranks)]
        self.since, self.rate, self.stamp = [0.0] * total, [0.0] * total, [0] * total
        self.events: list[tuple[float, int, int, int]] = []

    def play(self, advance: Callable[[int], None]) -> None:
        """All of it."""
        for side in range(len(self.queue)):
            self._admit(side, 0.0)
        done = 0
        while self.events:
            now, n, kind, stamp = heapq.heappop(self.events)
            if kind == 0:
                pair = self.pair[n]
                self.ready[pair].append(n)
                if self.ready[pair][0] == n:
                    self._join(n, now)
            elif kind == 1:
                if stamp == self.stamp[n]:
                    self._leave(n, now)
            else:
                self.end[n] = now
                self._drop(n, now)
                done += 1
                if done % 1000 == 0:
                    advance(done)
        advance(done)

    def _admit(self, side: int, now: float) -> None:
        queue = self.queue[side]
        while self.busy[side] < self.places and self.next[side] < len(queue):
            n = queue[self.next[side]]
            self.next[side] += 1
            self.busy[side] += 1
            self._gain(n, now)

    def _gain(self, n: int, now: float) -> None:
        """One thing less that it waits for."""
        self.lacks[n] -= 1
        if not self.lacks[n]:
            self.start[n] = now
            packing = self.size[n] / self.links.copy if self.origin[n] < 0 else 0.0
            heapq.heappush(self.events, (now + self.links.latency + packing, n, 0, 0))

    def _drop(self, n: int, now: float) -> None:
        """One thing less that its place at the receiver is kept for."""
        self.kept[n] -= 1
        if not self.kept[n]:
            self._release(self.receiver[n], now)

    def _release(self, side: int, now: float) -> None:
        self.busy[side] -= 1
        self._admit(side, now)

    def _join(self, n: int, now: float) -> None:
        self.since[n] = now
        touched = self.on[self.out[n]] | self.on[self.into[n]] | {n}
        self.on[self.out[n]].add(n)
        self.on[self.into[n]].add(n)
        self._share(touched, now)

    def _leave(self, n: int, now: float) -> None:
        self.on[self.out[n]].discard(n)
        self.on[self.into[n]].discard(n)
        line = self.ready[self.pair[n]]
        line.popleft()
        if line:
            self._join(line[0], now)
        heapq.heappush(self.events, (now + self.size[n] / self.links.copy, n, 2, 0))
        self._share(self.on[self.out[n]] | self.on[self.into[n]], now)
        self._release(self.sender[n], now)
        if self.origin[n] >= 0:
            self._drop(self.origin[n], now)
        for further in self.relayed[n]:
            self._gain(further, now)

    def _share(self, buckets: set[int], now: float) -> None:
        """New rates: a link's speed is shared out equally among what is on it."""
        for n in buckets:
            self.left[n] -= self.rate[n] * (now - self.since[n])
            self.since[n] = now
            self.rate[n] = self.speed[n] / max(len(self.on[self.out[n]]), len(self.on[self.into[n]]))
            self.stamp[n] += 1
            heapq.heappush(self.events, (now + max(0.0, self.left[n]) / self.rate[n], n, 1, self.stamp[n]))
