"""The training adapter for Megatron-Core models, plain or wrapped in DDP, one chunk or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from weightlink.converters.families.base import Family, choose_family
from weightlink.converters.megatron import (
    METADATA,
    Shard,
    Source,
    memory_of,
    read_layout,
    require_same_rotation,
    sizes_of,
)
from weightlink.hooks.errors import ConfigError, LayoutError
from weightlink.hooks.geometry import Layout, Regions
from weightlink.hooks.manager import PluginManager
from weightlink.plugins.megatron.entries import entries

if TYPE_CHECKING:
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.messages import EngineContext
    from weightlink.hooks.protocols import Family as FamilyLike

Fingerprint = tuple[tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


@dataclass
class _Read:
    """The last layout, the sources of its params, and what tells whether the model still looks the same."""

    layout: Layout
    sources: list[Source]
    fingerprint: Fingerprint
    family: Family
    context: EngineContext
    exclude: Sequence[str]


class MegatronAdapter:
    """One Megatron rank's model chunks as a :class:`~weightlink.hooks.protocols.TrainingAdapter`.

    :param model: a Megatron module, or the list of chunks of a rank with virtual pipeline stages
    :param families: families by name; None takes every plugin's
    """

    kind: Literal["megatron"] = "megatron"

    def __init__(self, model: object, families: Mapping[str, FamilyLike] | None = None) -> None:
        self.chunks = chunks_of(model)
        self._modules = [list(wrappers(chunk))[-1] for chunk in self.chunks]
        self._families = families
        self._read: _Read | None = None
        self.rank = f"trainer {dist.get_rank() if dist.is_initialized() else 0}"
        first = next((p for module in self._modules for p in module.parameters()), None)
        if first is None:
            raise ConfigError("the model has no parameters", rank=self.rank)
        self._device = first.device

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self._device

    def make_readable(self, deadline: Deadline) -> None:
        """Forces the parameter all-gathers that Megatron left for the next forward pass (``overlap_param_gather``).

        Between ``optimizer.step()`` and that pass a rank holds only its own shard fresh. Collective over the
        data-parallel groups; the wait inside is Megatron's, bounded by those groups' own timeout.

        :raises ConfigError: for a model that was unwrapped from such a DDP, which only the wrapper can bring up to date
        """
        deadline.check("the trainer's parameters", rank=self.rank)
        for chunk in self.chunks:
            ddp = [module for module in wrappers(chunk) if hasattr(module, "start_param_sync")]
            for module in ddp:
                if module.ddp_config.overlap_param_gather:
                    module.start_param_sync(force_sync=True)
            if not ddp and _awaits_gather(chunk):
                raise ConfigError(
                    "the model was taken out of a DDP wrapper that gathers parameters late (overlap_param_gather)",
                    rank=self.rank,
                    found=type(chunk).__name__,
                    remedy="pass the wrapped model chunks",
                )
        deadline.check("the trainer's parameter all-gather", rank=self.rank)

    def layout(self, context: EngineContext, family: str | None, exclude: Sequence[str] = ()) -> Layout:
        """This rank's regions. Of the context it uses ``architecture``, ``hf_config`` and ``dtype``.

        :raises NameMapError: for an unknown architecture, or for parameters without a rule
        :raises LayoutError: for a parameter that cannot be read in place
        """
        families = PluginManager().families() if self._families is None else self._families
        chosen = choose_family(families, context.architecture, family)
        self._read = self._read_now(chosen, context, exclude)
        return self._read.layout

    def tensors(self) -> Sequence[torch.Tensor]:
        """The live local tensors of the last layout's ``params``; reads the model again when something moved.

        Zero-centred norms are float32 copies, made anew by each call.
        """
        if self._read is None:
            raise LayoutError("the layout has not been read yet", rank=self.rank, remedy="call layout() first")
        if self._fingerprint() != self._read.fingerprint:
            now = self._read_now(self._read.family, self._read.context, self._read.exclude)
            _require_equal(self._read.layout, now.layout)
            self._read = now
        with torch.no_grad():
            return [source.refresh() for source in self._read.sources]

    def store(self) -> None:
        """Takes values that were written into :meth:`tensors` back into the model, where those are copies."""
        with torch.no_grad():
            for source in self._read.sources if self._read else ():
                source.store()

    def synchronize(self) -> None:
        """Wait until all device work that writes the parameters has finished."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _read_now(self, family: Family, context: EngineContext, exclude: Sequence[str]) -> _Read:
        shards: list[Shard] = []
        for module in self._modules:
            # A fresh dict each time: Megatron adds entries of its own to it.
            shards += entries(module.sharded_state_dict(metadata=dict(METADATA)))
        sent = {s.key for s in shards if not any(fnmatchcase(s.key, pattern) for pattern in exclude)}
        _require_tied_alike(context.hf_config, sent, self.rank)
        config = self._modules[0].config
        require_same_rotation(config, family, self.rank)
        layout, sources = read_layout(
            shards,
            family,
            sizes_of(config, context.hf_config),
            dtype=context.dtype,
            rank=self.rank,
            zero_centred=bool(getattr(config, "layernorm_zero_centered_gamma", False)),
            exclude=exclude,
        )
        # After the read: a router's bias is rebound to fp32 while Megatron builds the sharded dict.
        resident = {memory_of(t) for t in self._resident()}
        for param, source in zip(layout.params, sources, strict=True):
            if memory_of(source.live) not in resident:
                raise LayoutError(
                    "Megatron's sharded entry is a copy, which would never show a later optimizer step",
                    tensor=param.name,
                    rank=self.rank,
                    remedy="use a module whose sharded_state_dict shows views of its parameters",
                )
        return _Read(layout, sources, self._fingerprint(), family, context, exclude)

    def _resident(self) -> Iterator[torch.Tensor]:
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()

    def _fingerprint(self) -> Fingerprint:
        return tuple(
            (t.data_ptr(), t.untyped_storage().nbytes(), t.dtype, tuple(t.shape), t.stride()) for t in self._resident()
        )


