"""Mixture-of-experts families and dense GLM-4: names as Transformer Engine has them, and what a router learns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proofs
import pytest
import torch
import toys
from megatron_cpu import Megatron
from safetensors import safe_open
from test_families import FAMILIES, Entry, read, rows
from warm import shared
from weightlink.converters.families.base import choose_family
from weightlink.converters.megatron import sizes_of
from weightlink.plugins.megatron.cpu.moe import moe_options

IDS = [[i * 7 % 249 for i in range(16)]]


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


def whole(key: str, *shape: int) -> Entry:
    """A tensor that one rank holds whole, every element another number."""
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return Entry(key, numbers, shape, (0,) * len(shape), allow_shape_mismatch="embedding" in key or "output" in key)


def transformer_engine(hf: dict[str, Any], moe: dict[str, Any]) -> Iterator[Entry]:
    """The entries of a model with Transformer Engine's modules, and without ``singleton_local_shards`` for MLPs."""
    hidden, head = hf["hidden_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    bias = hf.get("attention_bias") or hf.get("use_qkv_bias") or hf["architectures"][0].startswith("Qwen2")
    yield whole("embedding.word_embeddings.weight", hf["vocab_size"] + 6, hidden)
    yield whole("output_layer.weight", hf["vocab_size"] + 6, hidden)
    yield whole("decoder.final_layernorm.weight", hidden)
    for layer in range(hf["num_hidden_layers"]):
        base = f"decoder.layers.{layer}."
        yield whole(base + "self_attention.linear_qkv.layer_norm_weight", hidden)
        yield whole(base + "self_attention.linear_qkv.weight", (heads + 2 * groups) * head, hidden)
        yield whole(base + "self_attention.linear_proj.weight", hidden, heads * head)
        if bias:
            yield whole(base + "self_attention.linear_qkv.bias", (heads + 2 * groups) * head)
        if hf.get("use_qk_norm"):
            yield whole(base + "self_attention.q_layernorm.weight", head)
            yield whole(base + "self_attention.k_layernorm.weight", head)
        if hf["architectures"][0] == "Glm4ForCausalLM":
            yield whole(base + "self_attention.post_self_attn_layernorm.weight", hidden)
            yield whole(base + "mlp.post_mlp_layernorm.weight", hidden)
        if not moe or not moe["moe_layer_freq"][layer]:
            yield whole(base + "mlp.linear_fc1.layer_norm_weight", hidden)
            yield whole(base + "mlp.linear_fc1.weight", 2 * hf["intermediate_size"], hidden)
            yield whole(base + "mlp.linear_fc2.weight", hidden, hf["intermediate_size"])
            continue
        yield whole(base + "pre_mlp_layernorm.weight", hidden)
        yield whole(base + "mlp.router.weight", moe["num_moe_experts"], hidden)
        if moe.get("moe_router_enable_expert_bias"):
            yield whole(base + "mlp.router.expert_bias", moe["num_moe_experts"])
        for expert in range(moe["num_moe_experts"]):
            one, width = f"{base}mlp.experts.experts.{expert}.", moe["moe_ffn_hidden_size"]
            yield whole(one + "linear_fc1.weight_w", width, hidden)
            yield whole(one + "linear_fc1.weight_v", width, hidden)
            yield whole(one + "linear_fc2.weight", hidden, width)
        shared = moe.get("moe_shared_expert_intermediate_size")
        if shared:
            yield whole(base + "mlp.shared_experts.linear_fc1.weight", 2 * shared, hidden)
            yield whole(base + "mlp.shared_experts.linear_fc2.weight", hidden, shared)
        if moe.get("moe_shared_expert_gate"):
            yield whole(base + "mlp.shared_experts.gate_weight", 1, hidden)


TOYS = ["qwen2_moe", "mixtral", "glm4_moe", "glm4_moe_air", "glm4", "glm", "bailing_moe", "bailing_moe_v2"]


@pytest.mark.parametrize("toy", proofs.rows([(name,) for name in TOYS], "rules"))
def test_names_of_transformer_engine_cover_the_checkpoint_once(toy: str, folder: Path) -> None:
    path = toys.make(toy, folder / toy)
    hf = json.loads((path / "config.json").read_text())
    hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    moe = moe_options(hf)
    config = SimpleNamespace(
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        **moe,
    )
    family = choose_family(FAMILIES, hf["architectures"][0])
    layout, _ = read(list(transformer_engine(hf, moe)), family, **sizes_of(config, hf))
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        stored = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    assert {spec.name: spec.shape for spec in layout.tensors} == stored
    held: Counter[str] = Counter()
    for row in range(len(layout.regions)):
        held[layout.tensors[layout.regions.tensor[row]].name] += int(layout.regions.size[row].prod())
    assert dict(held) == {name: torch.Size(shape).numel() for name, shape in stored.items()}


@pytest.mark.proves("bailing_moe", "rules")
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_bailing_keeps_all_queries_then_all_keys_then_all_values(kind: str) -> None:
    groups, per_group, head = 3, 2, 4
    total = groups * (per_group + 2) * head
    key = f"decoder.layers.5.self_attention.linear_qkv.{kind}"
    everything = torch.arange(float(total)) if kind == "bias" else torch.arange(2.0 * total).reshape(total, 2)
    sizes = {"groups": groups, "q": per_group * head, "k": head, "v": head}
    grouped = everything.unflatten(0, (groups, per_group + 2, head))
    parts = (grouped[:, :per_group], grouped[:, per_group : per_group + 1], grouped[:, per_group + 1 :])
    want = torch.cat([part.flatten(0, 2) for part in parts])
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for start, end in ((0, 7), (7, 30), (30, total)):
        entry = Entry(key, everything[start:end], tuple(everything.shape), (start, *[0] * (everything.dim() - 1)))
        found |= rows(*read([entry], "bailing_moe", **sizes))
    assert len(found) == everything.numel()
    for (name, index), value in found.items():
        assert name == f"model.layers.5.attention.query_key_value.{kind}"
        assert value == want[index]


@pytest.mark.proves("glm4", "rules")
def test_glm_keeps_gate_and_up_in_one_matrix() -> None:
    gate, up = torch.arange(12.0).reshape(6, 2), 100 + torch.arange(12.0).reshape(6, 2)
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    want = torch.cat([gate, up])
    one = [Entry(key, gate[3:], (12, 2), (3, 0)), Entry(key, up[3:], (12, 2), (9, 0))]
    two = [Entry(key + "_w", gate[3:], (6, 2), (3, 0)), Entry(key + "_v", up[3:], (6, 2), (3, 0))]
    for entries in (one, two):
        found = rows(*read(entries, "glm4", ffn=6))
        assert {index[0] for _, index in found} == {3, 4, 5, 9, 10, 11}
        assert all(value == want[index] for (_, index), value in found.items())


@pytest.mark.parametrize(
    ("toy", "world", "parallel"),
    proofs.rows(
        [
            ("qwen2_moe", 1, {"tp": 1}),
            ("qwen2_moe", 4, {"tp": 2, "ep": 2, "etp": 2}),
            ("mixtral", 2, {"tp": 2, "ep": 2, "etp": 1}),
            ("glm4_moe", 2, {"tp": 1, "ep": 1, "etp": 2}),
            ("glm4_moe", 4, {"tp": 2, "ep": 4, "etp": 1}),
            ("glm4_moe_air", 2, {"tp": 1, "ep": 2}),
            ("glm4", 2, {"tp": 2}),
            ("glm", 1, {"tp": 1}),
        ],
        "logits",
    ),
)
def test_logits_equal_transformers(
    megatron: Megatron, folder: Path, toy: str, world: int, parallel: dict[str, int]
) -> None:
    from transformers import AutoModelForCausalLM

    path = toys.make(toy, folder / toy)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        want = reference(torch.tensor(IDS)).logits
    for found in megatron.run("logits", world, path=str(path), ids=IDS, **parallel):
        difference = (torch.tensor(found) - want).abs().max()
        assert difference <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("toy", ["bailing_moe", "bailing_moe_v2"])
def test_logits_equal_sglangs_own(megatron: Megatron, folder: Path, toy: str) -> None:
    """For a family that transformers does not have."""
    path = toys.make(toy, folder / toy)
    prompts = [IDS[0][:5], IDS[0]]
    (wanted,) = shared().run("forward:logits", path, arguments={"prompts": prompts}, server={"dtype": "float32"})
    (found,) = megatron.run("logits", 1, path=str(path), ids=IDS, tp=1)
    for prompt, want in zip(prompts, map(torch.tensor, wanted), strict=True):
        have = torch.tensor(found[0][len(prompt) - 1])
        want = want[: len(have)]
        assert (have - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_the_linear_variants_loader_is_followed(folder: Path, sizes: dict[str, int]) -> None:
    """Linear attention beside latent attention; Megatron-Core has no linear attention of this kind to send it from."""
    path = toys.make("bailing_moe_linear", folder / "linear")
    ranks = shared().run("test_replay_sglang:cell", path, server={"disable_radix_cache": True}, **sizes)
    for rank in ranks:
        assert rank["unchanged"]
        assert rank["opaque"] == []
        assert rank["different"] == []
        assert rank["params"] >= 11
    assert set.intersection(*(set(rank["unused"]) for rank in ranks)) == set()
    assert {name.rpartition(".")[2] for rank in ranks for name in rank["derived"]} == {"w_kc", "w_vc"}


def test_a_head_that_the_loader_normalises_goes_through_the_loader(folder: Path) -> None:
    path = toys.make("bailing_moe_norm_head", folder / "norm_head")
    ranks = shared().run("test_delivery:cell", path, tp=2, arguments={"kind": "plain"})
    for rank in ranks:
        assert rank["different"] == []
        assert rank["staged"] == ["lm_head.weight"]
        assert {name for name, _ in rank["opaque"]} == {"lm_head.weight"}
        assert all(delivered for _, delivered in rank["opaque"])
        assert rank["calls"]["load"] == 1


def learned_bias(path: str, **parallel: Any) -> dict[str, Any]:
    """On a Megatron rank: the correction biases that the adapter gives before and after training, and the modules'."""
    from megatron_worker import build
    from weightlink.converters.checkpoint import context_from_checkpoint
    from weightlink.hooks.deadline import Deadline
    from weightlink.plugins.megatron import MegatronAdapter, load_hf
    from weightlink.plugins.megatron import cpu as megatron_cpu

    chunks = build(path, "bfloat16", **parallel)
    load_hf(chunks, path, timeout=30)
    ddp, optimizer = megatron_cpu.wrap_for_training(chunks, lr=1e-3)
    adapter = MegatronAdapter(ddp)
    described = adapter.layout(context_from_checkpoint(Path(path)), None)

    def biases() -> dict[str, list[float]]:
        adapter.make_readable(Deadline.after(30))
        pairs = zip(described.params, adapter.tensors(), strict=True)
        return {param.name: tensor.tolist() for param, tensor in pairs if param.name.endswith("expert_bias")}

    before = biases()
    ids = (torch.arange(24) * 7 % 200).reshape(2, 12)
    megatron_cpu.train_step(ddp, optimizer, [(ids, ids.roll(-1, 1))])
    after = biases()
    # A trainer may cast the whole model again, the biases too; Megatron then makes new fp32 memory for them.
    for chunk in chunks:
        chunk.bfloat16()
    cast = biases()
    own = [b.tolist() for chunk in chunks for name, b in chunk.named_buffers() if name.endswith("expert_bias")]
    dtypes = {param.dtype for param in described.params if param.name.endswith("expert_bias")}
    return {"before": before, "after": after, "cast": cast, "own": own, "dtypes": sorted(dtypes)}


@pytest.mark.parametrize("parallel", [{"ep": 2}, {"pp": 2}], ids=["ep2", "pp2"])
def test_a_routers_bias_is_read_live_and_in_float32(megatron: Megatron, folder: Path, parallel: dict[str, int]) -> None:
    path = toys.make("glm4_moe", folder / "glm4_moe")
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        stored = opened.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    results = megatron.run("test_moe:learned_bias", 2, path=str(path), **parallel)
    key = "decoder.layers.1.mlp.router.expert_bias"
    for result in results[-1:] if "pp" in parallel else results:
        assert result["dtypes"] == ["float32"]
        assert result["before"] == {key: stored.tolist()}
        assert result["after"][key] != stored.tolist()
        rounded = torch.tensor(result["after"][key]).bfloat16().float().tolist()
        assert result["cast"] == {key: rounded}
        assert result["own"] == [rounded]
    if "pp" in parallel:
        assert results[0]["before"] == {}
