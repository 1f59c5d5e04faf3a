"""Real SGLang ranks without servers: a parent that has imported SGLang once forks one process per rank and cell.

A cell is a checkpoint, parallel sizes, and a function given as ``"module:name"``. It is called on every rank as
``function(runner, **arguments)`` with the rank's real ``ModelRunner``, whose weights SGLang loaded itself; what it
returns must be JSON. Use::

    from warm import shared

    results = shared().run("test_x:my_cell", checkpoint, tp=2, arguments={"scale": 3})

``results`` has one entry per world rank (``pp_rank * tp_size + tp_rank``); when a rank fails, :meth:`Warm.run` raises
:class:`CellFailed` with every failed rank's traceback.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_SECONDS = 240.0
MODELS = [
    *("qwen3", "llama", "qwen2_moe", "qwen3_moe", "deepseek_v2", "mixtral", "glm4", "glm4_moe", "bailing_moe"),
    *("gpt_oss", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_text", "mistral"),
]
"""SGLang's model files that the parent imports once for all ranks."""


class CellFailed(AssertionError):
    """One or more ranks of a cell failed; the message holds their tracebacks."""


class Warm:
    """The parent process. One at a time: cells use both cores."""

    def __init__(self) -> None:
        env = {
            **os.environ,
            "SGLANG_PLATFORM": "torch_cpu",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = tempfile.NamedTemporaryFile("w+b", prefix="warm-", suffix=".log")  # noqa: SIM115 - closed with us
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self._ready = False

    def run(
        self,
        function: str,
        checkpoint: Path | str,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        rounded: bool = True,
        seconds: float = 120.0,
        arguments: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Every rank's result. ``server`` holds further ``ServerArgs``. Raises :class:`CellFailed`.

        :param rounded: False keeps SGLang from rounding the model's sizes up to suit the ranks, which it does on CPUs
            only (and wrongly for fewer key-value heads than ranks): the layout is that of a GPU
        """
        if not self._ready:
            self._answer(START_SECONDS)
            self._ready = True
        request = {
            "function": function,
            "checkpoint": str(checkpoint),
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "rounded": rounded,
            "seconds": seconds,
            "arguments": arguments or {},
            "server": server or {},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        ranks = self._answer(seconds + 30)
        failed = {rank: outcome["error"] for rank, outcome in enumerate(ranks) if "error" in outcome}
        if failed:
            raise CellFailed("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in failed.items()))
        return [outcome["value"] for outcome in ranks]

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self.close()
            raise CellFailed(f"no answer within {seconds:g} s\n{self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise CellFailed(f"the warm parent died\n{self._tail()}")
        return json.loads(line)

    def _tail(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-6000:]

    def close(self) -> None:
        """Ends the parent and every rank that is left."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)


@cache
def shared() -> Warm:
    """The process-wide parent, started on first use (about 20 s)."""
    warm = Warm()
    atexit.register(warm.close)
    return warm


# --- in the parent --------------------------------------------------------------------------------------------------


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever SGLang prints must not mix with the answers.
    os.dup2(2, 1)
    sys.modules["flash_mla"] = None  # type: ignore[assignment]
    importlib.import_module("sglang.benchmark.one_batch")
    for name in MODELS:
        importlib.import_module(f"sglang.srt.models.{name}")
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_cell(json.loads(line))).encode() + b"\n")
        answers.flush()


def _cell(request: dict[str, Any]) -> list[dict[str, Any]]:
    world = request["tp"] * request["pp"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    limit = time.monotonic() + request["seconds"]
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        children = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _rank(request, rank, port, Path(folder))
            children[pid] = rank
        waiting = dict(children)
        while waiting and time.monotonic() < limit:
            for pid in list(waiting):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del waiting[pid]
            time.sleep(0.01)
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        late = set(waiting.values())
        outcomes = []
        for rank in range(world):
            file = Path(folder) / str(rank)
            if file.exists():
                outcomes.append(json.loads(file.read_text()))
            else:
                outcomes.append({"error": "still running at the deadline" if rank in late else "died"})
        return outcomes


def _rank(request: dict[str, Any], rank: int, port: int, folder: Path) -> None:
    """One rank, from fork to exit. Never returns."""
    try:
        module, name = request["function"].split(":")
        value = getattr(importlib.import_module(module), name)(_runner(request, rank, port), **request["arguments"])
        outcome = {"value": value}
        text = json.dumps(outcome)
    except BaseException:  # noqa: BLE001 - the traceback is the answer, and a forked rank must not return
        text = json.dumps({"error": traceback.format_exc()[-8000:]})
    (folder / f"{rank}.part").write_text(text)
    (folder / f"{rank}.part").rename(folder / str(rank))
    sys.stderr.flush()
    os._exit(0)


def _runner(request: dict[str, Any], rank: int, port: int) -> Any:
    import sglang.benchmark.one_batch as one_batch
    import sglang.srt.model_executor.model_runner as model_runner
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import publish, spawn_world_rank

    torch.set_num_threads(1)
    # Some models place tensors on "the current device" of a CUDA build of torch, which a forked rank cannot ask for.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tp, pp = request["tp"], request["pp"]
    cores = os.cpu_count() or 1
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(r % cores) for r in range(tp * pp))
    options = {
        "model_path": request["checkpoint"],
        "device": "cpu",
        "attention_backend": "torch_native",
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 512,
        "trust_remote_code": True,  # some toys bring a configuration class, as their families do
        "tp_size": tp,
        "pp_size": pp,
        "ep_size": request["ep"],
        **request["server"],
    }
    server = one_batch.ServerArgs(**options)
    if not request["rounded"]:
        model_runner.adjust_config_with_unaligned_cpu_tp = lambda model_config, *_: model_config
    world_rank = spawn_world_rank(server, tp_rank=rank % tp, pp_rank=rank // tp)
    publish(server, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world_rank, gpu_id=0))
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(server)
    one_batch.bootstrap.init_parallel_runtime(server_args=server, device="cpu", dist_port=port)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    return one_batch.ModelRunner(
        model_config=config, mem_fraction_static=0.5, gpu_id=0, nccl_port=port, server_args=server
    )


if __name__ == "__main__":
    _serve()
