"""A benchmark's member processes, all on this machine: started together, told what to do, ended by process id."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, Protocol, TypeVar

from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ErrorInfo, WeightlinkError, rebuild
from weightlink.plugins.demo.processes import pipes, start, stop, tail

D = TypeVar("D", covariant=True)


class Decoder(Protocol[D]):
    """Bytes of one line to an answer, or to an error."""

    def __call__(self, line: bytes, /) -> D | ErrorInfo: ...


class Members(Generic[D]):
    """Processes of ``python -m module``, which read commands from their input and answer each on their output.

    :param threads: of torch in each process; None shares the cores out
    """

    def __init__(
        self,
        module: str,
        count: int,
        decode: Decoder[D],
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weightlink-bench-"))
        self._logs = [self._folder / f"member-{rank}.log" for rank in range(count)]
        self._events: queue.SimpleQueue[tuple[int, D | ErrorInfo | None]] = queue.SimpleQueue()
        self._decode = decode
        self._processes: list[subprocess.Popen[bytes]] = []
        share = max(1, len(os.sched_getaffinity(0)) // count)
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(threads or share),
            **(env or {}),
        }
        for rank, log in enumerate(self._logs):
            command = [sys.executable, "-W", "ignore", "-m", module]
            process = start(command, env=environment, log=log, folder=self._folder, piped=True)
            self._processes.append(process)
            threading.Thread(target=self._read, args=(rank, pipes(process)[1]), daemon=True).start()

    def __enter__(self) -> Members[D]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is None:
                pipes(process)[0].close()  # the end of its input ends it
        for process in self._processes:
            if kind is None:
                try:
                    process.wait(10.0)
                except subprocess.TimeoutExpired:
                    kind = subprocess.TimeoutExpired
            stop(process)
        if kind is None:
            for log in self._logs:
                log.unlink()
            self._folder.rmdir()

    def _read(self, rank: int, output: IO[bytes]) -> None:
        for line in output:
            self._events.put((rank, self._decode(line)))
        self._events.put((rank, None))

    def ask(self, commands: Sequence[bytes], deadline: Deadline) -> list[D]:
        """Have each member carry out its command; their answers. Raises the first failure of any member."""
        for rank, (process, command) in enumerate(zip(self._processes, commands, strict=True)):
            try:
                pipes(process)[0].write(command)
                pipes(process)[0].flush()
            except OSError as error:
                raise self._lost(rank) from error
        answers: dict[int, D] = {}
        while len(answers) < len(self._processes):
            try:
                rank, event = self._events.get(timeout=deadline.check("the benchmark's processes"))
            except queue.Empty:
                continue  # the check above raises
            if event is None:
                raise self._lost(rank)
            if isinstance(event, ErrorInfo):
                raise rebuild(event)
            answers[rank] = event
        return [answers[rank] for rank in range(len(self._processes))]

    def _lost(self, rank: int) -> WeightlinkError:
        code = self._processes[rank].poll()
        return WeightlinkError(
            f"a process of the benchmark ended{f' with code {code}' if code is not None else ''}",
            rank=f"member {rank}",
            found=tail(self._logs[rank]),
            remedy=f"see {self._logs[rank]}",
        )
