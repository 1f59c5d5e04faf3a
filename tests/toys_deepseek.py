"""Toys with multi-head latent attention: DeepSeek-V2, V2-Lite, V3 with and without a next-token layer, Kimi-K2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Toy = tuple[Any, dict[str, Any]]

_COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "moe_intermediate_size": 72,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
}
_YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
#: What the configurations of the original writers say besides.
_ORIGINAL = {"moe_layer_freq": 1, "rope_scaling": _YARN}
_V3 = {**_ORIGINAL, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _v2() -> Toy:
    """Experts chosen by groups."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        n_routed_experts=8,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        rope_parameters=_YARN,
        **_COMMON,
    )
    return DeepseekV2ForCausalLM(config), {**_ORIGINAL, "scoring_func": "softmax"}


def _v2_lite() -> Toy:
    """Queries without a low-rank projection."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        n_routed_experts=4,
        n_shared_experts=2,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        rope_parameters=_YARN,
        **{**_COMMON, "q_lora_rank": None},
    )
    return DeepseekV2ForCausalLM(config), {**_ORIGINAL, "scoring_func": "softmax"}


def _v3(layers: int = 2, **changes: Any) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    options = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "rope_parameters": _YARN}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**_COMMON, **options, **changes, "num_hidden_layers": layers}))


def _v3_mtp(layers: int = 2) -> Toy:
    """A next-token layer after the last one, with its copies of the embeddings and the output layer."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    model = _v3(layers=layers + 1)
    layer, hidden = model.model.layers[layers], _COMMON["hidden_size"]
    layer.enorm, layer.hnorm = DeepseekV3RMSNorm(hidden), DeepseekV3RMSNorm(hidden)
    layer.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
    layer.embed_tokens = torch.nn.Embedding.from_pretrained(model.model.embed_tokens.weight.detach().clone())
    layer.shared_head = torch.nn.Module()
    layer.shared_head.norm = DeepseekV3RMSNorm(hidden)
    layer.shared_head.head = torch.nn.Linear(hidden, _COMMON["vocab_size"], bias=False)
    with torch.no_grad():
        layer.shared_head.head.weight.copy_(model.lm_head.weight)
    return model, {**_V3, "num_hidden_layers": layers, "num_nextn_predict_layers": 1}


def _kimi_k2() -> Toy:
    """DeepSeek-V3 with a configuration class of its own, as Kimi-K2's folder has it, and six experts."""
    code = "from transformers import DeepseekV3Config as Base\n\n\nclass DeepseekV3Config(Base):\n    "
    return _v3(n_routed_experts=6), {
        **_V3,
        "model_type": "kimi_k2",
        "num_nextn_predict_layers": 0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "files": {"configuration_deepseek.py": code + 'model_type = "kimi_k2"\n'},
    }


def _write_fused(path: Path) -> None:
    """As transformers 5 has the weights in memory: the experts of a layer in two tensors."""
    model = _v3()
    weights = {}
    for name, tensor in model.state_dict().items():
        noisy = tensor + 0.1 * torch.randn_like(tensor) if tensor.dim() == 1 else tensor
        weights[name] = noisy.contiguous() if name.endswith("correction_bias") else noisy.bfloat16().contiguous()
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_diff_dict(), **_V3, "num_nextn_predict_layers": 0}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config, indent=1, default=str))


#: Written without ``save_pretrained``.
WRITTEN = {"deepseek_v3_fused": _write_fused}

TOYS: dict[str, Callable[[], Toy]] = {
    "deepseek_v3": lambda: (_v3(), {**_V3, "num_nextn_predict_layers": 0}),
    "deepseek_v2": _v2,
    "deepseek_v2_lite": _v2_lite,
    "deepseek_v3_mtp": _v3_mtp,
    "deepseek_v3_deep": lambda: _v3_mtp(layers=4),
    "kimi_k2": _kimi_k2,
}
