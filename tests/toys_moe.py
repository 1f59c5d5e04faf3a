"""Toys of the mixture-of-experts families and of dense GLM-4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _qwen2_moe() -> tuple[Any, dict[str, Any]]:
    """Experts 72 wide: at TP2 SGLang's shard of 36 is not aligned, so that its loader pads.

    No dense layers (``mlp_only_layers``): SGLang builds experts in every layer.
    """
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        moe_intermediate_size=72,
        shared_expert_intermediate_size=112,
        num_experts=4,
        num_experts_per_tok=2,
        **_COMMON,
    )
    return Qwen2MoeForCausalLM(config), {}


def _mixtral() -> tuple[Any, dict[str, Any]]:
    """SGLang takes hidden / heads for the width of a head, so that q_proj is square."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **{**_COMMON, "hidden_size": 192})
    return MixtralForCausalLM(config), {}


def _glm4_moe(**changes: Any) -> tuple[Any, dict[str, Any]]:
    """One dense layer, one with experts; groups of experts; half of each head is rotated."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    options = {
        "head_dim": 48,
        "moe_intermediate_size": 96,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
        **_COMMON,
        **changes,
    }
    return Glm4MoeForCausalLM(Glm4MoeConfig(**options)), {}


def _glm4_moe_mtp() -> tuple[Any, dict[str, Any]]:
    """A next-token layer after the last one, with experts of its own and without copies of embeddings and head."""
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm

    model, _ = _glm4_moe(num_hidden_layers=3)
    layer, hidden = model.model.layers[2], _COMMON["hidden_size"]
    layer.enorm, layer.hnorm = Glm4MoeRMSNorm(hidden), Glm4MoeRMSNorm(hidden)
    layer.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
    layer.shared_head = torch.nn.Module()
    layer.shared_head.norm = Glm4MoeRMSNorm(hidden)
    return model, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}


def _glm4() -> tuple[Any, dict[str, Any]]:
    """Gate and up projection in one matrix; norms after attention and MLP.

    192 wide: SGLang on CPUs cannot load such a matrix when it would have to pad the shards to whole blocks of 32.
    """
    from transformers import Glm4Config, Glm4ForCausalLM

    changes = {"intermediate_size": 192, "head_dim": 48, "attention_bias": True, "pad_token_id": 0}
    return Glm4ForCausalLM(Glm4Config(**{**_COMMON, **changes})), {}


def _glm() -> tuple[Any, dict[str, Any]]:
    """The models before 0414: no further norms."""
    from transformers import GlmConfig, GlmForCausalLM

    return GlmForCausalLM(GlmConfig(head_dim=48, attention_bias=True, pad_token_id=0, **_COMMON)), {}


TOYS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "qwen2_moe": _qwen2_moe,
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
    "glm4_moe_air": lambda: _glm4_moe(use_qk_norm=False, attention_bias=False, moe_intermediate_size=72),
    "glm4_moe_mtp": _glm4_moe_mtp,
    "glm4": _glm4,
    "glm": _glm,
}


# --- families that only their authors' own code describes: written by hand, after SGLang's model file -----------------

_CONFIGURATION = """
from transformers import PretrainedConfig


class ToyConfig(PretrainedConfig):
    model_type = "bailing_moe"
