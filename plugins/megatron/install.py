"""Makes the checkpoints of this process publish themselves, without a change to the code that saves them.

Call :func:`install` before the first save, or start the script by :mod:`weightlink.plugins.megatron.run`, which does.

What is replaced, everywhere it has been imported to, and named in the log:

- ``megatron.core.dist_checkpointing.save``, to put a :class:`PublishingSaveStrategy` around the strategy of the save;
- ``megatron.training.checkpointing.save_checkpoint``, if there is a ``megatron.training``, so that the error of a
  failed push waits until the new checkpoint has been named the latest one.

The model is the one that the first save holds, which also connects. Saves that hold nothing of it (another model, a
quantiser's state) are left alone; one that holds a part of it is an error.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

import torch
import weightlink
from megatron.core.transformer.module import MegatronModule
from weightlink.converters.megatron import Shard
from weightlink.hooks.errors import ConfigError, PluginError
from weightlink.plugins.megatron.save import OnFailure, PublishingSaveStrategy, default_strategy, starts

logger = logging.getLogger("weightlink")

_MARK = "_weightlink_installed"
CORE = ("megatron.core.dist_checkpointing", "save", ("sharded_state_dict", "checkpoint_dir", "sharded_strategy"))
TRAINING = ("megatron.training.checkpointing", "save_checkpoint", ("iteration", "model"))


class Installed(PublishingSaveStrategy):
    """The strategy around every save of this process.

    As a context manager it leaves the engines at the end. Everything is collective over the trainer's ranks.
    """

    def __init__(self, engines: Sequence[str], on_failure: OnFailure, settings: dict[str, Any]) -> None:
        super().__init__([], self._over_link, on_failure=on_failure)
        self.engines, self.settings = list(engines), settings
        self.link: weightlink.Link | None = None
        self.seen = 0  #: saves of this process, published or not
        self._open = 0

    def concerns(self, shards: list[Shard]) -> bool:
        """Whether the checkpoint holds anything of the model, which is the first one that a checkpoint holds."""
        self.model = self.model or models_of(shards)
        concerned = bool(self.model) and holds_any(self.model, starts(shards))
        if not concerned:
            logger.warning("a checkpoint is not published: it holds %s", "another model" if self.model else "no model")
        return concerned

    def publish(self, version: int, shards: list[Shard]) -> None:
        """Publish the model; connect first if that has not been done."""
        if self.link is None:
            self.link = weightlink.connect(self.model, self.engines, **self.settings)
        super().publish(version, shards)

    def _over_link(self, version: int) -> None:
        if self.link is None:
            raise ConfigError("publishing before the first save")
        self.link.push(version)

    def around(self, given: Any) -> PublishingSaveStrategy:
        """The strategy to save with instead of ``given``: this one around it, or ``given`` if it publishes itself."""
        for strategy in (given, getattr(given, "base_strategy", None)):
            if isinstance(strategy, PublishingSaveStrategy):
                return strategy
        self.delegate_to(default_strategy(given))
        return self

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Around the code that completes a checkpoint: raises a failed push at the outermost end."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
        if not self._open:
            self.check()

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.link is not None:
            self.link.__exit__(kind, error, trace)
        if error is None and self.published is None:
            logger.warning("nothing was published: %d checkpoints were saved", self.seen)


def install(engines: Sequence[str], *, on_failure: OnFailure = "raise", **settings: Any) -> Installed:
    """Publish to ``engines`` at every checkpoint from now on. A repeated call with the same arguments changes nothing.

    :param engines: base URLs of engines that run with weightlink
    :param on_failure: see :class:`PublishingSaveStrategy`
    :param settings: settings of :func:`weightlink.connect`
    :raises ConfigError: if a function to replace is missing or takes other arguments, or if other engines or settings
        were given before; nothing has been replaced then
    """
    found = [(_function(*CORE), _around_save)]
    if importlib.util.find_spec("megatron.training") is not None:
        found.append((_function(*TRAINING), _around_save_checkpoint))
    for function, _ in found:
        before: Installed | None = getattr(function, _MARK, None)
        if before is not None:
            if (before.engines, before.on_failure, before.settings) != (list(engines), on_failure, settings):
                raise ConfigError("checkpoints are published already, to other engines or with other settings")
            return before
    installed = Installed(engines, on_failure, settings)
    for function, wrap in found:
        replacement = functools.wraps(function)(wrap(installed, function))
        setattr(replacement, _MARK, installed)
        for place in _replace(function, replacement):
            logger.info("weightlink has replaced %s", place)
    return installed


def _around_save(installed: Installed, original: Callable[..., Any]) -> Callable[..., Any]:
    def save(
        sharded_state_dict: Any, checkpoint_dir: Any, sharded_strategy: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        installed.seen += 1
        strategy = installed.around(sharded_strategy)
        before = strategy.saves
        with installed.completing():
            given = sharded_strategy if strategy is not installed else strategy
            result = original(sharded_state_dict, checkpoint_dir, given, *args, **kwargs)
        if strategy.saves == before:
            raise PluginError("Megatron saved without the strategy that publishes", found=str(checkpoint_dir))
        return result

    return save


def _around_save_checkpoint(installed: Installed, original: Callable[..., Any]) -> Callable[..., Any]:
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        before = installed.seen
        with installed.completing():
            result = original(*args, **kwargs)
        # Checkpoints for a restart on the same machines have a format of their own.
        if installed.seen == before and not kwargs.get("non_persistent_ckpt"):
            raise ConfigError(
                "the checkpoint is saved, but in a format that cannot be published",
                remedy="use --ckpt-format torch_dist",
            )
        return result

    return save_checkpoint


def _function(module: str, name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """The function to replace; raises :class:`ConfigError` unless it is there and takes what is expected."""
    function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    found = tuple(inspect.signature(function).parameters) if callable(function) else "no such function"
    if function is None or found[: len(parameters)] != parameters:
        raise ConfigError(
            f"{module}.{name} is not the function that weightlink knows how to replace",
            expected=", ".join(parameters),
            found=found,
            remedy="use PublishingSaveStrategy directly",
        )
    return function


def _replace(original: object, replacement: object) -> list[str]:
    """Put the replacement wherever a module holds the original; the places."""
    places = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            for attribute in [key for key, value in vars(module).items() if value is original]:
                setattr(module, attribute, replacement)
                places.append(f"{name}.{attribute}")
    return places


def models_of(shards: list[Shard]) -> list[torch.nn.Module]:
    """The outermost Megatron modules of this process whose parameters the checkpoint holds.

    A state dict does not tell which modules it was made of. They are looked up once among all live objects, which asks
    nothing of the code that built them.
    """
    held = starts(shards)
    # The type alone is asked: isinstance() would wake proxies that load on their first use.
    modules = [item for item in gc.get_objects() if issubclass(type(item), MegatronModule)]
    found = [module for module in modules if holds_any([module], held)]
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


def holds_any(model: Sequence[torch.nn.Module], held: set[int]) -> bool:
    """Whether a parameter of the model begins at one of these addresses."""
    return any(p.numel() and p.data_ptr() in held for module in model for p in module.parameters())
