"""Parameters that a quantisation method changes after SGLang has loaded them: packed, transposed, requantised.

What the loader describes is then no longer what is resident. SGLang can undo some of that for an update; whatever it
cannot undo must not be written. Which parameters are changed is observed at SGLang's own load, by digests.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from weightlink.converters.snapshot import digest_of


class _Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    digest: int


_rewritten: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Per module: its parameters that were changed; True where the change shows in shape, dtype or strides."""


def watch(model: torch.nn.Module, *_args: Any, **_kwargs: Any) -> None:
    """After SGLang has built a model and before it loads it: notes, the first time that a quantisation method processes
    a module, what the method changes."""
    for method in {id(m.quant_method): m.quant_method for m in model.modules() if _has_method(m)}.values():
        method.process_weights_after_loading = _Noting(method.process_weights_after_loading)


def _has_method(module: torch.nn.Module) -> bool:
    return getattr(module, "quant_method", None) is not None


class _Noting:
    """A ``process_weights_after_loading`` that is compared before and after."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def __call__(self, layer: torch.nn.Module) -> None:
        if layer in _rewritten:
            self._process(layer)
            return
        before = _forms(layer)
        self._process(layer)
        after = _forms(layer)
        _rewritten[layer] = {
            name: before[name][:3] != after[name][:3]
            for name in before.keys() & after.keys()
            if before[name] != after[name]
        }


def _forms(layer: torch.nn.Module) -> dict[str, _Form]:
    with torch.no_grad():
        return {
            name: _Form(tuple(p.shape), p.dtype, p.stride(), digest_of(p.data))
            for name, p in layer._parameters.items()
            if p is not None
        }


def refusal(model: torch.nn.Module) -> str:
    """Why ``model`` cannot be updated because of what was noted, naming the first parameter; empty if it can."""
    for path, module in model.named_modules():
        for name, reshaped in sorted(_rewritten.get(module, {}).items()):
            method = type(module.quant_method)
            undo = getattr(method, "restore_weights_before_loading", QuantizeMethodBase.restore_weights_before_loading)
            # SGLang's contract: it restores what changes a parameter's form, and nothing else.
            if not reshaped or undo is QuantizeMethodBase.restore_weights_before_loading:
                return f"{path}.{name}: {method.__name__} rewrites it after loading, and SGLang cannot undo that"
    return ""
