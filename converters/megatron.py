"""Reads a Megatron rank's layout from the entries of its ``sharded_state_dict``.

Every entry states a box of a global tensor and holds the live local tensor. The family's rule says which Hugging Face
tensors the box's rows belong to. Nothing here imports Megatron: entries and configurations are used by attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeGuard

import numpy as np
import torch
from weightlink.converters.boxes import Boxes
from weightlink.converters.families.base import Family, Match
from weightlink.converters.pieces import pieces
from weightlink.hooks.errors import LayoutError
from weightlink.hooks.geometry import CASTABLE, Layout, ParamSpec, RegionBuilder, Regions, TensorSpec

METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}
"""Asks Megatron for one key per layer and per expert, without stacked axes."""


class Shard(Protocol):
    """What is used of Megatron's ``ShardedTensor``: a local tensor and its box in the global tensor."""

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int
    allow_shape_mismatch: bool


def memory_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory from other memory, also where there is none (the meta device)."""
    storage = tensor.untyped_storage()
    return int(storage._cdata if storage.device.type == "meta" else storage.data_ptr())


def is_shard(item: object) -> TypeGuard[Shard]:
    """True for a ``ShardedTensor``; False for sharded objects (extra states) and plain values."""
    return all(hasattr(item, name) for name in ("key", "data", "local_shape", "global_offset", "prepend_axis_num"))


def shards_of(state: object) -> Iterator[Shard]:
    """The sharded tensors of a nested state dict whose factories were applied, in order."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from shards_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from shards_of(value)
    elif is_shard(state):
        yield state


