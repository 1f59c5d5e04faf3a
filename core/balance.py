"""Who sends: every copy is given to one of the ranks that hold it, so that all send about the same number of bytes.

Copies with one holder have no choice. The others are taken holder set by holder set, small sets first, since they have
the least freedom; each set pours its bytes over its holders up to a common level, and the receivers, in order, are cut
at those levels. So a sender serves a few receivers with much rather than all of them with little.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from weightlink.hooks.geometry import Int64

#: How far a sender's load may exceed its level to serve receivers on its own host, and what is taken for balanced.
SLACK = 0.05
_GREEDY = 20_000
_ROUNDS = 32


def choose_senders(
    holders: Int64,
    sets: Sequence[tuple[int, ...]],
    nbytes: Int64,
    receiver: Int64,
    ranks: int,
    *,
    hosts: Sequence[str] = (),
    receiver_hosts: Sequence[str] = (),
) -> Int64:
    """The sending rank of every copy.

    :param holders: per copy the number of its holder set
    :param sets: the ranks of each set, ascending
    :param nbytes: bytes per copy
    :param receiver: per copy any number that tells receivers apart
    :param ranks: number of sending ranks
    :param hosts, receiver_hosts: machine per sender and per receiver, empty strings where unknown
    """
    sender = np.zeros(len(holders), np.int64)
    load = np.zeros(ranks, np.int64)
    order = np.lexsort((receiver, holders))
    bounds = np.searchsorted(holders[order], np.arange(len(sets) + 1))
    shared: list[tuple[Int64, Int64]] = []
    for number in sorted(range(len(sets)), key=lambda n: (len(sets[n]), sets[n])):
        rows = order[bounds[number] : bounds[number + 1]]
        if len(sets[number]) == 1:
            sender[rows] = sets[number][0]
            load[sets[number][0]] += int(nbytes[rows].sum())
        elif len(rows):
            shared.append((rows, np.array(sets[number], np.int64)))
    near = _near(hosts, receiver_hosts)
    for turn in range(_ROUNDS):
        before = load.copy()
        for rows, own in shared if turn % 2 == 0 else reversed(shared):
            if turn:
                np.subtract.at(load, sender[rows], nbytes[rows])
            sender[rows] = _share(nbytes[rows], receiver[rows], own, load, near)
            np.add.at(load, sender[rows], nbytes[rows])
        if turn > 1 and load.max(initial=0) >= before.max(initial=0) * (1 - SLACK / 25):
            break
    return sender


def _near(hosts: Sequence[str], receiver_hosts: Sequence[str]) -> tuple[Int64, Int64] | None:
    """Machines as numbers, per sender and per receiver; None if no two share one."""
    common = {h for h in hosts if h} & {h for h in receiver_hosts if h}
    if not common:
        return None
    number = {host: n for n, host in enumerate(sorted(common))}
    return tuple(np.array([number.get(h, -1) for h in side], np.int64) for side in (hosts, receiver_hosts))  # type: ignore[return-value]


def _share(nbytes: Int64, receiver: Int64, own: Int64, load: Int64, near: tuple[Int64, Int64] | None) -> Int64:
    """The holder of each copy of one set, of which nothing is part of ``load`` yet."""
    quota = _pour(load[own], int(nbytes.sum()))
    chosen = np.full(len(nbytes), -1, np.int64)
    if near is not None:
        sender_host, receiver_host = near[0][own], near[1][receiver]
        for host in np.intersect1d(sender_host[sender_host >= 0], receiver_host):
            here, rows = np.flatnonzero(sender_host == host), np.flatnonzero(receiver_host == host)
            room = (quota[here] * (1 + SLACK)).astype(np.int64)
            rows = rows[np.cumsum(nbytes[rows]) <= int(room.sum())]
            chosen[rows] = here[_cut(nbytes[rows], _shrink(room, int(nbytes[rows].sum())))]
        taken = np.bincount(chosen[chosen >= 0], nbytes[chosen >= 0], len(own)).astype(np.int64)
        rest = chosen < 0
        chosen[rest] = _cut(nbytes[rest], _pour(load[own] + taken, int(nbytes[rest].sum())))
    else:
        chosen = _cut(nbytes, quota)
    reached = load[own] + np.bincount(chosen, nbytes, len(own)).astype(np.int64)
    level = int((load[own] + quota).max())
    fair = level * (1 + SLACK / 5) if near is None else level * (1 + SLACK) + int(nbytes.max(initial=0))
    if reached.max() > fair and len(nbytes) <= _GREEDY:
        greedy = _greedy(nbytes, load[own])
        if (load[own] + np.bincount(greedy, nbytes, len(own)).astype(np.int64)).max() < reached.max():
            chosen = greedy
    return own[chosen]


def _pour(load: Int64, amount: int) -> Int64:
    """How much each gets when ``amount`` is poured over loads up to a common level."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    level = (amount + np.cumsum(sorted_load)) // np.arange(1, len(load) + 1)
    count = int(np.flatnonzero(level >= sorted_load)[-1]) + 1
    quota = np.zeros(len(load), np.int64)
    quota[order[:count]] = np.maximum(level[count - 1] - sorted_load[:count], 0)
    quota[order[0]] += amount - int(quota.sum())
    return quota


def _shrink(room: Int64, amount: int) -> Int64:
    """Quotas in proportion to ``room`` that add up to ``amount``."""
    total = max(int(room.sum()), 1)
    quota = (room * (amount / total)).astype(np.int64)
    quota[0] += amount - int(quota.sum())
    return quota


def _cut(nbytes: Int64, quota: Int64) -> Int64:
    """Cut a sequence of copies at the quotas: the holder in whose part the middle of each copy lies."""
    middle = np.cumsum(nbytes) - (nbytes + 1) // 2
    place = np.searchsorted(np.cumsum(quota), middle, side="right")
    return np.minimum(place, np.flatnonzero(quota)[-1] if quota.any() else 0).astype(np.int64)


def _greedy(nbytes: Int64, load: Int64) -> Int64:
    """Largest copy first, each to the least loaded holder."""
    heap = [(int(n), k) for k, n in enumerate(load)]
    heapq.heapify(heap)
    chosen = np.zeros(len(nbytes), np.int64)
    for row in np.argsort(-nbytes, kind="stable").tolist():
        least, holder = heap[0]
        heapq.heapreplace(heap, (least + int(nbytes[row]), holder))
        chosen[row] = holder
    return chosen
