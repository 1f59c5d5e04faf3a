"""Megatron's legacy grouped experts on CPUs: a loop in place of the grouped matrix product of its CUDA library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def grouped_options() -> dict[str, Any]:
    """Megatron's options for legacy grouped experts; makes them buildable in this process."""
    from megatron.core.transformer.moe import experts, grouped_gemm_util

    util: Any = grouped_gemm_util
    util.assert_grouped_gemm_is_available = lambda: None
    util.grouped_gemm_is_available = lambda: True
    util.ops = SimpleNamespace(gmm=_products)
    forward = experts.GroupedMLP.forward

    def run(self: Any, *args: Any) -> Any:
        # It refuses other dtypes than its library's.
        before, self.config.bf16 = self.config.bf16, True
        try:
            return forward(self, *args)
        finally:
            self.config.bf16 = before

    if forward.__name__ != "run":
        experts.GroupedMLP.forward = run
    return {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}


def _products(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """``rows`` in groups of ``counts``, each times its matrix of ``weights``."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ (w.t() if trans_b else w) for part, w in zip(parts, weights, strict=True)])
