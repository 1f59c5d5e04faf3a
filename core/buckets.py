"""Copies of one pair of ranks share buckets: as many as fit, in order; large ones have a bucket to themselves.

Equal copies come as parts of runs, and are not written out: a bucket is a range of positions in the sequence of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from weightlink.hooks.geometry import Int64
from weightlink.kinds import spread
from weightlink.program import ALIGN


@dataclass
class Packing:
    """``order`` sorts the parts by pair; ``place`` is the position of each sorted part's first copy in the sequence of
    all copies, ``at`` its distance in bytes from the sequence's beginning, and ``stride`` that from copy to copy.

    Bucket ``b`` holds the copies ``first[b]`` to ``first[b + 1] - 1``."""

    order: Int64
    place: Int64
    at: Int64
    stride: Int64
    # buckets
    first: Int64
    src: Int64
    dst: Int64
    nbytes: Int64
    alone: Int64

    def copies(self, bucket: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """The copies of these buckets, one bucket after the other.

        :returns: per copy the position of its bucket in ``bucket``, its part, its number within the part, and its
            offset in the bucket in bytes
        """
        count = self.first[bucket + 1] - self.first[bucket]
        copy = spread(self.first[bucket], count)
        part = np.searchsorted(self.place, copy, side="right") - 1
        number = copy - self.place[part]
        at = self.at[part] + number * self.stride[part]
        start = np.cumsum(count) - count
        place = np.repeat(np.arange(len(bucket)), count)
        return place, self.order[part], number, at - at[start][place]


def pack(src: Int64, dst: Int64, nbytes: Int64, count: Int64, limit: int, alone_from: int) -> Packing:
    """Fill buckets of at most ``limit`` bytes, pair by pair. Copies of ``alone_from`` bytes and more go alone.

    :param src, dst: ranks, per part
    :param nbytes: bytes of each copy of a part; none is larger than ``limit``
    :param count: copies per part
    """
    lone = nbytes >= alone_from
    key = (src * (int(dst.max(initial=0)) + 1) + dst) * 2 + lone
    order = np.argsort(key, kind="stable")
    if not len(order):
        none = np.zeros(0, np.int64)
        return Packing(none, none, none, none, np.zeros(1, np.int64), none, none, none, none)
    key, lone, nbytes, count = key[order], lone[order], nbytes[order], count[order]
    stride = -(-nbytes // ALIGN) * ALIGN
    at, place = np.cumsum(stride * count) - stride * count, np.cumsum(count) - count
    total = int(place[-1] + count[-1])
    opens = np.flatnonzero(np.diff(key, prepend=-1))
    # Next fit, one bucket of every pair at a time.
    first = [spread(place[lone], count[lone])]
    mixed = ~lone[opens]
    head, head_at = place[opens][mixed], at[opens][mixed]
    last = np.append(place[opens], total)[1:][mixed]
    end = at + (count - 1) * stride + nbytes  # the last copy of a bucket need not be padded
    while len(head):
        first.append(head)
        part = np.minimum(np.searchsorted(end, head_at + limit, side="right"), len(end) - 1)
        fit = np.clip((head_at + limit - nbytes[part] - at[part]) // stride[part] + 1, 0, count[part])
        head, head_at = place[part] + fit, at[part] + fit * stride[part]
        more = head < last
        head, head_at, last = head[more], head_at[more], last[more]
    starts = np.sort(np.concatenate([*first, np.array([total])]))
    opening = np.searchsorted(place, starts[:-1], side="right") - 1
    closing = np.searchsorted(place, starts[1:] - 1, side="right") - 1
    begin = at[opening] + (starts[:-1] - place[opening]) * stride[opening]
    end = at[closing] + (starts[1:] - 1 - place[closing]) * stride[closing] + nbytes[closing]
    pair = order[opening]
    return Packing(order, place, at, stride, starts, src[pair], dst[pair], end - begin, lone[opening].astype(np.int64))
