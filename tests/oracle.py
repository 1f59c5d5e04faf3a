"""Moves data as a layout says, in the plainest way: the other side of every comparison with a real loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from weightlink.hooks.geometry import Layout, ParamSpec

POISON = 0x5B
"""Byte written over every destination first."""


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrites every byte of the tensors' memory."""
    for tensor in tensors:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)


def live(modules: Sequence[tuple[str, torch.nn.Module]], params: Sequence[ParamSpec]) -> list[torch.Tensor]:
    """The tensors that a layout's parameters name; new, poisoned memory for those that are staged."""
    found = []
    for param in params:
        if param.staged:
            found.append(torch.empty(param.shape, dtype=getattr(torch, param.dtype)))
            poison(found[-1:])
            continue
        for prefix, root in sorted(modules, key=lambda module: len(module[0]), reverse=True):
            if prefix and not param.name.startswith(prefix + "."):
                continue
            value: object = root
            path = param.name.removeprefix(prefix + ".") if prefix else param.name
            for part in path.split("."):
                if isinstance(value, torch.nn.Module):
                    value = getattr(value, part)
                else:
                    value = value[int(part)] if isinstance(value, list | tuple) else value[part]  # type: ignore[index]
            assert isinstance(value, torch.Tensor)
            found.append(value.data)
            break
    return found


def write(layout: Layout, params: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes fills and regions into the live tensors of ``layout.params``; refuses to leave their memory."""
    fills, regions = layout.fills, layout.regions
    for i in range(len(fills)):
        param = params[int(fills.param[i])]
        view = param.as_strided(
            fills.size[i].tolist(), fills.stride[i].tolist(), param.storage_offset() + int(fills.offset[i])
        )
        view.fill_(fills.value[i])
    for i in range(len(regions)):
        spec = layout.tensors[int(regions.tensor[i])]
        param, source = params[int(regions.param[i])], tensors[spec.name]
        assert tuple(source.shape) == spec.shape
        index = tuple(
            slice(lo, lo + (n - 1) * step + 1, step)
            for lo, n, step in zip(
                regions.lo[i].tolist(), regions.size[i].tolist(), regions.step[i].tolist(), strict=True
            )
        )
        view = param.as_strided(
            regions.size[i].tolist(), regions.stride[i].tolist(), param.storage_offset() + int(regions.offset[i])
        )
        wide = source.reshape(*source.shape, *(1,) * (len(index) - source.dim()))
        view.copy_(wide[index])


def deliver(
    layout: Layout, params: Sequence[torch.Tensor], load: Callable[[Iterator[tuple[str, torch.Tensor]]], object]
) -> None:
    """Gives what was staged to the engine's own loader, in one call."""
    if any(entry.delivered for entry in layout.opaque):
        load((spec.name, tensor) for spec, tensor in zip(layout.params, params, strict=True) if spec.staged)
