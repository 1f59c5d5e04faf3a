"""Toys of gpt-oss, Qwen3-Next, Qwen3.5, Qwen3-VL, Mistral and Llama with biases.

Only the vision towers have square matrices, where their kind must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Toy = tuple[Any, dict[str, Any]]

COMMON: dict[str, Any] = {
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


def _llama_bias() -> Toy:
    """Biases on every linear layer, as Megatron's ``add_bias_linear`` has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(head_dim=48, attention_bias=True, mlp_bias=True, **COMMON)), {}


def _mistral() -> Toy:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(head_dim=48, sliding_window=None, **COMMON)), {}


def _gpt_oss() -> Toy:
    """A window shorter than the prompts of the tests, so that it matters; plain rotary embeddings."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        head_dim=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **{**COMMON, "intermediate_size": 96},
    )
    return GptOssForCausalLM(config), {}


_DELTA_NET: dict[str, Any] = {
    "head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

#: SGLang reads the interval, transformers the list.
_INTERVAL = {"full_attention_interval": 2}
#: Qwen3.5's vision tower has no deepstack; SGLang's default is that of Qwen3-VL.
_NESTED = {"text_config": _INTERVAL, "vision_config": {"deepstack_visual_indexes": []}}

_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 72,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def _qwen3_next() -> Toy:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(**_DELTA_NET, **_ROUTED, **COMMON)), _INTERVAL


_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2], "mrope_interleaved": True}


def _qwen3_5() -> Toy:
    """Dense, with its vision tower."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**_DELTA_NET, **COMMON, "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.25}}
    config = Qwen3_5Config(text_config=text, vision_config=_vision(), **_tokens())
    return Qwen3_5ForConditionalGeneration(config), _NESTED


def _qwen3_5_moe() -> Toy:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {**_DELTA_NET, **_ROUTED, **COMMON, "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.25}}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=_vision(), **_tokens())
    return Qwen3_5MoeForConditionalGeneration(config), _NESTED


def _qwen3_5_text() -> Toy:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {**_SECTIONS, "partial_rotary_factor": 0.25}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_DELTA_NET, **COMMON, rope_parameters=rope)), _INTERVAL


def _qwen3_vl() -> Toy:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {"head_dim": 48, **COMMON, "rope_parameters": {**_SECTIONS, "mrope_section": [8, 8, 8]}}
    config = Qwen3VLConfig(text_config=text, vision_config={**_vision(), "deepstack_visual_indexes": [1]}, **_tokens())
    return Qwen3VLForConditionalGeneration(config), {}


def _qwen3_vl_moe() -> Toy:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    experts = {key: value for key, value in _ROUTED.items() if "shared" not in key}
    text = {"head_dim": 48, **experts, **COMMON, "rope_parameters": {**_SECTIONS, "mrope_section": [8, 8, 8]}}
    config = Qwen3VLMoeConfig(
        text_config=text, vision_config={**_vision(), "deepstack_visual_indexes": [1]}, **_tokens()
    )
    # Published checkpoints hold the experts as [expert, in, out]; transformers writes its own order.
    return Qwen3VLMoeForConditionalGeneration(config), {"transposed": (".gate_up_proj", ".experts.down_proj")}


def _vision() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": COMMON["hidden_size"],
        "num_position_embeddings": 36,
    }


def _tokens() -> dict[str, Any]:
    """Special tokens inside the toy's vocabulary."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: 240 + n for n, name in enumerate(names)} | {"tie_word_embeddings": False}


TOYS: dict[str, Callable[[], Toy]] = {
    "llama_bias": _llama_bias,
    "mistral": _mistral,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
}

#: gpt-oss names the attention backends that it accepts; the others keep states that only some platforms can snapshot.
SERVER: dict[str, dict[str, Any]] = {
    "gpt_oss": {"attention_backend": "triton"},
    **{toy: {"disable_radix_cache": True} for toy in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text")},
}
