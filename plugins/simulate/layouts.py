"""The layouts of every rank of a trainer and of engines, made in short-lived processes with a progress bar."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from weightlink.hooks.errors import WeightlinkError, rebuild
from weightlink.hooks.geometry import Layout
from weightlink.plugins.demo.engine import require_platform
from weightlink.plugins.demo.processes import pipes, start, stop, tail
from weightlink.plugins.simulate.notation import Engine, Trainer
from weightlink.plugins.simulate.nursery import Made, Request, manifest_file
from weightlink.plugins.simulate.stored import Stored, unpack_rank
from weightlink.survey import merge_manifest

NOTES = (
    "trainer: Megatron-Core's own model of every rank on the meta device, read as at connect",
    "engines: SGLang's own model of every rank on the meta device, its loader replayed over one layer of every kind"
    " and repeated for layers of equal structure (compared with the last layer of each kind on two ranks)",
)


def make(
    model: str,
    config: dict[str, Any],
    trainer: Trainer,
    text: str,
    engines: Sequence[Engine],
    console: Console,
    jobs: int | None = None,
) -> Stored:
    """All layouts. Raises what any rank raised.

    :param text: the trainer's layout as it was written
    :param jobs: ranks at a time; None for as many as there are cores
    """
    require_platform()
    jobs = jobs or len(os.sched_getaffinity(0))
    shown = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with shown as progress, tempfile.TemporaryDirectory(prefix="weightlink-simulate-") as folder:
        base = Path(folder)
        (base / "config.json").write_bytes(msgspec.json.encode(config))
        packed = _ranks(Request(folder=folder, jobs=jobs, trainer=trainer), progress, "trainer ranks")
        trainers = tuple(Layout.unpack(data) for data in packed)
        manifest = merge_manifest(trainers)
        manifest_file(base).write_bytes(msgspec.msgpack.encode(manifest))
        done: dict[Engine, tuple[Layout, ...]] = {}
        groups = []
        for engine in engines:
            alike = msgspec.structs.replace(engine, count=1)
            if alike not in done:
                packed = _ranks(
                    Request(folder=folder, jobs=jobs, engine=alike), progress, f"engine ranks ({engine.label})"
                )
                done[alike] = tuple(unpack_rank(data, manifest) for data in packed)
            groups.append((engine.label, engine.count, done[alike]))
    return Stored(model, text, NOTES, manifest, trainers, tuple(groups))


def _ranks(request: Request, progress: Progress, what: str) -> list[bytes]:
    folder = Path(request.folder)
    asked, log = folder / "request.json", folder / "log"
    asked.write_bytes(msgspec.json.encode(request))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTLINK_", "SGLANG_"))}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = start(
        [sys.executable, "-W", "ignore", "-m", "weightlink.plugins.simulate.nursery", str(asked)],
        env=env, log=log, folder=folder, piped=True,
    )  # fmt: skip
    task = progress.add_task(what, total=request.world)
    done = 0
    try:
        for line in pipes(process)[1]:
            made = msgspec.json.decode(line, type=Made)
            if made.error is not None:
                raise rebuild(made.error)
            done += 1
            progress.advance(task)
    finally:
        stop(process)
    if done < request.world:
        raise WeightlinkError(
            f"the process that makes the {what} ended after {done} of {request.world}", found=tail(log)
        )
    return [(folder / f"rank-{rank}").read_bytes() for rank in range(request.world)]
