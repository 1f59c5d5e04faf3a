"""A process that imports a framework once and forks one short process per rank, two or a few at a time.

Run as ``python -m weightlink.plugins.simulate.nursery REQUEST``; prints one line of JSON per rank that is done. The
layouts lie in the request's folder, one file per rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from weightlink.hooks.errors import ErrorInfo, describe
from weightlink.hooks.geometry import TensorSpec
from weightlink.plugins.simulate import fake
from weightlink.plugins.simulate.notation import Engine, Trainer
from weightlink.plugins.simulate.stored import pack_rank


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Which layouts to make.

    :param folder: holds ``config.json``, for engines ``manifest``, and takes the layouts
    :param jobs: ranks at a time
    :param trainer: the trainer, or None for
    :param engine: one engine
    """

    folder: str
    jobs: int
    trainer: Trainer | None = None
    engine: Engine | None = None

    @property
    def world(self) -> int:
        """Ranks to make."""
        sizes = self.trainer or self.engine
        return sizes.world if sizes else 0


class Made(msgspec.Struct, frozen=True):
    """One rank is done, or failed."""

    rank: int
    error: ErrorInfo | None = None


def manifest_file(folder: Path) -> Path:
    """Where the manifest lies."""
    return folder / "manifest"


def _make(request: Request, rank: int, manifest: tuple[TensorSpec, ...]) -> bytes:
    folder = Path(request.folder)
    if request.trainer is not None:
        from weightlink.plugins.simulate import trainer_rank

        config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
        return trainer_rank.layout(config, request.trainer, rank).pack()
    if request.engine is None:
        raise ValueError("neither a trainer nor an engine")
    from weightlink.plugins.simulate import engine_rank

    # The repetition is compared with the loader's own doing where an engine begins and where it ends.
    check = rank in (0, request.engine.world - 1)
    return pack_rank(engine_rank.layout(folder, request.engine, rank, manifest, check=check))


def _child(request: Request, rank: int, manifest: tuple[TensorSpec, ...]) -> None:
    """One rank, from fork to exit. Never returns."""
    file = Path(request.folder) / f"rank-{rank}"
    code = 1
    try:
        data = _make(request, rank, manifest)
        file.write_bytes(data)
        code = 0
    except BaseException as error:  # noqa: BLE001 - it is told, and a forked rank must not return
        file.with_suffix(".error").write_bytes(msgspec.json.encode(describe(error, rank=f"rank {rank}")))
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Exit code 0 when every rank is done."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # frameworks print
    fake.install()
    folder = Path(request.folder)
    manifest: tuple[TensorSpec, ...] = ()
    if request.trainer is not None:
        from weightlink.plugins.simulate import trainer_rank

        trainer_rank.prepare()
    else:
        from weightlink.plugins.simulate import engine_rank

        os.environ.update(engine_rank.ENVIRONMENT)
        engine_rank.prepare(folder)
        manifest = msgspec.msgpack.decode(manifest_file(folder).read_bytes(), type=tuple[TensorSpec, ...])
    gc.freeze()
    running: dict[int, int] = {}
    waiting = list(range(request.world))[::-1]
    failed = False
    while running or (waiting and not failed):
        while waiting and not failed and len(running) < request.jobs:
            rank = waiting.pop()
            pid = os.fork()
            if pid == 0:
                _child(request, rank, manifest)
            running[pid] = rank
        pid, status = os.wait()
        rank = running.pop(pid)
        error = None
        if status:
            failed = True
            error = ErrorInfo("WeightlinkError", f"the process ended with status {status}", rank=f"rank {rank}")
            with contextlib.suppress(FileNotFoundError):
                error = msgspec.json.decode((folder / f"rank-{rank}.error").read_bytes(), type=ErrorInfo)
        out.write(msgspec.json.encode(Made(rank, error)) + b"\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
