"""A training step through Megatron's own DDP, optimizer and pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch


def causal_inputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions ``[batch, length]`` and the mask ``[1, 1, length, length]`` (True hides) for token ids."""
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return torch.arange(length).expand_as(ids), mask


def wrap_for_training(
    chunks: list[Any], *, lr: float, overlap: bool = False, bucket_size: int | None = None
) -> tuple[list[Any], Any]:
    """``(DDP chunks, optimizer)``: Megatron's DDP and distributed Adam.

    :param overlap: overlap gradient reduction and the parameter all-gather with computation
    :param bucket_size: elements per DDP bucket, None for Megatron's choice
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=bucket_size,
    )
    ddp = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    dtype = config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        ),
        ddp,
    )
    return ddp, optimizer


def train_step(ddp: list[Any], optimizer: Any, microbatches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """One optimizer step through Megatron's own (pipeline) schedule, on every rank with the same data.

    :param microbatches: ``(token ids, labels)``, each ``[batch, length]``, all of one shape; negative labels do not
        count, and each microbatch has one that does
    :return: the mean loss on the last stage, 0.0 on the others
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    listed = list(microbatches)

    def forward(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        ids, labels = next(data)
        positions, mask = causal_inputs(ids)
        return model(ids, positions, mask, labels=labels.clamp(min=0)), partial(masked_mean, labels)

    def masked_mean(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses[labels >= 0].float().mean()
        return loss, {"loss": loss.detach()}

    for chunk in ddp:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(listed) for _ in ddp] if len(ddp) > 1 else iter(listed),
        model=ddp if len(ddp) > 1 else ddp[0],
        num_microbatches=len(listed),
        seq_length=listed[0][0].shape[1],
        micro_batch_size=listed[0][0].shape[0],
        forward_only=False,
    )
    optimizer.step()
    losses = [float(result["loss"]) for result in results]
    return sum(losses) / len(losses) if losses else 0.0
