"""Tensors that are cut over ranks, told twice: as weightlink's layouts and as awex's metadata."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.survey import merge_manifest

DTYPE = "bfloat16"

Replica = list[tuple[int, int, int]]
"""One full copy: rank, first index and size along the cut dimension."""


@dataclass
class Cut:
    """A canonical tensor, and who holds which part of it on either side."""

    name: str
    shape: tuple[int, ...]
    dim: int
    trainer: list[Replica]
    engine: list[Replica]


@dataclass
class Case:
    """A trainer and equal engines.

    :param trainers: ranks of the trainer
    :param ranks: ranks of one engine
    :param engines: how many of them
    """

    trainers: int
    ranks: int
    engines: int
    cuts: list[Cut] = field(default_factory=list)

    def layouts(self) -> tuple[list[Layout], list[Layout]]:
        """Of every trainer rank, over its own tensors, and of every rank of one engine, over all."""
        specs = [TensorSpec(cut.name, cut.shape, DTYPE) for cut in self.cuts]
        trainers = [
            _layout(f"trainer {rank}", [specs[n] for n in mine], [(self.cuts[n], *at) for n, at in mine.items()])
            for rank, mine in enumerate(self._held(self.trainers, [cut.trainer for cut in self.cuts]))
        ]
        manifest = merge_manifest(trainers)
        place = {cut.name: n for n, cut in enumerate(self.cuts)}
        cuts = [self.cuts[place[spec.name]] for spec in manifest]
        engine = [
            _layout(f"rank {rank}", manifest, [(cuts[n], *at) for n, at in mine.items()], list(mine))
            for rank, mine in enumerate(self._held(self.ranks, [cut.engine for cut in cuts]))
        ]
        return trainers, engine

    @staticmethod
    def _held(ranks: int, replicas: Sequence[Sequence[Replica]]) -> list[dict[int, tuple[int, int]]]:
        """Per rank, the tensors that it holds a part of: first index and size."""
        held: list[dict[int, tuple[int, int]]] = [{} for _ in range(ranks)]
        for number, of_tensor in enumerate(replicas):
            for replica in of_tensor:
                for rank, lo, size in replica:
                    held[rank][number] = (lo, size)
        return held

    def metadata(self) -> tuple[list[Any], list[Any]]:
        """The same for awex: of one engine, and of the trainer."""
        return (
            [_meta(cut, cut.engine, self.ranks) for cut in self.cuts],
            [_meta(cut, cut.trainer, self.trainers) for cut in self.cuts],
        )


def _layout(
    who: str, tensors: Sequence[TensorSpec], parts: Sequence[tuple[Cut, int, int]], numbers: Sequence[int] | None = None
) -> Layout:
    """Every part is a parameter of its own. ``numbers`` are the parts' tensors; one after the other if left out."""
    regions, params = RegionBuilder(), []
    for n, (cut, lo, size) in enumerate(parts):
        shape = tuple(size if d == cut.dim else length for d, length in enumerate(cut.shape))
        stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        regions.add(
            n if numbers is None else numbers[n],
            n,
            lo=[lo if d == cut.dim else 0 for d in range(len(shape))],
            size=shape,
            step=[1] * len(shape),
            offset=0,
            stride=stride,
        )
        params.append(ParamSpec(cut.name, shape, DTYPE, n, 0, stride))
    return Layout(who, tuple(tensors), tuple(params), regions.build())


def _meta(cut: Cut, replicas: Sequence[Replica], world: int) -> Any:
    import torch
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
    from awex.sharding.param_sharding import ShardingType

    made = []
    for replica in replicas:
        shards = []
        for n, (rank, lo, size) in enumerate(replica):
            shape = tuple(size if d == cut.dim else length for d, length in enumerate(cut.shape))
            shards.append(
                ParameterShardMeta(
                    tp_rank=n, attn_tp_rank=n, pp_rank=0, ep_rank=0, ep_tp_rank=0, global_rank=rank, world_size=world,
                    engine_rank=0, name=cut.name, shape=shape, numel=math.prod(shape), dtype=torch.bfloat16,
                    global_offset=tuple(lo if d == cut.dim else 0 for d in range(len(shape))),
                    sharding_type=ShardingType.TP_SHARDING if len(replica) > 1 else ShardingType.NO_SHARDING,
                    num_shards=len(replica), sharding_dim=cut.dim,
                )
            )  # fmt: skip
        made.append(ParameterReplicaMeta(shards=shards))
    everything = [shard for replica in made for shard in replica.shards]
    return ParameterMeta(
        name=cut.name, global_numel=math.prod(cut.shape), global_shape=cut.shape, dtype=torch.bfloat16,
        shards=everything, replicas=made,
    )  # fmt: skip


