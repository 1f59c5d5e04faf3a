"""Runs an unchanged training script that publishes its weights at every checkpoint it saves::

    torchrun ... -m weightlink.plugins.megatron.run --weightlink-engines URL,URL SCRIPT ARGUMENTS...

The saves must go through ``megatron.core.dist_checkpointing.save``, as those of ``megatron.training`` do with
``--ckpt-format torch_dist``; see :mod:`weightlink.plugins.megatron.install` for what is replaced. Megatron is imported
before the script starts.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from weightlink.hooks.errors import ConfigError
from weightlink.hooks.settings import PauseMode, read_token


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script as ``__main__``; what it raises, and its exit code unless 0, goes to the caller.

    :raises WeightlinkError: after the checkpoint whose weights could not be published is complete
    """
    options = _parse(arguments)
    _log(os.environ.get("RANK", "0") == "0")
    script = Path(options.script).resolve()
    # As if Python had been started with the script.
    sys.argv = [options.script, *options.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.parent)
    from weightlink.plugins.megatron.install import install

    with install(options.engines, on_failure=options.on_failure, **options.settings):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m weightlink.plugins.megatron.run",
        description="Run a Megatron training script and publish its weights at every checkpoint.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--weightlink-engines", dest="engines", required=True, metavar="URL,URL", help="engines to publish to")
    add("--weightlink-token-file", dest="token_file", metavar="FILE", help="the token that the engines expect")
    add("--weightlink-timeout", dest="timeout", type=float, metavar="SECONDS", help="for connecting and each push")
    add("--weightlink-pause-mode", dest="pause_mode", choices=get_args(PauseMode), help="how engines are paused")
    add(
        "--weightlink-on-failure",
        dest="on_failure",
        choices=("raise", "log"),
        default="raise",
        help="end the training with the error of a failed push, once the checkpoint is complete, or only log it",
    )
    add("script", metavar="SCRIPT", help="the training script")
    add("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    options.engines = [url.strip() for url in options.engines.split(",") if url.strip()]
    if not Path(options.script).is_file():
        parser.error(f"no such script: {options.script}")
    settings: dict[str, Any] = {"timeout": options.timeout, "pause_mode": options.pause_mode}
    try:
        settings["token"] = read_token(options.token_file) if options.token_file else None
    except ConfigError as error:
        parser.error(str(error))
    options.settings = {name: value for name, value in settings.items() if value is not None}
    return options


def _log(first: bool) -> None:
    """Show weightlink's own messages, on rank 0 more than elsewhere, unless the logger was set up before."""
    logger = logging.getLogger("weightlink")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s weightlink: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if first else logging.WARNING)


if __name__ == "__main__":
    main()
