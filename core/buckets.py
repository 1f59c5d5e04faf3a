"""Copies of one pair of ranks share buckets: as many as fit, in order; large ones have a bucket to themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from weightlink.hooks.geometry import Int64
from weightlink.program import ALIGN


@dataclass
class Packing:
    """``order`` sorts the copies by bucket and place; ``bucket`` and ``at`` (bytes) belong to the sorted copies."""

    order: Int64
    bucket: Int64
    at: Int64
    src: Int64
    dst: Int64
    nbytes: Int64
    alone: Int64


def pack(src: Int64, dst: Int64, nbytes: Int64, limit: int, alone_from: int) -> Packing:
    """Fill buckets of at most ``limit`` bytes, pair by pair. Copies of ``alone_from`` bytes and more go alone.

    No copy is larger than ``limit``."""
    alone = nbytes >= alone_from
    key = (src * (int(dst.max(initial=0)) + 1) + dst) * 2 + alone
    order = np.argsort(key, kind="stable")
    key, alone, nbytes = key[order], alone[order], nbytes[order]
    count = len(order)
    if not count:
        none = np.zeros(0, np.int64)
        return Packing(none, none, none, none, none, none, none)
    padded = -(-nbytes // ALIGN) * ALIGN
    end = np.cumsum(padded)
    start = end - padded
    opens = np.ones(count, bool)
    opens[1:] = (key[1:] != key[:-1]) | alone[1:]
    # Next fit, one bucket of every pair at a time.
    heads = np.flatnonzero(opens & ~alone)
    stops = np.append(np.flatnonzero(opens), count)
    last = stops[np.searchsorted(stops, heads, side="right")]
    while len(heads):
        # The last copy of a bucket need not be padded.
        following = np.searchsorted(start + nbytes, start[heads] + limit, side="right")
        more = following < last
        heads, last = following[more], last[more]
        opens[heads] = True
    first = np.flatnonzero(opens)
    bucket = np.cumsum(opens) - 1
    at = start - start[first][bucket]
    closing = np.append(first[1:], count) - 1
    pair = order[first]
    return Packing(order, bucket, at, src[pair], dst[pair], (at + nbytes)[closing], alone[first].astype(np.int64))