def sizes_of(config: object, hf_config: Mapping[str, object]) -> dict[str, int]:
    """The sizes that rules name, from a ``TransformerConfig`` and the true vocabulary size."""

    def of(name: str) -> int | None:
        value = getattr(config, name, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def stated(name: str, section: str) -> int | None:
        nested = hf_config.get(section)
        value = nested.get(name) if isinstance(nested, Mapping) else hf_config.get(name)
        return value if isinstance(value, int) else None

    heads, channels = of("num_attention_heads"), of("kv_channels")
    groups = of("num_query_groups") or heads
    found = {
        "vocab": stated("vocab_size", "text_config"),
        "heads": heads,
        "groups": groups,
        "head": channels,
        "k": channels,
        "v": channels,
        "ffn": of("ffn_hidden_size"),
        "moe_ffn": of("moe_ffn_hidden_size"),
        "shared_ffn": of("moe_shared_expert_intermediate_size"),
        "experts": of("num_moe_experts"),
        "layers": of("num_layers"),
    }
    if heads and groups and channels:
        found |= {"qpg": heads // groups, "q": heads // groups * channels}
    keys, values, size = of("linear_num_key_heads"), of("linear_num_value_heads"), of("linear_value_head_dim")
    if keys and values and size:
        found |= {"gdn_groups": keys, "gdn_heads": values // keys, "gdn_v": values // keys * size}
        found["gdn_k"] = of("linear_key_head_dim")
    if isinstance(hf_config.get("vision_config"), Mapping):
        found["vit_heads"] = stated("num_heads", "vision_config")
        width = stated("hidden_size", "vision_config")
        if width and found["vit_heads"]:
            found["vit_head"] = width // found["vit_heads"]
    return {symbol: value for symbol, value in found.items() if value is not None}


def require_same_rotation(config: object, family: Family, rank: str) -> None:
    """Raises :class:`LayoutError` when the model rotates queries and keys in pairs that the family does not have: the
    checkpoint's rows would mean something else."""
    found = bool(getattr(config, "rotary_interleaved", False))
    if found != family.rotary_interleaved:
        raise LayoutError(
            f"family {family.name!r} pairs the rows of rotary embeddings in another way",
            rank=rank,
            expected=f"rotary_interleaved={family.rotary_interleaved}",
            found=f"rotary_interleaved={found}",
        )


@dataclass(frozen=True)
class Source:
    """Where a parameter of a layout comes from.

    :param live: Megatron's own tensor
    :param sent: what regions point into: ``live`` itself, or for a norm that HF centres differently a float32 tensor
        that holds ``live`` plus ``shift`` after :meth:`refresh`
    """

    live: torch.Tensor
    sent: torch.Tensor
    shift: float = 0.0

    def refresh(self) -> torch.Tensor:
        """``sent``, brought up to date."""
        if self.sent is not self.live:
            torch.add(self.live.float(), self.shift, out=self.sent)
        return self.sent

    def store(self) -> None:
        """Takes ``sent``, into which a checkpoint was loaded, back into ``live``."""
        if self.sent is not self.live:
            self.live.copy_(self.sent - self.shift)


def read_layout(
    shards: Iterable[Shard],
    family: Family,
    sizes: Mapping[str, int],
    *,
    dtype: str,
    rank: str,
    zero_centred: bool = False,
    exclude: Sequence[str] = (),
) -> tuple[Layout, list[Source]]:
    """One rank's layout in canonical form, and the source of every entry of its ``params``.

    :param sizes: see :func:`sizes_of`
    :param dtype: of canonical tensors, as the engine's loader is to see them; it decides no value (DESIGN 5.2)
    :param zero_centred: norms hold their scale less one
    :param exclude: Megatron keys, or patterns with ``*``, that are not sent
    :raises NameMapError: naming every key without a rule
    :raises LayoutError: for an entry that cannot be read in place (quantised, released, a copy with stacked axes) or
        whose rows do not match its rule
    """
    known: list[tuple[Shard, Match]] = []
    missing: set[str] = set()
    excluded: set[str] = set()
    for shard in shards:
        if any(fnmatchcase(shard.key, pattern) for pattern in exclude):
            excluded.add(shard.key)
            continue
        match = family.match(shard.key, sizes, rank)
        if match is None:
            missing.add(shard.key)
        else:
            known.append((shard, match))
    if missing:
        raise family.unknown(sorted(missing), rank=rank)
    tensors: dict[str, TensorSpec] = {}
    index: dict[str, int] = {}
    params: list[ParamSpec] = []
    sources: list[Source] = []
    storages: dict[int, int] = {}
    regions = RegionBuilder()
    for shard, match in known:
        live = _readable(shard, rank)
        shift = float(zero_centred) - float(match.rule.centred) if match.rule.norm else 0.0
        sent = torch.empty(live.shape, dtype=torch.float32, device=live.device) if shift else live
        params.append(
            ParamSpec(
                shard.key,
                tuple(sent.shape),
                str(sent.dtype).removeprefix("torch."),
                storages.setdefault(memory_of(sent), len(storages)),
                sent.storage_offset(),
                tuple(sent.stride()),
            )
        )
        sources.append(Source(live, sent, shift))
        for piece in pieces(shard, match, sizes, rank):
            spec = TensorSpec(piece.name, piece.shape, dtype)
            if tensors.setdefault(spec.name, spec) != spec:
                raise LayoutError(
                    "two Megatron parameters disagree on a tensor's shape",
                    tensor=spec.name,
                    rank=rank,
                    expected=tensors[spec.name].shape,
                    found=f"{spec.shape} from {shard.key}",
                )
            if 0 in piece.size:
                continue
            stride = list(sent.stride())
            offset = piece.first * stride[0] if piece.first else 0
            if match.rule.transpose:
                stride.reverse()
            regions.add(
                index.setdefault(spec.name, len(index)),
                len(params) - 1,
                lo=piece.lo,
                size=piece.size,
                step=piece.step,
                offset=offset,
                stride=[0, *stride] if match.rule.stack else stride,
            )
    held = tuple(tensors[name] for name in index)
    layout = Layout(rank, held, tuple(params), regions.build(), excluded=tuple(sorted(excluded)))
    layout.validate()
    return layout, sources


def require_one_parameter(layouts: Sequence[Layout]) -> None:
    """Raises :class:`LayoutError` when parameters of different Megatron keys, on any ranks, give the same elements of
    a canonical tensor: equal boxes count as replicas, and which of the two would be sent is chance."""
    tensors: dict[str, int] = {}
    keys: dict[str, int] = {}
    regions = Regions.concat(layout.regions for layout in layouts)
    tensor, key = (
        np.concatenate([np.array(numbers, np.int64)[column] for numbers, column in columns])
        for columns in (
            [([tensors.setdefault(t.name, len(tensors)) for t in x.tensors], x.regions.tensor) for x in layouts],
            [([keys.setdefault(p.name, len(keys)) for p in x.params], x.regions.param) for x in layouts],
        )
    )
    first, box = Boxes(tensor, regions.lo, regions.size, regions.step).unique()
    wrong = np.flatnonzero(key != key[first][box])
    if not len(wrong):
        return
    row, names = int(wrong[0]), list(keys)
    held = int(first[box[row]])
    owner = np.repeat(np.arange(len(layouts)), [len(layout.regions) for layout in layouts])
    raise LayoutError(
        f"{len(set(tensor[wrong].tolist()))} tensor(s) are given by two different parameters",
        tensor=list(tensors)[int(tensor[row])],
        rank=layouts[int(owner[row])].rank,
        expected=f"{names[int(key[held])]}, as on {layouts[int(owner[held])].rank}",
        found=names[int(key[row])],
        remedy="give each its own name in the family's rules: every placeholder of the key belongs in the name",
    )


def _readable(shard: Shard, rank: str) -> torch.Tensor:
    """The shard's tensor, detached but on the same memory; raises :class:`LayoutError` if it cannot be read there."""
    data = shard.data
    if data is None:
        raise LayoutError("a sharded entry holds no tensor", tensor=shard.key, rank=rank)
    # A quantised or distributed parameter is a subclass whose dtype and pointer are not those of its values.
    if type(data) not in (torch.Tensor, torch.nn.Parameter):
        raise LayoutError(
            "a parameter is not a plain tensor",
            tensor=shard.key,
            rank=rank,
            expected="a torch.Tensor or torch.nn.Parameter",
            found=f"{type(data).__module__}.{type(data).__qualname__}",
            remedy="train with bf16, fp16 or fp32 primary weights",
        )
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype not in CASTABLE:
        raise LayoutError(
            "a parameter's dtype cannot be sent by casting",
            tensor=shard.key,
            rank=rank,
            expected=", ".join(sorted(CASTABLE)),
            found=dtype,
            remedy="train with bf16, fp16 or fp32 primary weights",
        )
    last = data.storage_offset() + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True)) + 1
    if data.numel() and last * data.element_size() > data.untyped_storage().nbytes():
        raise LayoutError(
            "a parameter's memory has been released",
            tensor=shard.key,
            rank=rank,
            expected=f"{last * data.element_size()} bytes of storage",
            found=f"{data.untyped_storage().nbytes()} bytes",
            remedy="bring the weights back before they are read",
        )
    if shard.prepend_axis_num:
        raise LayoutError(
            "a sharded entry has stacked axes",
            tensor=shard.key,
            rank=rank,
            expected="one key per layer and expert",
            found=f"global shape {tuple(shard.global_shape)}",
            remedy="the module's sharded_state_dict ignores " + ", ".join(METADATA),
        )
    return data.detach()
