"""Real SGLang servers on CPUs for tests: started on a free loopback port, stopped by process id with their children."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from weightlink.plugins.demo import processes
from weightlink.plugins.demo.engine import free_port

READY = "The server is fired up and ready to roll"

#: A small server: plain torch operators, little memory, no tokenizer.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "2048", "--random-seed", "7"),
    "--sleep-on-idle",  # idle schedulers spin otherwise, on the cores that the tests need
)


class ServerFailed(AssertionError):
    """The server ended, or was not up in time; carries the end of its log."""


class Server:
    """One running server. ``log`` is its output; ``http`` a client with the token, if there is one."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, world: int, token: str | None) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.world = world
        self._dump = log.parent / f"{log.stem}.checksums"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def wait_up(self, seconds: float) -> None:
        """Until SGLang has warmed up; raises :class:`ServerFailed`."""
        end = time.monotonic() + seconds
        while READY not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > end:
                raise ServerFailed(f"the server was not up after {seconds:g} s:\n{self.tail()}")
            time.sleep(0.1)

    def wait_ended(self, seconds: float) -> int:
        """The exit code of a server that is expected to die; raises :class:`ServerFailed` if it lives on."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server still ran after {seconds:g} s:\n{self.tail()}") from None

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(line[:300] for line in processes.tail(self.log, lines).splitlines())

    def generate(self, prompt: Sequence[int], tokens: int = 8) -> list[int]:
        """Greedy continuation of token ids."""
        response = self.post(
            "/generate", {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
        )
        return list(response["output_ids"])

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A stock route's JSON answer; fails unless it is 200."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, f"{path}: HTTP {response.status_code}: {response.text[:500]}"
        return response.json()

    def poison(self) -> None:
        """Overwrite every parameter and buffer of every rank with noise."""
        self.post("/weights_checker", {"action": "reset_tensors"})

    def checksums(self, seconds: float = 60) -> list[dict[str, str]]:
        """SGLang's own checksum of every tensor, by world rank."""
        return [rank["checksums"] for rank in self._dumped(seconds)]

    def pointers(self, seconds: float = 60) -> list[dict[str, int]]:
        """The address of every parameter and buffer, by world rank."""
        return [rank["pointers"] for rank in self._dumped(seconds)]

    def _dumped(self, seconds: float) -> list[dict[str, Any]]:
        """What SGLang's checksum route makes every rank leave behind.

        Its route answers for pipeline stage 0 only, so the test platform leaves every rank's in a file.
        """
        files = [self._dump / f"{rank}.json" for rank in range(self.world)]
        for file in files:
            file.unlink(missing_ok=True)
        self.post("/weights_checker", {"action": "checksum"})
        end = time.monotonic() + seconds
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, f"no checksums in {self._dump} after {seconds:g} s"
            time.sleep(0.02)
        return [json.loads(file.read_text()) for file in files]

    def stop(self) -> None:
        """End the server and its children, by process id, and remove their shared memory. Safe to repeat."""
        self.http.close()
        processes.stop(self.process)


def launch(
    checkpoint: Path | str,
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    weightlink: bool = True,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    token: str | None = None,
    tokenizer: bool = False,
) -> Server:
    """Start a server and return at once.

    :param checkpoint: Hugging Face checkpoint folder
    :param folder: where the log goes
    :param dp: replicas of the model behind the one server
    :param flags: more command line flags; ``--load-format dummy`` starts without the checkpoint's weights
    :param token: weightlink token, given to the server as a file
    :param tokenizer: the checkpoint has a tokenizer
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = folder / f"server-{port}.log"
    dump = folder / f"{log.stem}.checksums"
    dump.mkdir()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--tp-size",
        str(tp),
        "--pp-size",
        str(pp),
        "--dp-size",
        str(dp),
        *CPU_FLAGS,
        *flags,
    ]
    command += [] if tokenizer else ["--skip-tokenizer-init"]
    command += ["--weightlink"] if weightlink else []
    if token is not None:
        (folder / f"{log.stem}.token").write_text(token)
        command += ["--weightlink-token-file", str(folder / f"{log.stem}.token")]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WEIGHTLINK_")},
        "SGLANG_PLATFORM": "torch_cpu",
        "WEIGHTLINK_TEST_CHECKSUMS": str(dump),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(env or {}),
    }
    if tp * pp * dp > 1:  # SGLang wants one core list per rank, and refuses more ranks than NUMA nodes otherwise
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(tp * pp * dp))
    process = processes.start(command, env=environment, log=log, folder=folder)
    return Server(process, port, log, tp * pp * dp, token)


@contextlib.contextmanager
def serve(checkpoint: Path | str, folder: Path, *, seconds: float = 180, **options: Any) -> Iterator[Server]:
    """A server that is up, stopped at the end. Options as for :func:`launch`."""
    server = launch(checkpoint, folder, **options)
    try:
        server.wait_up(seconds)
        yield server
    finally:
        server.stop()
