"""A trainer that holds a plain checkpoint: a dict of tensors, known to weightlink through a plugin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import weightlink
from safetensors.torch import load_file
from servers import Server
from weightlink.hooks import hookimpl
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.hooks.manager import PluginManager


class PlainTrainer:
    """A training adapter over a dict of tensors that have the checkpoint's own names and shapes."""

    kind = "hf"

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights
        self.device = next(iter(weights.values())).device

    def make_readable(self, deadline: Deadline) -> None:
        """Nothing is pending."""

    def layout(self, context: m.EngineContext, family: str | None, exclude: Sequence[str] = ()) -> Layout:
        tensors, params, regions = [], [], RegionBuilder()
        for n, (name, tensor) in enumerate(self.weights.items()):
            shape, stride = tuple(tensor.shape), tensor.stride()
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append(TensorSpec(name, shape, context.dtype))
            params.append(ParamSpec(name, shape, dtype, n, 0, stride))
            regions.add(n, n, lo=[0] * len(shape), size=shape, offset=0, stride=stride)
        return Layout("trainer 0", tuple(tensors), tuple(params), regions.build())

    def tensors(self) -> Sequence[Any]:
        return list(self.weights.values())

    def synchronize(self) -> None:
        """Nothing is pending."""


class PlainPlugin:
    """Knows dicts of tensors, as a third party's plugin would."""

    @hookimpl
    def weightlink_training_adapter(self, model: object) -> PlainTrainer | None:
        return PlainTrainer(model) if isinstance(model, dict) else None


def connect(server: Server, checkpoint: Path, **settings: Any) -> weightlink.Link:
    """A link from the checkpoint's own weights, in this process alone, to one server."""
    plugins = PluginManager()
    plugins.register(PlainPlugin(), origin="this test", name="plain")
    weights = load_file(checkpoint / "model.safetensors")
    return weightlink.connect(weights, [server.url], plugins=plugins, **{"timeout": 60, **settings})
