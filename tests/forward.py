"""SGLang's own forward pass in a warm rank's process: the reference for families that transformers does not have."""

from __future__ import annotations

from typing import Any


def logits(runner: Any, prompts: list[list[int]]) -> list[list[float]]:
    """The logits after the last token of every prompt, which are run one by one."""
    import sglang.benchmark.one_batch as one_batch

    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    found = []
    for prompt in prompts:
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(prompt), custom_inputs=[prompt])
        _, last, _ = one_batch.extend(requests, runner)
        found.append(last[0].float().tolist())
    return found
