"""Small Megatron models for Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from weightlink.plugins.megatron.cpu.configs import rotary_options, text_of, transformer_config
from weightlink.plugins.megatron.cpu.gated import adapt_specs
from weightlink.plugins.megatron.cpu.grouped import grouped_options
from weightlink.plugins.megatron.cpu.moe import experts_of
from weightlink.plugins.megatron.cpu.output_norms import add_output_norms
from weightlink.plugins.megatron.cpu.patches import install_cpu_patches
from weightlink.plugins.megatron.cpu.vision import add_vision


def build_model(
    hf: dict[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    grouped: bool = False,
    cp: int = 1,
    dtype: torch.dtype = torch.float32,
    vocab_multiple: int = 8,
    max_sequence_length: int = 512,
    options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """This rank's model chunks. ``torch.distributed`` must be initialised; Megatron's groups are made here.

    :param vpp: chunks per pipeline stage, None for one
    :param cp: ranks of the context-parallel groups. They hold the same weights; the model itself is not told, since
        Megatron's attention for CPUs refuses to be built for more than one
    :param grouped: legacy grouped experts
    :param vocab_multiple: the vocabulary is padded to a multiple of this times ``tp``
    :param options: further fields of Megatron's ``TransformerConfig``
    """
    install_cpu_patches()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    config = transformer_config(
        hf,
        dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        **(grouped_options() if grouped else {}),
        **(options or {}),
    )
    hf = text_of(hf)
    padded = -(-hf["vocab_size"] // (vocab_multiple * tp)) * vocab_multiple * tp
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    for chunk in range(vpp or 1):
        vp_stage = None if vpp is None else chunk
        if experts_of(hf) or config.layernorm_zero_centered_gamma:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
            if hf["architectures"][0] == "Glm4ForCausalLM":
                add_output_norms(spec)
        spec = adapt_specs(config, spec, vp_stage)
        last = stage == pp - 1 and chunk == (vpp or 1) - 1
        mtp = get_gpt_mtp_block_spec(config, spec, False, vp_stage=vp_stage) if config.mtp_num_layers else None
        model = GPTModel(
            config,
            spec,
            vocab_size=padded,
            max_sequence_length=max_sequence_length,
            pre_process=stage == 0 and chunk == 0,
            post_process=last,
            **rotary_options(hf),
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
        )
        if "vision_config" in hf:
            model = add_vision(model, hf, tp=tp, here=stage == 0 and chunk == 0)
        chunks.append(model.to(dtype))
    return chunks
