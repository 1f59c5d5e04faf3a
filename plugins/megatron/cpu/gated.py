"""Gated delta nets, output gates and zero-centred norms on CPUs.

Megatron builds these layers with Transformer Engine and flash-linear-attention only. Here its own modules get plain
linear layers, a norm that torch does not have, and Megatron's own slow form of the delta rule.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

LINEAR = "linear_attention"


def gated_options(hf: dict[str, Any]) -> dict[str, Any]:
    """Megatron's options for models with gated delta nets; empty for others."""
    if "linear_num_value_heads" not in hf:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == LINEAR) for kind in hf["layer_types"]],
        "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        "linear_key_head_dim": hf["linear_key_head_dim"],
        "linear_value_head_dim": hf["linear_value_head_dim"],
        "linear_num_key_heads": hf["linear_num_key_heads"],
        "linear_num_value_heads": hf["linear_num_value_heads"],
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


class ZeroCentredNorm(torch.nn.Module):  # type: ignore[misc]
    """RMS norm whose scale is one more than its weight; takes what Megatron's specs give a norm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x / rms(x) * (1 + weight)`` over the last dimension, in fp32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def adapt_specs(config: Any, block: Any, vp_stage: int | None) -> Any:
    """Puts delta nets and zero-centred norms, where ``config`` asks for them, into a block spec of the local kind."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if config.experimental_attention_variant == "gated_delta_net":
        offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
        # Equal layers share one spec.
        block.layer_specs = [deepcopy(layer) for layer in block.layer_specs]
        for number, layer in enumerate(block.layer_specs):
            if config.linear_attention_freq[offset + number]:
                layer.submodules.self_attention = _delta_net()
                # The local spec would file the norm under a linear layer that is not there.
                layer.submodules.sharded_state_dict_keys_map = {}
    if config.layernorm_zero_centered_gamma:
        _replace(block, WrappedTorchNorm, ZeroCentredNorm)
    return block


def _delta_net() -> Any:
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    module: Any = gated_delta_net
    if not module.HAVE_FLA:
        module.HAVE_FLA = True
        module.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        module.chunk_gated_delta_rule = module.torch_chunk_gated_delta_rule
    return ModuleSpec(
        module=module.GatedDeltaNet,
        submodules=module.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )


def _replace(spec: Any, before: type, after: type) -> None:
    """Exchanges one module class for another in a nested spec."""
    for item in spec.layer_specs if hasattr(spec, "layer_specs") else ():
        _replace(item, before, after)
    inner = getattr(spec, "submodules", None) or spec
    for name, value in vars(inner).items():
        if value is before:
            setattr(inner, name, after)
        elif hasattr(value, "submodules"):
            if value.module is before:
                value.module = after
            _replace(value, before, after)
