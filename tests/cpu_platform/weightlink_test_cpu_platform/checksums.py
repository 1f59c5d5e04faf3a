"""Leaves every rank's weight checksums, and the addresses of its weights, in ``$WEIGHTLINK_TEST_CHECKSUMS/RANK.json``:
SGLang answers for pipeline stage 0 only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weightlink_test_cpu_platform import drafts

FOLDER = "WEIGHTLINK_TEST_CHECKSUMS"
DRAFTS = "WEIGHTLINK_TEST_DRAFTS"


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``; does nothing unless the folder is given."""
    if os.environ.get(DRAFTS):
        drafts.register()
    if os.environ.get(FOLDER):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
        HookRegistry.register(target, write, HookType.AFTER)


def write(payload: dict[str, Any] | None, runner: Any, *_args: object, **_kwargs: object) -> None:
    """After ``ModelRunner.check_weights``: the file appears whole or not at all."""
    if payload is None or runner.is_draft_worker:  # the route itself answers for drafts
        return
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    replica = parallel.dp_rank if parallel.dp_size > 1 else 0
    rank = (replica * parallel.pp_size + parallel.pp_rank) * parallel.tp_size + parallel.tp_rank
    file = Path(os.environ[FOLDER]) / f"{rank}.json"
    model = runner.model
    pointers = {name: t.data_ptr() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"checksums": payload["checksums"], "pointers": pointers}))
    part.rename(file)
