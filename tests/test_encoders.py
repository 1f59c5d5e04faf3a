"""Encoders: block FP8 against a plain quantiser, sharded tensors against whole ones, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import fp8
import pytest
import torch
import toys
from fp8 import quantise
from grid import WIRE, Cell, Grid
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import contiguous
from megatron_cpu import Megatron
from oracle import POISON
from safetensors.torch import load_file
from test_dtypes import plain_trainer
from test_properties import carry
from warm import shared
from weightlink.converters.encoders import choose_encoding, encode_layout, quantised_names
from weightlink.converters.encoders_fp8 import BlockFp8, BlockFp8Encoder
from weightlink.encoded import encode, names_to_encode, require_one_format, require_taken
from weightlink.hooks import messages as m
from weightlink.hooks.errors import ConfigError, CoverageError, LayoutError, PluginError
from weightlink.hooks.geometry import EncodedPart, Layout, Opaque, ParamSpec, Quantised, RegionBuilder, TensorSpec
from weightlink.hooks.manager import PluginManager
from weightlink.plan import EngineLayouts, build_plan, owned_names
from weightlink.program import verify_receive
from weightlink.survey import merge_manifest

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def context(config: dict[str, Any] | None = None, quantization: str = "") -> m.EngineContext:
    return m.EngineContext(
        protocol=m.PROTOCOL, engine="torch", engine_version="0", weightlink_version="0",
        hf_config={} if config is None else {"quantization_config": config}, architecture="Toy", dtype="bfloat16",
        quantization=quantization, tp_size=1, pp_size=1, world=1, device="cpu",
    )  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def tensor(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers of very different size, so that a scale of another block shows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 3)).to(dtype)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (3, 5), (1, 128)])
@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (3, 37, 41), (1, 1)])
@pytest.mark.parametrize("powers", [False, True])
def test_values_and_scales_are_the_plain_quantisers(block, shape, powers):
    values = tensor(shape)
    values[..., 0, 0] = 0
    encoding = BlockFp8(*block, powers_of_two=powers)
    parts = encoding.parts(TensorSpec("x.weight", shape, "bfloat16"))
    assert [p.spec.name for p in parts] == ["x.weight", "x.weight_scale_inv"]
    out = [torch.empty(p.spec.shape, dtype=getattr(torch, p.spec.dtype)) for p in parts]
    encoding.encode(values, out)
    wanted = quantise(values, block, powers_of_two=powers)
    for have, want in zip(out, wanted, strict=True):
        assert have.shape == want.shape
        assert torch.equal(bits(have), bits(want))


def test_a_block_of_zeros_is_zero_and_finite():
    values = torch.zeros(4, 6, dtype=torch.bfloat16)
    values[2:, 3:] = 5
    encoded, scales = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.zeros(2, 2)
    BlockFp8(2, 3).encode(values, [encoded, scales])
    assert scales.isfinite().all()
    assert (scales > 0).all()
    back = encoded.float() * scales.repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert torch.equal(back, values.float())


def test_a_vector_has_no_blocks():
    with pytest.raises(LayoutError, match="matrices only") as caught:
        BlockFp8(128, 128).parts(TensorSpec("norm.weight", (128,), "bfloat16"))
    assert caught.value.tensor == "norm.weight"


# --- choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (BLOCK, BlockFp8(128, 128)),
        ({**BLOCK, "weight_block_size": [32, 64]}, BlockFp8(32, 64)),
        ({**BLOCK, "scale_fmt": "ue8m0", "fmt": "e4m3"}, BlockFp8(128, 128, powers_of_two=True)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, None),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, None),
        ({"quant_method": "compressed-tensors"}, None),
        (None, None),
    ],
)
def test_the_engines_own_config_chooses_the_encoder(config, wanted):
    found = choose_encoding(PluginManager(entry_points=False).encoders(), context(config))
    assert found == (None if wanted is None else ("block-fp8", wanted))


@pytest.mark.parametrize("change", [{"fmt": "e5m2"}, {"scale_fmt": "bf16"}, {"weight_block_size": [128]}])
def test_an_unknown_variant_of_the_format_is_refused(change):
    with pytest.raises(ConfigError):
        BlockFp8Encoder().encoding(context({**BLOCK, **change}))


def test_two_encoders_for_one_engine_are_refused():
    with pytest.raises(ConfigError, match="two encoders"):
        choose_encoding({"a": BlockFp8Encoder(), "b": BlockFp8Encoder()}, context(BLOCK))


def test_engines_of_one_link_have_one_format():
    contexts = [context(BLOCK, "fp8"), context(BLOCK, "fp8")]
    require_one_format(["a", "b"], contexts)
    for other in (context(), context(BLOCK), context({**BLOCK, "weight_block_size": [64, 64]}, "fp8")):
        with pytest.raises(ConfigError, match="same format"):
            require_one_format(["a", "b"], [contexts[0], other])


def observed(quantised: tuple[Quantised, ...] = (), opaque: tuple[Opaque, ...] = ()) -> list[EngineLayouts]:
    layout = Layout("rank 0", (), (), RegionBuilder().build(), opaque=opaque, quantised=quantised)
    return [EngineLayouts("http://e", [Layout("rank 1", (), (), RegionBuilder().build()), layout])]


def test_only_what_the_engine_keeps_quantised_is_encoded():
    plugins = PluginManager(entry_points=False)
    engines = observed((Quantised("b", "float8_e4m3fn"), Quantised("a", "float8_e4m3fn")), (Opaque("a", "cast"),))
    assert names_to_encode(engines, context(BLOCK, "fp8"), plugins) == ("a", "b")
    assert names_to_encode(observed(), context(BLOCK, "fp8"), plugins) == ()
    assert names_to_encode(observed(opaque=(Opaque("a", "-exp"),)), context(), plugins) == ()


@pytest.mark.parametrize("config", [None, BLOCK])
def test_a_quantised_dtype_that_no_encoder_makes_is_refused_by_name(config):
    engines = observed((Quantised("a", "int8"),))
    with pytest.raises(ConfigError, match="no encoder makes that") as caught:
        names_to_encode(engines, context(config), PluginManager(entry_points=False))
    assert caught.value.tensor == "a"
    assert "weightlink_encoders" in caught.value.remedy


def test_one_tensor_in_two_quantised_dtypes_is_refused():
    with pytest.raises(LayoutError, match="several quantised dtypes"):
        quantised_names([observed((Quantised("a", "int8"), Quantised("a", "float8_e4m3fn")))[0].layouts[1]])


def test_plain_numbers_never_meet_a_quantised_parameter():
    """Also when the plan or the program is asked without the steps before."""
    from test_plan import shard

    trainer = shard("w", (4, 5), dtype="bfloat16")
    layout = replace(shard("w", (4, 5), rank="rank 0"), quantised=(Quantised("w", "float8_e4m3fn"),))
    with pytest.raises(LayoutError, match="cast to a quantised dtype"):
        build_plan([trainer], [EngineLayouts("e", [layout])], WIRE)
    plan = build_plan([trainer], [EngineLayouts("e", [replace(layout, quantised=())])], WIRE)
    with pytest.raises(LayoutError, match="cast to a quantised dtype"):
        verify_receive(plan.receive_program(0, 0), layout, plan_digest=plan.digest, rank="rank 0")
    assert Layout.unpack(layout.pack()).quantised == layout.quantised


# --- sharded trainers -----------------------------------------------------------------------------------------------


def trainer(
    pieces: list[tuple[list[int], list[int]]], shape: tuple[int, ...], step: tuple[int, ...] = (1, 1)
) -> Layout:
    """A rank that holds blocks of ``w``, ``(lo, size)`` each, in memory of their own."""
    build, params = RegionBuilder(), []
    for n, (lo, size) in enumerate(pieces):
        build.add(0, n, lo=lo, size=size, step=step, offset=0, stride=contiguous(size))
        params.append(ParamSpec(f"p{n}", tuple(size), "bfloat16", n, 0, contiguous(size)))
    return Layout("trainer 3", (TensorSpec("w", shape, "bfloat16"),), tuple(params), build.build())


def test_pieces_of_one_block_are_put_together_and_others_are_not():
    """Rows of two query groups that Megatron keeps apart: neither is a block, together they are."""
    layout = trainer([([4, 0], [4, 6]), ([0, 0], [4, 6]), ([8, 0], [8, 6])], (20, 6))
    encoded = encode_layout(layout, {"w"}, BlockFp8(8, 8))
    assert [(job.lo, job.size) for job in encoded.jobs] == [((0, 0), (8, 6)), ((8, 0), (8, 6))]
    assert [t.name for t in encoded.layout.tensors] == ["w", "w_scale_inv"]
    assert [t.shape for t in encoded.layout.tensors] == [(20, 6), (3, 1)]


@pytest.mark.parametrize("pieces", [[([4, 0], [8, 6])], [([0, 0], [12, 6])], [([0, 0], [4, 6]), ([8, 0], [8, 6])]])
def test_a_shard_that_cuts_a_block_is_refused_by_name(pieces):
    with pytest.raises(LayoutError, match="cuts through a block") as caught:
        encode_layout(trainer(pieces, (20, 6)), {"w"}, BlockFp8(8, 8))
    assert (caught.value.tensor, caught.value.rank) == ("w", "trainer 3")
    assert "multiples of 8 in dimension 0" in caught.value.expected
    assert "parallel sizes" in caught.value.remedy


@pytest.mark.parametrize(
    ("cell", "shape", "dtype"),
    [
        ((4,), (5, 6), "float32"),
        ((4, 0), (5, 6), "float32"),
        ((4, 6), (5,), "float32"),
        ((4, 6), (6, 1), "float32"),
        ((4, 6), (5, 1), "float8"),
    ],
)
def test_parts_that_do_not_fit_their_tensor_are_the_plugins_fault(cell, shape, dtype):
    class Wrong(BlockFp8):
        def parts(self, spec):
            return (*super().parts(spec)[:1], EncodedPart(TensorSpec("w_scale", shape, dtype), cell))

    with pytest.raises(PluginError, match="w_scale") as caught:
        encode_layout(trainer([([0, 0], [20, 6])], (20, 6)), {"w"}, Wrong(4, 6))
    assert caught.value.tensor == "w"
    assert str(cell) in caught.value.found


def test_interleaved_parts_are_one_box_or_refused():
    whole = trainer([([0, 0], [4, 6]), ([1, 0], [4, 6])], (8, 6), step=(2, 1))
    assert [(job.lo, job.size) for job in encode_layout(whole, {"w"}, BlockFp8(4, 4)).jobs] == [((0, 0), (8, 6))]
    with pytest.raises(LayoutError, match="interleaved") as caught:
        encode_layout(trainer([([0, 0], [4, 6])], (8, 6), step=(2, 1)), {"w"}, BlockFp8(4, 4))
    assert caught.value.tensor == "w"


def test_only_what_is_sent_is_encoded_and_memory_stays():
    layout = trainer([([0, 0], [8, 6]), ([8, 0], [8, 6])], (16, 6))
    encoded = encode_layout(layout, {"w"}, BlockFp8(8, 8))
    live = [tensor((8, 6), 1), tensor((8, 6), 2)]
    second = encoded.jobs[1].params
    first = encoded.tensors(live, set(second))
    assert encoded.nbytes == 8 * 6 + 4
    assert [t.numel() for t in first[2:]] == [0, 0, 48, 1]
    live[1].mul_(2)
    again = encoded.tensors(live, set(second))
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]  # the sender's views stay valid
    assert torch.equal(bits(again[second[1]]), bits(quantise(live[1], (8, 8))[1]))


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([(1, 1), (2, 2), (2, 3), (3, 1)]))
def test_however_it_is_cut_what_arrives_is_the_whole_tensor_encoded(rng, block):
    """Random trainers, cut anywhere: refused only where a rank lacks a part of a block, or holds interleaved parts."""
    manifest = [s for s in cases.random_manifest(rng, "bfloat16") if len(s.shape) >= 2]
    if not manifest:
        return
    trainers = cases.random_side(rng, "trainer", manifest, dtypes=("float32", "bfloat16"), fill=False)
    names = {s.name for s in manifest if rng.random() < 0.7}
    encoding = BlockFp8(*block)
    values = {s.name: tensor(s.shape, n) for n, s in enumerate(manifest)}
    try:
        made = [encode_layout(layout, names, encoding) for layout in trainers]
    except LayoutError:
        rows = [(layout, row) for layout in trainers for row in range(len(layout.regions))]
        assert any(begun(*row, names, block) or stepped(*row, names) for row in rows)
        return
    want = {}
    for spec in manifest:
        parts = encoding.parts(spec) if spec.name in names else ()
        encoded = quantise(values[spec.name], block) if parts else (values[spec.name],)
        want.update(zip([p.spec.name for p in parts] or [spec.name], encoded, strict=True))
    for layout, encoded in zip(trainers, made, strict=True):
        live = cases.memory(layout)
        cases.put(layout, live, values)
        tensors = encoded.tensors(live, set(range(len(encoded.layout.params))))
        flat = [t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0) for t in tensors]
        for row in range(len(encoded.layout.regions)):
            spec = encoded.layout.tensors[int(encoded.layout.regions.tensor[row])]
            param = int(encoded.layout.regions.param[row])
            for index, at in cases.elements(encoded.layout, row):
                have = flat[param][encoded.layout.params[param].start + at]
                assert have.float() == want[spec.name][index].float(), (spec, index)


def stepped(layout: Layout, row: int, names: set[str]) -> bool:
    """Whether a region of an encoded tensor leaves elements out that another may hold."""
    r = layout.regions
    return layout.tensors[int(r.tensor[row])].name in names and bool(((r.size[row] > 1) & (r.step[row] > 1)).any())


def begun(layout: Layout, row: int, names: set[str], block: tuple[int, int]) -> bool:
    """Whether a region begins a block of which its rank does not hold every element."""
    r = layout.regions
    spec = layout.tensors[int(r.tensor[row])]
    if spec.name not in names:
        return False
    held = {
        index
        for other in range(len(r))
        if r.tensor[other] == r.tensor[row]
        for index, _ in cases.elements(layout, other)
    }
    for *stack, i, j in (index for index, _ in cases.elements(layout, row)):
        rows = range(i // block[0] * block[0], min((i // block[0] + 1) * block[0], spec.shape[-2]))
        columns = range(j // block[1] * block[1], min((j // block[1] + 1) * block[1], spec.shape[-1]))
        if any((*stack, a, b) not in held for a in rows for b in columns):
            return True
    return False


# --- real engines ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    with Megatron() as ranks:
        yield Grid(ranks, tmp_path_factory.mktemp("encoders"))


#: ``(family, block, scale format, trainer ranks, Megatron layout, SGLang layout)``
REAL = [
    ("qwen3", 16, None, 2, {"tp": 2}, {"tp": 2}),
    ("qwen3", 32, "ue8m0", 1, {}, {}),
    ("qwen3_moe", 16, None, 2, {"ep": 2}, {"tp": 2}),
]
MORE = [
    ("qwen3", 16, None, 2, {"pp": 2}, {"pp": 2}),
    ("qwen3_moe", 16, None, 2, {"tp": 2, "etp": 1}, {"tp": 2, "ep": 2}),
    ("qwen3_moe", 16, "ue8m0", 2, {"tp": 2}, {}),
]


@pytest.mark.parametrize("cell", [*REAL, *(pytest.param(c, marks=pytest.mark.grid) for c in MORE)], ids=str)
def test_an_fp8_engine_gets_what_it_would_load_itself(grid, tmp_path, cell):
    """The trainer has bf16 weights. The judge is SGLang's own load of a checkpoint that the plain quantiser made."""
    family, size, scale_fmt, world, layout, engine = cell
    skipped = ["lm_head", "model.layers.1.self_attn.o_proj"]
    extra = {} if scale_fmt is None else {"scale_fmt": scale_fmt}
    plain = grid.checkpoint(family, "bfloat16")
    path = fp8.checkpoint(plain, tmp_path / "fp8", [size, size], skipped, **extra)
    trained = grid._trainer(Cell(family, world, layout, engine, dtype="bfloat16"))
    judge(trained.layouts, trained.tensors, path, engine, tmp_path)


