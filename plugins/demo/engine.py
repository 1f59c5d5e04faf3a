"""The demo's engine: the real SGLang server on CPUs, on a free loopback port, started on random weights."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, EngineUnavailable
from weightlink.plugins.demo.processes import start, stop, tail

PLATFORM = "torch_cpu"

FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "2048", "--random-seed", "7"),
    *("--load-format", "dummy", "--weightlink", "--weightlink-serve-unready"),
)


def require_platform() -> None:
    """Raises :class:`ConfigError` unless SGLang can run on a CPU here."""
    if not importlib.metadata.entry_points(group="sglang.srt.platforms", name=PLATFORM):
        raise ConfigError(
            f"SGLang has no platform {PLATFORM!r} here, so the demo's server cannot run on a CPU",
            remedy="make demo, or, in the source tree, pip install ./tests/cpu_platform",
        )


def free_port() -> int:
    """A loopback port below those that the system gives to outgoing connections: SGLang takes it a minute later."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(min(10000, low // 2), low), 64):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError("no free port", expected=f"one of 64 tried below {low}")


class Engine:
    """One server. Starting returns at once; :meth:`wait_up` waits. ``token`` is what trainers must show.

    :param tp: tensor-parallel ranks
    :param flags: more of SGLang's flags
    """

    def __init__(self, checkpoint: Path, folder: Path, *, tp: int = 1, flags: Sequence[str] = ()) -> None:
        require_platform()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.token = secrets.token_urlsafe(32)
        self.log = folder / "engine.log"
        self._token_file = folder / "token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(self.token)
        self._http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.token}"}, trust_env=False)
        # Another SGLang's settings in the user's shell are not this server's.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTLINK_", "SGLANG_"))}
        env |= {"SGLANG_PLATFORM": PLATFORM, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if tp > 1:  # SGLang wants a list of cores per rank, and refuses more ranks than NUMA nodes otherwise
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[n % len(cores)]) for n in range(tp))
        self._sockets = folder / "tmp"  # SGLang's sockets, which it leaves behind
        self._sockets.mkdir()
        env["TMPDIR"] = str(self._sockets)
        self._process = start(
            [
                *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)),
                *("--host", "127.0.0.1", "--port", str(port), "--tp-size", str(tp), *FLAGS, *flags),
                *("--weightlink-token-file", str(self._token_file)),
            ],
            env=env,
            log=self.log,
            folder=folder,
        )

    def wait_up(self, deadline: Deadline) -> None:
        """Until the server has warmed up; raises :class:`EngineUnavailable` with the end of its log if it ends."""
        while True:
            code = self._process.poll()
            if code is not None or "address already in use" in tail(self.log):  # then it would idle for ever
                raise EngineUnavailable(
                    "the SGLang server did not start" if code is None else f"the SGLang server ended with code {code}",
                    found=tail(self.log),
                    remedy=f"see {self.log}",
                )
            left = deadline.check(f"the SGLang server to start (its log: {self.log})")
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health", timeout=min(left, 30.0)).status_code == 200:
                    return
            time.sleep(0.2)

    def _ask(self, method: str, path: str, deadline: Deadline, body: object = None) -> Any:
        return self._send(method, path, deadline, body).json()

    def _send(self, method: str, path: str, deadline: Deadline, body: object = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=deadline.check(f"the engine's {path}"))
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{path} failed: {error}", rank=self.url, found=tail(self.log, 5)) from error
        if response.status_code != 200:
            raise EngineUnavailable(
                f"{path} answered HTTP {response.status_code}", rank=self.url, found=response.text[:300]
            )
        return response

    def pause_flush_continue(self, deadline: Deadline) -> None:
        """What SGLang itself does around any update, by its own routes."""
        self._send("POST", "/pause_generation", deadline, {"mode": "retract"})
        self._send("POST", "/flush_cache", deadline)
        self._send("POST", "/continue_generation", deadline, {"torch_empty_cache": False})

    def complete(self, prompt: str, tokens: int, deadline: Deadline) -> str:
        """The greedy continuation of ``prompt``, at most ``tokens`` long."""
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
        return str(self._ask("POST", "/generate", deadline, body)["text"])

    def weight_version(self, deadline: Deadline) -> str:
        """What SGLang itself reports as its weights' version."""
        return str(self._ask("GET", "/model_info", deadline)["weight_version"])

    def status(self, deadline: Deadline) -> dict[str, Any]:
        """weightlink's own state of the engine."""
        return dict(self._ask("GET", "/weightlink/v1/status", deadline))

    def checksums(self, deadline: Deadline) -> dict[str, str]:
        """SGLang's checksum of every tensor of a server of one rank."""
        (rank,) = self.rank_checksums(deadline)
        return rank

    def rank_checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        """SGLang's checksum of every tensor, per tensor-parallel rank."""
        ranks = self._ask("POST", "/weights_checker", deadline, {"action": "checksum"})["ranks"]
        return [dict(rank["checksums"]) for rank in ranks]

    def scramble(self, deadline: Deadline) -> None:
        """Lets SGLang fill every tensor with noise."""
        self._send("POST", "/weights_checker", deadline, {"action": "reset_tensors"})

    def load(self, checkpoint: Path, deadline: Deadline) -> None:
        """Lets SGLang load a checkpoint by its own loader, without weightlink."""
        self._ask("POST", "/update_weights_from_disk", deadline, {"model_path": str(checkpoint), "load_format": "auto"})

    def stop(self) -> None:
        """Ends the server and its children. Safe to repeat."""
        self._http.close()
        stop(self._process)
        self._token_file.unlink(missing_ok=True)
        shutil.rmtree(self._sockets, ignore_errors=True)
