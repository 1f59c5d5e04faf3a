"""What Megatron ranks do in the checkpoint tests; run by megatron_worker.py: each function is one case on every rank.

The engine is real but for its model: a front, its control route over HTTP, a rank with its owner thread and Gloo group.
It lives in rank 0's process and holds the checkpoint's tensors whole."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
import weightlink
from megatron_worker import build
from plain import PlainTrainer
from rig import Engine
from safetensors.torch import load_file
from weightlink.converters.checkpoint import context_from_checkpoint
from weightlink.hooks import messages as m
from weightlink.hooks.errors import WeightlinkError
from weightlink.hooks.manager import PluginManager
from weightlink.plugins.megatron import cpu as megatron_cpu
from weightlink.plugins.megatron import load_hf

SECONDS = 200.0  #: must not pass, however busy the machine is
DTYPE = "bfloat16"


class Served:
    """An engine behind a loopback URL."""

    def __init__(self, path: str) -> None:
        described = context_from_checkpoint(Path(path))
        self.weights = load_file(Path(path) / "model.safetensors")
        layout = PlainTrainer(self.weights).layout(described, None)
        self.names = [param.name for param in layout.params]
        self.engine = Engine("http://engine", [layout], DTYPE, PluginManager())
        self.engine.port._context = msgspec.structs.replace(
            self.engine.port._context, hf_config=described.hf_config, architecture=described.architecture
        )
        front, loop = self.engine.front, self.engine.loop

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = m.decode_request(self.rfile.read(int(self.headers["content-length"])))
                answer = asyncio.run_coroutine_threadsafe(front.handle(request), loop).result(SECONDS)
                body = m.encode(answer)
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    @property
    def version(self) -> int | None:
        return self.engine.front.version

    def resident(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.engine.adapters[0].params, strict=True))

    def holds(self, factor: float) -> bool:
        """The engine has exactly the Hugging Face checkpoint, times ``factor``."""
        return all(torch.equal(tensor, self.weights[name] * factor) for name, tensor in self.resident().items())

    def stop(self) -> None:
        """No longer answer, as a dead engine."""
        self.http.shutdown()
        self.http.server_close()


@contextlib.contextmanager
def serving(path: str) -> Iterator[tuple[Served | None, str]]:
    """The engine, on rank 0 only, and its URL."""
    # Megatron's writers are started from a process that imports the main module: spare it Megatron.
    vars(sys.modules["__main__"]).pop("__file__", None)
    served = Served(path) if dist.get_rank() == 0 else None
    shared = [served.url if served else None]
    dist.broadcast_object_list(shared, src=0)
    try:
        yield served, str(shared[0])
    finally:
        if served:
            served.stop()
            served.engine.close()


def model(path: str, factor: float = 1.0, **parallel: Any) -> list[Any]:
    chunks = build(path, DTYPE, **parallel)
    load_hf(chunks, path, timeout=SECONDS)
    scale(chunks, factor)
    return chunks


def second(path: str, **parallel: Any) -> list[Any]:
    """A model of the same layout with other weights, in the groups that the first one made."""
    from megatron.core import parallel_state

    with mock.patch.object(parallel_state, "initialize_model_parallel"):
        chunks = build(path, DTYPE, **parallel)
    torch.manual_seed(5)  # replicas are equal
    with torch.no_grad():
        for parameter in parameters(chunks):
            parameter.copy_(torch.rand_like(parameter) - 7)
    return chunks


def scale(chunks: list[Any], factor: float) -> None:
    with torch.no_grad():
        for parameter in parameters(chunks):
            parameter.mul_(factor)


def parameters(chunks: list[Any]) -> list[torch.Tensor]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def state_of(chunks: list[Any]) -> dict[str, Any]:
    """As megatron.training names the chunks."""
    if len(chunks) == 1:
        return {"model": chunks[0].sharded_state_dict()}
    return {f"model{n}": chunk.sharded_state_dict() for n, chunk in enumerate(chunks)}


def folder_of(out: str, name: str) -> str:
    folder = Path(out) / name
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return str(folder)


def loads_as(folder: str, other: list[Any], wanted: list[torch.Tensor]) -> bool:
    """The checkpoint, loaded by Megatron into another model, has exactly the wanted values."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in parameters(other):
            parameter.fill_(-7)
    loaded = dist_checkpointing.load(state_of(other), folder)
    for n, chunk in enumerate(other):
        chunk.load_state_dict(loaded["model" if len(other) == 1 else f"model{n}"])
    return all(torch.equal(a, b) for a, b in zip(parameters(other), wanted, strict=True))


