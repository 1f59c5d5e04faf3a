"""Latent attention, routers with a bias, shared experts and next-token layers: DeepSeek and Kimi-K2 on both sides."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from grid import Cell, Grid, cases, runners, world_rank
from megatron_cpu import Megatron
from oracle import poison
from proofs import rows
from safetensors.torch import load_file, save_file
from test_families import cut, read
from test_grid import MOE
from warm import shared
from weightlink.converters.megatron import sizes_of
from weightlink.hooks.errors import CoverageError

IDS = [[i * 7 % 249 for i in range(16)]]


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


LOGITS = [("deepseek_v2", 1, {"tp": 1}), ("deepseek_v3", 2, {"tp": 2})]
MORE_LOGITS = [("deepseek_v2_lite", 2, {"tp": 2, "etp": 1}), ("deepseek_v3", 2, {"tp": 1, "ep": 2})]


@pytest.mark.parametrize(
    ("family", "world", "parallel"), [*rows(LOGITS, "logits"), *rows(MORE_LOGITS, "logits", full=True)]
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
    from weightlink.plugins.megatron import cpu as megatron_cpu
    from weightlink.plugins.megatron import load_hf

    (model,) = build(path, tp=tp)
    load_hf(model, path, timeout=30, ignore=toys.COPIES)
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


@pytest.mark.proves("deepseek", "MTP")
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.grid), 2])
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


# --- names that only Transformer Engine gives -------------------------------------------------------------------------


def transformer_engine(hf: dict[str, Any]) -> Iterator[tuple[str, str | None, tuple[int, ...]]]:
    """``(key, HF name or None for gate and up in one, shape)`` of Transformer Engine's latent attention and MLPs."""
    hidden, heads, layers = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
    low, rank = hf["q_lora_rank"], hf["kv_lora_rank"]
    for number in range(layers + 1):
        key = f"decoder.layers.{number}." if number < layers else "mtp.layers.0.transformer_layer."
        name = f"model.layers.{number}."
        rope, nope = hf["qk_rope_head_dim"], hf["qk_nope_head_dim"]
        for module, theirs, shape in (
            ("input_layernorm.weight", "input_layernorm", (hidden,)),
            ("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj", (low, hidden)),
            ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm", (low,)),
            ("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj", (heads * (nope + rope), low)),
            ("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa", (rank + rope, hidden)),
            ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm", (rank,)),
            (
                "self_attention.linear_kv_up_proj.weight",
                "self_attn.kv_b_proj",
                (heads * (nope + hf["v_head_dim"]), rank),
            ),
            ("self_attention.linear_proj.weight", "self_attn.o_proj", (hidden, heads * hf["v_head_dim"])),
        ):
            yield key + module, f"{name}{theirs}.weight", shape
        if number < hf["first_k_dense_replace"]:
            yield key + "mlp.linear_fc1.layer_norm_weight", name + "post_attention_layernorm.weight", (hidden,)
            yield key + "mlp.linear_fc1.weight", None, (2 * hf["intermediate_size"], hidden)
        else:
            width = hf["moe_intermediate_size"] * hf["n_shared_experts"]
            yield key + "pre_mlp_layernorm.weight", name + "post_attention_layernorm.weight", (hidden,)
            yield key + "mlp.shared_experts.linear_fc1.weight", None, (2 * width, hidden)


@pytest.mark.proves("deepseek", "rules")
def test_names_of_transformer_engine(folder):
    path = toys.make("deepseek_v3_mtp", folder / "deepseek_v3_mtp")
    hf = json.loads((path / "config.json").read_text())
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(path / "model.safetensors").items()}
    listed = list(transformer_engine(hf))
    entries = [cut(key, torch.arange(float(math.prod(shape))).reshape(shape), 0, shape[0]) for key, _, shape in listed]
    config = SimpleNamespace(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        ffn_hidden_size=hf["intermediate_size"],
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
    )
    layout, _ = read(entries, "deepseek", **sizes_of(config, hf))
    assert all(stored[spec.name] == spec.shape for spec in layout.tensors)
    targets: dict[str, list[str]] = {}
    for row in range(len(layout.regions)):
        name = layout.tensors[layout.regions.tensor[row]].name
        targets.setdefault(layout.params[layout.regions.param[row]].name, []).append(name)
        whole = layout.regions.size[row, : len(stored[name])].tolist()
        assert tuple(whole) == stored[name]
    for key, name, _ in listed:
        if name is not None:
            assert targets[key] == [name]
        else:
            gate, up = targets[key]
            assert gate.endswith("gate_proj.weight")
            assert up == gate.replace("gate_proj", "up_proj")
            first = [int(o) for o, p in zip(layout.regions.offset, layout.regions.param, strict=True)
                     if layout.params[p].name == key]  # fmt: skip
            assert first == [0, math.prod(stored[gate])]


# --- what travels -----------------------------------------------------------------------------------------------------

