"""Engines that keep weights quantised: which tensors they are, who encodes them, and what cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightlink.converters.encoders import Encoded, choose_encoding, encode_layout, quantised_names
from weightlink.hooks.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from weightlink.hooks.geometry import Layout
    from weightlink.hooks.manager import PluginManager
    from weightlink.hooks.messages import EngineContext
    from weightlink.plan import EngineLayouts

_REMEDY = (
    "serve a checkpoint in a format that an encoder knows (its config.json has the quantization_config), serve without"
    " quantisation, or install a plugin with a weightlink_encoders hook"
)


def require_one_format(names: Sequence[str], contexts: Sequence[EngineContext]) -> None:
    """Raises :class:`ConfigError` unless every engine of a link is quantised in the same way, or none is."""
    first = _format(contexts[0])
    for name, context in zip(names, contexts, strict=True):
        if _format(context) != first:
            raise ConfigError(
                "the engines of one link must keep their weights in the same format",
                rank=name,
                expected=first,
                found=_format(context),
                remedy="make a link for each format",
            )


def _format(context: EngineContext) -> str:
    config = context.hf_config.get("quantization_config")
    return f"quantization {context.quantization or 'none'}, quantization_config {config or 'none'}"


def require_encoder(name: str, context: EngineContext, plugins: PluginManager) -> None:
    """Raises :class:`ConfigError` for a quantised engine whose format no encoder knows: its loader has to quantise what
    it is given, and what it makes of plain numbers after the first load is not what it made before."""
    if context.quantization and choose_encoding(plugins.encoders(), context) is None:
        raise _unknown(f"the engine is quantised ({context.quantization})", name, context, plugins)


def names_to_encode(
    engines: Sequence[EngineLayouts], context: EngineContext, plugins: PluginManager
) -> tuple[str, ...]:
    """Canonical tensors that have to be sent in the engines' own format: those that the engines' loaders, given plain
    numbers, would cast to a quantised dtype. Sorted; empty for engines that keep plain numbers.

    Raises :class:`ConfigError` for a dtype that the encoder of the engines' format does not make."""
    dtypes = quantised_names([layout for engine in engines for layout in engine.layouts])
    chosen = choose_encoding(plugins.encoders(), context) if dtypes else None
    wrong = sorted(name for name, dtype in dtypes.items() if chosen is None or dtype != chosen[1].dtype)
    if wrong:
        what = f"the engine keeps {len(wrong)} tensors in {dtypes[wrong[0]]}"
        raise _unknown(what, engines[0].name, context, plugins, tensor=wrong[0])
    return tuple(sorted(dtypes))


def _unknown(what: str, name: str, context: EngineContext, plugins: PluginManager, *, tensor: str = "") -> ConfigError:
    return ConfigError(
        f"{what}, and no encoder makes that from plain numbers",
        tensor=tensor,
        rank=name,
        expected=f"a format that an encoder knows ({', '.join(sorted(plugins.encoders())) or 'none is installed'})",
        found=_format(context),
        remedy=_REMEDY,
    )


def encode(layout: Layout, names: Sequence[str], context: EngineContext, plugins: PluginManager) -> Encoded | None:
    """One trainer rank's layout with ``names`` in the engines' format; None if there are none."""
    chosen = choose_encoding(plugins.encoders(), context) if names else None
    return encode_layout(layout, names, chosen[1]) if chosen is not None else None


def require_taken(engines: Sequence[EngineLayouts], plain: Sequence[Layout], encoded: Sequence[Layout]) -> None:
    """Raises :class:`LayoutError` when an engine does not take a tensor in the form that it was encoded in.

    :param plain, encoded: every trainer rank's layout before and after"""
    before = {spec for layout in plain for spec in layout.tensors}
    derived = {spec.name for layout in encoded for spec in layout.tensors if spec not in before}
    for engine in engines:
        for layout in engine.layouts:
            for opaque in layout.opaque:
                if opaque.name in derived:
                    raise LayoutError(
                        f"the engine does not take an encoded tensor as it is: {opaque.reason}",
                        tensor=opaque.name,
                        rank=f"{engine.name} {layout.rank}",
                        remedy=_REMEDY,
                    )
