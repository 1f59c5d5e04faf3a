"""An engine's layout, observed: its own weight loader is run over tensors without data, and every copy is recorded.

Nothing resident changes: writes to memory that existed before are not executed, attributes and bindings are put back,
and pointers and digests are compared before and after.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weightlink.converters import delivery
from weightlink.converters.cells import key
from weightlink.converters.operators import RULES, rule_of
from weightlink.converters.operators import tensors as tensors_in
from weightlink.converters.provenance import Tracker
from weightlink.converters.snapshot import Snapshot
from weightlink.converters.writes import Contents, Destinations, Left
from weightlink.hooks.errors import LayoutError, ReplayError
from weightlink.hooks.geometry import ITEMSIZE, Layout, TensorSpec

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


def observe(
    *,
    rank: str,
    tensors: Sequence[TensorSpec],
    load: Load | Sequence[Load],
    modules: Sequence[tuple[str, torch.nn.Module]],
    finish: Callable[[], object] | None = None,
    retries: int = 16,
) -> Layout:
    """The layout of one engine rank.

    :param rank: who it describes, for messages
    :param tensors: the manifest; every tensor is offered to the loader once, in this order, on the meta device
    :param load: the engine's own loader, e.g. ``model.load_weights``, or one per model, each called over all tensors;
        called in this thread
    :param modules: ``(prefix, root module)`` pairs whose parameters, buffers and tensor attributes are the destinations
    :param finish: the engine's own processing at the end of an update, replayed to see which derived attributes it
        refreshes; those that only the loader computes become opaque. None: all of them are refreshed
    :param retries: names that may raise in the loader; each becomes opaque and the replay is run again without it

    The layout's ``params`` are all parameters and buffers, those tensor attributes that the loader fills, and staging
    for canonical tensors that must go through ``load`` itself, all in one call after the regions are written. What
    could not be followed is in ``opaque``: destinations, and the canonical names that went into them.

    Raises :class:`ReplayError` when a resident weight changed, when another thread took part, or when the loader fails
    for more than ``retries`` names; :class:`LayoutError` for a tensor of unknown dtype.
    """
    for spec in tensors:
        if spec.dtype not in ITEMSIZE:
            raise LayoutError("unknown dtype", tensor=spec.name, expected=", ".join(ITEMSIZE), found=spec.dtype)
    loads = load if isinstance(load, Sequence) else [load]
    with _without_collection():
        return _observe(rank, tensors, loads, modules, finish, retries)


def _observe(
    rank: str,
    tensors: Sequence[TensorSpec],
    loads: Sequence[Load],
    modules: Sequence[tuple[str, torch.nn.Module]],
    finish: Callable[[], object] | None,
    retries: int,
) -> Layout:
    with torch.inference_mode(False), torch.no_grad():
        snapshot = Snapshot(modules)
    # Weights that were made in inference mode can be written, also by a recorded write, in that mode only.
    inference = any(held.tensor.is_inference() for held in snapshot.held)
    with torch.inference_mode(inference), torch.no_grad():
        before = snapshot.digests()
        resident = frozenset(before)
        try:
            tracker, left, failed = _run(rank, tensors, range(len(tensors)), loads, snapshot, resident, retries)
            destinations = Destinations(snapshot.held, tracker)
            full = Contents(destinations, tensors, tracker, left, failed)
            quantised = tracker.quantised()
            refreshed = full.derived.keys()
            if finish is not None and refreshed:
                tracker, left, _ = _run(rank, tensors, (), [lambda _: finish()], snapshot, resident, 0)
                refreshed = Contents(destinations, tensors, tracker, left, {}).derived.keys()
            full.expect(refreshed)
            del tracker

            def again(names: frozenset[int]) -> Contents:
                tracker, left, _ = _run(rank, tensors, sorted(names), loads, snapshot, resident, 0)
                seen = Contents(destinations, tensors, tracker, left, {})
                seen.expect(refreshed)
                return seen

            decided = delivery.decide(full, len(tensors), again)
        except ReplayError as error:
            _prove_unchanged(rank, snapshot, before, error)
            raise
        _prove_unchanged(rank, snapshot, before, None)
    return replace(delivery.layout(rank, tensors, full, decided), quantised=quantised)


def _run(
    rank: str,
    specs: Sequence[TensorSpec],
    names: Sequence[int],
    loads: Sequence[Load],
    snapshot: Snapshot,
    resident: frozenset[int],
    retries: int,
) -> tuple[Tracker, list[Left], dict[int, str]]:
    """One run of the loader over the canonical tensors ``names``; again without each that it fails for."""
    failed: dict[int, str] = {}
    while True:
        tracker = Tracker(specs, resident, rank)
        feed = _Feed(tracker, [i for i in names if i not in failed])
        try:
            with _guarded_threads(tracker), tracker:
                for load in loads:
                    load(iter(feed))
        except Exception as error:
            if tracker.foreign is not None:
                raise tracker.foreign from error
            culprit = tracker.touched if feed.done and tracker.touched is not None else feed.last
            if culprit is None or culprit in failed:
                raise ReplayError(
                    f"the loader failed: {type(error).__name__}: {error}",
                    rank=rank,
                    tensor=", ".join(specs[i].name for i in failed),
                    found="; ".join(failed.values()),
                ) from error
            failed[culprit] = f"the loader raised {type(error).__name__}: {error}"
            if len(failed) > retries:
                raise ReplayError(
                    f"the loader failed for more than {retries} names" if retries else failed[culprit],
                    rank=rank,
                    tensor=", ".join(specs[i].name for i in failed),
                    found=failed[culprit],
                ) from error
            continue
        finally:
            tracker.closed = True
            left = [Left(name, kind, tracker.contents(now), old) for name, kind, now, old in snapshot.rebound()]
            left += [Left(name, "param", frozenset(), True) for name in snapshot.missing()]
            snapshot.restore()
        if tracker.foreign is not None:
            raise tracker.foreign
        return tracker, left, failed


class _Feed:
    """The canonical tensors as the loader's input; knows which one was taken last."""

    def __init__(self, tracker: Tracker, indices: Sequence[int]) -> None:
        self._tracker = tracker
        self._items = [(i, tracker.canonical(i)) for i in indices]
        self.last: int | None = None
        self.done = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.done = False
        for index, tensor in self._items:
            self._tracker.check_thread()
            self._tracker.next_name(index)
            self.last = index
            yield self._tracker.specs[index].name, tensor
        self.done = True


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection. A replay keeps millions of objects, and every full collection would look at all of them
    with the interpreter locked: seconds in which the engine's other threads stand still."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _guarded_threads(tracker: Tracker) -> Iterator[None]:
    """While open, threads that start do so under a :class:`_Guard`: a dispatch mode is local to its thread."""

    def started(frame: FrameType, event: str, argument: Any) -> None:
        # Called inside the new thread, by its first call.
        sys.setprofile(None)
        if not tracker.closed:
            _Guard(tracker).__enter__()

    before: Any = threading.getprofile()
    threading.setprofile(started)
    try:
        yield
    finally:
        threading.setprofile(before)


class _Guard(TorchDispatchMode):  # type: ignore[misc]
    """Refuses, in another thread, to write a weight and to touch a tensor of the replay."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._tracker.closed:
            rule = RULES.get(func) or rule_of(func)
            if rule.kind == "write" and any(key(t) in self._tracker.resident for t in rule.targets(args, kwargs)):
                self._tracker.check_thread()
            if any(key(t) in self._tracker.cells for t in tensors_in(args, kwargs)):
                self._tracker.check_thread()
        return func(*args, **kwargs)


def _prove_unchanged(
    rank: str, snapshot: Snapshot, before: dict[int, tuple[str, tuple[int, int, int]]], cause: Exception | None
) -> None:
    after = snapshot.digests()
    for storage, (name, state) in before.items():
        if after[storage][1] != state:
            raise ReplayError(
                "a loader replay changed a resident weight",
                tensor=name,
                rank=rank,
                expected=f"(address, bytes, digest) {state}",
                found=after[storage][1],
                remedy="reload this engine's weights; its loader writes where the dispatcher does not see it",
            ) from cause