@pytest.mark.parametrize("engine", [{"tp": 2}, pytest.param({}, marks=pytest.mark.grid)], ids=str)
def test_fused_latent_projections_and_experts_in_fp8(tmp_path, engine):
    """DeepSeek-V3: q_a and kv_a in one parameter, values and scales; an fp32 router bias. SGLang's scales of a
    quantised KV cache are no weights of the checkpoint."""
    deepseek(tmp_path, 4, engine)


def test_blocks_that_the_engine_does_not_load_are_named(tmp_path):
    """72 rows are 9 blocks of 8. SGLang gives each of two ranks 4 of them, and leaves the last one's scales out."""
    with pytest.raises(CoverageError, match=r"experts.3.up_proj.weight_scale_inv on e: .* takes 128 of 144 elements"):
        deepseek(tmp_path, 8, {"tp": 2})


def deepseek(folder: Path, block: int, engine: dict[str, int]) -> None:
    plain = toys.make("deepseek_v3", folder / "plain")
    path = fp8.checkpoint(plain, folder / "fp8", [block, block], ["lm_head"])
    weights = load_file(plain / "model.safetensors")
    trainer = plain_trainer(weights, "bfloat16")
    judge([trainer], [list(weights.values())], path, engine, folder, declared=("*.k_scale", "*.v_scale"))


