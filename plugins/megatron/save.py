"""Publishing at checkpoints: a save strategy for ``torch_dist`` checkpoints that sends what is saved to the engines.

Megatron offers one seam for this, the strategy object of a save::

    strategy = PublishingSaveStrategy(model, link.push, inner)
    checkpointing_context["save_strategy"] = strategy                         # megatron.training
    dist_checkpointing.save(state, folder, sharded_strategy=strategy)         # or directly
    strategy.check()                                                          # after a save that is not asynchronous

Four facts about that seam shape the class:

- The checkpoint is complete only after the strategy has returned: ``metadata.json`` and the file that names the latest
  iteration come later. An error raised by the strategy would lose the checkpoint, so that a failed push is raised
  where the checkpoint is safe: by :meth:`PublishingSaveStrategy.check`, or at the end of an asynchronous save.
- The engines get the live weights, so that nothing of the state dict needs to be filtered for them. It is read for one
  question: does this checkpoint hold that model? Entries of the optimizer (``optimizer.`` in their key) and those that
  are not sharded tensors do not count as an answer.
- ``FullyParallelSaveStrategyWrapper`` deals the shards out anew by rewriting their replica ids. It belongs inside, as
  ``inner``. (Around this one it does no harm either: the replica ids are not read here.)
- From Megatron-Core 0.17 on any object that is not a ``TorchDistSaveShardedStrategy`` is silently replaced by one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from weightlink.converters.megatron import Shard, shards_of
from weightlink.hooks.errors import ConfigError, LayoutError, VersionError
from weightlink.plugins.megatron.adapter import chunks_of

logger = logging.getLogger("weightlink")

OnFailure = Literal["raise", "log"]
NAME = "weightlink"


def iteration_of(folder: Path) -> int:
    """The number that ends the name of a checkpoint's folder, as in ``iter_0001200``, ``step-1200`` or ``1200``."""
    found = re.fullmatch(r"(?:.*[_-])?(\d+)", folder.name)
    if found is None:
        raise ConfigError(
            "the checkpoint's folder does not tell the iteration",
            expected="a name like iter_0001200",
            found=str(folder),
            remedy="pass version=, a function of the folder, to the save strategy",
        )
    return int(found[1])


class PublishingSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Publishes a model, then lets ``inner`` write the checkpoint. Collective, as every save of Megatron's is.

    The checkpoint is ``inner``'s in every byte, its format name too, and loads without weightlink.

    Publishing comes first because it forces the parameter all-gathers that are still pending: what is published and
    what is saved are then the same values. It delays the save by its timeout at most. An asynchronous save publishes
    before it returns as well; in its finalisation the weights would be those of later steps.

    :param model: the model chunks that ``push`` publishes, wrapped in DDP if they are trained so
    :param push: called with the version on every rank: :meth:`weightlink.Link.push`, or a function that raises on every
        rank or on none, as it does
    :param inner: the strategy that writes; Megatron's default if None. Build it like the save that this one replaces:
        with ``FullyParallelSaveStrategyWrapper`` around it for fully parallel saves
    :param version: the version for a checkpoint's folder; must rise from save to save
    :param on_failure: what becomes of a failed push once the checkpoint is safe; it is logged as an error at once in
        either case, and the next save publishes again
    """

    def __init__(
        self,
        model: object,
        push: Callable[[int], object],
        inner: Any = None,
        *,
        version: Callable[[Path], int] = iteration_of,
        on_failure: OnFailure = "raise",
    ) -> None:
        inner = default_strategy(inner)
        super().__init__(backend=inner.backend, version=inner.version)
        if on_failure not in ("raise", "log"):
            raise ConfigError("unknown on_failure", expected="raise or log", found=on_failure)
        self.model: Any = model
        self.inner: Any = inner
        self.saves = 0  #: saves that came through here
        self.published: int | None = None  #: the version that was published last
        self._push = push
        self._version_of = version
        self.on_failure = on_failure
        self._failure: Exception | None = None

    def delegate_to(self, inner: Any) -> None:
        """Let another strategy write from the next save on."""
        self.inner, self.backend, self.version = inner, inner.backend, inner.version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ``inner`` writes sharded objects too."""
        answer = self.inner.can_handle_sharded_objects
        return bool(answer() if callable(answer) else answer)  # Megatron has it as a property and as a method

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Publish, then save. A failed push is left for :meth:`check`; what ``inner`` raises is raised here."""
        self._failure = None
        failure = self._attempt(sharded_state_dict, checkpoint_dir)
        result = self.inner.save(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        self._failure = failure
        return result

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Publish, then prepare the save. A failed push is raised when the request has been finalised.

        :returns: ``inner``'s ``AsyncRequest``
        """
        if not hasattr(self.inner, "async_save"):
            raise ConfigError("the inner strategy cannot save asynchronously", found=str(self.inner))
        failure = self._attempt(sharded_state_dict, checkpoint_dir)
        request = self.inner.async_save(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        if failure is not None:
            request.add_finalize_fn(partial(self._fail_last, request.finalize_fns, failure))
        return request

    def check(self) -> None:
        """Raise the failed push of the last synchronous save, once. Call it when the checkpoint is complete."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def concerns(self, shards: list[Shard]) -> bool:
        """Whether a checkpoint with these tensors is one to publish."""
        return True

    def publish(self, version: int, shards: list[Shard]) -> None:
        """Publish the model as ``version``.

        :param shards: the sharded tensors of the checkpoint, without the optimizer's
        :raises LayoutError: if they are not the model's
        """
        require_held(self.model, shards)
        self._push(version)

    def _attempt(self, state: object, folder: Any) -> Exception | None:
        """Publish; the error that is to be raised once the checkpoint is safe."""
        self.saves += 1
        try:
            shards = list(model_shards(state))
            if not self.concerns(shards):
                return None
            version = self._version_of(Path(folder))
            if self.published is not None and version <= self.published:
                raise VersionError(
                    "this checkpoint's version is not higher than the published one",
                    expected=f"more than {self.published}",
                    found=version,
                    remedy="pass version=, a function of the folder, to the save strategy",
                )
            self.publish(version, shards)
        except Exception as error:
            only_log = self.on_failure == "log"
            text = "the engines did not get the weights of the checkpoint %s, which is saved all the same: %s"
            logger.error(text, folder, error, exc_info=only_log)
            return None if only_log else error
        self.published = version
        logger.info("published version %d with the checkpoint %s", version, folder)
        return None

    def _fail_last(self, finalize_fns: list[Callable[[], None]], failure: Exception) -> None:
        """Raise behind the functions that Megatron has added since: they complete the checkpoint."""

        def fail() -> None:
            raise failure

        # Megatron walks this very list now, and will come to what is added at its end.
        finalize_fns.append(fail)


def default_strategy(given: Any) -> Any:
    """The save strategy that ``given`` means: itself, Megatron's default for None, one of the registry for a pair."""
    if given is None:
        return TorchDistSaveShardedStrategy(backend="torch_dist", version=1)
    if isinstance(given, tuple):
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy

        return get_default_strategy(StrategyAction.SAVE_SHARDED, *given)
    return given


def model_shards(state: object) -> Iterator[Shard]:
    """The sharded tensors of a checkpoint's state dict, without the optimizer's."""
    return (shard for shard in shards_of(state) if "optimizer." not in shard.key)


def starts(shards: list[Shard]) -> set[int]:
    """Where the checkpoint's tensors begin in memory."""
    return {shard.data.data_ptr() for shard in shards if isinstance(shard.data, torch.Tensor)}


def require_held(model: object, shards: list[Shard]) -> None:
    """Raises :class:`LayoutError` unless the checkpoint holds every parameter of the model itself, not of a copy."""
    held = starts(shards)
    chunks = chunks_of(model)
    if not chunks:
        raise ConfigError("not a Megatron model", found=type(model).__name__, remedy="pass the list of model chunks")
    missing = [
        name
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.numel() and parameter.data_ptr() not in held
    ]
    if missing:
        raise LayoutError(
            "the checkpoint does not hold the model that is to be published",
            tensor=missing[0],
            expected="every parameter of the model",
            found=f"{len(missing)} parameters are not in it",
            remedy="publish at the saves of this model only",
        )


def register(strategy: PublishingSaveStrategy) -> bool:
    """Make ``sharded_strategy=("weightlink", 1)`` mean ``strategy``, in versions of Megatron with a registry (0.16).

    :returns: False where there is none; pass the strategy itself then
    """
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError:
        return False
    register_default_strategy(StrategyAction.SAVE_SHARDED, NAME, 1, strategy)
    return True
