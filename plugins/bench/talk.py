"""What a benchmark tells its member processes and what they answer: one JSON line each, over input and output."""

from __future__ import annotations

import msgspec
from weightlink.hooks.errors import ErrorInfo
from weightlink.hooks.settings import WireSettings


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Form the groups, allocate the weights.

    :param rank: group rank; the first ``trainers`` ranks send
    :param layout: this rank's packed :class:`~weightlink.hooks.geometry.Layout`
    :param program: this rank's packed :class:`~weightlink.program.Program`
    :param bare: allocate what the bare reference needs, too
    """

    rank: int
    world: int
    trainers: int
    host: str
    port: int
    key: str
    layout: bytes
    program: bytes
    wire: WireSettings
    timeout: float
    bare: bool = True


class Wire(msgspec.Struct, frozen=True, tag=True):
    """Send or receive one full update with weightlink, checked.

    :param memory: watch this process's memory, too
    """

    update: str
    memory: bool = False


class Raw(msgspec.Struct, frozen=True, tag=True):
    """Move as many bytes between the same pairs with bare Gloo.

    :param chunk: bytes of one message
    :param copies: ``none``; ``apart``: all bytes are copied once before they are sent and once after they came;
        ``overlapped``: the same, chunk by chunk, while others are on their way
    """

    chunk: int
    copies: str = "none"


class Done(msgspec.Struct, frozen=True, tag=True):
    """Carried out. ``seconds`` from one barrier of all members to the next, ``apply`` of it in packing or unpacking,
    ``cpu`` of it on a core, in all threads of the process, ``extra`` the most bytes that the process held meanwhile
    beyond what it held when it was set up; ``prepared`` seconds before the first barrier, while engines still serve."""

    seconds: float = 0.0
    bytes: int = 0
    apply: float = 0.0
    cpu: float = 0.0
    extra: int = 0
    prepared: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command failed; the member ends."""

    error: ErrorInfo


Command = Setup | Wire | Raw
Event = Done | Failed

commands = msgspec.json.Decoder(Command)
events = msgspec.json.Decoder(Event)


def line(message: Command | Event) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"
