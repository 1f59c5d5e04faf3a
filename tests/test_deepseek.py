"""Latent attention, routers with a bias, shared experts and next-token layers: DeepSeek and Kimi-K2 on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from megatron_cpu import Megatron
from safetensors.torch import load_file

IDS = [[i * 7 % 249 for i in range(16)]]
#: What Megatron has no tensor of its own for.
COPIES = ["model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"]


@pytest.fixture(scope="module")
def megatron():
    with Megatron() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


def reference(path: Path, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **changes).eval()


@torch.no_grad()
def reference_logits(path: Path, **changes: Any) -> torch.Tensor:
    return reference(path, **changes)(torch.tensor(IDS)).logits


def distance(found: Any, want: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return ((torch.as_tensor(found) - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    [
        ("deepseek_v2", 1, {"tp": 1}),
        ("deepseek_v2_lite", 2, {"tp": 2, "etp": 1}),
        ("deepseek_v3", 2, {"tp": 2}),
        ("deepseek_v3", 2, {"tp": 1, "ep": 2}),
    ],
)
def test_logits_equal_transformers(megatron, folder, family, world, parallel):
    path = toys.make(family, folder / family)
    want = reference_logits(path)
    for found in megatron.run("logits", world, path=str(path), ids=IDS, **parallel):
        assert distance(found, want) <= 1e-5


def test_logits_tell_the_order_of_rotary_rows(folder):
    """The comparison above would fail if the rows of the rotary parts were taken in the other order."""
    path = toys.make("deepseek_v3", folder / "deepseek_v3")
    assert distance(reference_logits(path, rope_interleave=False), reference_logits(path)) > 1e-3


# --- next-token layers ------------------------------------------------------------------------------------------------


def next_token_logits(path: str, ids: list[list[int]], tp: int = 1) -> Any:
    """On a Megatron rank: logits of the model and of its next-token layer."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron_worker import build
    from weightlink.plugins.megatron import load_hf
    from weightlink.plugins.megatron import cpu as megatron_cpu

    (model,) = build(path, tp=tp)
    load_hf(model, path, timeout=30, ignore=COPIES)
    hidden: list[torch.Tensor] = []
    model.mtp.register_forward_hook(lambda module, args, output: hidden.append(output))
    tokens = torch.tensor(ids)
    with torch.no_grad():
        positions, mask = megatron_cpu.causal_inputs(tokens)
        model.eval()(tokens, positions, mask, labels=tokens)
        logits = gather_from_tensor_model_parallel_region(model.output_layer(hidden[0])[0])
    return [part.transpose(0, 1)[..., :250].tolist() for part in logits.chunk(2)]


@torch.no_grad()
def reference_next_token_logits(path: Path) -> list[torch.Tensor]:
    """The same from transformers' own layer, joined to the model as DeepSeek's report describes it."""
    weights = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    prefix = "model.layers.2."
    model = reference(path, num_hidden_layers=3)  # which loads the next-token layer as one more decoder layer
    layer, norm, inner = model.model.layers[2], model.model.norm, model.model
    before: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    inner(torch.tensor(IDS))
    hidden = norm(before[0])

    def scaled(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[prefix + name + ".weight"], 1e-6)

    following = torch.tensor(IDS).roll(-1, 1)
    following[:, -1] = 0  # there is none: Megatron takes token 0
    embedded = torch.nn.functional.embedding(following, weights[prefix + "embed_tokens.weight"])
    joined = torch.cat([scaled(embedded, "enorm"), scaled(hidden, "hnorm")], -1) @ weights[prefix + "eh_proj.weight"].T
    length = len(IDS[0])
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    out = layer(
        joined, attention_mask=mask, position_ids=positions, position_embeddings=inner.rotary_emb(joined, positions)
    )
    out = out if isinstance(out, torch.Tensor) else out[0]
    return [
        hidden @ weights["lm_head.weight"].T,
        scaled(out, "shared_head.norm") @ weights[prefix + "shared_head.head.weight"].T,
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_next_token_layer_equals_transformers_own_layer(megatron, folder, tp):
    path = toys.make("deepseek_v3_mtp", folder / "deepseek_v3_mtp")
    want = reference_next_token_logits(path)
    for found in megatron.run("test_deepseek:next_token_logits", tp, path=str(path), ids=IDS, tp=tp):
        for mine, theirs in zip(found, want, strict=True):
            assert distance(mine, theirs) <= 1e-5


def load_without_declaration(path: str) -> str:
    """On a Megatron rank: what a plain load says."""
    from megatron_worker import build
    from weightlink.hooks.errors import NameMapError
    from weightlink.plugins.megatron import load_hf

    try:
        load_hf(build(path), path, timeout=30)
    except NameMapError as error:
        return str(error)
    return ""


def test_copies_in_the_checkpoint_are_left_out_by_declaration_only(megatron, folder):
    path = toys.make("deepseek_v3_mtp", folder / "deepseek_v3_mtp")
    (said,) = megatron.run("test_deepseek:load_without_declaration", 1, path=str(path))
    for name in ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight", "ignore="):
        assert name in said
    assert "eh_proj" not in said
