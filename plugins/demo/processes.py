"""Child processes of the demo: each leads a session of its own and is ended by process id, with its children."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

#: Seconds to end politely; SGLang looks for the signal every five seconds.
GRACE = 10.0
SHARED_MEMORY = "/dev/shm/"


def start(
    command: Sequence[str], *, env: Mapping[str, str], log: Path, folder: Path, piped: bool = False
) -> subprocess.Popen[bytes]:
    """Starts ``command`` in ``folder`` with its output in ``log``.

    A new session: a Ctrl-C at the terminal reaches this process only, which then ends its children in order.

    :param piped: input and output are pipes to this process; only the error output goes to ``log``
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else out,
            stderr=out,
            env=dict(env),
            cwd=folder,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children: politely, then for good; then removes the shared memory that they leave
    behind, which SGLang does not. Safe to repeat."""
    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    shared = {path for member in family for path in _shared_memory(member.pid)}
    if process.poll() is None:
        process.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=1.0)
    process.wait(GRACE)
    for path in shared:
        path.unlink(missing_ok=True)


def _shared_memory(pid: int) -> Iterator[Path]:
    """Named shared memory that a process has mapped."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, found, name = line.partition(SHARED_MEMORY)
            if found and not name.endswith("(deleted)"):
                yield Path(SHARED_MEMORY + name)


def tail(log: Path, lines: int = 25) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Input and output of a piped process."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process was not started with pipes")
    return process.stdin, process.stdout


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a termination signal raises ``KeyboardInterrupt`` as Ctrl-C does, so that ``finally`` blocks run."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, which must be short, a second Ctrl-C does not stop the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
