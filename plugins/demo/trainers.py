"""Starts the trainer's ranks, tells them what to do and hears them all out."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import WeightlinkError, rebuild
from weightlink.plugins.demo import talk
from weightlink.plugins.demo.processes import pipes, start, stop, tail

_END_SECONDS = 30.0


class Trainers:
    """A group of ranks. Starting returns at once; the first :meth:`wait` returns when all have loaded."""

    def __init__(self, checkpoint: Path, folder: Path, world: int, deadline: Deadline) -> None:
        self._logs = [folder / f"trainer-{rank}.log" for rank in range(world)]
        self._events: queue.SimpleQueue[tuple[int, talk.Event | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        threads = max(1, len(os.sched_getaffinity(0)) // world)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        for rank, log in enumerate(self._logs):
            command = [sys.executable, "-W", "ignore", "-m", "weightlink.plugins.demo.trainer"]
            command += ["--checkpoint", str(checkpoint), "--store", str(folder / "trainers.store")]
            command += ["--rank", str(rank), "--world", str(world), "--timeout", f"{deadline.remaining():.0f}"]
            process = start(command, env=env, log=log, folder=folder, piped=True)
            self._processes.append(process)
            threading.Thread(target=self._read, args=(rank, pipes(process)[1]), daemon=True).start()

    def _read(self, rank: int, output: IO[bytes]) -> None:
        for line in output:
            self._events.put((rank, talk.events.decode(line)))
        self._events.put((rank, None))

    def ask(
        self, command: talk.Command, deadline: Deadline, on_step: Callable[[talk.Step], None] | None = None
    ) -> talk.Done:
        """Have every rank carry ``command`` out; rank 0's answer. Raises the first failure of any rank."""
        for rank, process in enumerate(self._processes):
            try:
                pipes(process)[0].write(talk.line(command))
                pipes(process)[0].flush()
            except OSError as error:
                raise self._lost(rank) from error
        return self.wait(deadline, on_step)

    def wait(self, deadline: Deadline, on_step: Callable[[talk.Step], None] | None = None) -> talk.Done:
        """Until every rank is done."""
        done: dict[int, talk.Done] = {}
        while len(done) < len(self._processes):
            try:
                rank, event = self._events.get(timeout=deadline.check("the trainer"))
            except queue.Empty:
                continue  # the check above raises
            if event is None:
                raise self._lost(rank)
            if isinstance(event, talk.Failed):
                raise rebuild(msgspec.structs.replace(event.error, remedy=event.error.remedy or self._see(rank)))
            if isinstance(event, talk.Done):
                done[rank] = event
            elif rank == 0 and on_step is not None:
                on_step(event)
        return done[0]

    def _see(self, rank: int) -> str:
        return f"see {self._logs[rank]}"

    def _lost(self, rank: int) -> WeightlinkError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(5.0)
        return WeightlinkError(
            f"trainer rank {rank} ended with code {self._processes[rank].poll()}",
            rank=f"trainer {rank}",
            found=tail(self._logs[rank]),
            remedy=self._see(rank),
        )

    def leave(self, deadline: Deadline) -> None:
        """Let the ranks close their link and end; raises if one fails to."""
        for process in self._processes:
            pipes(process)[0].close()
        for rank, process in enumerate(self._processes):
            try:
                code = process.wait(min(_END_SECONDS, deadline.check("the trainer to end")))
            except subprocess.TimeoutExpired as error:
                raise deadline.exceeded("the trainer to end") from error
            if code:
                raise self._lost(rank)

    def stop(self) -> None:
        """End what still runs. Safe to repeat."""
        for process in self._processes:
            stop(process)
