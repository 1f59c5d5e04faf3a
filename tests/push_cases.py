"""What Megatron ranks do in the update tests; run by megatron_worker.py, so each function is one case on every rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
import weightlink
from megatron.core import parallel_state
from megatron_worker import DTYPES
from weightlink.converters.checkpoint import context_from_checkpoint
from weightlink.hooks.errors import WeightlinkError
from weightlink.plugins.megatron import cpu as megatron_cpu
from weightlink.plugins.megatron import load_hf


def _model(path: str, dtype: str = "bfloat16", config: dict[str, Any] | None = None, **parallel: Any) -> list[Any]:
    torch.manual_seed(100 + dist.get_rank())
    hf_config = {**context_from_checkpoint(Path(path)).hf_config, **(config or {})}
    return megatron_cpu.build_model(hf_config, dtype=DTYPES[dtype], **parallel)


def _scale(chunks: list[Any], factor: float) -> None:
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def push(
    path: str,
    urls: list[str],
    versions: list[int],
    factors: list[float] | None = None,
    settings: dict[str, Any] | None = None,
    **parallel: Any,
) -> list[dict[str, Any]]:
    """Load the checkpoint, connect, push each version (its weights scaled by its factor), close. The reports."""
    chunks = _model(path, **parallel)
    load_hf(chunks, path, timeout=180)
    reports = []
    with weightlink.connect(chunks, urls, **{"timeout": 180.0, **(settings or {})}) as link:
        for version, factor in zip(versions, factors or [1.0] * len(versions), strict=True):
            _scale(chunks, factor)
            report = link.push(version)
            reports.append({"bytes": report.bytes, "sent": list(report.sent), "json": report.json()})
    return reports


def after_step(path: str, url: str, version: int) -> dict[str, Any]:
    """Train under DDP with a distributed optimizer and ``overlap_param_gather``, and push right after a step; then push
    the optimizer's own fp32 masters, rounded, from a model that was never trained.

    ``stale``: this rank's resident weights differed from what was pushed. ``pushed`` and ``masters``: what SGLang's own
    checksum says after each push (rank 0)."""
    chunks = _model(path)
    load_hf(chunks, path, timeout=180)
    ddp, optimizer = megatron_cpu.wrap_for_training(chunks, lr=1e-2, overlap=True, bucket_size=10000)
    torch.manual_seed(dist.get_rank())

    def step() -> None:
        tokens = torch.randint(0, 250, (1, 12))
        megatron_cpu.train_step(ddp, optimizer, [(tokens, tokens.roll(-1, 1))])

    step()
    result: dict[str, Any] = {}
    with weightlink.connect(ddp, [url], timeout=180.0) as link:
        step()  # connecting has brought the weights up to date, so train once more behind its back
        before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        link.push(version)
        result["pushed"] = _checksum(url)
    after = [p.detach() for chunk in chunks for p in chunk.parameters()]
    result["stale"] = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    masters = []
    (inner,) = optimizer.chained_optimizers
    for trained in chunks[0].parameters():
        whole = torch.zeros(trained.numel())
        if getattr(trained, "main_param", None) is not None:  # this rank's shard, if it has one
            span = inner._get_model_param_range_map(trained)["param"]
            whole[span.start : span.end] = trained.main_param.detach().reshape(-1)
        dist.all_reduce(whole)
        masters.append(whole.reshape(trained.shape))
    parallel_state.destroy_model_parallel()
    untrained = _model(path)
    with torch.no_grad():
        for plain, master in zip(untrained[0].parameters(), masters, strict=True):
            plain.copy_(master)
    with weightlink.connect(untrained, [url], timeout=180.0) as link:
        link.push(version + 1)
        result["masters"] = _checksum(url)
    return result


def _checksum(url: str) -> Any:
    """Every rank waits until rank 0 has asked."""
    answer = None
    if dist.get_rank() == 0:
        answer = httpx.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=60, trust_env=False).json()
    dist.barrier()
    return answer


def refused(
    path: str,
    urls: list[str],
    version: int | None = None,
    settings: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    trouble: str = "",
    **parallel: Any,
) -> dict[str, Any]:
    """Connect, and push if a version is given, expecting an error: its kind, text and whether it came in time."""
    chunks = _model(path, config=config, **parallel)
    if trouble:
        _TROUBLES[trouble](chunks)
    options = {"timeout": 150.0, **(settings or {})}
    started = time.monotonic()
    try:
        with weightlink.connect(chunks, urls, **options) as link:
            if version is not None:
                link.push(version)
    except WeightlinkError as error:
        late = time.monotonic() - started > options["timeout"] + 10
        return {"kind": type(error).__name__, "text": str(error), "late": late}
    return {"kind": "", "text": "nothing was raised", "late": False}


def _unknown_parameter(chunks: list[Any]) -> None:
    layer = chunks[0].decoder.layers[0].self_attention
    layer.register_parameter("oddity", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    plain = layer.sharded_state_dict

    def with_oddity(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        state = plain(prefix, sharded_offsets, metadata)
        key = f"{prefix}oddity"
        state[key] = ShardedTensor.from_rank_offsets(key, layer.oddity.data, replica_id=(0, 0, 0))
        return state

    layer.sharded_state_dict = with_oddity


def _missing_tensor(chunks: list[Any]) -> None:
    """A model that forgets one of its own tensors on every rank."""
    layer = chunks[0].decoder.layers[0].mlp
    plain = layer.sharded_state_dict

    def without_fc2(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = plain(prefix, sharded_offsets, metadata)
        return {key: value for key, value in state.items() if "linear_fc2" not in key}

    layer.sharded_state_dict = without_fc2


def _sent_twice(chunks: list[Any]) -> None:
    """Layer 1 claims the name of layer 0's tensor, with memory of its own."""
    first, second = (chunks[0].decoder.layers[n].mlp for n in (0, 1))
    plain = first.sharded_state_dict

    def doubled(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = plain(prefix, sharded_offsets, metadata)
        again = second.sharded_state_dict(prefix, sharded_offsets, metadata)
        state["again"] = next(value for key, value in again.items() if key.endswith("linear_fc2.weight"))
        return state

    first.sharded_state_dict = doubled


def _world_of_another_size(chunks: list[Any]) -> None:
    """Programs for one engine rank less than there are."""
    import msgspec
    from weightlink.client import EngineClient
    from weightlink.hooks import messages as m

    plain = EngineClient.send

    def send(self: Any, request: Any, deadline: Any) -> Any:
        if isinstance(request, m.Attach):
            request = msgspec.structs.replace(request, world=request.world - 1)
        return plain(self, request, deadline)

    EngineClient.send = send  # type: ignore[method-assign]


def _lose_a_copy(chunks: list[Any]) -> None:
    """A survey that leaves out a box of the engine's rank 0 once it is told: only that rank can notice."""
    from dataclasses import replace

    from weightlink.survey import Survey

    plain = Survey.pack

    def pack(self: Any) -> bytes:
        first = self.engines[0][0]
        short = replace(first, tensor=first.tensor[:-1], dtype=first.dtype[:-1], box=first.box[:-1])
        engines = ([short, *self.engines[0][1:]], *self.engines[1:])
        return plain(Survey.of(self.manifest, self.trainers, engines))

    Survey.pack = pack  # type: ignore[method-assign]


_TROUBLES = {
    "unknown": _unknown_parameter,
    "missing": _missing_tensor,
    "twice": _sent_twice,
    "world": _world_of_another_size,
    "lost": _lose_a_copy,
}


def meddle(path: str, urls: list[str], version: int, calls: list[str], **parallel: Any) -> list[list[int]]:
    """Push while rank 0 makes foreign calls in the middle of the transfer: their HTTP statuses."""
    from weightlink.wire import Sender

    chunks = _model(path, **parallel)
    load_hf(chunks, path, timeout=180)
    statuses: list[list[int]] = []
    run = Sender.run

    def run_and_call(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 0:
            with httpx.Client(base_url=urls[0], trust_env=False, timeout=20) as http:
                statuses.append([http.post(call, json={}).status_code for call in calls])
        return run(self, *args)

    Sender.run = run_and_call  # type: ignore[method-assign]
    with weightlink.connect(chunks, urls, timeout=180.0) as link:
        link.push(version)
    return statuses


def broken_push(path: str, urls: list[str], version: int, **parallel: Any) -> dict[str, Any]:
    """The last rank dies half way through the transfer (it raises); then a second push over the same link heals."""
    from weightlink.wire import Sender

    chunks = _model(path, **parallel)
    load_hf(chunks, path, timeout=180)
    run = Sender.run

    def fail(self: Any, *args: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("this trainer rank breaks")
        return run(self, *args)

    with (
        weightlink.connect(chunks, urls, timeout=180.0) as link,
        httpx.Client(base_url=urls[0], trust_env=False) as http,
    ):
        Sender.run = fail  # type: ignore[method-assign]
        result: dict[str, Any] = {}
        try:
            link.push(version)
        except WeightlinkError as error:
            result["error"] = str(error)
        Sender.run = run  # type: ignore[method-assign]
        dist.barrier()
        if dist.get_rank() == 0:
            result["state"] = http.get("/weightlink/v1/status").json()
            result["ready"] = http.get("/ready").status_code
            result["continue"] = http.post("/continue_generation", json={}).status_code
            result["generate"] = http.post("/generate", json={"input_ids": [1, 2]}).status_code
        dist.barrier()
        report = link.push(version + 1)
        result["healed"] = [engine.committed for engine in report.engines]
    return result
