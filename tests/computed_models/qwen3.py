"""Qwen3 whose query norms are computed from the checkpoint's, in the way of SGLang's own models with ``A_log``."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_loader.weight_utils import composed_weight_loader, default_weight_loader
from sglang.srt.models import qwen3


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for layer in self.model.layers:
            layer.self_attn.q_norm.weight.weight_loader = composed_weight_loader(
                default_weight_loader, lambda p: 1.5 * p.data
            )


EntryClass = Qwen3ForCausalLM
