"""The state of modules before a loader replay: put back after it, and proof that nothing resident has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

_BLOCK = 1 << 17
"""Words of a digest block; bounds its scratch memory to a few MiB."""

_PRIME = 0x9E3779B97F4A7C15


class Held(NamedTuple):
    """A tensor of a module. ``kind`` is ``param``, ``buffer`` or ``attribute``; ``loaded`` is False for a buffer that
    is not part of the module's state. ``data`` shares its memory and keeps its binding."""

    name: str
    kind: str
    loaded: bool
    tensor: torch.Tensor
    data: torch.Tensor


class Snapshot:
    """Everything that a loader could change on ``modules``: attributes, containers, parameter bindings.

    :param modules: ``(prefix, root module)`` pairs
    """

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.held: list[Held] = []
        self._owners: list[tuple[str, torch.nn.Module]] = []
        self._namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        for prefix, root in modules:
            for path, module in root.named_modules():
                self._owners.append((".".join(part for part in (prefix, path) if part), module))
        seen: set[int] = set()
        for path, module in self._owners:
            self.held += _held(path, module)
            if id(module) not in seen:
                seen.add(id(module))
                self._remember(module.__dict__)
        # Parameters and buffers first: when an attribute shares their memory, they own it.
        self.held.sort(key=lambda held: held.kind == "attribute")
        for held in self.held:
            if id(held.tensor) not in seen and hasattr(held.tensor, "__dict__"):
                seen.add(id(held.tensor))
                self._namespaces.append((held.tensor.__dict__, dict(held.tensor.__dict__)))

    def _remember(self, namespace: dict[str, Any]) -> None:
        self._namespaces.append((namespace, dict(namespace)))
        for value in namespace.values():
            if isinstance(value, dict | list | set):
                self._containers.append((value, value.copy()))

    def rebound(self) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
        """``(name, kind, tensor, existed)`` of what the modules hold now and did not hold before, or hold in other
        memory than before."""
        before = {(held.name, held.kind): held for held in self.held}
        for path, module in self._owners:
            for now in _held(path, module):
                was = before.get((now.name, now.kind))
                if was is None or was.tensor is not now.tensor or not _same_binding(was.data, now.data):
                    yield now.name, now.kind, now.tensor, was is not None

    def missing(self) -> Iterator[str]:
        """Names of parameters and buffers that the modules no longer have."""
        now = {held.name for path, module in self._owners for held in _held(path, module)}
        yield from (held.name for held in self.held if held.kind != "attribute" and held.name not in now)

    def restore(self) -> None:
        """Puts everything back that differs."""
        for namespace, before in self._namespaces:
            if not _same_items(namespace, before):
                namespace.clear()
                namespace.update(before)
        for container, content in self._containers:
            if isinstance(container, dict):
                if not _same_items(container, content):
                    container.clear()
                    container.update(content)
            elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        for held in self.held:
            if not _same_binding(held.tensor, held.data):
                held.tensor.data = held.data

    def digests(self) -> dict[int, tuple[str, tuple[int, int, int]]]:
        """Per resident storage: the first name, and address, size in bytes and a position-sensitive digest."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for held in self.held:
            found.setdefault(held.data.untyped_storage()._cdata, (held.name, held.data))
        keys: dict[torch.device, torch.Tensor] = {}
        result = {}
        for number, (name, tensor) in found.items():
            storage = tensor.untyped_storage()
            value = 0 if storage.device.type == "meta" else _digest(storage, keys)
            result[number] = (name, (storage.data_ptr(), storage.nbytes(), value))
        return result


def _held(path: str, module: torch.nn.Module) -> Iterator[Held]:
    def named(name: str) -> str:
        return f"{path}.{name}" if path else name

    transient = module._non_persistent_buffers_set
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Held(named(name), "param", True, parameter, parameter.data)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield Held(named(name), "buffer", name not in transient, buffer, buffer.data)
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers"):
            continue
        if isinstance(value, torch.Tensor):
            yield Held(named(name), "attribute", True, value, value.data)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield Held(named(f"{name}.{i}"), "attribute", True, item, item.data)
        elif isinstance(value, dict):
            for label, item in value.items():
                if isinstance(item, torch.Tensor):
                    yield Held(named(f"{name}.{label}"), "attribute", True, item, item.data)


def _same_items(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return len(a) == len(b) and all(x is y and a[x] is b[y] for x, y in zip(a, b, strict=True))


def _same_binding(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def digest_of(tensor: torch.Tensor) -> int:
    """A position-sensitive digest of a tensor's elements; 0 without data."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.itemsize:
        storage = tensor.clone(memory_format=torch.contiguous_format).untyped_storage()
    return 0 if storage.device.type == "meta" else _digest(storage, {})


def _digest(storage: torch.UntypedStorage, keys: dict[torch.device, torch.Tensor]) -> int:
    """Bytes as 64-bit words times position keys, summed modulo 2**64, and the blocks' sums chained."""
    octets = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device not in keys:
        index = torch.arange(_BLOCK, dtype=torch.int64, device=storage.device)
        keys[storage.device] = (index * (_PRIME - (1 << 64)) ^ (index >> 7)) * 2 + 1
    key = keys[storage.device]
    whole = len(octets) // 8 * 8
    words = octets[:whole].view(torch.int64)
    tail = torch.zeros(8, dtype=torch.uint8, device=storage.device)
    tail[: len(octets) - whole] = octets[whole:]
    sums = [(block * key[: len(block)]).sum() for block in words.split(_BLOCK) if len(block)]
    total = len(octets)
    for value in torch.stack([*sums, tail.view(torch.int64)[0]]).tolist():
        total = (total * _PRIME + value) % (1 << 64)
    return total
