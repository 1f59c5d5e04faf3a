"""Rounds: as few as can be, in one order, and never a wait that cannot end."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightlink.buckets import pack
from weightlink.program import ALIGN
from weightlink.schedule import colour_rounds

WORLDS = [1, 2, 3, 5, 6, 7, 12]


def check(pairs: list[tuple[int, int]], peers: int, nbytes: list[int] | None = None) -> None:
    src, dst = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    sizes = np.array(nbytes or [1000] * len(pairs), np.int64)
    rounds = colour_rounds(src, dst, sizes, peers).tolist()
    busy = [Counter((pair[side], r) for pair, r in zip(pairs, rounds, strict=True)) for side in (0, 1)]
    assert max(max(count.values()) for count in busy) <= peers
    for pair, size in set(zip(pairs, sizes, strict=True)):
        own = [r for r, p, n in zip(rounds, pairs, sizes, strict=True) if (p, n) == (pair, size)]
        assert own == sorted(own), "equal buckets of a pair change places"
    busiest = max(max(Counter(pair[side] for pair in pairs).values()) for side in (0, 1))
    assert max(rounds) + 1 == -(-busiest // peers), "more rounds than the busiest rank needs"
    assert finishes(pairs, rounds)


def finishes(pairs: list[tuple[int, int]], rounds: list[int]) -> bool:
    """Whether all ranks come to their end when nothing is buffered on the way: a bucket arrives once both of its ranks
    have posted it, and no rank posts a round while two of its earlier ones are on their way.

    What can happen only grows, so one order of events stands for all."""
    programs: dict[tuple[str, int], list[list[int]]] = {}
    for side, name in enumerate(("send", "receive")):
        for rank in {pair[side] for pair in pairs}:
            own = sorted({r for pair, r in zip(pairs, rounds, strict=True) if pair[side] == rank})
            programs[name, rank] = [
                [n for n, pair in enumerate(pairs) if pair[side] == rank and rounds[n] == r] for r in own
            ]
    return carried_out(programs) == len(pairs)


def carried_out(programs: dict[tuple[str, int], list[list[int]]]) -> int:
    """Buckets that arrive before nothing can move any more."""
    posted = dict.fromkeys(programs, 0)
    while True:
        where = Counter(n for who, turn in posted.items() for numbers in programs[who][:turn] for n in numbers)
        done = {n for n, times in where.items() if times == 2}
        ready = [
            who
            for who, turns in programs.items()
            if posted[who] < len(turns) and sum(not set(t) <= done for t in turns[: posted[who]]) < 2
        ]
        if not ready:
            return len(done)
        for who in ready:
            posted[who] += 1


@pytest.mark.parametrize(("senders", "receivers"), list(itertools.product(WORLDS, WORLDS)))
def test_rounds_of_uneven_worlds(senders: int, receivers: int) -> None:
    rng = random.Random(senders * 100 + receivers)
    for peers in (1, 2, 4, 1024):
        count = rng.randint(1, 60)
        pairs = sorted((rng.randrange(senders), rng.randrange(receivers)) for _ in range(count))
        check(pairs, peers)
        check(pairs, peers, [rng.choice([1, 100, 480, 1000]) for _ in pairs])


def test_large_buckets_do_not_wait_for_small_ones() -> None:
    """Each of eight ranks has a large and a small bucket for each of eight others: eight rounds have all large ones."""
    pairs = [(a, b) for a in range(8) for b in range(8) for _ in range(2)]
    src, dst = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    nbytes = np.tile([3, 1000], 64)
    rounds = colour_rounds(src, dst, nbytes, 1)
    assert rounds.max() == 15
    assert rounds[nbytes == 1000].max() == 7


def test_every_small_world() -> None:
    """Multigraphs of up to 3 by 3 ranks, two buckets a pair: all of up to five buckets, and every fourth size."""
    for a, b in itertools.product((1, 2, 3), (1, 2, 3)):
        every = list(itertools.product(range(a), range(b)))
        for counts in itertools.product((0, 1, 2), repeat=len(every)):
            pairs = [pair for pair, count in zip(every, counts, strict=True) for _ in range(count)]
            if pairs and (sum(counts) <= 5 or sum(counts) % 4 == 0):
                check(pairs, 1 + sum(counts) % 3)


def test_the_model_finds_a_deadlock() -> None:
    """Two senders whose receivers expect them in the opposite order, each round its own for every rank."""
    pairs = [(0, 0), (0, 1), (0, 0), (0, 1), (0, 0), (0, 1)]
    assert finishes(pairs, [0, 1, 2, 3, 4, 5])
    crossed = {("send", 0): [[0], [1], [2], [3]], ("receive", 0): [[3], [2], [1], [0]]}
    assert carried_out(crossed) < 4


parts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 4096), st.integers(1, 9)), min_size=1, max_size=40
)  # sender, receiver, bytes, copies


@given(parts, st.sampled_from([1, 700, 5000]))
@settings(max_examples=200, deadline=None)
def test_buckets_hold_what_fits(rows: list[tuple[int, int, int, int]], alone_from: int) -> None:
    src, dst, nbytes, count = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    packed = pack(src, dst, nbytes, count, 4096, alone_from)
    every = [column.tolist() for column in packed.copies(np.arange(len(packed.src)))]
    assert sorted(zip(*every[1:3], strict=True)) == [(n, k) for n, c in enumerate(count.tolist()) for k in range(c)]
    inside: dict[int, list[tuple[int, int]]] = {}
    for bucket, part, _, at in zip(*every, strict=True):
        assert (packed.src[bucket], packed.dst[bucket]) == (src[part], dst[part])
        assert at % ALIGN == 0
        inside.setdefault(bucket, []).append((at, int(nbytes[part])))
    assert sorted(inside) == list(range(len(packed.src)))
    for bucket, held in inside.items():
        assert held[0][0] == 0
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(held))
        assert packed.nbytes[bucket] == held[-1][0] + held[-1][1] <= 4096
        assert packed.alone[bucket] == (held[0][1] >= alone_from)
        assert len(held) == 1 or not packed.alone[bucket]
    # A bucket is closed only because the next copy of its pair would not fit.
    mixed = [b for b in range(len(packed.src)) if not packed.alone[b]]
    for a, b in itertools.pairwise(mixed):
        if (packed.src[a], packed.dst[a]) == (packed.src[b], packed.dst[b]):
            assert -(-int(packed.nbytes[a]) // ALIGN) * ALIGN + inside[b][0][1] > 4096
    some = np.array([b for b in range(len(packed.src)) if b % 2])
    picked = [column.tolist() for column in packed.copies(some.astype(np.int64))]
    wanted = [row for row in zip(*every, strict=True) if row[0] % 2]
    assert [(int(some[b]), *rest) for b, *rest in zip(*picked, strict=True)] == wanted
