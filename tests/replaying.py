"""Toy modules with loaders, and the comparison of a replay with the same loader run for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from oracle import deliver, live, poison, write
from torch import nn
from weightlink.converters.replay import observe
from weightlink.hooks.geometry import Layout, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["Toy", dict[str, torch.Tensor]], None]
Shapes = dict[str, tuple[int, ...]]


class Toy(nn.Module):
    """Parameters ``w0``, ``w1``, ... of given shapes, and a loader."""

    def __init__(self, loader: Loader, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.loader = loader
        for i, shape in enumerate(shapes):
            data = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
            self.register_parameter(f"w{i}", nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, dict(weights))


def coded(shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors in which every element of every tensor has its own value."""
    result, start = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        result[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(shape).to(dtype)
        start += count
    return result


def state(model: nn.Module) -> list[tuple[str, int, bytes]]:
    """Pointers and bytes of everything resident, dictionaries included."""
    found = []
    for path, module in model.named_modules():
        for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor):
                octets = torch.empty(0, dtype=torch.uint8).set_(value.data.untyped_storage())
                found.append((f"{path}.{name}", value.data_ptr(), octets.numpy().tobytes()))
            else:
                found.append((f"{path}.{name}", id(value), b""))
    return found


def replay(model: nn.Module, shapes: Shapes, dtype: str = "float32", **kwargs: object) -> Layout:
    """Observes, and checks that nothing resident changed."""
    specs = [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]
    before = state(model)
    try:
        return observe(rank="toy", tensors=specs, load=model.load_weights, modules=[("", model)], **kwargs)
    finally:
        assert state(model) == before


def check(build: Callable[[], nn.Module], shapes: Shapes, dtype: torch.dtype = torch.float32) -> Layout:
    """The layout, after its prediction was compared with what the loader really does, bit for bit."""
    layout = replay(build(), shapes, str(dtype).removeprefix("torch."))
    weights = coded(shapes, dtype)
    real, predicted = build(), build()
    poison(list(real.state_dict().values()) + list(predicted.state_dict().values()))
    for _ in range(2):  # a loader that reads what is resident settles on what a reload gives
        real.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    params = live([("", predicted)], layout.params)
    write(layout, params, weights)
    deliver(layout, params, predicted.load_weights)
    opaque = {layout.params[entry.param].name for entry in layout.opaque if entry.param is not None}
    opaque -= {entry.name for entry in layout.opaque if entry.delivered}
    for (name, want), got in zip(real.state_dict().items(), predicted.state_dict().values(), strict=True):
        if name not in opaque:
            octets = [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (want, got)]
            assert torch.equal(*octets), name
    return layout


def rows(layout: Layout) -> list[tuple[str, str, list[int], list[int], list[int], int, list[int]]]:
    """Readable regions, without unused dimensions."""
    result = []
    r = layout.regions
    for i in range(len(r)):
        spec = layout.tensors[r.tensor[i]]
        d = len(spec.shape)
        columns = [c[i][:d].tolist() for c in (r.lo, r.size, r.step, r.stride)]
        result.append(
            (
                spec.name,
                layout.params[r.param[i]].name,
                columns[0],
                columns[1],
                columns[2],
                int(r.offset[i]),
                columns[3],
            )
        )
    return result


def opaque(layout: Layout) -> dict[str, str]:
    return {entry.name: entry.reason for entry in layout.opaque}


def plain(m: Toy, w: dict[str, torch.Tensor]) -> None:
    m.w0.data.copy_(w["a"])


def fused(m: Toy, w: dict[str, torch.Tensor]) -> None:
    at = 0
    for name, start, size in (("q", 4, 4), ("k", 2, 2), ("v", 2, 2)):
        m.w0.data.narrow(0, at, size).copy_(w[name].narrow(0, start, size))
        at += size
