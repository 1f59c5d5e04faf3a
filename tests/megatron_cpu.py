"""Real Megatron-Core ranks on CPUs for tests: a warm parent imports Megatron once and forks the ranks of every case."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("megatron_worker.py")


class RankFailed(Exception):
    """A case raised on some rank; the message holds every rank's traceback."""


class Megatron:
    """A process that forks Megatron ranks. Use it as a context manager, one for many cases."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe(self._process.stdout), selectors.EVENT_READ)
        self._reply(300.0)

    @staticmethod
    def _pipe(pipe: Any) -> Any:
        if pipe is None:
            raise RuntimeError("the worker has no pipe")
        return pipe

    def _reply(self, timeout: float) -> Any:
        if not self._selector.select(timeout):
            self.close()
            raise TimeoutError(f"the Megatron worker did not answer within {timeout:g} s")
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the Megatron worker ended with status {self._process.wait(10)}")
        return json.loads(line)

    def run(self, case: str, world: int, *, timeout: float = 400.0, **params: Any) -> list[Any]:
        """What ``case`` returned on each of ``world`` ranks (plain JSON data).

        :param case: a function of megatron_worker.py, or ``module:function`` of another test module
        :param params: its keyword arguments, plain JSON data
        """
        with tempfile.TemporaryDirectory() as folder:
            request = {"case": case, "world": world, "params": params, "folder": folder, "timeout": timeout}
            self._pipe(self._process.stdin).write(json.dumps(request) + "\n")
            answers = self._reply(timeout + 20.0)
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failures:
            raise RankFailed("\n".join(failures))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """End the worker."""
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._selector.close()

    def __enter__(self) -> Megatron:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
