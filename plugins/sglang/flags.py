"""The engine's flags and environment, and the refusals at start: what cannot work must not come up."""

from __future__ import annotations

import argparse
import importlib.metadata
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from weightlink.hooks.errors import ConfigError
from weightlink.hooks.settings import EngineSettings, read_token
from weightlink.plugins.sglang import install

#: Tested range of SGLang versions: first, and first that is too new.
SUPPORTED = ((0, 5, 23), (0, 6, 0))

ADD_FLAGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_FLAGS = "sglang.srt.server_args.ServerArgs.from_cli_args"


def register() -> None:
    """Hook SGLang's argument parser."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADD_FLAGS, add_flags, HookType.AFTER)
    HookRegistry.register(FROM_FLAGS, from_flags, HookType.AROUND)


def settings() -> EngineSettings:
    """This engine's settings, from the environment that its processes share."""
    return EngineSettings.from_env(os.environ)


def enabled() -> bool:
    """weightlink is on. A malformed setting counts as on, so that the start fails with its reason."""
    try:
        return settings().enabled
    except ConfigError:
        return True


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``."""
    if not install.applied(FROM_FLAGS, from_flags):
        return  # the flags would be parsed and dropped; unknown flags are refused loudly
    group = parser.add_argument_group("weightlink", "online weight updates from RL trainers")
    group.add_argument("--weightlink", action="store_true", help="accept weight updates from a weightlink trainer")
    group.add_argument(
        "--weightlink-token-file", metavar="FILE", help="bearer token that every weightlink request must carry"
    )
    group.add_argument(
        "--weightlink-serve-unready",
        action="store_true",
        help="answer requests although the weights are random and no version was ever committed",
    )
    group.add_argument(
        "--weightlink-max-message-bytes", type=int, metavar="N", help="larger weightlink requests are refused unread"
    )


def from_flags(original: Callable[..., Any], cls: type, namespace: argparse.Namespace) -> Any:
    """Around ``ServerArgs.from_cli_args``: check, export to the environment for the child processes, install."""
    chosen = merge(namespace, os.environ)
    server_args = original(cls, namespace)
    if chosen.enabled:
        check(server_args, chosen)
        os.environ[EngineSettings.ENV] = chosen.to_env()
        install.now()
    return server_args


def merge(namespace: argparse.Namespace, env: Mapping[str, str]) -> EngineSettings:
    """Flags over environment; raises :class:`ConfigError` for flags that have no effect or values out of range."""
    base = EngineSettings.from_env(env)
    given: dict[str, Any] = {}
    if namespace.weightlink_token_file:
        given["token"] = read_token(namespace.weightlink_token_file)
    if namespace.weightlink_serve_unready:
        given["serve_unready"] = True
    if namespace.weightlink_max_message_bytes is not None:
        given["max_message_bytes"] = namespace.weightlink_max_message_bytes
    if not (namespace.weightlink or base.enabled):
        if given:
            raise ConfigError("a --weightlink-... flag was given without --weightlink", remedy="add --weightlink")
        return base
    merged = {**msgspec.structs.asdict(base), **given, "enabled": True}
    try:
        return msgspec.convert(merged, EngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid weightlink flag: {error}") from error


def check(server_args: Any, chosen: EngineSettings) -> None:
    """Refuse, by name, what weightlink cannot serve. Raises :class:`ConfigError`."""
    check_version(importlib.metadata.version("sglang"))
    key = server_args.admin_api_key or server_args.api_key
    if chosen.token and key and chosen.token != key:
        raise ConfigError(
            "the weightlink token differs from SGLang's own key",
            expected="one of them, or both equal: SGLang's --admin-api-key (else --api-key) then is the token",
            remedy="drop --weightlink-token-file and give trainers SGLang's key",
        )
    if not (chosen.token or key or is_loopback(server_args.host)):
        raise ConfigError(
            "weightlink does not listen on the network without a token",
            expected="a loopback --host, --weightlink-token-file, --admin-api-key or --api-key",
            found=f"--host {server_args.host} and no token",
        )
    for flag, found in unsupported(server_args):
        raise ConfigError(f"weightlink does not support {flag} yet", found=found, remedy=f"start without {flag}")


def unsupported(server_args: Any) -> list[tuple[str, str]]:
    """``(flag, value)`` of every setting under which weightlink's hooks would not reach the engine."""
    from sglang.srt.environ import envs

    found = []
    for flag, value, plain in (
        ("--tokenizer-worker-num > 1", server_args.tokenizer_worker_num, 1),
        ("--elastic-ep-backend", server_args.elastic_ep_backend or "none", "none"),
        ("--grpc-mode", server_args.grpc_mode, False),
        ("--smg-grpc-mode", server_args.smg_grpc_mode, False),
        ("--grpc-port", server_args.grpc_port, None),
        ("--use-ray", server_args.use_ray, False),
        ("--encoder-only", server_args.encoder_only, False),
        ("SGLANG_RUST_SERVER", bool(envs.SGLANG_RUST_SERVER.get()), False),
    ):
        if value != plain:
            found.append((flag, str(value)))
    return found


def check_version(version: str) -> None:
    """Raises :class:`ConfigError` unless SGLang's version is in the tested range."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in match.groups()) if match else ()
    low, high = SUPPORTED
    if not low <= numbers < high:
        raise ConfigError(
            "this SGLang version is not supported",
            expected=f">= {'.'.join(map(str, low))}, < {'.'.join(map(str, high))}",
            found=version,
        )


def is_loopback(host: str) -> bool:
    """Only this machine reaches ``host``. A name other than ``localhost`` counts as the network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
