"""Reads a Megatron rank's layout from the entries of its ``sharded_state_dict``.

Every entry states a box of a global tensor and holds the live local tensor. The family's rule says which Hugging Face
tensors the box's rows belong to. Nothing here imports Megatron: entries and configurations are used by attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard

import torch
from weightlink.converters.families.base import Family, Match
from weightlink.hooks.errors import LayoutError, NameMapError
from weightlink.hooks.geometry import CASTABLE, Layout, ParamSpec, RegionBuilder, TensorSpec

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
    """The sizes that rules name, from a ``TransformerConfig`` and the true vocabulary size.

    Raises :class:`LayoutError` for what would need more than moving rows: the values of such a model differ from the
    Hugging Face checkpoint's, and a plain copy would be silently wrong.
    """
    for option in ("layernorm_zero_centered_gamma", "rotary_interleaved", "attention_output_gate"):
        if getattr(config, option, False):
            raise LayoutError(
                f"a Megatron model with {option} is not supported",
                expected=f"{option}=False",
                found=f"{option}=True",
            )
    heads: int | None = getattr(config, "num_attention_heads", None)
    groups: int | None = getattr(config, "num_query_groups", None) or heads
    channels: int | None = getattr(config, "kv_channels", None)
    found: dict[str, object] = {
        "groups": groups,
        "k": channels,
        "v": channels,
        "ffn": getattr(config, "ffn_hidden_size", None),
        "vocab": hf_config.get("vocab_size"),
    }
    if heads and groups and channels:
        found["q"] = heads // groups * channels
    return {symbol: value for symbol, value in found.items() if isinstance(value, int)}


def read_layout(
    shards: Iterable[Shard],
    family: Family,
    sizes: Mapping[str, int],
    *,
    dtype: str,
    dtypes: Mapping[str, str],
    rank: str,
) -> tuple[Layout, list[torch.Tensor]]:
    """One rank's layout in canonical form, and the live tensor of every entry of its ``params``.

    :param sizes: see :func:`sizes_of`
    :param dtype: dtype of canonical tensors, ``dtypes`` that of the exceptions by name
    :raises NameMapError: naming every key without a rule
    :raises LayoutError: for an entry that cannot be read in place (quantised, released, a copy with stacked axes) or
        whose rows do not match its rule
    """
    known: list[tuple[Shard, Match]] = []
    missing: set[str] = set()
    for shard in shards:
        match = family.match(shard.key)
        if match is None:
            missing.add(shard.key)
        else:
            known.append((shard, match))
    if missing:
        raise family.unknown(sorted(missing), rank=rank)
    tensors: dict[str, TensorSpec] = {}
    index: dict[str, int] = {}
    params: list[ParamSpec] = []
    live: list[torch.Tensor] = []
    storages: dict[int, int] = {}
    regions = RegionBuilder()
    for shard, match in known:
        data = _readable(shard, rank)
        place = data.untyped_storage().data_ptr()
        params.append(
            ParamSpec(
                shard.key,
                tuple(data.shape),
                str(data.dtype).removeprefix("torch."),
                storages.setdefault(place, len(storages)),
                data.storage_offset(),
                tuple(data.stride()),
            )
        )
        live.append(data)
        for name, shape, lo, size, first in _pieces(shard, match, sizes, rank):
            spec = TensorSpec(name, shape, dtypes.get(name, dtype))
            if tensors.setdefault(name, spec) != spec:
                raise LayoutError(
                    "two Megatron parameters disagree on a tensor's shape",
                    tensor=name,
                    rank=rank,
                    expected=tensors[name].shape,
                    found=f"{shape} from {shard.key}",
                )
            if 0 not in size:
                regions.add(
                    index.setdefault(name, len(index)),
                    len(params) - 1,
                    lo=lo,
                    size=size,
                    offset=first * data.stride(0) if first else 0,
                    stride=data.stride(),
                )
    held = tuple(tensors[name] for name in index)
    layout = Layout(rank, held, tuple(params), regions.build())
    layout.validate()
    return layout, live


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


def _pieces(
    shard: Shard, match: Match, sizes: Mapping[str, int], rank: str
) -> Iterator[tuple[str, tuple[int, ...], list[int], list[int], int]]:
    """``(HF name, canonical shape, lo, size, first local row)`` of every canonical box of a shard.

    A name whose rows lie wholly on other ranks is left out.
    """
    if not match.sections:
        yield match.name, tuple(shard.global_shape), list(shard.global_offset), list(shard.local_shape), 0
        return
    groups, rows = _rows(shard, match, sizes, rank)
    per_group = sum(rows)
    start, end = shard.global_offset[0], shard.global_offset[0] + shard.local_shape[0]
    others = tuple(shard.global_shape[1:])
    # Only the groups that the local rows touch: one at least is cut when there are fewer groups than ranks.
    for group in range(start // per_group, min(groups, -(-end // per_group))):
        first = group * per_group
        for (name, _), count in zip(match.sections, rows, strict=True):
            low, high = max(start, first), min(end, first + count)
            if low < high:
                lo = [group * count + low - first, *shard.global_offset[1:]]
                yield name, (groups * count, *others), lo, [high - low, *shard.local_shape[1:]], low - start
            first += count


def _rows(shard: Shard, match: Match, sizes: Mapping[str, int], rank: str) -> tuple[int, Sequence[int]]:
    """``(groups, rows of each section)``; raises unless they add up to the global rows, padding excepted."""
    symbols = [rows for _, rows in match.sections] + ([match.groups] if match.groups else [])
    absent = [symbol for symbol in symbols if symbol not in sizes]
    if absent:
        raise NameMapError(
            f"a rule names sizes that the model's configuration does not have: {', '.join(absent)}",
            tensor=shard.key,
            rank=rank,
            expected=", ".join(sorted(sizes)),
        )
    groups = sizes[match.groups] if match.groups else 1
    rows = [sizes[symbol] for _, symbol in match.sections]
    total, found = groups * sum(rows), shard.global_shape[0]
    # Only entries that Megatron itself marks as padded (the vocabulary) may have rows beyond the true ones.
    if total > found or (total < found and not shard.allow_shape_mismatch):
        raise LayoutError(
            "a parameter's rows do not match its rule",
            tensor=shard.key,
            rank=rank,
            expected=f"{total} rows ("
            + " + ".join(f"{name}: {n}" for (name, _), n in zip(match.sections, rows, strict=True))
            + ")",
            found=f"{found} rows",
            remedy="compare the trainer's configuration with the checkpoint's config.json",
        )
    return groups, rows
