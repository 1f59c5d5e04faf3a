"""Who sends: every copy is given to one of the ranks that hold it, so that all send about the same number of bytes.

Copies with one holder have no choice. The others are taken holder set by holder set, small sets first, since they have
the least freedom; each set pours its bytes over its holders up to a common level, and the receivers, in order, are cut
at those levels. So a sender serves a few receivers with much rather than all of them with little.

Copies come as runs of equal ones, and stay runs: a level cuts one run at most.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from weightlink.hooks.geometry import Int64

#: How far a sender's load may exceed its level to serve receivers on its own host, and what is taken for balanced.
SLACK = 0.05
_GREEDY = 20_000
_ROUNDS = 32


@dataclass
class Parts:
    """Parts of runs: the copies ``first .. first + count - 1`` of run ``run``, and the rank that sends them."""

    run: Int64
    first: Int64
    count: Int64
    sender: Int64

    def __len__(self) -> int:
        return len(self.run)

    def take(self, index: Int64) -> Parts:
        """The parts at ``index``."""
        return Parts(self.run[index], self.first[index], self.count[index], self.sender[index])

    def equals(self, other: Parts) -> bool:
        """Whether it is the same to send either."""
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in ("run", "first", "count", "sender"))

    @classmethod
    def join(cls, parts: Sequence[Parts]) -> Parts:
        """All of them, in the order of the runs and their copies."""
        columns = ([getattr(p, name) for p in parts] for name in ("run", "first", "count", "sender"))
        joined = cls(*(np.concatenate([np.zeros(0, np.int64), *column]) for column in columns))
        return joined.take(np.lexsort((joined.first, joined.run)))


def choose_senders(
    holders: Int64,
    sets: Sequence[tuple[int, ...]],
    nbytes: Int64,
    count: Int64,
    receiver: Int64,
    ranks: int,
    *,
    hosts: Sequence[str] = (),
    receiver_hosts: Sequence[str] = (),
) -> Parts:
    """The sending rank of every copy, as parts of the runs, in order.

    :param holders: per run the number of its holder set
    :param sets: the ranks of each set, ascending
    :param nbytes: bytes of each copy of a run
    :param count: copies per run
    :param receiver: per run any number that tells receivers apart
    :param ranks: number of sending ranks
    :param hosts, receiver_hosts: machine per sender and per receiver, empty strings where unknown
    """
    size = np.array([len(s) for s in sets] or [0], np.int64)
    only = np.array([s[0] for s in sets] or [0], np.int64)
    alone = np.flatnonzero(size[holders] == 1) if len(holders) else holders
    fixed = Parts(alone, np.zeros(len(alone), np.int64), count[alone], only[holders[alone]])
    load = np.bincount(fixed.sender, (nbytes * count)[alone], ranks).astype(np.int64)
    order = np.lexsort((receiver, holders))
    bounds = np.searchsorted(holders[order], np.arange(len(sets) + 1))
    shared = [
        _Set(rows, nbytes[rows], count[rows], receiver[rows], np.array(sets[n], np.int64))
        for n in sorted(range(len(sets)), key=lambda n: (len(sets[n]), sets[n]))
        if len(sets[n]) > 1 and len(rows := order[bounds[n] : bounds[n + 1]])
    ]
    near = _near(hosts, receiver_hosts)
    chosen: dict[int, tuple[Parts, Int64]] = {}
    for turn in range(_ROUNDS if len(shared) > 1 else len(shared)):
        before = load.copy()
        for n in range(len(shared)) if turn % 2 == 0 else reversed(range(len(shared))):
            if turn:
                load[shared[n].own] -= chosen[n][1]
            chosen[n] = shared[n].share(load, near)
            load[shared[n].own] += chosen[n][1]
        if turn > 1 and np.abs(load - before).max(initial=0) <= load.max(initial=0) * SLACK / 25:
            break
    return Parts.join([fixed, *(parts for parts, _ in chosen.values())])


def _near(hosts: Sequence[str], receiver_hosts: Sequence[str]) -> tuple[Int64, Int64] | None:
    """Machines as numbers, per sender and per receiver; None if no two share one."""
    common = {h for h in hosts if h} & {h for h in receiver_hosts if h}
    if not common:
        return None
    number = {host: n for n, host in enumerate(sorted(common))}
    return tuple(np.array([number.get(h, -1) for h in side], np.int64) for side in (hosts, receiver_hosts))  # type: ignore[return-value]


@dataclass
class _Set:
    """The runs that one set of ranks, ``own``, holds, in the order of their receivers."""

    run: Int64
    nbytes: Int64
    count: Int64
    receiver: Int64
    own: Int64

    def share(self, load: Int64, near: tuple[Int64, Int64] | None) -> tuple[Parts, Int64]:
        """The holder of each copy, and the bytes that each holder sends. Nothing of it is part of ``load`` yet."""
        load = load[self.own]
        every = Parts(np.arange(len(self.run)), np.zeros(len(self.run), np.int64), self.count, self.run)
        quota = _pour(load, self._bytes(every))
        parts = self._cut(every, quota) if near is None else self._cut_near(every, quota, load, near)
        sent = self._sent(parts)
        level = int((load + quota).max())
        fair = level * (1 + SLACK / 5) if near is None else level * (1 + SLACK) + int(self.nbytes.max())
        if (load + sent).max() > fair and int(self.count.sum()) <= _GREEDY:
            greedy = self._greedy(load)
            least = self._sent(greedy)
            if (load + least).max() < (load + sent).max():
                parts, sent = greedy, least
        return Parts(self.run[parts.run], parts.first, parts.count, self.own[parts.sender]), sent

    def _bytes(self, parts: Parts) -> int:
        return int((self.nbytes[parts.run] * parts.count).sum())

    def _sent(self, parts: Parts) -> Int64:
        return np.bincount(parts.sender, self.nbytes[parts.run] * parts.count, len(self.own)).astype(np.int64)

    def _cut_near(self, every: Parts, quota: Int64, load: Int64, near: tuple[Int64, Int64]) -> Parts:
        """First receivers on the holders' own machines, as far as the slack allows; then the others, and what is left
        of these."""
        sender_host, receiver_host = near[0][self.own], near[1][self.receiver]
        done, rest = [], [every.take(np.flatnonzero(~np.isin(receiver_host, sender_host[sender_host >= 0])))]
        for host in np.intersect1d(sender_host[sender_host >= 0], receiver_host):
            here = np.flatnonzero(sender_host == host)
            room = (quota[here] * (1 + SLACK)).astype(np.int64)
            fits, more = self._until(every.take(np.flatnonzero(receiver_host == host)), int(room.sum()))
            part = self._cut(fits, _shrink(room, self._bytes(fits)))
            done.append(Parts(part.run, part.first, part.count, here[part.sender]))
            rest.append(more)
        taken = self._sent(Parts.join(done))
        left = Parts.join(rest)
        return Parts.join([*done, self._cut(left, _pour(load + taken, self._bytes(left)))])

    def _until(self, parts: Parts, most: int) -> tuple[Parts, Parts]:
        """The copies up to ``most`` bytes, and those after them."""
        nbytes = self.nbytes[parts.run]
        end = np.cumsum(nbytes * parts.count)
        whole = int(np.searchsorted(end, most, side="right"))
        if whole == len(parts):
            return parts, parts.take(np.zeros(0, np.int64))
        some = (most - int(end[whole - 1] if whole else 0)) // int(nbytes[whole])
        fits, more = parts.take(np.arange(whole + 1)), parts.take(np.arange(whole, len(parts)))
        fits.count[-1] = some
        more.first[0] += some
        more.count[0] -= some
        return fits.take(np.flatnonzero(fits.count)), more

    def _cut(self, parts: Parts, quota: Int64) -> Parts:
        """Cut a sequence of copies at the quotas: the holder in whose part the middle of each copy lies.

        ``quota`` adds up to the bytes of all copies."""
        nbytes = self.nbytes[parts.run]
        end = np.cumsum(nbytes * parts.count)
        middle = nbytes - (nbytes + 1) // 2  # of a copy, from its first byte
        limits = np.cumsum(quota)[:-1]
        # The first copy whose middle is not before the limit belongs to the next holder.
        at = np.minimum(np.searchsorted(end - nbytes + middle, limits), max(len(parts) - 1, 0))
        copies = np.cumsum(parts.count)
        if len(parts):
            start, first = end - nbytes * parts.count, copies - parts.count
            inside = -((start[at] + middle[at] - limits) // nbytes[at])
            limits = first[at] + np.clip(inside, 0, parts.count[at])
        else:
            limits, first = np.zeros(0, np.int64), copies
        starts = np.unique(np.concatenate([first, limits]))
        starts = starts[starts < (copies[-1] if len(parts) else 0)]
        run = np.searchsorted(copies, starts, side="right")
        return Parts(
            parts.run[run],
            parts.first[run] + starts - first[run],
            np.diff(starts, append=copies[-1:]),
            np.searchsorted(limits, starts, side="right").astype(np.int64),
        )

    def _greedy(self, load: Int64) -> Parts:
        """Largest copy first, each to the least loaded holder."""
        heap = [(int(n), k) for k, n in enumerate(load)]
        heapq.heapify(heap)
        run = np.repeat(np.arange(len(self.run)), self.count)
        chosen = np.zeros(len(run), np.int64)
        for row in np.argsort(-self.nbytes[run], kind="stable").tolist():
            least, holder = heap[0]
            heapq.heapreplace(heap, (least + int(self.nbytes[run[row]]), holder))
            chosen[row] = holder
        # Copies of one run are equal: one part for each of its senders.
        pair, count = np.unique(run * len(self.own) + chosen, return_counts=True)
        run, sender = pair // len(self.own), pair % len(self.own)
        before = np.cumsum(count) - count
        first = before - before[np.searchsorted(run, run)]
        return Parts(run, first, count.astype(np.int64), sender)


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