"""


def _bailing_config(architecture: str) -> dict[str, Any]:
    second = architecture == "BailingMoeV2ForCausalLM"
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "bailing_moe",
        "auto_map": {"AutoConfig": "configuration_toy.ToyConfig"},
        **_COMMON,
        "head_dim": 48,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "use_bias": False,
        "use_qkv_bias": not second,
        "use_qk_norm": second,
        "norm_head": False,
        "norm_topk_prob": True,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 600000},
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 1 if second else 0,
    }
    if second:
        config |= {
            "partial_rotary_factor": 0.5,
            "n_group": 2,
            "topk_group": 1,
            # SGLang on CPUs leaves this factor out of this model.
            "routed_scaling_factor": 1.0,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "router_dtype": "fp32",
        }
    return config


def _bailing_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }

    def mlp(base: str, width: int) -> dict[str, tuple[int, ...]]:
        shape = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {f"{base}.{name}_proj.weight": size for name, size in shape.items()}

    def attention(base: str, layer: int) -> dict[str, tuple[int, ...]]:
        period = config.get("layer_group_size", 1)
        if "kv_lora_rank" in config and (layer + 1) % period == 0:
            return _latent_attention(base, config)
        keys = heads if period > 1 else groups
        found: dict[str, tuple[int, ...]] = {
            f"{base}query_key_value.weight": ((heads + 2 * keys) * head, hidden),
            f"{base}dense.weight": (hidden, heads * head),
        }
        if period > 1:
            found |= {f"{base}g_proj.weight": (heads * head, hidden), f"{base}g_norm.weight": (heads * head,)}
        if config["use_qkv_bias"]:
            found[f"{base}query_key_value.bias"] = ((heads + 2 * keys) * head,)
        if config["use_qk_norm"]:
            found |= {f"{base}{name}_layernorm.weight": (head,) for name in ("query", "key")}
        return found

    for layer in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        base = f"model.layers.{layer}."
        if layer >= config["num_hidden_layers"]:
            shapes[f"{base}eh_proj.weight"] = (hidden, 2 * hidden)
            shapes |= {f"{base}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "final_layernorm")}
        shapes |= {f"{base}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= attention(f"{base}attention.", layer)
        if layer < config["first_k_dense_replace"]:
            shapes |= mlp(f"{base}mlp", config["intermediate_size"])
            continue
        shapes[f"{base}mlp.gate.weight"] = (config["num_experts"], hidden)
        if config.get("moe_router_enable_expert_bias"):
            shapes[f"{base}mlp.gate.expert_bias"] = (config["num_experts"],)
        for expert in range(config["num_experts"]):
            shapes |= mlp(f"{base}mlp.experts.{expert}", config["moe_intermediate_size"])
        shapes |= mlp(f"{base}mlp.shared_experts", config["num_shared_experts"] * config["moe_intermediate_size"])
    return shapes


def _latent_attention(base: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    low, keys = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        f"{base}q_a_proj.weight": (low, hidden),
        f"{base}q_a_layernorm.weight": (low,),
        f"{base}q_b_proj.weight": (heads * (plain + turned), low),
        f"{base}kv_a_proj_with_mqa.weight": (keys + turned, hidden),
        f"{base}kv_a_layernorm.weight": (keys,),
        f"{base}kv_b_proj.weight": (heads * (plain + value), keys),
        f"{base}dense.weight": (hidden, heads * value),
    }


def _linear_config(period: int) -> dict[str, Any]:
    """Version 2.5: linear attention, and latent attention in every ``period``-th layer."""
    return {
        **_bailing_config("BailingMoeV2ForCausalLM"),
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "layer_group_size": period,
        "group_norm_size": 2,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "num_nextn_predict_layers": 0,
        # The one kind that SGLang's latent attention has on CPUs.
        "rope_parameters": {
            "rope_type": "deepseek_yarn",
            "rope_theta": 600000,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
        },
    }


def _write_bailing(config: dict[str, Any], path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in _bailing_shapes(config).items():
        value = torch.randn(shape, generator=generator) * (0.02 if len(shape) == 2 else 0.1)
        value = value + 1 if "norm" in name else value
        tensors[name] = value if name.endswith("expert_bias") else value.to(torch.bfloat16)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "configuration_toy.py").write_text(_CONFIGURATION)
    (path / "config.json").write_text(json.dumps(config, indent=1))


WRITTEN: dict[str, Callable[[Path], None]] = {
    "bailing_moe": lambda path: _write_bailing(_bailing_config("BailingMoeForCausalLM"), path),
    "bailing_moe_norm_head": lambda path: _write_bailing(
        {**_bailing_config("BailingMoeForCausalLM"), "norm_head": True}, path
    ),
    "bailing_moe_v2": lambda path: _write_bailing(_bailing_config("BailingMoeV2ForCausalLM"), path),
    "bailing_moe_mtp": lambda path: _write_bailing(
        {**_bailing_config("BailingMoeV2ForCausalLM"), "num_nextn_predict_layers": 1}, path
    ),
    "bailing_moe_linear": lambda path: _write_bailing(_linear_config(2), path),
    "bailing_moe_latent": lambda path: _write_bailing(_linear_config(1), path),
}

#: Linear attention keeps states that only some platforms can snapshot.
SERVER: dict[str, dict[str, Any]] = {
    toy: {"disable_radix_cache": True} for toy in ("bailing_moe_linear", "bailing_moe_latent")
}
