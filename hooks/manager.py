"""The plugin manager: built-ins and entry points through the same hooks; a plugin that fails is a named error."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy
from weightlink.hooks import specs
from weightlink.hooks.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from weightlink.hooks.protocols import Encoder, Family, LocalEngine, TrainingAdapter, Transport

#: Built-in plugins by dotted module name; each is registered like a third party's.
BUILTINS = (
    "weightlink.converters.encoders_fp8",
    "weightlink.converters.families",
    "weightlink.plugins.bench",
    "weightlink.plugins.demo",
    "weightlink.plugins.megatron",
    "weightlink.plugins.sglang",
    "weightlink.plugins.simulate",
    "weightlink.plugins.transports",
)


class PluginManager:
    """Wraps pluggy: loads plugins, calls hooks, and names the distribution of whatever fails."""

    def __init__(self, *, entry_points: bool = True, builtins: Iterable[str] = BUILTINS) -> None:
        self._pm = pluggy.PluginManager(specs.PROJECT)
        self._pm.add_hookspecs(specs)
        self._origin: dict[str, str] = {}
        for module in builtins:
            self.register(importlib.import_module(module), origin="weightlink (built-in)", name=module)
        if entry_points:
            self._load_entry_points()

    def _load_entry_points(self) -> None:
        for point in importlib.metadata.entry_points(group=specs.PROJECT):
            dist = point.dist
            origin = f"{dist.name} {dist.version}" if dist is not None else point.value
            try:
                plugin = point.load()
            except Exception as error:
                raise PluginError(
                    f"plugin {point.name!r} of {origin} failed to load: {type(error).__name__}: {error}",
                    remedy=f"fix or uninstall {origin}",
                ) from error
            self.register(plugin, origin=origin, name=point.name)

    def register(self, plugin: object, *, origin: str, name: str | None = None) -> None:
        """Registers one plugin; raises :class:`PluginError` when a hook is unknown or misses its arguments."""
        try:
            registered = self._pm.register(plugin, name)
            self._pm.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name or plugin!r} of {origin} is not valid: {error}") from error
        if registered is not None:
            self._origin[registered] = origin

    def plugins(self) -> list[tuple[str, str, list[str]]]:
        """``(name, distribution, hooks implemented)`` of every plugin."""
        rows = []
        for name, plugin in self._pm.list_name_plugin():
            if plugin is not None:
                callers = self._pm.get_hookcallers(plugin) or []
                rows.append((name, self._origin.get(name, "?"), sorted(caller.name for caller in callers)))
        return rows

    def _call(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Every implementation's result with its origin, last registered first; None results are dropped."""
        results = []
        caller = getattr(self._pm.hook, hook)
        for impl in reversed(caller.get_hookimpls()):
            origin = self._origin.get(impl.plugin_name, impl.plugin_name)
            try:
                value = impl.function(*(arguments[name] for name in impl.argnames))
            except Exception as error:
                raise PluginError(
                    f"hook {hook} of plugin {impl.plugin_name!r} ({origin}) failed: {type(error).__name__}: {error}"
                ) from error
            if value is not None:
                results.append((origin, value))
                if caller.spec.opts["firstresult"]:
                    break
        return results

    def training_adapter(self, model: object) -> TrainingAdapter:
        """The adapter for ``model``; raises :class:`ConfigError` when no plugin knows it."""
        found = self._call("weightlink_training_adapter", model=model)
        if not found:
            raise ConfigError(
                "no plugin knows this model",
                expected="a Megatron-Core module or a list of model chunks",
                found=type(model).__name__,
                remedy="install a plugin with a weightlink_training_adapter hook",
            )
        adapter: TrainingAdapter = found[0][1]
        return adapter

    def local_engine(self, engine: object) -> LocalEngine:
        """The engine in this process; raises :class:`ConfigError` when no plugin knows it."""
        found = self._call("weightlink_local_engine", engine=engine)
        if not found:
            raise ConfigError(
                "no plugin knows this engine",
                expected="a URL, or an sglang.Engine in the process of trainer rank 0 (None on the other ranks)",
                found=type(engine).__name__,
            )
        local: LocalEngine = found[0][1]
        return local

    def _named(self, hook: str, what: str) -> dict[str, Any]:
        items: dict[str, tuple[str, Any]] = {}
        for origin, listed in self._call(hook):
            for item in listed:
                if item.name in items:
                    raise PluginError(
                        f"two plugins define the {what} {item.name!r}", found=f"{items[item.name][0]} and {origin}"
                    )
                items[item.name] = (origin, item)
        return {name: item for name, (_, item) in items.items()}

    def families(self) -> dict[str, Family]:
        """Model families by name."""
        return self._named("weightlink_families", "family")

    def encoders(self) -> dict[str, Encoder]:
        """Encoders by name."""
        return self._named("weightlink_encoders", "encoder")

    def transports(self) -> dict[str, Transport]:
        """Transports by name."""
        return self._named("weightlink_transports", "transport")

    def transport(self, name: str) -> Transport:
        """One transport; raises :class:`ConfigError` listing the known ones."""
        known = self.transports()
        if name not in known:
            raise ConfigError(f"unknown transport {name!r}", expected=", ".join(sorted(known)))
        return known[name]

    def update_event(self, event: str, **fields: Any) -> None:
        """Tells every observer."""
        self._call("weightlink_update_event", event=event, fields=fields)

    def add_cli_commands(self, app: object) -> None:
        """Lets every plugin add its commands."""
        self._call("weightlink_cli_commands", app=app)
