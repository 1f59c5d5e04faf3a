"""Built-in transports. Importing this package is cheap: torch is imported when a channel is opened."""

from __future__ import annotations

from collections.abc import Sequence

from weightlink.hooks import hookimpl
from weightlink.hooks.protocols import Transport
from weightlink.plugins.transports.p2p import P2P


@hookimpl
def weightlink_transports() -> Sequence[Transport]:
    return [P2P()]
