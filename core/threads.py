"""One thread for torch's own operators while bytes are on their way.

On a CPU the network's threads do most of the work of a transfer. Operators that split their work over all cores wait
for the slowest part in a spinning loop, which takes the very core that it waits for: with two threads in each of two
processes on two cores, transfers were measured to take twice as long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()
_inside = 0
_before = 1


@contextlib.contextmanager
def single_threaded(device: torch.device) -> Iterator[None]:
    """Inside, this thread runs CPU operators alone; afterwards, as before. Several threads may be inside. For other
    devices nothing changes."""
    global _inside, _before
    if device.type != "cpu":
        yield
        return
    with _lock:
        if not _inside:
            _before = torch.get_num_threads()
        _inside += 1
        torch.set_num_threads(1)  # of this thread, and what threads that are yet to start will take for theirs
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(_before)
