"""Megatron-Core on CPUs: for tests and the demo only, never for a real trainer.

Megatron places its tensors with ``torch.cuda`` calls. :func:`install_cpu_patches` redirects them for this process,
before Megatron is imported. The rest builds and trains small models of the families that weightlink knows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from weightlink.hooks.errors import ConfigError

_FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "zeros_like", "empty_like", "arange")
_installed = False


class _Stub:
    """Stands for a CUDA stream or event."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def install_cpu_patches() -> None:
    """Redirects this process's CUDA calls to the CPU. Call it before anything imports Megatron; safe to repeat."""
    global _installed
    if _installed:
        return
    _installed = True
    # Its CUDA library raises OSError where Megatron expects ImportError.
    sys.modules["flash_mla"] = None  # type: ignore[assignment]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = cuda.current_stream = lambda *args, **kwargs: _Stub()
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    original_type = tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer accepts torch.cuda.*Tensor only, by name.
        out = original_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) and not args else out

    tensor.type = type_name
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    megatron_random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    # Without Transformer Engine the name is missing.
    moe_utils.te_general_gemm = None


def experts_of(hf: dict[str, Any]) -> int | None:
    """Routed experts per layer, None for a dense model. Newer writers use the second name."""
    return hf.get("num_experts") or hf.get("num_local_experts")


def transformer_config(hf: dict[str, Any], *, dtype: torch.dtype, **parallel: Any) -> Any:
    """A ``TransformerConfig`` for a Hugging Face configuration (Llama, Qwen2, Qwen3, Qwen3-MoE).

    :param parallel: Megatron's own names, e.g. ``tensor_model_parallel_size``
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    architecture = hf["architectures"][0]
    experts = experts_of(hf)
    options: dict[str, Any] = {}
    if experts:
        period, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
        options = {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            # Softmax over all experts and then the largest, unless the chosen ones are normalised again.
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_layer_freq": [
                int(layer not in dense and (layer + 1) % period == 0) for layer in range(hf["num_hidden_layers"])
            ],
        }
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_hidden_size=hf["intermediate_size"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        qk_layernorm=architecture.startswith("Qwen3"),
        add_qkv_bias=architecture.startswith("Qwen2"),
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **options,
        **parallel,
    )


def build_model(
    hf: dict[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    dtype: torch.dtype = torch.float32,
    vocab_multiple: int = 8,
    max_sequence_length: int = 512,
) -> list[Any]:
    """This rank's model chunks. ``torch.distributed`` must be initialised; Megatron's groups are made here.

    :param vpp: chunks per pipeline stage, None for one
    :param vocab_multiple: the vocabulary is padded to a multiple of this times ``tp``
    """
    install_cpu_patches()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    rope = hf.get("rope_parameters") or hf
    if rope.get("rope_type", "default") != "default" or hf.get("rope_scaling"):
        raise ConfigError("a model with scaled rotary embeddings cannot be built here", found=rope)
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp,
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
    )
    padded = -(-hf["vocab_size"] // (vocab_multiple * tp)) * vocab_multiple * tp
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    for chunk in range(vpp or 1):
        vp_stage = None if vpp is None else chunk
        if experts_of(hf):
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        model = GPTModel(
            config,
            spec,
            vocab_size=padded,
            max_sequence_length=max_sequence_length,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == pp - 1 and chunk == (vpp or 1) - 1,
            position_embedding_type="rope",
            rotary_base=rope.get("rope_theta", 10000),
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
            vp_stage=vp_stage,
        )
        chunks.append(model.to(dtype))
    return chunks


def causal_inputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions ``[batch, length]`` and the mask ``[1, 1, length, length]`` (True hides) for token ids."""
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return torch.arange(length).expand_as(ids), mask


def wrap_for_training(
    chunks: list[Any], *, lr: float, overlap: bool = False, bucket_size: int | None = None
) -> tuple[list[Any], Any]:
    """``(DDP chunks, optimizer)``: Megatron's DDP and distributed Adam.

    :param overlap: overlap gradient reduction and the parameter all-gather with computation
    :param bucket_size: elements per DDP bucket, None for Megatron's choice
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=bucket_size,
    )
    ddp = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    dtype = config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        ),
        ddp,
    )
    return ddp, optimizer


def train_step(ddp: list[Any], optimizer: Any, microbatches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """One optimizer step through Megatron's own (pipeline) schedule, on every rank with the same data.

    :param microbatches: ``(token ids, labels)``, each ``[batch, length]``, all of one shape; negative labels do not
        count, and each microbatch has one that does
    :return: the mean loss on the last stage, 0.0 on the others
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    listed = list(microbatches)

    def forward(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        ids, labels = next(data)
        positions, mask = causal_inputs(ids)
        return model(ids, positions, mask, labels=labels.clamp(min=0)), partial(masked_mean, labels)

    def masked_mean(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses[labels >= 0].float().mean()
        return loss, {"loss": loss.detach()}

    for chunk in ddp:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(listed) for _ in ddp] if len(ddp) > 1 else iter(listed),
        model=ddp if len(ddp) > 1 else ddp[0],
        num_microbatches=len(listed),
        seq_length=listed[0][0].shape[1],
        micro_batch_size=listed[0][0].shape[0],
        forward_only=False,
    )
    optimizer.step()
    losses = [float(result["loss"]) for result in results]
    return sum(losses) / len(losses) if losses else 0.0
