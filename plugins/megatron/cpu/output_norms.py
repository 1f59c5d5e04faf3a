"""Norms after attention and MLP (GLM-4), for which Megatron-Core has no place. Trainers add them to the layer."""

from __future__ import annotations

from typing import Any


def add_output_norms(spec: Any) -> None:
    """Changes the spec of a decoder layer: a norm follows its attention, and another its MLP, before each sum."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    base: Any = spec.module

    class LayerWithOutputNorms(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.post_self_attn_layernorm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.post_mlp_layernorm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attention.register_forward_hook(lambda *call: _normed(self.post_self_attn_layernorm, call[-1]))
            self.mlp.register_forward_hook(lambda *call: _normed(self.post_mlp_layernorm, call[-1]))

    spec.module = LayerWithOutputNorms


def _normed(norm: Any, result: tuple[Any, Any]) -> tuple[Any, Any]:
    output, bias = result
    return norm(output), bias
