"""Cells of the grid: a family's checkpoint, a Megatron layout and an SGLang layout.

What travels by the plan, over real Gloo groups, must equal SGLang's own load of the same checkpoint on every rank, bit
for bit. Each side is run once per layout and kept, so that n trainers and m engines start n + m sets of ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import toys
from megatron_cpu import Megatron
from oracle import POISON
from safetensors.torch import load_file, save_file
from warm import shared
from weightlink.converters.megatron import require_one_parameter
from weightlink.handshake import handshake
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.geometry import Layout, ParamSpec, TensorSpec
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, build_plan
from weightlink.plugins.transports import P2P
from weightlink.program import verify_receive
from weightlink.rendezvous import Rendezvous, connect, new_key
from weightlink.survey import merge_manifest
from weightlink.wire import Receiver, Sender

WIRE = WireSettings(bucket_bytes=16384, direct_bytes=8192, max_peers=2)


@dataclass(frozen=True)
class Cell:
    """One comparison.

    :param family: a toy of toys.py
    :param world: trainer ranks
    :param trainer: keyword arguments of the Megatron builder: ``tp``, ``pp``, ``vpp``, ``ep``, ``etp``, ``cp``
    :param engine: ``tp``, ``pp``, ``ep``, ``rounded`` (warm.py), and ``server`` with further SGLang arguments
    :param dtype: of both sides. The weights of a ``float32`` cell are index-coded: every element of the checkpoint is
        another number, so that no swap of equal shapes can pass
    :param ignore: names of the checkpoint that this engine does not load
    :param draft: the engine has a draft model too, made of the checkpoint's next-token layer
    """

    family: str
    world: int = 1
    trainer: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    ignore: tuple[str, ...] = ()
    draft: bool = False

    @property
    def id(self) -> str:
        """For pytest and for the table in the docs."""

        def text(layout: Mapping[str, Any]) -> str:
            flat = {**layout, **layout.get("server", {})}
            flat.pop("server", None)
            return "".join(f"{k}{v}" for k, v in flat.items()) or "one"

        engine = text(self.engine) + ("draft" if self.draft else "")
        return f"{self.family}-{self.world}x{text(self.trainer)}-to-{engine}-{self.dtype}"


def marks(cell: Cell) -> list[pytest.MarkDecorator]:
    """What a cell proves, for the table in the docs."""
    sides = {
        "trainer TP": cell.trainer.get("tp", 1) > 1,
        "trainer PP": cell.trainer.get("pp", 1) > 1,
        "trainer VPP": cell.trainer.get("vpp") is not None,
        "trainer EP": cell.trainer.get("ep", 1) > 1,
        "trainer ETP": cell.trainer.get("etp", cell.trainer.get("tp", 1)) != cell.trainer.get("tp", 1),
        "trainer CP": cell.trainer.get("cp", 1) > 1,
        "engine TP": cell.engine.get("tp", 1) > 1,
        "engine PP": cell.engine.get("pp", 1) > 1,
        "engine EP": cell.engine.get("ep", 1) > 1,
        "engine EPxTP": 1 < cell.engine.get("ep", 1) < cell.engine.get("tp", 1),
        "engine DP attention": cell.engine.get("server", {}).get("attn_dp_size", 1) > 1,
        "engine KV copies": not cell.engine.get("rounded", True)
        and "attn_dp_size" not in cell.engine.get("server", {}),
        "draft": cell.draft,
        "coded": cell.dtype == "float32",
    }
    features = [feature for feature, has in sides.items() if has]
    return [pytest.mark.proves(toys.family_of(cell.family), *features)] if features else []


def cases(cells: Iterable[Cell], *, full: bool = False) -> list[Any]:
    """The cells as parameters of a test; ``full`` for cells of the full grid only."""
    more = [pytest.mark.grid] if full else []
    return [pytest.param(cell, id=cell.id, marks=[*marks(cell), *more]) for cell in cells]


def engine_cell(runner: Any, out: str, draft: bool = False) -> list[str]:
    """In an engine rank's process: its layout over the trainer's manifest, and its parameters as SGLang loaded them."""
    import msgspec
    from oracle import live
    from weightlink.converters.replay import observe
    from weightlink.hooks.geometry import TensorSpec

    rank = world_rank()
    manifest = msgspec.json.decode((Path(out) / "manifest.json").read_bytes(), type=tuple[TensorSpec, ...])
    modules = [(prefix, one.model) for prefix, one in runners(runner, draft)]

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        listed = list(weights)
        for _, model in modules:
            model.load_weights(listed)

    layout = observe(rank=f"rank {rank}", tensors=manifest, load=load, modules=modules)
    values = live(modules, layout.params)
    opaque = {entry.param for entry in layout.opaque}
    dump = {
        str(n): t.detach().clone()
        for n, (p, t) in enumerate(zip(layout.params, values, strict=True))
        if p.loaded and not p.staged and n not in opaque
    }
    (Path(out) / f"engine{rank}.layout").write_bytes(layout.pack())
    save_file(dump, Path(out) / f"engine{rank}.safetensors")
    return [p.name for p in layout.params if p.loaded]


def delivered_cell(runner: Any, out: str, draft: bool) -> list[str]:
    """In an engine rank's process: what arrived goes into poisoned weights, and what was staged through SGLang's own
    loader. Returns what then differs from SGLang's load, opaque destinations included."""
    from oracle import live, poison

    rank = world_rank()
    layout = Layout.unpack((Path(out) / f"engine{rank}.layout").read_bytes())
    arrived = load_file(Path(out) / f"engine{rank}.safetensors")
    modules = [(prefix, one.model) for prefix, one in runners(runner, draft)]
    opaque = {entry.param for entry in layout.opaque}
    resident = [
        (n, param.name, tensor)
        for n, (param, tensor) in enumerate(zip(layout.params, live(modules, layout.params), strict=True))
        if not param.staged and (param.loaded or n in opaque)
    ]
    wanted = [tensor.clone() for _, _, tensor in resident]
    poison([tensor for _, _, tensor in resident])
    for n, _, tensor in resident:
        if n not in opaque:
            tensor.copy_(arrived[str(n)])
    staged = [(param.name, arrived[str(n)]) for n, param in enumerate(layout.params) if param.staged]
    for _, model in modules:
        model.load_weights(iter(staged))
    return [name for (_, name, have), want in zip(resident, wanted, strict=True) if not torch.equal(have, want)]


