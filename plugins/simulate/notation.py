"""How layouts are written on the command line.

Trainer: ``tp4,pp4,ep16,etp1,last22,world=64``. Engines: ``2*tp8``, ``tp8,ep8``, ``128:ep128,dp-attention``; several
groups are separated by ``+``.
"""

from __future__ import annotations

import math
import re

import msgspec
from weightlink.hooks.errors import ConfigError

_ITEM = re.compile(r"([a-z][a-z-]*?)=?([1-9][0-9]{0,8})?")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_TRAINER = ("tp", "pp", "vpp", "ep", "etp", "cp", "world", "first", "last")
_ENGINE = ("tp", "pp", "ep", "dp-attention", "moe-dense-tp")


class Trainer(msgspec.Struct, frozen=True, kw_only=True):
    """Megatron's parallel sizes.

    :param world: ranks in all
    :param vpp: chunks per pipeline stage, None for one
    :param etp: tensor parallelism of experts, None for that of the rest
    :param first: layers of the first pipeline stage, if other than the others'
    :param last: layers of the last pipeline stage, if other than the others'
    """

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    etp: int | None = None
    vpp: int | None = None
    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> Trainer:
        """From ``tp4,pp4,ep16,...``. Without ``world``, the smallest that the other sizes allow.

        Raises :class:`ConfigError` for a word that is not known, or a world that the sizes do not divide."""
        sizes = _sizes(text, _TRAINER)
        tp, etp = sizes.get("tp", 1), sizes.get("etp", sizes.get("tp", 1))
        dense, sparse = tp * sizes.get("cp", 1), etp * sizes.get("ep", 1)
        least = sizes.get("pp", 1) * math.lcm(dense, sparse)
        world = sizes.pop("world", least)
        if world % least:
            raise ConfigError(
                "the trainer's sizes do not divide its world", expected=f"a multiple of {least}", found=world
            )
        return cls(world=world, **sizes)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's parallel sizes of one engine.

    :param count: equal engines
    :param dp_attention: groups of data-parallel attention; 1 for none
    :param moe_dense_tp: ``--moe-dense-tp-size``; None leaves it to SGLang
    """

    count: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_attention: int = 1
    moe_dense_tp: int | None = None

    @property
    def world(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp

    @property
    def label(self) -> str:
        """As it could be written."""
        words = [f"tp{self.tp}"]
        words += [f"{name}{size}" for name, size in (("pp", self.pp), ("ep", self.ep)) if size > 1]
        if self.dp_attention > 1:
            words.append(f"dp-attention{self.dp_attention}")
        if self.moe_dense_tp is not None:
            words.append(f"moe-dense-tp{self.moe_dense_tp}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> Engine:
        """From ``2*tp8,ep8`` or ``128:ep128,dp-attention``, where 128 is the number of ranks."""
        count, _, rest = text.rpartition("*")
        ranks, _, words = rest.rpartition(":")
        for number in (count, ranks):
            if number and not _COUNT.fullmatch(number):
                raise ConfigError("not a number of engines or ranks", expected="2*tp8 or 128:ep128", found=text)
        if not text.strip() or text.startswith(("*", ":")):
            raise ConfigError("not an engine", expected="2*tp8 or 128:ep128", found=text)
        sizes = _sizes(words, _ENGINE, bare=("dp-attention",))
        pp = sizes.get("pp", 1)
        if ranks:
            if "tp" in sizes and sizes["tp"] * pp != int(ranks):
                raise ConfigError("tp times pp is not the number of ranks", expected=int(ranks), found=text)
            if int(ranks) % pp:
                raise ConfigError("pp does not divide the number of ranks", expected=int(ranks), found=text)
            sizes["tp"] = int(ranks) // pp
        tp = sizes.get("tp", 1)
        if sizes.get("dp-attention") == 0:
            sizes["dp-attention"] = tp
        for name in ("ep", "dp-attention"):
            if tp % sizes.get(name, 1):
                raise ConfigError(f"{name} does not divide tp", expected=f"a divisor of {tp}", found=text)
        return cls(
            count=int(count or 1),
            tp=tp,
            pp=pp,
            ep=sizes.get("ep", 1),
            dp_attention=sizes.get("dp-attention", 1),
            moe_dense_tp=sizes.get("moe-dense-tp"),
        )


def engines_of(text: str) -> tuple[Engine, ...]:
    """Groups of engines, separated by ``+``."""
    return tuple(Engine.parse(part.replace(" ", "")) for part in text.split("+"))


def _sizes(text: str, known: tuple[str, ...], bare: tuple[str, ...] = ()) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in (word.strip() for word in text.split(",")) if text.strip() else ():
        found = _ITEM.fullmatch(word)
        name = found[1] if found else ""
        if found is None or name not in known or name in sizes or not (found[2] or name in bare):
            raise ConfigError(
                "not a parallel size", expected=", ".join(f"{name}N" for name in known), found=f"{word} in {text!r}"
            )
        sizes[name] = int(found[2] or 0)
    return sizes


_UNITS = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8}


def speed(text: str) -> float:
    """Bytes per second from ``50GB/s`` or ``400Gb/s``. Raises :class:`ConfigError`."""
    found = re.fullmatch(r"([0-9.]+) ?([A-Za-z]+/s)", text.strip())
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if value <= 0:
        raise ConfigError("not a speed", expected=f"a number and one of {', '.join(_UNITS)}", found=text)
    return value
