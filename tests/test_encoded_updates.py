"""A quantised engine in whole updates, from connect to commit, and quantised engines that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import rig as rigged
import torch
from fp8 import quantise
from layouts import contiguous
from rig import Rig, TorchEngine
from warm import shared
from weightlink.converters import encoders_fp8
from weightlink.hooks import messages as m
from weightlink.hooks.errors import ConfigError, LayoutError
from weightlink.hooks.geometry import Layout, Opaque, ParamSpec, Quantised, RegionBuilder, TensorSpec

CONFIG = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
PLAIN = (TensorSpec("w", (20, 12), "bfloat16"), TensorSpec("n", (5,), "bfloat16"))
ENCODED = (
    TensorSpec("w", (20, 12), "float8_e4m3fn"),
    TensorSpec("w_scale_inv", (3, 2), "float32"),
    TensorSpec("n", (5,), "bfloat16"),
)


def side(name: str, tensors: tuple[TensorSpec, ...], dtypes: Sequence[str], cuts: Sequence[Any]) -> Layout:
    """A rank that holds rows of some tensors; ``cuts`` has ``(first, last)`` per tensor, or None."""
    build, params = RegionBuilder(), []
    for n, (spec, dtype, cut) in enumerate(zip(tensors, dtypes, cuts, strict=True)):
        if cut is not None:
            size = (cut[1] - cut[0], *spec.shape[1:])
            zeros = [0] * (len(size) - 1)
            build.add(n, len(params), lo=[cut[0], *zeros], size=size, offset=0, stride=contiguous(size))
            params.append(ParamSpec(f"{spec.name}.local", size, dtype, len(params), 0, contiguous(size)))
    return Layout(name, tensors, tuple(params), build.build())


class QuantisedEngine(TorchEngine):
    """Keeps ``w`` in FP8 blocks: its loader would cast plain numbers."""

    config: dict[str, Any] | None = CONFIG

    def context(self) -> m.EngineContext:
        config = {} if self.config is None else {"quantization_config": self.config}
        return msgspec.structs.replace(super().context(), hf_config=config, quantization="fp8", dtype="bfloat16")

    def observe(self, tensors: Sequence[TensorSpec], *rest: Any) -> Layout:
        found = super().observe(tensors, *rest)
        if any(t.name == "w" and t.dtype != "float8_e4m3fn" for t in tensors):
            found.opaque = (Opaque("w", "casting is not quantising"),)
            found.quantised = (Quantised("w", "float8_e4m3fn"),)
        return found


@pytest.fixture
def rig(monkeypatch):
    made = []

    def build(cut: int = 8, **settings: Any) -> Rig:
        monkeypatch.setattr(rigged, "TorchEngine", QuantisedEngine)
        floats = ("float32", "float32")
        trainers = [
            side("trainer 0", PLAIN, floats, [(0, cut), (0, 5)]),
            side("trainer 1", PLAIN, floats, [(cut, 20), None]),
        ]
        kinds = [t.dtype for t in ENCODED]
        engine = [
            side("rank 0", ENCODED, kinds, [(0, 8), (0, 1), (0, 5)]),
            side("rank 1", ENCODED, kinds, [(8, 20), (1, 3), (0, 5)]),
        ]
        rig = Rig(trainers, {"http://e0": engine}, **settings)
        rig.plugins.register(encoders_fp8, origin="weightlink", name="fp8")
        made.append(rig)
        return rig

    yield build
    for rig in made:
        rig.close()


def test_an_fp8_engine_gets_fresh_values_and_scales_with_every_push(rig):
    rig = rig()
    rig.connect()
    ranks = rig.engines["http://e0"].adapters
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        w, n = torch.randn(20, 12, generator=generator) * version, torch.randn(5, generator=generator)
        rig.trainers[0].params[0].copy_(w[:8])
        rig.trainers[0].params[1].copy_(n)
        rig.trainers[1].params[0].copy_(w[8:])
        for rank in ranks:
            for param in rank.params:
                param.view(torch.uint8).fill_(0x5B)
        rig.push(version)
        encoded, scales = quantise(w.bfloat16(), (8, 8))  # canonical numbers are bf16, whatever the trainer keeps
        for rank, first, last in ((0, 0, 8), (1, 8, 20)):
            have = ranks[rank].params
            assert torch.equal(have[0].view(torch.uint8), encoded[first:last].view(torch.uint8))
            assert torch.equal(have[1], scales[first // 8 : -(-last // 8)])
            assert torch.equal(have[2], n.bfloat16())
    assert [log for log in ranks[0].log if log == "0 observe"] == ["0 observe"] * 2


def test_a_trainers_shard_that_cuts_a_block_is_refused_at_connect(rig):
    rig = rig(cut=12)
    with pytest.raises(LayoutError, match="cuts through a block") as caught:
        rig.connect()
    assert (caught.value.tensor, caught.value.rank) == ("w", "trainer 0")


@pytest.mark.parametrize("config", [None, {"quant_method": "mxfp8"}, {"quant_method": "fp8"}])
def test_a_quantised_engine_that_no_encoder_knows_is_refused_before_it_is_paused(rig, monkeypatch, config):
    monkeypatch.setattr(QuantisedEngine, "config", config)
    rig = rig()
    with pytest.raises(ConfigError, match=r"quantised \(fp8\), and no encoder") as caught:
        rig.connect()
    assert caught.value.rank == "http://e0"
    assert "weightlink_encoders" in caught.value.remedy
    assert not any("observe" in line for line in rig.engines["http://e0"].log)


def test_an_engine_that_does_not_take_the_encoded_form_is_refused(rig, monkeypatch):
    def stubborn(self: Any, tensors: Sequence[TensorSpec], *rest: Any) -> Layout:
        found = TorchEngine.observe(self, tensors, *rest)
        found.opaque = (Opaque("w", "float8_e4m3fn cast to bfloat16"),)
        if all(t.dtype == "bfloat16" for t in tensors):
            found.quantised = (Quantised("w", "float8_e4m3fn"),)
        return found

    monkeypatch.setattr(QuantisedEngine, "observe", stubborn)
    with pytest.raises(LayoutError, match="does not take an encoded tensor") as caught:
        rig().connect()
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_int8"])
def test_an_engine_that_sglang_quantised_online_shows_no_place_for_plain_numbers(tmp_path, quantization):
    """SGLang quantises after it has loaded. Nothing may then look like a copy from bf16 into what it made."""
    import toys

    (found,) = shared().run(
        "test_encoded_updates:online_cell",
        toys.make("qwen3", tmp_path / "qwen3"),
        server={"quantization": quantization},
    )
    assert found["quantization"] == quantization
    assert found["rewritten"] >= 8
    assert found["copied"] == []
    assert found["lost"] >= 14


def online_cell(runner: Any) -> dict[str, Any]:
    """What a replay of bf16 names finds in an engine that was quantised after its load."""
    from safetensors import safe_open
    from weightlink.converters.replay import observe
    from weightlink.hooks.geometry import CASTABLE

    with safe_open(f"{runner.server_args.model_path}/model.safetensors", "pt") as file:
        specs = [TensorSpec(n, tuple(file.get_slice(n).get_shape()), "bfloat16") for n in file.keys()]  # noqa: SIM118
    model = runner.model
    layout = observe(rank="rank 0", tensors=specs, load=model.load_weights, modules=[("", model)])
    touched = {layout.params[int(p)] for p in layout.regions.param}
    return {
        "quantization": runner.model_config.quantization,
        "rewritten": sum(p.dtype not in CASTABLE for p in layout.params if p.loaded),
        "copied": [p.name for p in touched if p.dtype not in CASTABLE],
        "lost": sum(not o.delivered for o in layout.opaque),
    }