NEXT_TOKEN = ("model.layers.2.*",)
V3 = "deepseek_v3"
SPREAD = [
    Cell(V3, 2, {"tp": 2}, {"tp": 2, "ep": 2}, dtype="bfloat16"),
    Cell("deepseek_v2_lite", 2, {"ep": 2}, {"pp": 2}),
    Cell("deepseek_v3_mtp", 2, {"tp": 2}, {"tp": 2}, draft=True),
]
MORE = [
    Cell(V3, 2, {"ep": 2}, {"tp": 4, "rounded": False, "ep": 2}),
    Cell(V3, 2, {"pp": 2}, {"tp": 2, "server": {"attn_dp_size": 2}}),
    Cell("deepseek_v3_deep", 2, {"pp": 2, "vpp": 2}, {"tp": 2}, draft=True),
    Cell("deepseek_v3_mtp", 2, {"pp": 2}, {"tp": 2, "ep": 2}, dtype="bfloat16", draft=True),
    Cell("deepseek_v3_mtp", 2, {"tp": 2}, {"pp": 2}, ignore=NEXT_TOKEN),
    Cell("deepseek_v2", 2, {"pp": 2}, {"tp": 2}),
    Cell("kimi_k2", 1, {}, {"tp": 2, "ep": 2}),
]
PLAIN = [V3, "deepseek_v2", "deepseek_v2_lite"]
FULL = [
    *(Cell(family, world, trainer, engine) for family in PLAIN for world, trainer in MOE[0] for engine in MOE[1]),
    *(
        Cell("deepseek_v3_mtp", world, trainer, engine, draft=True)
        for world, trainer in MOE[0]
        for engine in MOE[1]
        if engine.get("pp", 1) == 1  # SGLang's drafts on pipeline stages are an experiment of its own
    ),
]


@pytest.fixture(scope="module")
def grid(megatron: Megatron, folder: Path) -> Grid:
    return Grid(megatron, folder)


def update(runner: Any, out: str, draft: bool) -> dict[str, Any]:
    """In an engine rank: poisons all weights and what SGLang derives of them, writes what arrived, and lets SGLang
    finish the update."""
    both, rank = runners(runner, draft), world_rank()

    def resident() -> dict[str, torch.Tensor]:
        return {
            ".".join(filter(None, (prefix, path, name))): value.data
            for prefix, one in both
            for path, module in one.model.named_modules()
            for name, value in [*module._parameters.items(), *vars(module).items()]
            if isinstance(value, torch.Tensor)
        }

    held = resident()
    wanted = {name: tensor.clone() for name, tensor in held.items()}
    places = {name: tensor.data_ptr() for name, tensor in held.items()}
    for _, one in both:
        one.weight_updater.begin_weight_update()
    poison(list(held.values()))
    arrived = load_file(Path(out) / f"arrived{rank}.safetensors")
    for name, tensor in arrived.items():
        held[name].copy_(tensor)
    for _, one in both:
        one.weight_updater.end_weight_update(run_post_load=True)
    now = resident()
    return {
        "derived": sorted(name for name in now if places[name] not in {places[other] for other in arrived}),
        "different": [name for name, tensor in wanted.items() if not torch.equal(tensor, now[name])],
        "moved": [name for name, place in places.items() if now[name].data_ptr() != place],
        "names": list(arrived),
    }


@pytest.mark.parametrize("cell", [*cases(SPREAD), *cases(MORE, full=True)])
def test_weights_and_what_sglang_derives_of_them(grid: Grid, tmp_path: Path, cell: Cell) -> None:
    for rank, (layout, tensors) in enumerate(grid.judge(cell)):
        loaded = {spec.name: t for spec, t in zip(layout.params, tensors, strict=True) if spec.loaded}
        save_file({name: t.contiguous() for name, t in loaded.items()}, tmp_path / f"arrived{rank}.safetensors")
        if cell.dtype == "bfloat16":
            biases = [t for name, t in loaded.items() if name.endswith(".e_score_correction_bias")]
            assert {bias.dtype for bias in biases} == {torch.float32}
            assert not any(torch.equal(bias, bias.bfloat16().float()) for bias in biases)  # nothing rounded them
    checkpoint = grid.checkpoint(cell.family, cell.dtype)
    arguments = {"out": str(tmp_path), "draft": cell.draft}
    for rank in shared().run("test_deepseek:update", checkpoint, arguments=arguments, **cell.engine):
        assert rank["different"] == rank["moved"] == []
        assert {name.rpartition(".")[2] for name in rank["derived"]} == {"w_kc", "w_vc"}
        assert ("draft.model.eh_proj.weight" in rank["names"]) is cell.draft


@pytest.mark.parametrize("cell", cases([cell for cell in FULL if cell not in SPREAD + MORE], full=True))
def test_the_full_grid(grid: Grid, cell: Cell) -> None:
    grid.judge(cell)


def test_next_token_weights_are_left_out_by_declaration_only(grid: Grid) -> None:
    """An engine without a draft model does not take them."""
    with pytest.raises(CoverageError, match="ignore="):
        grid.judge(Cell("deepseek_v3_mtp", 2, {"pp": 2}, {"tp": 2}))
