"""Hugging Face configurations: a file, a checkpoint's folder, or one of the public ones that are kept here as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from weightlink.hooks.errors import ConfigError

FOLDER = Path(__file__).with_name("models")


def names() -> list[str]:
    """The configurations that are kept here."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(model: str) -> tuple[str, dict[str, Any]]:
    """Its name for people, and the configuration without its quantisation. Raises :class:`ConfigError`."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        path = FOLDER / f"{model}.json"
    if not path.is_file():
        raise ConfigError(
            "no such model", expected=f"a folder, a config.json, or one of {', '.join(names())}", found=model
        )
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigError("not a Hugging Face configuration", expected="architectures", found=path)
    # A trainer sends plain numbers; what an encoder would make of them is not simulated.
    config.pop("quantization_config", None)
    name = path.stem if path.parent == FOLDER else path.parent.name
    return name, config
