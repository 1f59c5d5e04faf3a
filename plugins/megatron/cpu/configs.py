"""Hugging Face configurations as Megatron's ``TransformerConfig``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


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
