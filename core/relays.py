"""Fan-out: which engines take their bytes from another engine of equal layout instead of from the trainer.

A trainer that serves many equal engines sends the same bytes many times, and its ranks' links are what an update waits
for. An engine sends nothing, so its links are idle in that direction. Equal engines are therefore put in chains: the
first of a chain is served by the trainer, each one passes on what it receives to the next, message by message. Every
link then carries a full update once, however long the chain is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: In place of an engine's number: the trainer, or no engine at all.
NOBODY = -1
#: Chains are made when the busiest sender has more than this many times the bytes of the busiest receiver.
WORTH = 1.25


def choose_relays(twins: Sequence[int], hosts: Sequence[Sequence[str]], sent: int, received: int) -> list[int]:
    """For each engine the one that it takes its bytes from, or :data:`NOBODY` for the trainer.

    :param twins: per engine the first engine with equal boxes on equal ranks; its own number if there is none before
    :param hosts: per engine the machines of its ranks; engines of one machine are neighbours in a chain
    :param sent: bytes of the most loaded trainer rank if the trainer served every engine
    :param received: bytes of the most loaded engine rank

    As many engines of each kind are served by the trainer as it can serve while its busiest rank sends no more than the
    busiest engine rank receives: shorter chains are filled sooner and lose fewer engines when one fails.
    """
    relay = [NOBODY] * len(twins)
    if sent <= received * WORTH:
        return relay
    for first in sorted(set(twins)):
        equal = sorted((n for n, twin in enumerate(twins) if twin == first), key=lambda n: (tuple(hosts[n]), n))
        chains = max(1, len(equal) * received // sent)
        for k in range(chains):
            chain = equal[k * len(equal) // chains : (k + 1) * len(equal) // chains]
            for before, after in pairwise(chain):
                relay[after] = before
    return relay


def source_of(relay: Sequence[int], engine: int) -> int:
    """The engine at the head of this one's chain, which may be itself."""
    while relay[engine] != NOBODY:
        engine = relay[engine]
    return engine
