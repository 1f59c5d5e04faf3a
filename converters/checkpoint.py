"""Loads a Hugging Face safetensors checkpoint into local tensors through their layout, read the other way round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from weightlink.hooks.errors import ConfigError, LayoutError, NameMapError
from weightlink.hooks.geometry import CASTABLE, Layout
from weightlink.hooks.messages import PROTOCOL, EngineContext

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class LoadReport:
    """What one rank read.

    :param loaded: names that the layout holds, all of them read
    :param unused: names of the checkpoint that this rank's layout does not hold (other ranks may)
    :param elements: elements written, without zeroed padding
    """

    loaded: tuple[str, ...]
    unused: tuple[str, ...]
    elements: int


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint folder; raises :class:`ConfigError` if it is not there or not JSON."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object", found=type(config).__name__)
    return config


def context_from_checkpoint(path: Path) -> EngineContext:
    """A checkpoint folder as the context of an engine of one rank, so that a layout can be built for it."""
    config = read_config(path)
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise ConfigError(f"{path}/config.json names no single architecture", found=architectures)
    return EngineContext(
        protocol=PROTOCOL,
        engine="checkpoint",
        engine_version="",
        weightlink_version="",
        hf_config=config,
        architecture=architectures[0],
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        tp_size=1,
        pp_size=1,
        world=1,
        device="cpu",
    )


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from every safetensors file; raises :class:`ConfigError` without any."""
    index = path / INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): path / Path(file).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"cannot read {index}: {type(error).__name__}: {error}") from error
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    if not found:
        raise ConfigError(f"no safetensors files in {path}")
    return found


def load_checkpoint(layout: Layout, tensors: Sequence[torch.Tensor], path: Path) -> LoadReport:
    """Writes the checkpoint's slices into ``tensors``, the live tensors of ``layout.params``; reads no more than them.

    Elements that no region names (padding of the vocabulary) become zero. Nothing is written unless every name is there
    with its shape and a dtype that may be cast; the error lists every name that is not.

    :raises NameMapError: if a name is missing
    :raises LayoutError: if shapes or dtypes alone are wrong
    :raises ConfigError: if a file cannot be read
    """
    if len(tensors) != len(layout.params):
        raise LayoutError(
            "not one tensor per parameter", rank=layout.rank, expected=len(layout.params), found=len(tensors)
        )
    files = tensor_files(path)
    with ExitStack() as stack, torch.no_grad():
        slices = _open(layout, files, stack)
        _check(layout, slices, path)
        _clear_padding(layout, tensors)
        regions = layout.regions
        # In the order of the checkpoint's tensors, so that files are read forwards.
        for row in np.argsort(regions.tensor, kind="stable").tolist():
            spec = layout.tensors[int(regions.tensor[row])]
            rank = len(spec.shape)
            lo, size, step, stride = (
                getattr(regions, name)[row, :rank].tolist() for name in ("lo", "size", "step", "stride")
            )
            box = tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(lo, size, step, strict=True))
            target = tensors[int(regions.param[row])]
            view = target.as_strided(size, stride, target.storage_offset() + int(regions.offset[row]))
            view.copy_(slices[spec.name][box])
    names = {spec.name for spec in layout.tensors}
    return LoadReport(
        tuple(spec.name for spec in layout.tensors),
        tuple(sorted(set(files) - names)),
        int(regions.numel.sum()),
    )


def _open(layout: Layout, files: Mapping[str, Path], stack: ExitStack) -> dict[str, Any]:
    """A lazy safetensors slice for each of the layout's tensors that the checkpoint has."""
    held = [spec.name for spec in layout.tensors if spec.name in files]
    try:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted({files[name] for name in held})
        }
        return {name: opened[files[name]].get_slice(name) for name in held}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the checkpoint: {error}", rank=layout.rank) from error


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _check(layout: Layout, slices: Mapping[str, Any], path: Path) -> None:
    missing, wrong = [], []
    for spec in layout.tensors:
        if spec.name not in slices:
            missing.append(f"{spec.name}: expected shape {spec.shape}, not in the checkpoint")
            continue
        shape, dtype = tuple(slices[spec.name].get_shape()), slices[spec.name].get_dtype()
        if shape != spec.shape:
            wrong.append(f"{spec.name}: expected shape {spec.shape}, found {shape}")
        elif _DTYPES.get(dtype) not in CASTABLE:
            wrong.append(f"{spec.name}: expected one of {', '.join(sorted(CASTABLE))}, found {dtype}")
    if missing or wrong:
        raise (NameMapError if missing else LayoutError)(
            f"{len(missing) + len(wrong)} tensor(s) of the checkpoint {path} do not fit the model",
            rank=layout.rank,
            found="; ".join(missing + wrong),
            remedy="compare the trainer's configuration with the checkpoint's config.json",
        )


def _clear_padding(layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
    """Zeroes every parameter of which the regions name only a part."""
    named = np.bincount(layout.regions.param, weights=layout.regions.numel, minlength=len(layout.params))
    for tensor, count in zip(tensors, named.tolist(), strict=True):
        if count < tensor.numel():
            tensor.zero_()
