"""What ``weightlink bench update`` tells its trainer ranks and what they answer: one JSON line each."""

from __future__ import annotations

import msgspec
from weightlink.hooks.errors import ErrorInfo
from weightlink.report import UpdateReport


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Form the trainer's groups, build Megatron's model and load the checkpoint.

    :param store: a file that the ranks meet at
    """

    rank: int
    world: int
    checkpoint: str
    store: str
    timeout: float


class Join(msgspec.Struct, frozen=True, tag=True):
    """Connect weightlink, and form SGLang's weight update group of trainer rank 0 and all engine ranks.

    :param layouts: of all trainer ranks, packed
    :param folder: for the checkpoints of the path over the disk
    :param bucket_bytes: of the references' buckets; a tensor is never cut
    """

    engine: str
    token: str
    engine_ranks: int
    layouts: list[bytes]
    folder: str
    bucket_bytes: int
    timeout: float


class Change(msgspec.Struct, frozen=True, tag=True):
    """Change every weight, as a training step does; replicas stay equal."""

    number: int


class Update(msgspec.Struct, frozen=True, tag=True):
    """Bring the resident weights to the engine.

    :param path: ``weightlink``, ``distributed``, ``tensor`` or ``disk``
    :param gather: how the last three gather shards: by the ``all-gather`` collective, or by ``sends`` to rank 0 only
    """

    path: str
    version: int
    timeout: float
    gather: str = "all-gather"


class Done(msgspec.Struct, frozen=True, tag=True):
    """Carried out. ``seconds`` from the weights' being there to the engine's having continued, in parts in ``phases``.

    :param layout: this rank's packed layout, after :class:`Setup`
    :param nbytes: that one copy of the model takes
    """

    seconds: float = 0.0
    phases: dict[str, float] = {}
    report: UpdateReport | None = None
    layout: bytes = b""
    nbytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command failed; the rank ends."""

    error: ErrorInfo


Command = Setup | Join | Change | Update
Event = Done | Failed

commands = msgspec.json.Decoder(Command)
events = msgspec.json.Decoder(Event)


def line(message: Command | Event) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"
