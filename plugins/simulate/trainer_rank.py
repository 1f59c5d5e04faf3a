"""The layout of one Megatron rank: Megatron's own model for that rank, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from weightlink.hooks.geometry import Layout
from weightlink.hooks.messages import PROTOCOL, EngineContext
from weightlink.plugins.simulate.notation import Trainer


def prepare() -> None:
    """What all ranks share: imports."""
    from weightlink.plugins.megatron.cpu import install_cpu_patches

    install_cpu_patches()
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    import weightlink.plugins.megatron.adapter
    import weightlink.plugins.megatron.cpu.model  # noqa: F401


def layout(config: dict[str, Any], trainer: Trainer, rank: int) -> Layout:
    """What the rank would report at connect. Needs fake groups (:mod:`weightlink.plugins.simulate.fake`)."""
    from weightlink.plugins.megatron.adapter import MegatronAdapter
    from weightlink.plugins.megatron.cpu import build_model

    dist.init_process_group("fake", rank=rank, world_size=trainer.world)
    uneven = {
        name: value
        for name, value in (
            ("num_layers_in_first_pipeline_stage", trainer.first),
            ("num_layers_in_last_pipeline_stage", trainer.last),
        )
        if value is not None
    }
    with torch.device("meta"):
        chunks = build_model(
            config,
            tp=trainer.tp,
            pp=trainer.pp,
            vpp=trainer.vpp,
            ep=trainer.ep,
            etp=trainer.etp,
            cp=trainer.cp,
            dtype=torch.bfloat16,
            options={"perform_initialization": False, **uneven},
        )
    return MegatronAdapter(chunks).layout(context(config), None)


def context(config: dict[str, Any]) -> EngineContext:
    """What a trainer hears of its engines before it builds layouts."""
    return EngineContext(
        protocol=PROTOCOL,
        engine="sglang",
        engine_version="",
        weightlink_version="",
        hf_config=config,
        architecture=config["architectures"][0],
        dtype="bfloat16",
        quantization="",
        tp_size=1,
        pp_size=1,
        dp_size=1,
        world=1,
        device="meta",
        versions={},
        transports=(),
        load_format="dummy",
        owns_weights=False,
        refusal="",
    )
