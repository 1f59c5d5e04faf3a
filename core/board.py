"""The results board of one replica of an engine: where each rank leaves its answer to a command, and rank 0 finds them.

A store of our own, not a collective: a rank that fails or comes late blocks nobody, and ranks of different pipeline
stages may answer in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from weightlink.hooks.errors import ConfigError
from weightlink.rendezvous import Rendezvous, connect

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline


class Board:
    """One rank's access to the board. Every call returns at once.

    :param store: the replica's own store, hosted by its rank 0
    :param rank: this rank within the replica
    :param world: ranks of the replica
    """

    def __init__(self, store: dist.Store, rank: int, world: int, listener: Rendezvous | None = None) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._listener = listener

    @classmethod
    def host(cls, address: str, world: int, key: str, deadline: Deadline) -> Board:
        """Rank 0's side: a store bound to ``address`` on a free port; ``key`` keeps strangers' keys apart."""
        listener = Rendezvous.listen(address, deadline)
        return cls(dist.PrefixStore(key, listener.store), 0, world, listener)

    @classmethod
    def join(cls, address: str, port: int, rank: int, world: int, key: str, deadline: Deadline) -> Board:
        """The other ranks' side."""
        return cls(dist.PrefixStore(key, connect(address, port, deadline)), rank, world)

    @property
    def port(self) -> int:
        """Where the hosting side listens."""
        if self._listener is None:
            raise ConfigError("only the rank that hosts the board knows its port", rank=f"rank {self.rank}")
        return self._listener.port

    def post(self, seq: int, data: bytes) -> None:
        """Leave this rank's answer to command ``seq``."""
        self._store.set(f"{seq}/{self.rank}", data)

    def collect(self, seq: int) -> list[bytes] | None:
        """Every rank's answer to ``seq`` in rank order, or None while one is missing. Removes them."""
        keys = [f"{seq}/{rank}" for rank in range(self.world)]
        if not self._store.check(keys):
            return None
        answers = [self._store.get(key) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return answers

    def close(self) -> None:
        """Stop listening. Safe to repeat."""
        if self._listener is not None:
            self._listener.close()
