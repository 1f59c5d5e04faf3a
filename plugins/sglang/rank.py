"""weightlink in a scheduler process: one :class:`weightlink.rank.EngineRank`, reached by the control request."""

from __future__ import annotations

import functools
import secrets
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher
from weightlink.board import Board
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.manager import PluginManager
from weightlink.hooks.messages import RankPlace
from weightlink.plugins.sglang import rewritten
from weightlink.plugins.sglang.adapter import SGLangAdapter
from weightlink.plugins.sglang.envelope import WeightlinkReqInput, WeightlinkReqOutput
from weightlink.plugins.sglang.install import Hook
from weightlink.rank import EngineRank

_BREATH = 0.001
"""Seconds that an idle scheduler sleeps per turn of its loop while weightlink works beside it."""

_KEY_WORDS = 4


def start(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``Scheduler.__init__``, on every rank in lock-step: the board needs all of them."""
    plugins = PluginManager()
    adapter = SGLangAdapter(scheduler, place(), tuple(sorted(plugins.transports())))
    scheduler.weightlink = EngineRank(adapter, form_board(scheduler.server_args, adapter.place), plugins)
    context = msgspec.msgpack.encode(adapter.context())  # now, while an error still stops the start
    handler = functools.partial(answer, scheduler.weightlink, adapter.place.dp_rank, context)
    scheduler._request_dispatcher += TypeBasedDispatcher([(WeightlinkReqInput, handler)])


def place() -> RankPlace:
    """Where this scheduler stands."""
    parallel = get_parallel()
    return RankPlace.at(
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        dp_rank=parallel.dp_rank if parallel.dp_size > 1 else 0,  # it numbers attention groups otherwise
        dp_size=parallel.dp_size,
    )


def form_board(server_args: Any, where: RankPlace) -> Board:
    """A replica's rank 0 hosts; its port and an unguessable key reach the others over SGLang's own group, as plain
    numbers. Replicas share no group: the front puts their answers together.

    The time limit is the one that SGLang's user chose for forming groups.
    """
    deadline = Deadline.after(float(server_args.dist_timeout or 600))
    group = get_parallel().world_group
    # One node: nobody else needs to reach it. Several: the host that SGLang's own ranks meet on, which is rank 0's.
    address = server_args.dist_init_addr.rpartition(":")[0].strip("[]") if server_args.nnodes > 1 else "127.0.0.1"
    told = torch.zeros(1 + _KEY_WORDS, dtype=torch.int64)
    board = None
    if where.replica_rank == 0:
        words = [secrets.randbits(63) for _ in range(_KEY_WORDS)]
        board = Board.host(address, where.replica_world, _key(words), deadline)
        told = torch.tensor([board.port, *words], dtype=torch.int64)
    dist.broadcast(told, src=group.ranks[0], group=group.cpu_group)
    if board is None:
        port, *words = told.tolist()
        board = Board.join(address, port, where.replica_rank, where.replica_world, _key(words), deadline)
    return board


def _key(words: list[int]) -> str:
    return "-".join(f"{word:x}" for word in words)


def answer(rank: EngineRank, replica: int, context: bytes, request: WeightlinkReqInput) -> WeightlinkReqOutput | None:
    """The scheduler's handler. With attention data parallelism SGLang would send every group's answer back."""
    data = rank.handle(request.data) if request.data else context
    return WeightlinkReqOutput(seq=request.seq, replica=replica, data=data) if rank.leads else None


def breathe(_result: None, scheduler: Any) -> None:
    """After an idle or paused turn of the event loop, which would otherwise spin on the cores that the update needs."""
    if scheduler.weightlink.busy:
        time.sleep(_BREATH)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

HOOKS = [
    Hook(f"{_SCHEDULER}.__init__", "after", start),
    Hook("sglang.srt.model_loader.loader._initialize_model", "after", rewritten.watch),
    Hook(f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", "after", breathe),
    Hook(f"{_SCHEDULER}.on_idle", "after", breathe),
]