def save(
    state: dict[str, Any],
    folder: str,
    strategy: Any,
    asynchronous: bool,
    meanwhile: Callable[[], None] = lambda: None,
    completed: Callable[[], None] = lambda: None,
) -> None:
    """Save as megatron.training does, with ``meanwhile`` between the scheduling of an asynchronous save and its end."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    request = dist_checkpointing.save(state, folder, strategy, async_sharded_save=asynchronous)
    if not asynchronous:
        completed()
        return
    request.add_finalize_fn(completed)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    meanwhile()
    queue.maybe_finalize_async_calls(blocking=True)


def wrap(strategy: Any) -> Any:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    return FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD, False)


def publish_and_save(path: str, out: str, how: str, asynchronous: bool, **parallel: Any) -> dict[str, Any]:
    """Two saves through one strategy; the weights change while the first is still being written.

    :param how: what stands around what: ``plain``, ``parallel`` inside, ``inside out``, or ``registry``
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from weightlink.plugins.megatron.save import PublishingSaveStrategy, register

    chunks = model(path, 2.0, **parallel)
    other = second(path, **parallel)
    found: dict[str, Any] = {"loads": [], "engine": [], "versions": []}
    with serving(path) as (served, url), weightlink.connect(chunks, [url], timeout=SECONDS) as link:
        inner = wrap(TorchDistSaveShardedStrategy("torch_dist", 1)) if how == "parallel" else None
        ours = PublishingSaveStrategy(chunks, link.push, inner)
        strategy: Any = {"inside out": wrap(ours), "registry": ("weightlink", 1)}.get(how, ours)
        found["registered"] = how == "registry" and register(ours)
        for iteration, factor in ((7, 2.0), (19, 6.0)):
            folder = folder_of(out, f"iter_{iteration:07d}")
            wanted = [p.detach().clone() for p in parameters(chunks)]
            save(state_of(chunks), folder, strategy, asynchronous, meanwhile=lambda: scale(chunks, 3.0))
            ours.check()
            found["loads"].append(loads_as(folder, other, wanted))
            if served:
                found["engine"].append(served.holds(factor))
                found["versions"].append(served.version)
            if not asynchronous:
                scale(chunks, 3.0)
        found["saves"], found["published"] = ours.saves, ours.published
    return found


