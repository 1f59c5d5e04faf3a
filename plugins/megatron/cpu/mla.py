"""Multi-head latent attention: DeepSeek's configurations, and what Megatron's local modules lack for it."""

from __future__ import annotations

from functools import wraps
from typing import Any

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")


def has_mla(hf: dict[str, Any]) -> bool:
    """True for a model that keeps keys and values in one low-rank projection."""
    return hf.get("kv_lora_rank") is not None


def mla_options(hf: dict[str, Any]) -> dict[str, Any]:
    """Options of an ``MLATransformerConfig``."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    scaled = rope.get("rope_type") in ("yarn", "deepseek_yarn")
    options: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "yarn" if scaled else "rope",
        "rotary_base": rope.get("rope_theta") or hf.get("rope_theta", 10000),
        "apply_rope_fusion": False,
    }
    if scaled:
        options |= {"rotary_scaling_factor": rope["factor"]}
        options |= {name: rope[name] for name in _YARN if name in rope}
    return options


def install_mla_patches() -> None:
    """Megatron 0.16 tests for a class that only Transformer Engine has, and its own attention does not take keys and
    values of two widths. For this process; once."""
    from megatron.core.transformer import dot_product_attention, multi_latent_attention

    multi_latent_attention.HAVE_TE = False
    attention: Any = dot_product_attention.DotProductAttention
    original = attention.__init__

    @wraps(original)
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = init