def judge(
    trainers: list[Layout],
    live: list[list[torch.Tensor]],
    path: Path,
    engine: dict[str, int],
    folder: Path,
    declared: tuple[str, ...] = (),
) -> None:
    """Fails unless what an engine of ``path`` is sent is what SGLang loads from there, in every parameter."""
    plugins = PluginManager(entry_points=False)

    def load(name: str, over: list[Layout]) -> tuple[list[Layout], list[dict[int, torch.Tensor]], m.EngineContext]:
        out = folder / name
        out.mkdir()
        specs = [{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in merge_manifest(over)]
        (out / "manifest.json").write_text(json.dumps(specs))
        ranks = shared().run("test_encoders:engine_cell", path, arguments={"out": str(out)}, **engine)
        seen = [Layout.unpack((out / f"engine{rank}.layout").read_bytes()) for rank in range(len(ranks))]
        wanted = [load_file(out / f"engine{rank}.safetensors") for rank in range(len(ranks))]
        return seen, [{int(n): t for n, t in rank.items()} for rank in wanted], context(*ranks[0])

    before, _, described = load("plain-names", trainers)
    names = names_to_encode([EngineLayouts("e", before)], described, plugins)
    stored = load_file(path / "model.safetensors")
    assert set(names) == {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    made = [encode(rank, names, described, plugins) for rank in trainers]
    encoded = [e.layout for e in made]
    layouts, wanted, _ = load("encoded-names", encoded)
    engines = [EngineLayouts("e", layouts, declared=declared)]
    require_taken(engines, trainers, encoded)
    plan = build_plan(encoded, engines, WIRE)
    assert {t.name for t in plan.manifest} == set(stored)
    sources = [
        e.tensors(tensors, {int(p) for p in plan.send_program(0, rank).copies.param})
        for rank, (e, tensors) in enumerate(zip(made, live, strict=True))
    ]
    targets = []
    for rank in layouts:
        memory = [torch.empty_strided(p.shape, p.stride, dtype=getattr(torch, p.dtype)) for p in rank.params]
        for target in memory:
            torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage()).fill_(POISON)
        targets.append(memory)
    carry(plan, encoded, layouts, sources, targets, declared)
    quantised, owned = 0, owned_names(engines[0])
    for rank, held in enumerate(wanted):
        for number, want in held.items():
            param = layouts[rank].params[number]
            if param.name not in owned:
                quantised += param.dtype == "float8_e4m3fn"
                assert torch.equal(bits(targets[rank][number]), bits(want)), f"{param.name} on rank {rank}"
    assert quantised >= 7


def engine_cell(runner: Any, out: str) -> list[Any]:
    """Like the grid's, and what the engine says of its quantisation."""
    import grid
    from weightlink.plugins.sglang.adapter import _plain, casts_shown

    with casts_shown():
        grid.engine_cell(runner, out)
    config = runner.model_config
    return [_plain(config.hf_config.to_dict()).get("quantization_config"), config.quantization or ""]
