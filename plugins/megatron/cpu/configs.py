"""Hugging Face configurations as Megatron's ``TransformerConfig``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from weightlink.hooks.errors import ConfigError
from weightlink.plugins.megatron.cpu.gated import gated_options
from weightlink.plugins.megatron.cpu.mla import has_mla, mla_options
from weightlink.plugins.megatron.cpu.moe import moe_options
from weightlink.plugins.megatron.cpu.oss import oss_options


def text_of(hf: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model's text part, which is the whole one of a text model."""
    return {**hf, **hf.get("text_config", {}), "architectures": hf["architectures"]}


def transformer_config(hf: dict[str, Any], *, dtype: torch.dtype, **parallel: Any) -> Any:
    """A ``TransformerConfig`` for a Hugging Face configuration.

    :param parallel: Megatron's own names, e.g. ``tensor_model_parallel_size``
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    hf = text_of(hf)
    architecture = hf["architectures"][0]
    options: dict[str, Any] = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        ffn_hidden_size=hf.get("intermediate_size") or hf["moe_intermediate_size"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        qk_layernorm=architecture.startswith("Qwen3") or bool(hf.get("use_qk_norm")) or has_mla(hf),
        add_qkv_bias=architecture.startswith("Qwen2") or bool(hf.get("attention_bias") or hf.get("use_qkv_bias")),
        rotary_interleaved=architecture in ("GlmForCausalLM", "Glm4ForCausalLM"),
        add_bias_linear=bool(hf.get("mlp_bias")),
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
        mtp_num_layers=hf.get("num_nextn_predict_layers") or None,
    )
    kind = TransformerConfig
    if has_mla(hf):
        kind = MLATransformerConfig
        options |= mla_options(hf)
    return kind(**{**options, **moe_options(hf), **gated_options(hf), **oss_options(hf), **parallel})


def rotary_options(hf: dict[str, Any]) -> dict[str, Any]:
    """The ``GPTModel`` arguments for rotary embeddings. Raises :class:`ConfigError` for scaled ones."""
    hf = text_of(hf)
    if has_mla(hf):
        return {"position_embedding_type": "rope"}  # MLA brings its own, from the configuration
    rope = hf.get("rope_parameters") or hf
    if rope.get("rope_type", "default") != "default" or hf.get("rope_scaling"):
        raise ConfigError("a model with scaled rotary embeddings cannot be built here", found=rope)
    share = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    return {
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", 10000),
        "rotary_percent": share,
    }