def split(length: int, ranks: Sequence[int]) -> Replica:
    """Equal parts, in order."""
    size = length // len(ranks)
    return [(rank, n * size, size) for n, rank in enumerate(ranks)]


def whole(length: int, ranks: Sequence[int]) -> list[Replica]:
    """A full copy on every rank."""
    return [[(rank, 0, length)] for rank in ranks]


def matrices(tensors: int, ways: int, replicas: int, ranks: int, engines: int) -> Case:
    """``tensors`` matrices, cut ``ways`` times along rows or columns in turn, the trainer's in several replicas."""
    case = Case(ways * replicas, ranks, engines)
    for n in range(tensors):
        shape, dim = ((48 * ways, 32 * ways) if n % 3 else (80 * ways, 16 * ways)), n % 2
        held = [split(shape[dim], range(ways * r, ways * (r + 1))) for r in range(replicas)]
        case.cuts.append(Cut(f"layers.{n}.weight", shape, dim, held, [split(shape[dim], range(ranks))]))
    return case


def mixture(layers: int, experts: int, hidden: int = 7168, inter: int = 2048, vocab: int = 163840) -> Case:
    """A mixture of experts of Kimi-K2's class: TP8 PP8 EP32 on 256 ranks to EP128 with data-parallel attention."""
    stages, tp, ranks = 8, 8, 128
    per_stage = 256 // stages
    case = Case(256, ranks, 1)
    everyone = list(range(ranks))

    def dense(name: str, stage: int, shape: tuple[int, ...], dim: int, *, cut: bool, spread: bool = False) -> None:
        first = stage * per_stage
        groups = [range(first + g, first + g + tp) for g in range(0, per_stage, tp)]
        held = (
            [split(shape[dim], group) for group in groups]
            if cut
            else whole(shape[dim], range(first, first + per_stage))
        )
        taken = [split(shape[dim], everyone)] if spread else whole(shape[dim], everyone)
        case.cuts.append(Cut(name, shape, dim, held, taken))

    dense("model.embed_tokens.weight", 0, (vocab, hidden), 0, cut=True)
    dense("lm_head.weight", stages - 1, (vocab, hidden), 0, cut=True, spread=True)
    dense("model.norm.weight", stages - 1, (hidden,), 0, cut=False)
    for layer in range(layers):
        stage, name = layer * stages // layers, f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense(f"{name}{norm}.weight", stage, (hidden,), 0, cut=False)
        dense(f"{name}self_attn.q_a_proj.weight", stage, (1536, hidden), 0, cut=False)
        dense(f"{name}self_attn.q_b_proj.weight", stage, (12288, 1536), 0, cut=True)
        dense(f"{name}self_attn.kv_a_proj.weight", stage, (576, hidden), 0, cut=False)
        dense(f"{name}self_attn.kv_b_proj.weight", stage, (16384, 512), 0, cut=True)
        dense(f"{name}self_attn.o_proj.weight", stage, (hidden, 8192), 1, cut=True)
        dense(f"{name}mlp.gate.weight", stage, (experts, hidden), 0, cut=False)
        for part, shape, dim in _projections(hidden, inter):
            dense(f"{name}mlp.shared_experts.{part}.weight", stage, shape, dim, cut=True, spread=True)
        for expert in range(experts):
            mine, theirs = stage * per_stage + expert * per_stage // experts, expert * ranks // experts
            for part, shape, dim in _projections(hidden, inter):
                where = [[(mine, 0, shape[dim])]], [[(theirs, 0, shape[dim])]]
                case.cuts.append(Cut(f"{name}mlp.experts.{expert}.{part}.weight", shape, dim, *where))
    return case


def _projections(hidden: int, inter: int) -> Iterator[tuple[str, tuple[int, int], int]]:
    yield "gate_proj", (inter, hidden), 0
    yield "up_proj", (inter, hidden), 0
    yield "down_proj", (hidden, inter), 1
