"""Rounds: which buckets travel together, so that no rank has more than a few peers at a time."""

from __future__ import annotations

import numpy as np
from weightlink.hooks.geometry import Int64


def colour_rounds(src: Int64, dst: Int64, max_peers: int) -> Int64:
    """A round per bucket: each rank sends at most ``max_peers`` and receives at most ``max_peers`` buckets a round.

    Buckets of one pair keep their order. Pairs are visited along diagonals, so that senders do not all start with the
    same receiver. Greedy: at most ``2 * busiest / max_peers`` rounds, where ``busiest`` is the busiest rank's count.
    """
    rounds = np.zeros(len(src), np.int64)
    if not len(src):
        return rounds
    receivers = int(dst.max()) + 1
    turn = np.zeros(len(src), np.int64)  # how many earlier buckets the pair has
    seen: dict[tuple[int, int], int] = {}
    for n, pair in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        turn[n] = seen.get(pair, 0)
        seen[pair] = int(turn[n]) + 1
    sending: dict[tuple[int, int], int] = {}
    receiving: dict[tuple[int, int], int] = {}
    open_for_src, open_for_dst, after = [0] * (int(src.max()) + 1), [0] * receivers, {pair: 0 for pair in seen}
    for n in np.lexsort((src, (dst - src) % receivers, turn)).tolist():
        s, d = int(src[n]), int(dst[n])
        r = max(open_for_src[s], open_for_dst[d], after[s, d])
        while sending.get((s, r), 0) >= max_peers or receiving.get((d, r), 0) >= max_peers:
            r += 1
        sending[s, r] = sending.get((s, r), 0) + 1
        receiving[d, r] = receiving.get((d, r), 0) + 1
        rounds[n], after[s, d] = r, r
        while sending.get((s, open_for_src[s]), 0) >= max_peers:
            open_for_src[s] += 1
        while receiving.get((d, open_for_dst[d]), 0) >= max_peers:
            open_for_dst[d] += 1
    return rounds
