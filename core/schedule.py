"""Rounds: which buckets travel together, so that no rank has more than a few peers at a time.

Ranks are the two sides of a bipartite multigraph and buckets its edges. Such a graph can be coloured with as many
colours as its busiest rank has buckets (König), so that no two buckets of one rank have the same colour; that many
turns are also needed. ``max_peers`` colours make one round. Every rank goes through its buckets in the order of the
rounds, and two ranks agree on the order of theirs: nobody ever waits for somebody who waits for him.
"""

from __future__ import annotations

import itertools

import numpy as np
from weightlink.hooks.geometry import Int64


def colour_rounds(src: Int64, dst: Int64, nbytes: Int64, max_peers: int) -> Int64:
    """A round per bucket: each rank sends at most ``max_peers`` and receives at most ``max_peers`` buckets a round.

    The number of rounds is the least possible: the busiest rank's buckets divided by ``max_peers``, rounded up. Large
    buckets come first, so that those of one round are about equally large, as far as that allows.
    """
    if not len(src):
        return np.zeros(0, np.int64)
    small = np.zeros(len(src), np.int64)
    for part in _SIZES:
        small += nbytes * part < nbytes.max()
    order = np.lexsort((dst, src, small))
    pair = (small[order] * (int(src.max()) + 1) + src[order]) * (int(dst.max()) + 1) + dst[order]
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    left, right, step = src[order][first], dst[order][first], small[order][first]
    # Along diagonals: pairs that share no rank follow one another, and find the same colours free.
    turn = np.lexsort((left, (right - left) % (int(dst.max()) + 1), step))
    count = np.diff(first, append=len(pair))
    masks = colour_edges(*(column[turn].tolist() for column in (left, right, count, step)))
    by_pair = [masks[n] for n in np.argsort(turn).tolist()]
    rounds = np.empty(len(src), np.int64)
    rounds[order] = _bits(by_pair) // max_peers
    return rounds


#: A bucket is smaller by one step for each of these parts of the largest that it does not reach.
_SIZES = (2, 8)


def _bits(masks: list[int]) -> Int64:
    """The numbers of the bits that are set in each of the masks, ascending, one mask after the other."""
    width = -(-max(mask.bit_length() for mask in masks) // 8)
    octets = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), np.uint8)
    used = np.flatnonzero(octets)
    which, bit = np.nonzero(np.unpackbits(octets[used, None], axis=1, bitorder="little"))
    bits: Int64 = used[which] % width * 8 + bit
    return bits


def colour_edges(left: list[int], right: list[int], count: list[int], step: list[int]) -> list[int]:
    """The colours of every pair's ``count`` edges as bits, with as many colours in all as the largest degree.

    :param step: pairs come in the order of their steps, whose later ones take what the earlier ones leave

    Each edge takes the least colour that is free at both ends. Where there is none, the path that alternates between a
    colour free at the one end and a colour free at the other is recoloured, which frees one at both.
    """
    degree = int(max(np.bincount(side, count).max() for side in (left, right)))
    everything = (1 << degree) - 1
    graph = _Graph(left, right)
    lefts, rights, colours = *graph.used, graph.colours
    # A few edges of each pair at a time, so that no pair takes the colours that the others would have in common.
    some, rest = -(-max(count) // _TURNS), list(count)
    waiting: list[int] = []
    steps = [list(pairs) for _, pairs in itertools.groupby(range(len(left)), step.__getitem__)]
    while waiting or steps:
        waiting = waiting or steps.pop(0)
        for pair in waiting:
            a, b, now = left[pair], right[pair], min(some, rest[pair])
            rest[pair] -= now
            free = later = everything & ~(lefts[a] | rights[b])
            while now and later:
                later &= later - 1
                now -= 1
            taken = free ^ later
            colours[pair] |= taken
            lefts[a] |= taken
            rights[b] |= taken
            for _ in range(now):
                colour = everything & ~lefts[a]
                colour &= -colour
                other = everything & ~rights[b]
                graph.exchange(b, colour, other & -other)
                colours[pair] |= colour
                lefts[a] |= colour
                rights[b] |= colour
        waiting = [pair for pair in waiting if rest[pair]]
    return colours


_TURNS = 16


class _Graph:
    """Coloured edges. ``used`` are the colours at a node of either side, and ``colours`` those of a pair, as bits."""

    def __init__(self, left: list[int], right: list[int]) -> None:
        self.ends = (left, right)
        self.used = ([0] * (max(left) + 1), [0] * (max(right) + 1))
        self.colours = [0] * len(left)
        self.pairs: tuple[list[list[int]], list[list[int]]] = ([[] for _ in self.used[0]], [[] for _ in self.used[1]])
        for pair, ends in enumerate(zip(left, right, strict=True)):
            for side, node in enumerate(ends):
                self.pairs[side][node].append(pair)

    def exchange(self, node: int, taken: int, free: int) -> None:
        """Exchange two colours along the path that starts at the right-hand ``node`` with ``taken``, so that it is free
        there. The path never comes to a left-hand node where ``taken`` is free: it enters the left by ``taken`` only.
        """
        both, path, side, colour = taken | free, [], 1, taken
        while self.used[side][node] & colour:
            path.append(next(pair for pair in self.pairs[side][node] if self.colours[pair] & colour))
            side, colour = 1 - side, both ^ colour
            node = self.ends[side][path[-1]]
        for pair in path:  # a node between two of its edges has both colours, before and after
            self.colours[pair] ^= both
            for side in (0, 1):
                self.used[side][self.ends[side][pair]] ^= both
