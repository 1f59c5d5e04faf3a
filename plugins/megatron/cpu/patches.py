"""Redirects Megatron's CUDA calls to the CPU, for this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch._dynamo
from weightlink.plugins.megatron.cpu.mla import install_mla_patches

_FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "zeros_like", "empty_like", "arange")
_installed = False


class _Stub:
    """Stands for a CUDA stream or event."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # needs a driver
        return factory(*args, **kwargs)

    return create


def install_cpu_patches() -> None:
    """Redirects this process's CUDA calls to the CPU. Call it before anything imports Megatron; safe to repeat."""
    global _installed
    if _installed:
        return
    _installed = True
    # Its CUDA library raises OSError where Megatron expects ImportError.
    sys.modules["flash_mla"] = None  # type: ignore[assignment]
    # Compiling what Megatron fuses takes longer than a test.
    torch._dynamo.config.disable = True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = cuda.current_stream = lambda *args, **kwargs: _Stub()
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    original_type = tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer accepts torch.cuda.*Tensor only, by name.
        out = original_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) and not args else out

    tensor.type = type_name
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    megatron_random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    # Without Transformer Engine the name is missing.
    moe_utils.te_general_gemm = None
    install_mla_patches()
