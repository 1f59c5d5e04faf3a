"""The Protocols that adapters and transports implement. Every blocking call takes the caller's deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    import torch
    import torch.distributed as dist
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.geometry import EncodedPart, Layout, ParamSpec, TensorSpec
    from weightlink.hooks.messages import EngineContext, LayoutKind, RankPlace, Reply, Request
    from weightlink.hooks.settings import PauseMode, Selector, WireSettings


class TrainingAdapter(Protocol):
    """One trainer rank's model. Layouts come from the framework's own description, never from name patterns."""

    @property
    def kind(self) -> LayoutKind:
        """``"megatron"`` (native names, mapped by a family) or ``"hf"``."""

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""

    def make_readable(self, deadline: Deadline) -> None:
        """Bring the resident parameters up to date (pending all-gathers, resharding). Called on every rank before
        every push and before a layout is read; may be collective over the trainer."""

    def layout(self, context: EngineContext, family: str | None, exclude: Sequence[str] = ()) -> Layout:
        """This rank's regions in canonical form, without the parameters whose own names match ``exclude`` (names, or
        patterns with ``*``); the layout's ``excluded`` names them. Raises ``NameMapError`` for one without a rule."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """The live local tensor of every entry of the last layout's ``params``, in that order, resolved now (a
        parameter may have been rebound since). Raises ``LayoutError`` when the layout itself has changed."""

    def synchronize(self) -> None:
        """Wait until all device work that writes the parameters has finished."""


class InferenceAdapter(Protocol):
    """One engine rank's model, called inside the engine's own process."""

    @property
    def place(self) -> RankPlace:
        """This rank's position."""

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""

    def context(self) -> EngineContext:
        """What the trainer needs to know. ``state``, ``version`` and ``epoch`` are filled in by the front process."""

    def fingerprint(self, selector: Selector) -> str:
        """Changes whenever what :meth:`observe` finds may change for the same manifest. Cheap: asked before every
        update."""

    def observe(self, tensors: Sequence[TensorSpec], kind: LayoutKind, selector: Selector) -> Layout:
        """This rank's layout of the selected models, by replaying the engine's own loaders. The engine is paused. No
        weight, pointer or attribute may differ afterwards (``ReplayError``)."""

    def tensors(self, params: Sequence[ParamSpec]) -> Sequence[torch.Tensor]:
        """The live tensors for ``params`` (none of them staged), resolved now. Raises ``LayoutError`` if one is gone or
        changed shape."""

    def require_idle(self, mode: PauseMode) -> None:
        """Raises ``NotIdle`` unless this rank is paused and runs no batch (it will be asked again), ``ConflictError``
        when waiting cannot help. Called in the main thread."""

    def begin(self, params: Sequence[ParamSpec]) -> None:
        """Put the models that ``params`` belong to into the load layout, so that they can be written in place. May
        follow an update that failed. Raises ``ConflictError`` when that one left other models half written."""

    def synchronize(self) -> None:
        """Wait for the device: every copy issued so far is complete when this returns."""

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give whole canonical tensors to the engine's own loader, all in one call, between ``begin`` and ``finish``,
        without its post-load processing where that is separate. Called only when the layout has opaque entries, perhaps
        with no tensors. Raises ``LayoutError`` when a parameter, buffer or attribute is in other memory afterwards."""

    def finish(self) -> None:
        """The engine's own post-load processing, exactly once per update."""

    def commit(self, version: int, *, flush: bool) -> None:
        """Flush the caches, then record the version. Called in the main thread."""


class LocalEngine(Protocol):
    """An engine that lives in the process of trainer rank 0."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the engine's front belongs to; running in another thread, or not running at all."""

    async def handle(self, request: Request) -> Reply:
        """Carry out one control request, in ``loop``."""


class Pending(Protocol):
    """Transfers that were posted together."""

    def wait(self, deadline: Deadline) -> None:
        """Until all of them are complete on the device's current stream; raises ``TransferError`` or
        ``DeadlineExceeded`` naming the peers."""


class Channel(Protocol):
    """A formed group of one link epoch: payload and control apart. Group ranks, not framework ranks."""

    rank: int
    size: int

    def post(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        deadline: Deadline,
    ) -> Pending:
        """Post one round of contiguous tensors, each ``(peer, tensor)``. Between one pair they arrive in order.
        Peers must post matching rounds in the same order."""

    def barrier(self, what: str, deadline: Deadline) -> None:
        """All members reach this point, over the control group; raises ``DeadlineExceeded`` naming ``what``."""

    def abort(self) -> None:
        """Give up without waiting: wakes peers that wait for this rank. Safe from another thread, safe to repeat."""

    def close(self) -> None:
        """Destroy the groups. Safe to repeat."""


class Transport(Protocol):
    """How payload moves. ``open`` runs concurrently on every member and never touches the frameworks' groups."""

    name: str

    def open(
        self,
        store: dist.Store,
        *,
        key: str,
        rank: int,
        size: int,
        host: str,
        device: torch.device,
        wire: WireSettings,
        deadline: Deadline,
    ) -> Channel:
        """Join the group ``key``. ``host`` is this process's address on the network that reaches the store."""


class Family(Protocol):
    """Names of one model family; see :mod:`weightlink.converters.families`."""

    @property
    def name(self) -> str:
        """How users choose it."""

    @property
    def architectures(self) -> Sequence[str]:
        """Entries of ``config.json``'s ``architectures`` that it serves."""


class Encoding(Protocol):
    """How an engine's format stores a tensor that the engine keeps quantised. The same on every trainer rank."""

    @property
    def dtype(self) -> str:
        """Dtype of the engine's parameters that this encoding is for."""

    def parts(self, spec: TensorSpec) -> Sequence[EncodedPart]:
        """What takes the canonical tensor's place, e.g. values and scales. Raises ``LayoutError`` for a tensor that
        the format cannot hold."""

    def encode(self, values: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Write a box of the canonical tensor into the matching boxes of its parts.

        :param values: contiguous, in the canonical dtype; begins at a cell of every part and ends at one, or at the
            tensor's end
        :param parts: contiguous, in the order of :meth:`parts`, on the same device
        """


class Encoder(Protocol):
    """Knows one quantised checkpoint format; see :mod:`weightlink.converters.encoders`."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def encoding(self, context: EngineContext) -> Encoding | None:
        """What this engine needs, or None if its format is another one. Raises ``ConfigError`` for a variant of the
        format that cannot be written."""
