"""Lets a server with draft models start on a CPU, where it cannot generate: their attention needs a GPU."""

from __future__ import annotations

from typing import Any

_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_WORKER = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker"
_NEED_A_GPU = (
    f"{_POOL}._init_kv_copy_and_warmup",
    f"{_WORKER}.init_attention_backends",
    f"{_WORKER}.init_cuda_graphs",
)


def register() -> None:
    """Leave out what the workers only need to run their models."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in _NEED_A_GPU:
        HookRegistry.register(target, nothing, HookType.AROUND)


def nothing(_original: Any, *_args: Any, **_kwargs: Any) -> None:
    """Instead of the original."""
