"""What the demo tells its trainer ranks and what they answer: one JSON line each, over their input and output."""

from __future__ import annotations

import msgspec
from weightlink.hooks.errors import ErrorInfo
from weightlink.report import UpdateReport


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect to the engine. The token comes this way, not by command line, where every user of the host sees it."""

    engine: str
    token: str
    timeout: float


class Push(msgspec.Struct, frozen=True, tag=True):
    """Push the resident weights."""

    version: int
    timeout: float


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train on ``prompt + answer`` until the loss on the answer is below ``loss``, or for ``steps``."""

    prompt: str
    answer: str
    loss: float
    steps: int
    timeout: float


class Step(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step was made."""

    number: int
    loss: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command is finished; the first one says that the rank has loaded the checkpoint."""

    report: UpdateReport | None = None
    steps: int = 0
    loss: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command failed; the rank ends."""

    error: ErrorInfo


Command = Connect | Push | Train
Event = Step | Done | Failed

commands = msgspec.json.Decoder(Command)
events = msgspec.json.Decoder(Event)


def line(message: Command | Event) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"
