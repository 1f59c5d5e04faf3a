"""The layout of one SGLang rank: SGLang's own model for that rank on the meta device, and a replay of its loader."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from weightlink.converters import replay
from weightlink.converters.snapshot import Snapshot
from weightlink.hooks.geometry import Layout, TensorSpec
from weightlink.plugins.simulate.notation import Engine
from weightlink.plugins.simulate.repeat import Repeated, kinds_of_layers, reduced, repeat, same_regions

#: SGLang starts on CPUs with the platform that comes with weightlink's tests.
ENVIRONMENT = {
    "SGLANG_PLATFORM": "torch_cpu",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare(folder: Path) -> None:
    """What all ranks share: imports, above all those of SGLang's table of models."""
    sys.modules["flash_mla"] = None  # type: ignore[assignment]  # its CUDA library raises what SGLang does not catch
    import sglang.benchmark.one_batch as one_batch
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.models.registry import ModelRegistry

    bootstrap._bind_threads_if_cpu = lambda **_: None
    ModelRegistry.get_supported_archs()
    del one_batch, get_model_architecture


def model_of(folder: Path, engine: Engine, rank: int) -> torch.nn.Module:
    """SGLang's model for a rank, without data. Needs fake groups; once per process."""
    import sglang.benchmark.one_batch as one_batch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import publish, spawn_world_rank

    os.environ.update(ENVIRONMENT)
    options: dict[str, Any] = {
        "model_path": str(folder),
        "device": "cpu",
        "attention_backend": "torch_native",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "mem_fraction_static": 0.5,
        "max_total_tokens": 512,
        "tp_size": engine.tp,
        "pp_size": engine.pp,
        "ep_size": engine.ep,
    }
    if engine.dp_attention > 1:
        options |= {"enable_dp_attention": True, "dp_size": engine.dp_attention}
    if engine.moe_dense_tp is not None:
        options["moe_dense_tp_size"] = engine.moe_dense_tp
    server = one_batch.ServerArgs(**options)
    world_rank = spawn_world_rank(server, tp_rank=rank % engine.tp, pp_rank=rank // engine.tp)
    publish(server, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world_rank, gpu_id=0))
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(server)
    one_batch.bootstrap.init_parallel_runtime(server_args=server, device="cpu", dist_port=1)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        return _initialize_model(config, LoadConfig())


def layout(folder: Path, engine: Engine, rank: int, manifest: Sequence[TensorSpec], *, check: bool) -> Layout:
    """What the rank would report at connect, over the whole manifest.

    The loader is replayed over one layer of every kind, and what it does there is repeated for the layers that the
    model and the manifest show to be of the same structure. Where that cannot be said of a layout, it is replayed over
    every layer.

    :param check: replay the last layer of every kind too, and compare
    """
    model = model_of(folder, engine, rank)
    name = f"rank {rank}"
    held = Snapshot([("", model)]).held
    kinds = kinds_of_layers(manifest, [(h.name, tuple(h.data.shape), str(h.data.dtype), h.kind) for h in held], model)
    found = repeat(observe(model, reduced(manifest, kinds, 0), name), manifest, kinds, 0)
    if isinstance(found, Repeated) and check and any(len(layers) > 1 for layers in kinds):
        other = repeat(observe(model, reduced(manifest, kinds, -1), name), manifest, kinds, -1)
        if not isinstance(other, Repeated) or not same_regions(found.layout, other.layout):
            found = "the first and the last layer of a kind differ"
    return found.layout if isinstance(found, Repeated) else observe(model, manifest, name)


def observe(model: torch.nn.Module, tensors: Sequence[TensorSpec], name: str) -> Layout:
    """The replay, as an engine makes it at connect."""
    from sglang.srt.model_loader.loader import post_load_weights
    from weightlink.plugins.sglang.adapter import casts_shown

    with casts_shown():
        return replay.observe(
            rank=name,
            tensors=tensors,
            load=[model.load_weights],
            modules=[("", model)],
            finish=lambda: [post_load_weights(model)],
        )
