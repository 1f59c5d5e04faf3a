"""Starts a Megatron model from a Hugging Face checkpoint, by the rules that later send its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from weightlink.converters.checkpoint import LoadReport, context_from_checkpoint, load_checkpoint, tensor_files
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, NameMapError, WeightlinkError
from weightlink.plugins.megatron.adapter import MegatronAdapter

if TYPE_CHECKING:
    from weightlink.hooks.protocols import Family


def load_hf(
    model: object,
    path: str | Path,
    *,
    family: str | None = None,
    families: Mapping[str, Family] | None = None,
    exclude: Sequence[str] = (),
    ignore: Sequence[str] = (),
    timeout: float = 600.0,
) -> LoadReport:
    """Loads the checkpoint in ``path`` into Megatron chunks. Collective over all ranks of the default group.

    Load before the optimizer is made, or call its ``reload_model_params()`` afterwards: it keeps copies.

    :param exclude: Megatron keys (or ``prefix*``) that the checkpoint does not have
    :param ignore: names (or ``prefix*``) of the checkpoint that no rank needs
    :param timeout: seconds until all ranks have loaded
    :raises NameMapError: when a name is missing here, or used by no rank at all
    :raises LayoutError: for a wrong shape or dtype
    :raises ConfigError: on the other ranks when one of them failed so
    :raises DeadlineExceeded: when a rank does not come
    """
    path, deadline, what = Path(path), Deadline.after(timeout), "the other ranks' checkpoint load"
    adapter = MegatronAdapter(model, families)
    context = context_from_checkpoint(path)
    report, error = None, None
    try:
        report = load_checkpoint(adapter.layout(context, family, exclude), adapter.tensors(), path)
        adapter.store()
    except WeightlinkError as raised:
        error = raised
    # Some writers store the shared matrix twice.
    tolerated = (*ignore, "lm_head.weight") if context.hf_config.get("tie_word_embeddings") else tuple(ignore)
    names = sorted(tensor_files(path))
    loaded = set(report.loaded) if report else set()
    # One flag per name, and one that says that this rank failed: every rank learns both in the same reduction.
    flags = torch.tensor([error is not None, *(name in loaded for name in names)], dtype=torch.uint8)
    flags = flags.to(adapter.device)
    if dist.is_initialized():
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)
        try:
            work.wait(deadline.timedelta(what))
        except RuntimeError as lost:
            raise deadline.exceeded(what, rank=adapter.rank) from lost
    if error is not None:
        raise error
    failed, *used = flags.tolist()
    if failed or report is None:
        raise ConfigError("another rank could not load the checkpoint", rank=adapter.rank, found=str(path))
    unused = [
        name
        for name, flag in zip(names, used, strict=True)
        if not flag and not any(fnmatchcase(name, pattern) for pattern in tolerated)
    ]
    if unused:
        raise NameMapError(
            f"no rank uses {len(unused)} tensor(s) of the checkpoint",
            tensor=", ".join(unused[:8]) + (", ..." if len(unused) > 8 else ""),
            rank=adapter.rank,
            found=str(path),
            remedy="build the model that the checkpoint describes, or name what to leave out with ignore=",
        )
    return report
