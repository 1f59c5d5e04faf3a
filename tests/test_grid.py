"""Trainer layout x engine layout on real Megatron ranks and real SGLang model runners, without servers: what travels by
the plan, over real Gloo groups, must equal SGLang's own load of the same checkpoint on every rank, bit for bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from megatron_cpu import Megatron
from oracle import POISON
from safetensors.torch import load_file, save_file
from warm import shared
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.geometry import Layout
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, build_plan, merge_manifest
from weightlink.plugins.transports import P2P
from weightlink.program import verify_receive
from weightlink.rendezvous import Rendezvous, connect, new_key
from weightlink.wire import Receiver, Sender, handshake

WIRE = WireSettings(bucket_bytes=16384, direct_bytes=8192, max_peers=2)


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid")


def engine_cell(runner: Any, out: str) -> list[str]:
    """In an engine rank's process: its layout over the trainer's manifest, and its parameters as SGLang loaded them."""
    import msgspec
    from oracle import live
    from sglang.srt.runtime_context import get_parallel
    from weightlink.converters.replay import observe
    from weightlink.hooks.geometry import TensorSpec

    parallel = get_parallel()
    rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    manifest = msgspec.json.decode((Path(out) / "manifest.json").read_bytes(), type=tuple[TensorSpec, ...])
    model = runner.model
    layout = observe(rank=f"rank {rank}", tensors=manifest, load=model.load_weights, modules=[("", model)])
    values = live([("", model)], layout.params)
    dump = {str(n): t.detach().clone() for n, (p, t) in enumerate(zip(layout.params, values, strict=True)) if p.loaded}
    (Path(out) / f"engine{rank}.layout").write_bytes(layout.pack())
    save_file(dump, Path(out) / f"engine{rank}.safetensors")
    return [p.name for p in layout.params if p.loaded]


def carry(
    plan: Plan, sources: list[list[torch.Tensor]], targets: list[list[torch.Tensor]], layouts: list[Layout]
) -> None:
    """Every rank in a thread, over real groups, by its own program."""
    deadline = Deadline.after(60)
    listener, key = Rendezvous.listen("127.0.0.1", deadline), new_key()
    size = len(sources) + len(targets)
    failed: list[BaseException] = []

    def member(rank: int) -> None:
        try:
            channel = P2P().open(
                connect(listener.host, listener.port, deadline), key=key, rank=rank, size=size, host="127.0.0.1",
                device=torch.device("cpu"), wire=WIRE, deadline=deadline,
            )  # fmt: skip
            engine = rank - len(sources)
            program = plan.send_program(0, rank) if engine < 0 else plan.receive_program(0, engine)
            handshake(channel, program, torch.device("cpu"), deadline)
            if engine < 0:
                Sender(program, WIRE, torch.device("cpu")).run(sources[rank], channel, "update", deadline)
            else:
                verify_receive(program, layouts[engine], plan_digest=plan.digest, rank=f"rank {engine}")
                receiver = Receiver(program, layouts[engine].fills, WIRE, torch.device("cpu"))
                receiver.run(targets[engine], channel, "update", deadline)
                receiver.check()
            channel.barrier("the end", deadline)
            channel.close()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    listener.close()
    if failed:
        raise failed[0]


CELLS = [
    ("qwen3", 2, {"tp": 2}, {"pp": 2}),
    ("qwen3", 2, {"pp": 2}, {"tp": 2, "pp": 2}),
    ("qwen3_deep", 2, {"pp": 2, "vpp": 2}, {"tp": 2}),
    ("qwen3_deep", 2, {"pp": 2, "vpp": 2}, {"pp": 2}),
    ("qwen3_deep", 1, {}, {"pp": 2}),
    ("llama_tied", 2, {"pp": 2}, {"tp": 2}),
    ("llama_tied", 2, {"tp": 2}, {"pp": 2}),
    ("qwen2", 2, {"tp": 2}, {"tp": 2}),
    ("qwen2", 2, {"pp": 2}, {}),
    ("qwen3_moe", 2, {"ep": 2}, {"tp": 2}),
    ("qwen3_moe", 1, {}, {"tp": 2, "ep": 2}),
    ("qwen3_moe_uneven", 2, {"ep": 2}, {"tp": 2}),
    ("qwen3_moe_uneven", 2, {"tp": 2}, {"pp": 2}),
]


@pytest.mark.parametrize(("family", "world", "trainer", "engine"), CELLS, ids=[f"{f}-{t}-{e}" for f, _, t, e in CELLS])
def test_what_travels_equals_sglangs_own_load(megatron, folder, tmp_path, family, world, trainer, engine):
    checkpoint = toys.make(family, folder / family)
    megatron.run("layout", world, path=str(checkpoint), out=str(tmp_path), dtype="bfloat16", **trainer)
    trainers = [Layout.unpack((tmp_path / f"{r}.layout").read_bytes()) for r in range(world)]
    sources = []
    for rank, layout in enumerate(trainers):
        tensors = load_file(tmp_path / f"{rank}.safetensors")
        sources.append([tensors[str(n)] for n in range(len(layout.params))])
    manifest = merge_manifest(trainers)
    specs = [{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in manifest]
    (tmp_path / "manifest.json").write_text(json.dumps(specs))

    names = shared().run("test_grid:engine_cell", checkpoint, arguments={"out": str(tmp_path)}, **engine)
    layouts = [Layout.unpack((tmp_path / f"engine{r}.layout").read_bytes()) for r in range(len(names))]
    plan = build_plan(trainers, [EngineLayouts("engine", layouts)], WIRE)
    wanted = [load_file(tmp_path / f"engine{r}.safetensors") for r in range(len(names))]
    targets = []
    for rank, layout in enumerate(layouts):
        memory = [torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in layout.params]
        for tensor in memory:
            tensor.view(-1).view(torch.uint8).fill_(POISON)
        targets.append(memory)
        assert len(wanted[rank]) >= 6
    carry(plan, sources, targets, layouts)
    for rank, layout in enumerate(layouts):
        for number, tensor in wanted[rank].items():
            have = targets[rank][int(number)]
            assert torch.equal(have.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), (
                f"{layout.params[int(number)].name} on rank {rank}"
            )
    stored = load_file(checkpoint / "model.safetensors")
    assert {t.name for t in manifest} == set(stored) - ({"lm_head.weight"} if "tied" in family else set())
