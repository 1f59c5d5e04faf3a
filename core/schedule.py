"""Rounds: which buckets travel together, so that no rank has more than a few peers at a time.

Ranks are the two sides of a bipartite multigraph and buckets its edges. Such a graph can be coloured with as many
colours as its busiest rank has buckets (König), so that no two buckets of one rank have the same colour; that many
turns are also needed. ``max_peers`` colours make one round. Every rank goes through its buckets in the order of the
rounds, and two ranks agree on the order of theirs: nobody ever waits for somebody who waits for him.
"""

from __future__ import annotations

import numpy as np
from weightlink.hooks.geometry import Int64


def colour_rounds(src: Int64, dst: Int64, max_peers: int) -> Int64:
    """A round per bucket: each rank sends at most ``max_peers`` and receives at most ``max_peers`` buckets a round.

    Buckets of one pair keep their order. The number of rounds is the least possible: the busiest rank's buckets divided
    by ``max_peers``, rounded up.
    """
    if not len(src):
        return np.zeros(0, np.int64)
    receivers = int(dst.max()) + 1
    pairs, pair, count = np.unique(src * receivers + dst, return_inverse=True, return_counts=True)
    left, right = pairs // receivers, pairs % receivers
    # Along diagonals: pairs that share no rank follow one another, and find the same colours free.
    order = np.lexsort((left, (right - left) % receivers))
    colours = colour_edges(left[order].tolist(), right[order].tolist(), count[order].tolist())
    rounds = np.empty(len(src), np.int64)
    # The buckets of a pair are alike to the colouring: the earlier bucket gets the earlier colour.
    rounds[np.argsort(pair.reshape(-1), kind="stable")] = np.concatenate(
        [np.array(colours[n], np.int64) for n in np.argsort(order).tolist()]
    )
    return rounds // max_peers


def colour_edges(left: list[int], right: list[int], count: list[int]) -> list[list[int]]:
    """The colours of every pair's ``count`` edges, ascending, with as many colours in all as the largest degree.

    Each edge takes the least colour that is free at both ends. Where there is none, the path that alternates between a
    colour free at the one end and a colour free at the other is recoloured, which frees one at both.
    """
    degree = int(max(np.bincount(side, count).max() for side in (left, right)))
    everything = (1 << degree) - 1
    graph = _Graph(max(left) + 1, max(right) + 1, degree)
    # A few edges of each pair at a time, so that no pair takes the colours that the others would have in common.
    some, rest = -(-max(count) // _TURNS), list(count)
    waiting = list(range(len(left)))
    while waiting:
        for pair in waiting:
            a, b, now = left[pair], right[pair], min(some, rest[pair])
            rest[pair] -= now
            free = everything & ~(graph.used[0][a] | graph.used[1][b])
            for _ in range(now):
                if free:
                    colour = (free & -free).bit_length() - 1
                    free &= free - 1
                else:
                    colour = _lowest(everything & ~graph.used[0][a])
                    graph.exchange(b, colour, _lowest(everything & ~graph.used[1][b]))
                graph.add(pair, a, b, colour)
        waiting = [pair for pair in waiting if rest[pair]]
    found: list[list[int]] = [[] for _ in left]
    for pairs in graph.pair[0]:
        for colour, pair in enumerate(pairs):
            if pair >= 0:
                found[pair].append(colour)
    return found


_TURNS = 16


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class _Graph:
    """Coloured edges. ``used`` are the colours at a node of either side, as bits; ``pair`` and ``other`` the pair and
    the other end of the edge that has a colour there."""

    def __init__(self, lefts: int, rights: int, colours: int) -> None:
        self.used = ([0] * lefts, [0] * rights)
        self.pair = tuple([[-1] * colours for _ in range(nodes)] for nodes in (lefts, rights))
        self.other = tuple([[-1] * colours for _ in range(nodes)] for nodes in (lefts, rights))

    def add(self, pair: int, left: int, right: int, colour: int) -> None:
        """An edge of ``pair``."""
        self.used[0][left] |= 1 << colour
        self.used[1][right] |= 1 << colour
        self.pair[0][left][colour] = self.pair[1][right][colour] = pair
        self.other[0][left][colour] = right
        self.other[1][right][colour] = left

    def exchange(self, node: int, taken: int, free: int) -> None:
        """Exchange two colours along the path that starts at the right-hand ``node`` with ``taken``, so that it is free
        there. The path never comes to a left-hand node where ``taken`` is free: it enters the left by ``taken`` only.
        """
        path: list[tuple[int, int, int, int]] = []
        side, colour, near = 1, taken, node
        while (pair := self.pair[side][near][colour]) >= 0:
            far = self.other[side][near][colour]
            path.append((pair, far, near, colour) if side else (pair, near, far, colour))
            side, colour, near = 1 - side, taken ^ free ^ colour, far
        for _, left, right, colour in path:
            self.used[0][left] ^= 1 << colour
            self.used[1][right] ^= 1 << colour
            self.pair[0][left][colour] = self.pair[1][right][colour] = -1
        for pair, left, right, colour in path:
            self.add(pair, left, right, taken ^ free ^ colour)