def runners(runner: Any, draft: bool) -> list[tuple[str, Any]]:
    """The rank's model runners with the prefixes of their parameters. A draft shares embeddings and output layer."""
    if not draft:
        return [("", runner)]
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.moe.utils import draft_model_build_scope

    server = runner.server_args
    with draft_model_build_scope():
        second = type(runner)(
            model_config=ModelConfig.from_server_args(server, model_path=server.model_path, is_draft_model=True),
            mem_fraction_static=0.5,
            gpu_id=0,
            nccl_port=0,
            server_args=server,
            is_draft_worker=True,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        )
    inner = second.model.model
    embeddings = inner.embed_tokens if hasattr(inner, "embed_tokens") else inner.word_embeddings
    embeddings.weight, second.model.lm_head.weight = runner.model.get_embed_and_head()
    return [("", runner), ("draft", second)]


def world_rank() -> int:
    """This engine rank's number."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)


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
            handshake(channel, program.pair_digests(), torch.device("cpu"), deadline)
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


@dataclass
class Trained:
    """The trainer's side of a cell: layouts and weights of its ranks."""

    layouts: list[Layout]
    tensors: list[list[torch.Tensor]]


@dataclass
class Loaded:
    """The engine's side: layouts, and what SGLang loaded, by parameter number."""

    layouts: list[Layout]
    wanted: list[dict[int, torch.Tensor]]
    names: frozenset[str]


