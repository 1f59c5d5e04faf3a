"""The Megatron side on real Megatron-Core ranks: logits, regions, stale weights, refusals, loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import proofs
import pytest
import torch
import toys
from megatron_cpu import Megatron, RankFailed
from safetensors.torch import load_file, save_file
from weightlink.hooks.errors import ConfigError
from weightlink.hooks.geometry import Layout
from weightlink.hooks.manager import PluginManager

IDS = [[i * 7 % 249 for i in range(16)]]


@pytest.fixture(scope="module")
def megatron():
    with Megatron() as ranks:
        yield ranks


def qwen2(path: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start as constants, which would hide a swap
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> a tiny bf16 checkpoint in one file."""
    made = {}

    def get(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = qwen2(path) if family == "qwen2" else toys.make(family, path)
        return made[family]

    return get


def write(path: Path, config: dict, weights: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def coded(source: Path, path: Path, layers: int = 2) -> Path:
    """The same model in fp32, with ``layers`` layers, in which no two elements of the whole checkpoint are equal."""
    config = json.loads((source / "config.json").read_text())
    shapes = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.startswith("model.layers."):
            shapes[name] = tensor.shape
        elif name.startswith("model.layers.0."):
            shapes |= {name.replace(".0.", f".{layer}.", 1): tensor.shape for layer in range(layers)}
    count = sum(shape.numel() for shape in shapes.values())
    assert count < 1 << 24  # exact in fp32
    values = torch.arange(count, dtype=torch.float32).split([shape.numel() for shape in shapes.values()])
    weights = {name: value.reshape(shape) for (name, shape), value in zip(shapes.items(), values, strict=True)}
    return write(path, {**config, "num_hidden_layers": layers, "dtype": "float32"}, weights)


def check_layouts(out: Path, world: int, checkpoint: Path) -> dict[str, int]:
    """Every region holds the slice that it claims; together they tile the checkpoint. Returns each name's copies."""
    weights = load_file(checkpoint / "model.safetensors")
    seen = {name: np.zeros(tensor.shape, np.int64) for name, tensor in weights.items()}
    for rank in range(world):
        layout = Layout.unpack((out / f"{rank}.layout").read_bytes())
        assert layout.rank == f"trainer {rank}"
        tensors = load_file(out / f"{rank}.safetensors")
        mine = {name: np.zeros(tensor.shape, np.int64) for name, tensor in weights.items()}
        for spec in layout.tensors:
            assert spec.shape == tuple(weights[spec.name].shape)
        for row in range(len(layout.regions)):
            r = layout.regions
            spec, param = layout.tensors[r.tensor[row]], layout.params[r.param[row]]
            tensor = tensors[str(r.param[row])]
            assert (tuple(tensor.shape), tensor.stride()) == (param.shape, param.stride)
            dims = len(spec.shape)
            lo, size = r.lo[row, :dims], r.size[row, :dims]
            box = tuple(slice(int(a), int(a + n)) for a, n in zip(lo, size, strict=True))
            held = tensor.as_strided(size.tolist(), r.stride[row, :dims].tolist(), int(r.offset[row]))
            assert torch.equal(held, weights[spec.name][box].to(held.dtype)), (rank, spec.name, box)
            mine[spec.name][box] += 1
        assert all(counts.max() <= 1 for counts in mine.values())
        for name in seen:
            seen[name] += mine[name]
    copies = {name: {*counts.flatten().tolist()} for name, counts in seen.items()}
    assert all(len(counts) == 1 for counts in copies.values()), copies
    assert all(counts != {0} for counts in copies.values()), copies
    return {name: counts.pop() for name, counts in copies.items()}


@pytest.mark.parametrize(
    ("family", "world", "parallel"),
    proofs.rows(
        [
            ("qwen3", 1, {"tp": 1}),
            ("qwen3", 2, {"tp": 2}),
            ("qwen3", 4, {"tp": 4}),
            ("llama_tied", 2, {"tp": 2}),
            ("qwen2", 2, {"tp": 2}),
            ("qwen3_moe", 2, {"tp": 1, "ep": 2}),
            ("qwen3_moe", 2, {"tp": 2, "etp": 1}),
            ("qwen3_moe", 2, {"tp": 1, "ep": 2, "grouped": True}),
            ("llama_bias", 1, {"tp": 1}),
            ("mistral", 1, {"tp": 1}),
            ("gpt_oss", 2, {"tp": 1, "ep": 2}),
            ("gpt_oss", 2, {"tp": 2, "etp": 1}),
            ("qwen3_next", 2, {"tp": 2, "etp": 1}),
            ("qwen3_5", 2, {"tp": 2}),
            ("qwen3_5_moe", 2, {"tp": 1, "ep": 2}),
            ("qwen3_5_text", 1, {"tp": 1}),
            ("qwen3_vl", 2, {"tp": 2}),
            ("qwen3_vl_moe", 2, {"tp": 1, "ep": 2}),
        ],
        "logits",
    ),
)
def test_logits_equal_transformers(megatron, checkpoints, family, world, parallel):
    import transformers

    path = checkpoints(family)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    reference = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        want = reference(torch.tensor(IDS)).logits
    for found in megatron.run("logits", world, path=str(path), ids=IDS, **parallel):
        difference = (torch.tensor(found) - want).abs().max()
        assert difference <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("fill", ["rules", "formula"])
@pytest.mark.parametrize(
    ("family", "world", "layers", "parallel"),
    [
        ("qwen3", 1, 2, {}),
        ("qwen3", 2, 2, {"tp": 2}),
        ("qwen3", 4, 2, {"tp": 4}),  # more ranks than query groups
        ("qwen3", 2, 2, {"pp": 2}),
        ("qwen3", 4, 3, {"tp": 2, "pp": 1}),  # two data-parallel replicas
        ("llama_tied", 2, 2, {"tp": 2}),
        ("llama_tied", 2, 2, {"pp": 2}),
        ("llama_tied", 2, 4, {"pp": 2, "vpp": 2}),
        ("qwen2", 2, 2, {"tp": 2}),
    ],
)
def test_every_region_holds_the_slice_it_claims(megatron, checkpoints, tmp_path, family, world, layers, parallel, fill):
    path = coded(checkpoints(family), tmp_path / "coded", layers)
    megatron.run("layout", world, path=str(path), out=str(tmp_path), fill=fill, **parallel)
    copies = check_layouts(tmp_path, world, path)
    pp, tp = parallel.get("pp", 1), parallel.get("tp", 1)
    replicas = world // pp // tp
    assert copies["model.layers.1.self_attn.k_proj.weight"] == replicas
    assert copies["model.layers.1.input_layernorm.weight"] == replicas * tp
    # Tied embeddings stand on the first and on the last stage.
    assert copies["model.embed_tokens.weight"] == replicas * (2 if family == "llama_tied" and pp == 2 else 1)


def test_expert_regions(megatron, checkpoints, tmp_path):
    path = coded(checkpoints("qwen3_moe"), tmp_path / "coded")
    for parallel in ({"ep": 2}, {"tp": 2, "etp": 2}):
        megatron.run("layout", 2, path=str(path), out=str(tmp_path), **parallel)
        copies = check_layouts(tmp_path, 2, path)
        assert copies["model.layers.1.mlp.experts.3.down_proj.weight"] == 1


def test_grouped_experts_of_transformer_engine_have_the_keys_that_rules_know(megatron):
    from weightlink.converters.families import BUILTIN

    (keys,) = megatron.run("test_megatron_entries:te_grouped", 1)
    base = "decoder.layers.3.mlp.experts.experts"
    assert {f"{base}.{e}.linear_fc1.weight_{half}" for e in (2, 3) for half in "wv"} < set(keys)
    assert len(keys) == 12
    gpt_oss = next(family for family in BUILTIN if family.name == "gpt_oss")
    assert all(gpt_oss.match(key) for key in keys)


def test_bfloat16_and_vocabulary_padding(megatron, checkpoints, tmp_path):
    path = checkpoints("llama_tied")
    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    assert vocabulary % 2 == 1
    names = megatron.run("layout", 2, path=str(path), out=str(tmp_path), dtype="bfloat16", tp=2)
    check_layouts(tmp_path, 2, path)
    last = load_file(tmp_path / "1.safetensors")[str(names[1].index("embedding.word_embeddings.weight"))]
    held = vocabulary - last.shape[0]
    assert last.dtype == torch.bfloat16
    assert 0 < held < last.shape[0]
    assert last[:held].abs().sum() > 0
    assert last[held:].abs().sum() == 0


def test_weights_are_stale_until_made_readable(megatron, checkpoints):
    """The oracle is the optimizer's own fp32 shards, rounded, put together from both ranks."""
    ranks = megatron.run("stale", 2, path=str(checkpoints("qwen3")), overlap=True)
    sizes: Counter = Counter()
    want: dict[str, dict[int, int]] = {}
    for rank in ranks:
        for name, start, values in rank["master"]:
            want.setdefault(name, {}).update(enumerate(values, start))
            sizes[name] += len(values)

    def resident(values: dict[str, list[int]], name: str) -> list[int]:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        return values[name] if name in values else values[name + "_w"] + values[name + "_v"]

    full = {name: [elements[i] for i in range(sizes[name])] for name, elements in want.items()}
    assert len(full) == len(ranks[0]["readable"]) - 2  # gate and up of two layers are one parameter each
    stale = {name for rank in ranks for name in full if resident(rank["resident"], name) != full[name]}
    assert stale, "nothing was stale, so this test shows nothing"
    for rank in ranks:
        assert all(resident(rank["readable"], name) == full[name] for name in full)
        assert rank["unwrapped"].startswith("ConfigError: ")
        assert "overlap_param_gather" in rank["unwrapped"]


def test_nothing_is_pending_without_overlap(megatron, checkpoints):
    for rank in megatron.run("stale", 2, path=str(checkpoints("qwen3")), overlap=False):
        assert rank["resident"] == rank["readable"]
        assert rank["unwrapped"] == ""


def test_training_steps_with_pipeline_stages(megatron, checkpoints):
    path = str(checkpoints("llama_tied"))
    (single,) = megatron.run("train", 1, path=path, steps=4, dtype="float32")
    first, last = megatron.run("train", 2, path=path, steps=4, dtype="float32", pp=2)
    assert single["losses"][-1] < single["losses"][0]
    assert last["losses"] == pytest.approx(single["losses"], rel=1e-3)
    embedding = "embedding.word_embeddings.weight"
    assert first["sums"][embedding] == last["sums"][embedding]
    assert first["sums"][embedding] == pytest.approx(single["sums"][embedding], rel=1e-2)


def test_what_cannot_be_described_is_refused_by_name(megatron, checkpoints):
    (found,) = megatron.run("errors", 1, path=str(checkpoints("qwen3")))
    assert not [fault for fault in found if fault.startswith("nothing wrong")]
    proj = "decoder.layers.0.self_attention.linear_proj.weight"
    for fault, kind, texts in (
        ("tensors before layout", "LayoutError", ["layout()"]),
        ("unknown parameter", "NameMapError", ["decoder.layers.0.surprise", 'Rule("decoder.layers.{L}.surprise"']),
        ("unknown parameter later", "NameMapError", ["decoder.layers.0.surprise"]),
        ("fp8", "LayoutError", [proj, "float8_e4m3fn", "bfloat16"]),
        ("subclass", "LayoutError", [proj, "Quantised"]),
        ("other strides", "LayoutError", [proj, "changed"]),
        ("released", "LayoutError", [proj, "released", "0 bytes"]),
        ("copy", "LayoutError", [proj, "copy"]),
        ("vocabulary too small", "LayoutError", ["embedding.word_embeddings.weight", "257", "256"]),
        ("tied differently", "LayoutError", ["output_layer.weight"]),
    ):
        assert found[fault].startswith(kind + ": ")
        for text in [*texts, "trainer 0"]:
            assert text in found[fault], (fault, text)


def test_rebound_parameters_are_found_again(megatron, checkpoints):
    (same,) = megatron.run("rebind", 1, path=str(checkpoints("llama_tied")))
    assert same
    assert all(same)


def test_checkpoints_that_do_not_fit(megatron, checkpoints, tmp_path):
    source = checkpoints("llama_tied")
    config = json.loads((source / "config.json").read_text())
    good = load_file(source / "model.safetensors")
    up, down = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
    variants = {
        "fits": good,
        "tied twice": {**good, "lm_head.weight": good["model.embed_tokens.weight"].clone()},
        "missing and mis-shaped": {n: t.t().contiguous() if n == up else t for n, t in good.items() if n != down},
        "wrong dtype": {**good, up: good[up].to(torch.int32)},
        "extra": {**good, "model.layers.1.self_attn.sinks": torch.zeros(4)},
    }
    paths = {fault: str(write(tmp_path / fault, config, weights)) for fault, weights in variants.items()}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 64)
    paths["broken"] = str(tmp_path / "broken")
    first, last = megatron.run("load_errors", 2, paths=paths, model=str(source), pp=2)
    for rank in (first, last):
        assert "fits" not in rank
        assert "tied twice" not in rank
        assert rank["fits changed"]
        assert rank["extra"].startswith("NameMapError: ")
        assert "model.layers.1.self_attn.sinks" in rank["extra"]
        assert rank["broken"].startswith("ConfigError: ")
    # Only the last stage holds layer 1; the first learns that its peer failed.
    assert last["missing and mis-shaped"].startswith("NameMapError: ")
    for text in (up, down, str(tuple(good[up].shape)), "trainer 1"):
        assert text in last["missing and mis-shaped"]
    assert not last["missing and mis-shaped changed"]
    assert last["wrong dtype"].startswith("LayoutError: ")
    assert "I32" in last["wrong dtype"]
    for fault in ("missing and mis-shaped", "wrong dtype"):
        assert first[fault].startswith("ConfigError: another rank")


def test_a_load_that_a_rank_never_joins(megatron, checkpoints, tmp_path):
    waiting, _ = megatron.run("absent", 2, path=str(checkpoints("llama_tied")), done=str(tmp_path / "done"))
    assert waiting.startswith("DeadlineExceeded: deadline of 1 s")
    assert "trainer 0" in waiting


def test_a_sharded_checkpoint_with_an_index(megatron, checkpoints, tmp_path):
    source = checkpoints("llama_tied")
    good = load_file(source / "model.safetensors")
    folder = tmp_path / "split"
    folder.mkdir()
    weight_map = {}
    for number, name in enumerate(sorted(good)):
        weight_map[name] = f"model-{number % 3}.safetensors"
    for file in set(weight_map.values()):
        save_file({n: t for n, t in good.items() if weight_map[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    megatron.run("layout", 1, path=str(folder), out=str(tmp_path))
    check_layouts(tmp_path, 1, source)


def test_a_failing_rank_fails_the_case(megatron, checkpoints):
    with pytest.raises(RankFailed, match="rank 0"):
        megatron.run("logits", 1, path="/nonexistent", tp=1, ids=IDS)


def test_other_models_are_left_alone_without_importing_megatron():
    code = """
import sys, torch
from weightlink.hooks.errors import ConfigError
from weightlink.hooks.manager import PluginManager
manager = PluginManager(entry_points=False)
for model in (torch.nn.Linear(2, 3), [torch.nn.Linear(2, 3)], [], 3, None):
    try:
        manager.training_adapter(model)
    except ConfigError:
        continue
    raise SystemExit(f"took {model}")
raise SystemExit("megatron was imported" if "megatron" in sys.modules else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=os.environ)


def test_the_plugin_manager_knows_this_adapter(megatron, checkpoints):
    (found,) = megatron.run("recognised", 1, path=str(checkpoints("qwen3")))
    assert found.pop("mixed") == "ConfigError"
    assert found == dict.fromkeys(("plain", "list", "float16", "ddp"), 21)
    with pytest.raises(ConfigError):
        PluginManager(entry_points=False).training_adapter(object())
