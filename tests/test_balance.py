"""Senders: bytes are shared as evenly as the replicas allow."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightlink.balance import SLACK, choose_senders


def senders(holders, sets, nbytes, count, receiver, ranks, **hosts):
    """``(run, sender)`` of every copy; the parts must be all copies of all runs, in order."""
    parts = choose_senders(holders, sets, nbytes, count, receiver, ranks, **hosts)
    assert (parts.count > 0).all()
    copies = [(r, f + k) for r, f, c in zip(parts.run, parts.first, parts.count, strict=True) for k in range(c)]
    assert copies == [(run, k) for run, c in enumerate(count) for k in range(c)]
    return np.repeat(parts.run, parts.count), np.repeat(parts.sender, parts.count)


def least(total: dict[tuple[int, ...], int], ranks: int) -> float:
    """The smallest possible load of the busiest rank, if bytes could be divided at will: some group of ranks has to
    send whatever nobody else holds."""
    groups = itertools.chain.from_iterable(itertools.combinations(range(ranks), n) for n in range(1, ranks + 1))
    return max(sum(b for held, b in total.items() if set(held) <= set(group)) / len(group) for group in groups)


@given(st.integers(0, 10**9))
@settings(max_examples=300, deadline=None)
def test_no_sender_has_much_more_than_it_must(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 6)
    every = [tuple(sorted(rng.sample(range(ranks), rng.randint(1, ranks)))) for _ in range(rng.randint(1, 4))]
    sets = sorted(set(every))
    runs = rng.randint(1, 100)
    holders = np.array([rng.randrange(len(sets)) for _ in range(runs)])
    nbytes = np.array([rng.choice([8, 300, 4000, 70_000]) for _ in range(runs)])
    count = np.array([rng.choice([1, 1, 3, 40]) for _ in range(runs)])
    receiver = np.array([rng.randrange(5) for _ in range(runs)])
    run, sender = senders(holders, sets, nbytes, count, receiver, ranks)
    load = np.bincount(sender, nbytes[run], ranks)
    assert all(int(s) in sets[h] for s, h in zip(sender, holders[run], strict=True))
    total = {held: int((nbytes * count)[holders == n].sum()) for n, held in enumerate(sets)}
    # Copies are not divided: one more than the ideal may be needed.
    assert load.max() <= (1 + SLACK) * least(total, ranks) + nbytes.max()


def test_replicas_of_many_tensors_share_within_five_percent() -> None:
    rng = random.Random(1)
    for ranks in (2, 3, 5, 8, 16):
        sets = [tuple(range(ranks)), *((r, (r + 1) % ranks) for r in range(ranks) if ranks > 2)]
        sets = [tuple(sorted(s)) for s in sets]
        runs = 100 * ranks
        holders = np.array([rng.randrange(len(sets)) for _ in range(runs)])
        nbytes = np.array([rng.choice([2048, 4096, 1 << 20]) for _ in range(runs)])
        run, sender = senders(holders, sets, nbytes, np.full(runs, 3), np.arange(runs) % 7, ranks)
        load = np.bincount(sender, nbytes[run], ranks)
        assert load.max() <= (1 + SLACK) * nbytes[run].sum() / ranks


def test_a_sender_serves_few_receivers() -> None:
    """Eight replicas, eight receivers: one each, not all to all."""
    receiver = np.repeat(np.arange(8), 10)
    every = np.zeros(80, np.int64), [tuple(range(8))], np.full(80, 1000), np.full(80, 5)
    run, sender = senders(*every, receiver, 8)
    assert len(set(zip(sender.tolist(), receiver[run].tolist(), strict=True))) == 8


@given(st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_receivers_are_served_from_their_own_host_within_the_slack(seed: int) -> None:
    rng = random.Random(seed)
    hosts = ["a", "b", "c", "a", "b", "c"]
    receivers = [rng.choice("abcd") for _ in range(9)]
    runs = 300
    receiver = np.array([rng.randrange(9) for _ in range(runs)])
    nbytes = np.array([rng.randint(500, 1500) for _ in range(runs)])
    args = np.zeros(runs, np.int64), [tuple(range(6))], nbytes, np.full(runs, 3), receiver, 6
    run, sender = senders(*args, hosts=hosts, receiver_hosts=receivers)
    load = np.bincount(sender, nbytes[run], 6)
    assert load.max() <= (1 + SLACK) * nbytes[run].sum() / 6 + nbytes.max()

    def near(run: np.ndarray, sender: np.ndarray) -> int:
        pairs = zip(sender, receiver[run], nbytes[run], strict=True)
        return sum(int(n) for s, r, n in pairs if hosts[s] == receivers[r])

    assert near(run, sender) >= near(*senders(*args))
    total = nbytes[run]
    at = np.array([receivers[r] for r in receiver[run]])
    wanted = sum(min(int(total[at == host].sum()), int(total.sum()) // 3) for host in "abc")
    assert near(run, sender) >= 0.95 * wanted - 6 * nbytes.max()


COPIES, BYTES = 400, 1000


def most(sets: list[tuple[int, ...]], copies: list[int], ranks: int) -> int:
    size = len(sets)
    parts = choose_senders(
        np.arange(size), sets, np.full(size, BYTES), np.array(copies), np.zeros(size, np.int64), ranks
    )
    return int(np.bincount(parts.sender, parts.count * BYTES, ranks).max())


@pytest.mark.parametrize("ranks", [4, 8])
def test_load_travels_along_a_chain_of_sets(ranks: int) -> None:
    """Every set overlaps the next; the last has twice the bytes. All ranks can send the same."""
    sets = [(n, n + 1) for n in range(ranks - 1)]
    copies = [COPIES] * (ranks - 2) + [2 * COPIES]
    assert most(sets, copies, ranks) <= (1 + SLACK) * BYTES * COPIES


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_any_sets(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(3, 8)
    sets = list({tuple(sorted(rng.sample(range(ranks), rng.randint(1, 3)))) for _ in range(rng.randint(2, 10))})
    copies = [round(rng.choice([0.2, 1, 1, 2, 5]) * COPIES) for _ in sets]
    ideal = least({s: c * BYTES for s, c in zip(sets, copies, strict=True)}, ranks)
    assert most(sets, copies, ranks) <= (1 + SLACK) * ideal + BYTES * len(sets)