class Grid:
    """Runs cells, and keeps what each side gave.

    :param folder: where checkpoints and results go
    """

    def __init__(self, megatron: Megatron, folder: Path) -> None:
        self._megatron = megatron
        self._folder = folder
        self._trained: dict[str, Trained] = {}
        self._loaded: dict[str, Loaded] = {}

    def checkpoint(self, family: str, dtype: str) -> Path:
        """The family's toy, index-coded if ``dtype`` is float32."""
        plain = toys.make(family, self._folder / family)
        return plain if dtype != "float32" else toys.coded(plain, self._folder / f"{family}-coded")

    def judge(self, cell: Cell) -> list[tuple[Layout, list[torch.Tensor]]]:
        """Fails unless every parameter of every rank is what SGLang loaded. Returns each engine rank's layout, and what
        arrived for its ``params``."""
        trained = self._trainer(cell)
        require_one_parameter(trained.layouts)
        manifest = merge_manifest(trained.layouts)
        loaded = self._engine(cell, manifest)
        assert {t.name for t in manifest} == loaded.names
        layouts = [_reordered(layout, manifest) for layout in loaded.layouts]
        plan = build_plan(trained.layouts, [EngineLayouts("engine", layouts)], WIRE, ignore=cell.ignore)
        targets = []
        for layout in layouts:
            memory = [torch.empty_strided(p.shape, p.stride, dtype=getattr(torch, p.dtype)) for p in layout.params]
            for tensor in memory:
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)
            targets.append(memory)
        carry(plan, trained.tensors, targets, layouts)
        for rank, (layout, wanted) in enumerate(zip(layouts, loaded.wanted, strict=True)):
            assert len(wanted) >= 6
            for number, tensor in wanted.items():
                have = targets[rank][number]
                assert torch.equal(_bits(have), _bits(tensor)), f"{layout.params[number].name} on rank {rank}"
        if any(param.staged for layout in layouts for param in layout.params):
            self._deliver(cell, layouts, targets)
        stored = toys.names(self.checkpoint(cell.family, cell.dtype))
        assert {t.name for t in manifest} == stored
        return list(zip(layouts, targets, strict=True))

    def _deliver(self, cell: Cell, layouts: Sequence[Layout], targets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fails unless the engine's own loader completes what arrived."""
        out = Path(mkdtemp(prefix="delivery", dir=self._folder))
        for rank, layout in enumerate(layouts):
            (out / f"engine{rank}.layout").write_bytes(layout.pack())
            held = {str(n): tensor.contiguous() for n, tensor in enumerate(targets[rank])}
            save_file(held, out / f"engine{rank}.safetensors")
        assert self._ranks(cell, "grid:delivered_cell", out) == [[]] * len(layouts)

    def _ranks(self, cell: Cell, function: str, out: Path) -> list[Any]:
        """What ``function`` returns on the engine's ranks."""
        return shared().run(
            function,
            self.checkpoint(cell.family, cell.dtype),
            arguments={"out": str(out), "draft": cell.draft},
            **{**cell.engine, "server": {**toys.SERVER.get(cell.family, {}), **cell.engine.get("server", {})}},
        )

    def _trainer(self, cell: Cell) -> Trained:
        key = f"{cell.family}-{cell.dtype}-{cell.world}-{json.dumps(dict(cell.trainer), sort_keys=True)}"
        if key not in self._trained:
            out = Path(mkdtemp(prefix="trainer", dir=self._folder))
            path = str(self.checkpoint(cell.family, cell.dtype))
            self._megatron.run("layout", cell.world, path=path, out=str(out), dtype=cell.dtype, **cell.trainer)
            layouts = [Layout.unpack((out / f"{rank}.layout").read_bytes()) for rank in range(cell.world)]
            tensors = []
            for rank, layout in enumerate(layouts):
                held = load_file(out / f"{rank}.safetensors")
                tensors.append([_as_live(held[str(n)], param) for n, param in enumerate(layout.params)])
            self._trained[key] = Trained(layouts, tensors)
        return self._trained[key]

    def _engine(self, cell: Cell, manifest: Sequence[TensorSpec]) -> Loaded:
        key = f"{cell.family}-{cell.dtype}-{cell.draft}-{json.dumps(dict(cell.engine), sort_keys=True)}"
        if key not in self._loaded:
            out = Path(mkdtemp(prefix="engine", dir=self._folder))
            specs = [{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in manifest]
            (out / "manifest.json").write_text(json.dumps(specs))
            ranks = len(self._ranks(cell, "grid:engine_cell", out))
            layouts = [Layout.unpack((out / f"engine{rank}.layout").read_bytes()) for rank in range(ranks)]
            wanted = [
                {int(n): t for n, t in load_file(out / f"engine{rank}.safetensors").items()} for rank in range(ranks)
            ]
            self._loaded[key] = Loaded(layouts, wanted, frozenset(t.name for t in manifest))
        return self._loaded[key]


def _reordered(layout: Layout, manifest: Sequence[TensorSpec]) -> Layout:
    """The layout over the same tensors in the manifest's order, which differs between trainers."""
    place = {tensor.name: n for n, tensor in enumerate(manifest)}
    moved = np.array([place[tensor.name] for tensor in layout.tensors], np.int32)
    regions = replace(layout.regions, tensor=moved[layout.regions.tensor])
    return replace(layout, tensors=tuple(manifest), regions=regions)


def _as_live(tensor: torch.Tensor, param: ParamSpec) -> torch.Tensor:
    """A tensor that was written contiguously, with the strides that it had in the trainer."""
    return torch.empty_strided(param.shape, param.stride, dtype=tensor.dtype).copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
