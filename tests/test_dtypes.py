"""The dtype policy: the receiver's dtype wins, and a copy changes it only among fp32, bf16 and fp16."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from layouts import contiguous
from oracle import poison
from replaying import Toy, replay
from safetensors.torch import load_file, save_file
from test_plan import engine, shard
from test_properties import carry
from warm import shared
from weightlink.hooks.errors import LayoutError, PlanMismatch
from weightlink.hooks.geometry import CASTABLE, ITEMSIZE, Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, build_plan
from weightlink.program import DTYPE_NUMBER, verify_receive

WIRE = WireSettings(bucket_bytes=4096, direct_bytes=64)


@pytest.mark.parametrize("target", ITEMSIZE)
@pytest.mark.parametrize("source", ITEMSIZE)
def test_only_floats_are_cast_and_always_by_the_sender(source, target):
    trainers, engines = [shard("w", (4, 5), dtype=source)], engine(shard("w", (4, 5), dtype=target))
    if source != target and not {source, target} <= CASTABLE:
        with pytest.raises(LayoutError, match="only among fp32, bf16 and fp16") as caught:
            build_plan(trainers, engines, WIRE)
        assert (caught.value.expected, caught.value.found) == (target, source)
        return
    plan = build_plan(trainers, engines, WIRE)
    assert plan.total_bytes == 20 * ITEMSIZE[target]
    program, layout = plan.receive_program(0, 0), engines[0].layouts[0]
    verify_receive(program, layout, plan_digest=plan.digest, rank="rank 0")
    assert set(program.copies.dtype.tolist()) == {DTYPE_NUMBER[target]}


def test_a_receiver_refuses_another_dtype_than_its_own():
    """A cast on arrival would be a second rounding, or a quantisation."""
    engines = engine(shard("w", (4, 5), dtype="bfloat16"))
    plan = build_plan([shard("w", (4, 5))], engines, WIRE)
    program = plan.receive_program(0, 0)
    for other in ITEMSIZE:
        if other == "bfloat16":
            continue
        forged = dataclasses.replace(program.copies, dtype=np.full_like(program.copies.dtype, DTYPE_NUMBER[other]))
        with pytest.raises(PlanMismatch, match="wire dtype differs") as caught:
            verify_receive(
                dataclasses.replace(program, copies=forged),
                engines[0].layouts[0],
                plan_digest=plan.digest,
                rank="rank 0",
            )
        assert (caught.value.expected, caught.value.found) == ("bfloat16", other)


def plain_trainer(weights: dict[str, torch.Tensor], dtype: str) -> Layout:
    """One rank that holds everything; the manifest has the engine's dtype for every name."""
    tensors, params, regions = [], [], RegionBuilder()
    for n, (name, tensor) in enumerate(weights.items()):
        shape = tuple(tensor.shape)
        tensors.append(TensorSpec(name, shape, dtype))
        params.append(ParamSpec(name, shape, str(tensor.dtype).removeprefix("torch."), n, 0, contiguous(shape)))
        regions.add(n, n, lo=[0] * len(shape), size=shape, offset=0, stride=contiguous(shape))
    return Layout("trainer 0", tuple(tensors), tuple(params), regions.build())


def test_an_fp32_router_bias_stays_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    """Nobody tells anybody that it is one: the engine's own parameter is fp32, so that fp32 is what is sent."""
    checkpoint = toys.make("deepseek_v3", tmp_path / "deepseek")
    weights = load_file(checkpoint / "model.safetensors")
    (name,) = [n for n in weights if n.endswith("e_score_correction_bias")]
    weights[name] = torch.rand(weights[name].shape, generator=torch.Generator().manual_seed(3)) + 0.1
    assert not torch.equal(weights[name].bfloat16().float(), weights[name])
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    trainer = plain_trainer(weights, "bfloat16")
    specs = [{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in trainer.tensors]
    (tmp_path / "manifest.json").write_text(json.dumps(specs))
    ranks = shared().run("grid:engine_cell", checkpoint, tp=2, arguments={"out": str(tmp_path)})
    layouts = [Layout.unpack((tmp_path / f"engine{rank}.layout").read_bytes()) for rank in range(len(ranks))]
    plan = build_plan([trainer], [EngineLayouts("e", layouts)], WIRE)
    targets: list[list[torch.Tensor]] = []
    for layout in layouts:
        targets.append([torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in layout.params])
        poison(targets[-1])
    carry(plan, [trainer], layouts, [list(weights.values())], targets)
    for rank, layout in enumerate(layouts):
        wanted = load_file(tmp_path / f"engine{rank}.safetensors")
        for number, want in wanted.items():
            assert torch.equal(targets[rank][int(number)], want), layout.params[int(number)].name
        (bias,) = [n for n, p in enumerate(layout.params) if p.name.endswith("e_score_correction_bias")]
        assert layout.params[bias].dtype == "float32"
        assert torch.equal(targets[rank][bias].flatten(), weights[name].flatten())


@pytest.mark.parametrize(("kept", "staged"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_what_goes_through_the_loader_is_fp32_where_the_engine_keeps_fp32(kept, staged):
    """As ``A = -exp(A_log)`` of the Mamba kind: an fp32 parameter that is computed from the tensor."""

    def loader(toy: Any, weights: dict[str, torch.Tensor]) -> None:
        toy.w0.data.copy_(-torch.exp(weights["a"].float()))

    layout = replay(Toy(loader, (5,), dtype=kept), {"a": (5,)}, dtype="bfloat16")
    assert [(p.name, p.dtype) for p in layout.params if p.staged] == [("a", staged)]
