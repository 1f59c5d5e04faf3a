"""Tiny Hugging Face checkpoints with non-square shapes, one per family: deterministic, and written in a moment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import toys_deepseek
import toys_moe
import toys_next
from safetensors import safe_open
from safetensors.torch import load_file, save_file

_COMMON: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _qwen3() -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=48, **_COMMON)), {}


def _qwen3_deep() -> tuple[Any, dict[str, Any]]:
    """Four layers, for trainers with several virtual pipeline stages; tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    changes = {"num_hidden_layers": 4, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(head_dim=48, **{**_COMMON, **changes})), {}


def _qwen2() -> tuple[Any, dict[str, Any]]:
    """Biases on q, k and v. Qwen2's heads are hidden / heads wide, so that q_proj is square."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**{**_COMMON, "hidden_size": 192})), {}


def _llama_tied() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(head_dim=48, **{**_COMMON, "vocab_size": 251, "tie_word_embeddings": True})), {}


def _qwen3_moe(width: int = 96) -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        head_dim=48, moe_intermediate_size=width, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, **_COMMON
    )
    return Qwen3MoeForCausalLM(config), {}


_FAMILIES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "qwen3": _qwen3,
    "llama_tied": _llama_tied,
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_uneven": lambda: _qwen3_moe(72),
    "qwen3_deep": _qwen3_deep,
    "qwen2": _qwen2,
    **toys_moe.TOYS,
    **toys_deepseek.TOYS,
    **toys_next.TOYS,
}


#: Copies that a next-token layer may hold of the embeddings and the output layer: nobody loads them.
COPIES = ["model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"]

#: Toys that are not called like their family.
FAMILY = {
    "llama_tied": "llama",
    "qwen3_deep": "qwen3",
    "qwen3_moe_uneven": "qwen3_moe",
    "glm": "glm4",
    "glm4_moe_air": "glm4_moe",
    "glm4_moe_mtp": "glm4_moe",
    "bailing_moe_v2": "bailing_moe",
    "bailing_moe_mtp": "bailing_moe",
    "bailing_moe_latent": "bailing_moe_linear",
    "deepseek_v2": "deepseek",
    "deepseek_v2_lite": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v3_mtp": "deepseek",
    "deepseek_v3_deep": "deepseek",
    "kimi_k2": "deepseek",
    "llama_bias": "llama",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl_moe": "qwen3_vl",
}

#: ``ServerArgs`` without which SGLang does not build a toy here.
SERVER = {**toys_next.SERVER, **toys_moe.SERVER}


def family_of(toy: str) -> str:
    """The built-in family that serves a toy."""
    return FAMILY.get(toy, toy)


def make(family: str, path: Path | str) -> Path:
    """Writes the checkpoint of ``family`` to ``path``, unless it is there already.

    A family is a model and what its ``config.json`` says besides; under ``files`` it has further files by name.
    """
    path = Path(path)
    if (path / "config.json").exists():
        return path
    written = {**toys_moe.WRITTEN, **toys_deepseek.WRITTEN}
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        if family in written:
            written[family](path)
            return path
        model, extra = _FAMILIES[family]()
        with torch.no_grad():
            # Norms and biases start as constants, which would hide a swap.
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for buffer in model.buffers():
                if buffer.dtype == torch.float32 and buffer.dim() == 1:
                    buffer.add_(torch.rand_like(buffer) * 0.1)
        # As checkpoints have it: the routers' correction biases stay fp32.
        kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
        model.to(torch.bfloat16)
        for name, value in kept.items():
            model.get_buffer(name).data = value
        model.save_pretrained(path)
    finally:
        torch.random.set_rng_state(state)
    if "transposed" in extra:
        transpose(path / "model.safetensors", extra.pop("transposed"))
    for file, text in extra.pop("files", {}).items():
        (path / file).write_text(text)
    config = json.loads((path / "config.json").read_text())
    for key, value in extra.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def transpose(file: Path, endings: tuple[str, ...]) -> None:
    """Exchanges the last two dimensions of the tensors whose names end so."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(endings):
            tensors[name] = tensor.transpose(-1, -2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def coded(plain: Path, path: Path) -> Path:
    """A copy of a checkpoint in float32, in which every element of every tensor is another number.

    A scale's numbers are as good as any: nothing is computed with these weights.
    """
    if (path / "config.json").exists():
        return path
    shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    first = 1
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        numbers = torch.arange(first, first + tensor.numel(), dtype=torch.int64)
        first += tensor.numel()
        tensors[name] = numbers.to(torch.float32).reshape(tensor.shape)
    if first > 1 << 24:
        raise ValueError(f"{plain.name} has more elements than float32 can count")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part["dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def names(path: Path) -> set[str]:
    """The tensors of a checkpoint, without second copies of a matrix."""
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        stored = set(opened.keys())
    stored = {name for name in stored if not any(fnmatchcase(name, copy) for copy in COPIES)}
    tied = json.loads((path / "config.json").read_text()).get("tie_word_embeddings")
    return stored - {"lm_head.weight"} if tied else stored
