"""Block FP8 in the plainest way, block by block, and checkpoints made with it: what SGLang's own load is given."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantise(
    values: torch.Tensor, block: Sequence[int], *, powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``float8_e4m3fn`` values and fp32 scales of a matrix, or of a stack of them."""
    if values.dim() > 2:
        parts = [quantise(matrix, block, powers_of_two=powers_of_two) for matrix in values]
        return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    rows, columns = values.shape
    encoded = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for i, j in itertools.product(*(range(n) for n in scales.shape)):
        here = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        numbers = values[here].to(torch.float32)
        largest = numbers.abs().max()
        scale = torch.maximum(largest, torch.tensor(1e-12)) / 448
        if powers_of_two:
            scale = torch.tensor(2.0 ** math.ceil(math.log2(scale.item())))
        scales[i, j] = scale
        encoded[here] = (numbers / scale).to(torch.float8_e4m3fn)
    return encoded, scales


def checkpoint(plain: Path, path: Path, block: Sequence[int], skipped: Sequence[str], **config: object) -> Path:
    """``plain`` with every projection in block FP8, but for the modules in ``skipped``."""
    if path.exists():
        return path
    shutil.copytree(plain, path)
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(skipped),
        **config,
    }
    (path / "config.json").write_text(json.dumps(settings))
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if "_proj" in name and name.endswith(".weight") and not any(module in name for module in skipped):
            powers = config.get("scale_fmt") == "ue8m0"
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor, block, powers_of_two=powers)
        else:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path