def publish_to(path: str, out: str, url: str, version: int, **parallel: Any) -> bool:
    """One asynchronous, fully parallel save of the checkpoint's own weights, published to a server."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from weightlink.plugins.megatron.save import PublishingSaveStrategy

    chunks = model(path, **parallel)
    folder = folder_of(out, f"iter_{version:07d}")
    with weightlink.connect(chunks, [url], timeout=SECONDS) as link:
        inner = wrap(TorchDistSaveShardedStrategy("torch_dist", 1))
        save(state_of(chunks), folder, PublishingSaveStrategy(chunks, link.push, inner), True)
    return loads_as(folder, second(path, **parallel), parameters(chunks))


def after_steps(path: str, out: str) -> dict[str, Any]:
    """Save right after optimizer steps with overlap_param_gather, the optimizer's state too: rank 0's view.

    Tensors that both sides hold whole and under one meaning are compared, the checkpoint's with the engine's.
    """
    from megatron.core import dist_checkpointing
    from weightlink.plugins.megatron.save import PublishingSaveStrategy

    chunks = model(path)
    ddp, optimizer = megatron_cpu.wrap_for_training(chunks, lr=1e-2, overlap=True, bucket_size=10000)
    tokens = torch.arange(1, 17)[None] * 7 % 250
    folder = folder_of(out, "iter_0000002")
    with serving(path) as (served, url), weightlink.connect(ddp, [url], timeout=SECONDS) as link:
        for _ in range(2):
            megatron_cpu.train_step(ddp, optimizer, [(tokens, tokens.roll(-1, 1))])
        before = [p.detach().clone() for p in parameters(chunks)]
        state = state_of(chunks)
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"], metadata={"distrib_optim_sharding_type": "fully_reshardable"}
        )
        strategy = PublishingSaveStrategy(ddp, link.push)
        save(state, folder, strategy, False)
        strategy.check()
        stale = not all(torch.equal(a, b) for a, b in zip(before, parameters(chunks), strict=True))
        metadata = dist_checkpointing.load_tensors_metadata(folder)
        plain = dist_checkpointing.load_plain_tensors(folder)
        engine = served.resident() if served else {}
        same = [
            torch.equal(plain[ours][layer] if layer is not None else plain[ours][:250], engine[theirs])
            for ours, layer, theirs in (
                ("embedding.word_embeddings.weight", None, "model.embed_tokens.weight"),
                ("output_layer.weight", None, "lm_head.weight"),
                *(
                    ("decoder.layers.mlp.linear_fc2.weight", n, f"model.layers.{n}.mlp.down_proj.weight")
                    for n in (0, 1)
                ),
            )
            if served
        ]
    return {"stale": stale, "same": same, "optimizer": sum(key.startswith("optimizer.") for key in metadata)}


def failing(path: str, out: str, asynchronous: bool, on_failure: str = "raise") -> list[dict[str, Any]]:
    """Saves that cannot be published, each with its checkpoint's state when the error came; then one that can."""
    from weightlink.plugins.megatron.save import PublishingSaveStrategy

    chunks = model(path)
    other, third = second(path), second(path)
    found = []
    with serving(path) as (served, url), contextlib.ExitStack() as stack:
        link = stack.enter_context(weightlink.connect(chunks, [url], timeout=SECONDS))
        strategy = PublishingSaveStrategy(chunks, link.push, on_failure=on_failure)

        def attempt(name: str, what: list[Any]) -> None:
            folder = folder_of(out, name)
            finished: list[bool] = []
            error = ""
            metadata = Path(folder) / "metadata.json"
            try:
                save(
                    state_of(what), folder, strategy, asynchronous, completed=lambda: finished.append(metadata.exists())
                )
                strategy.check()
            except WeightlinkError as failed:
                error = f"{type(failed).__name__}: {failed}"
            strategy.check()  # raises once only
            loads = loads_as(folder, third, [p.detach().clone() for p in parameters(what)])
            version = served.version if served else None
            found.append({"error": error, "complete": finished, "loads": loads, "version": version})

        attempt("iter_0000005", chunks)
        attempt("step-5", chunks)
        attempt("final", chunks)
        attempt("iter_0000006", other)
        attempt("iter_0000007", chunks)
        if served:
            served.stop()
        attempt("iter_0000008", chunks)
        # The engine is gone: leaving it fails as well.
        with contextlib.suppress(WeightlinkError):
            link.close()
    return found


def launched(path: str, out: str, script: str, arguments: list[str], options: list[str], alive: bool) -> dict[str, Any]:
    """The launcher runs a script, with an engine or with a dead one's URL."""
    from weightlink.plugins.megatron import run

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weightlink").addHandler(handler)
    logging.getLogger("weightlink").setLevel(logging.INFO)
    answer: dict[str, Any] = {"error": "", "log": lines}
    with serving(path) as (served, url):
        if served and not alive:
            served.stop()
        dist.barrier()
        try:
            run.main(["--weightlink-engines", url, *options, script, path, out, *arguments])
        except (WeightlinkError, SystemExit) as failed:
            answer["error"] = f"{type(failed).__name__}: {failed}"
        if served:
            answer |= {
                "version": served.version,
                "holds": served.holds(4.0),
                "left": served.engine.ranks[0]._link is None,
            }
    return answer


def unfit() -> dict[str, Any]:
    """Installing into a Megatron whose function takes other arguments; then twice into the right one."""
    from megatron.core import dist_checkpointing
    from weightlink.plugins.megatron.install import install

    original = dist_checkpointing.save
    found: dict[str, Any] = {"errors": []}

    def attempt(*engines: str, **settings: Any) -> Any:
        try:
            return install(engines, **settings)
        except WeightlinkError as error:
            found["errors"].append(str(error))
            return None

    dist_checkpointing.save = lambda state, folder: None
    attempt("http://a")
    dist_checkpointing.save = original
    first = attempt("http://a", timeout=3.0)
    once = dist_checkpointing.save
    found["same"] = attempt("http://a", timeout=3.0) is first and dist_checkpointing.save is once is not original
    attempt("http://b", timeout=3.0)
    found["everywhere"] = dist_checkpointing.serialization.save is once
    return found
