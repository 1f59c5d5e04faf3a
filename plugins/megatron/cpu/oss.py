"""What gpt-oss has of its own: attention sinks, windows in every other layer, and clamped experts with biases."""

from __future__ import annotations

from typing import Any

import torch


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Megatron's own is compiled on first use, which takes longer than a test."""
    return x * torch.sigmoid(1.702 * x)


def oss_options(hf: dict[str, Any]) -> dict[str, Any]:
    """Megatron's options for gpt-oss; empty for others."""
    if hf["architectures"][0] != "GptOssForCausalLM":
        return {}
    return {
        "softmax_type": "learnable",
        # A window of n tokens is the token itself and n - 1 before it.
        "window_size": (hf["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in hf["layer_types"]],
        "add_bias_linear": True,
        "activation_func": _quick_gelu,
        "activation_func_clamp_value": hf["swiglu_limit"],
        "glu_linear_offset": 1.0,
        # Softmax over the chosen experts only.
        "moe_router_pre_softmax": False,
    }