def chunks_of(model: object) -> list[torch.nn.Module]:
    """The model chunks in ``model``; empty if it is anything but Megatron modules. Does not import Megatron."""
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    modules = [chunk for chunk in chunks if isinstance(chunk, torch.nn.Module) and _is_megatron(chunk)]
    return modules if len(modules) == len(chunks) else []


def _is_megatron(chunk: torch.nn.Module) -> bool:
    inner = list(wrappers(chunk))[-1]
    named = any(cls.__module__.startswith("megatron.core.") for cls in type(inner).__mro__)
    return named and hasattr(inner, "sharded_state_dict") and hasattr(inner, "config")


def wrappers(chunk: torch.nn.Module) -> Iterator[Any]:
    """``chunk`` and what it wraps (DDP, Float16Module), the innermost last."""
    module: object = chunk
    while isinstance(module, torch.nn.Module):
        yield module
        module = getattr(module, "module", None)


def _awaits_gather(chunk: torch.nn.Module) -> bool:
    """True when a Megatron DDP has hooked its parameter all-gather into the forward passes of ``chunk``."""
    name = "DistributedDataParallel._make_forward_pre_hook."
    hooks = (hook for module in chunk.modules() for hook in module._forward_pre_hooks.values())
    return any(getattr(hook, "__qualname__", "").startswith(name) for hook in hooks)


def _require_tied_alike(hf_config: Mapping[str, Any], keys: set[str], rank: str) -> None:
    """A trained output layer cannot go to an engine that shares it with the embeddings: it would be dropped there."""
    own = [key for key in keys if key.split(".")[-2:] == ["output_layer", "weight"]]
    if hf_config.get("tie_word_embeddings") and own:
        raise LayoutError(
            "the trainer has an output layer of its own, the engine's model ties it to the embeddings",
            tensor=own[0],
            rank=rank,
            expected="share_embeddings_and_output_weights=True",
            found="share_embeddings_and_output_weights=False",
        )


def _require_equal(before: Layout, now: Layout) -> None:
    """Raises unless both layouts have the same tensors, params and regions; only addresses may differ."""

    def table(layout: Layout) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = [(spec.name, spec.shape, spec.dtype) for spec in layout.tensors]
        return rows + [(p.name, p.shape, p.dtype, p.stride) for p in layout.params]

    for was, found in zip(table(before), table(now), strict=False):
        if was != found:
            raise _changed(before, was, found)
    same = all(np.array_equal(getattr(before.regions, c), getattr(now.regions, c)) for c in Regions.COLUMNS)
    if len(before.params) != len(now.params) or len(before.tensors) != len(now.tensors) or not same:
        raise _changed(before, f"{len(before.regions)} regions", f"{len(now.regions)} other regions")


def _changed(layout: Layout, was: object, found: object) -> LayoutError:
    return LayoutError(
        "the model's layout has changed since the link was made",
        rank=layout.rank,
        expected=was,
        found=found,
        remedy="connect again",
    )
