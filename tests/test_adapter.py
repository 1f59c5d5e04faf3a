"""The SGLang adapter on real model runners: what moves a layout, and engines that cannot be updated online."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toys
from safetensors.torch import load_file
from warm import shared
from weightlink.attach import _check_context
from weightlink.hooks import messages as m
from weightlink.hooks.errors import ConfigError
from weightlink.hooks.settings import LinkSettings

#: Six places for four experts, three on each of two ranks: first as SGLang would fill them, then moved.
MOVED = [[3, 0, 1, 2, 2, 0], [1, 1, 3, 0, 2, 3]]


def adapter_of(runner: Any) -> Any:
    """The adapter, over SGLang's own manager of weight updates."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tp_worker import TpModelWorker
    from weightlink.plugins.sglang.adapter import SGLangAdapter
    from weightlink.plugins.sglang.rank import place

    worker = SimpleNamespace(model_runner=runner, _model_runner=runner)
    worker.weight_update_runners = functools.partial(TpModelWorker.weight_update_runners, worker)
    updater = SchedulerWeightUpdaterManager(
        tp_worker=worker, draft_worker=None, memory_saver_adapter=None, flush_cache=None, is_fully_idle=None
    )
    scheduler = SimpleNamespace(server_args=runner.server_args, tp_worker=worker, weight_updater=updater)
    return SGLangAdapter(scheduler, place(), ("p2p",))


def update(adapter: Any, tensors: dict[str, Any], want: dict[str, Any], model: Any) -> tuple[bytes, list[str]]:
    """Writes the tensors by the adapter's layout; the layout, and the names of parameters that differ from ``want``."""
    import torch
    from oracle import poison, write
    from weightlink.hooks.geometry import TensorSpec

    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
    layout = adapter.observe(specs, "hf", "all")
    adapter.begin(layout.params)
    params = adapter.tensors(layout.params)
    poison([tensor for spec, tensor in zip(layout.params, params, strict=True) if spec.loaded])
    write(layout, params, tensors)
    adapter.finish()
    return layout.pack(), [n for n, p in model.named_parameters() if not torch.equal(p, want[n])]


def experts_move(runner: Any) -> dict[str, Any]:
    """An update, SGLang's new map of experts, and an update by what is then observed."""
    import torch
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata, get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_parallel

    adapter, model = adapter_of(runner), runner.model
    tensors = load_file(Path(runner.server_args.model_path) / "model.safetensors")

    def loaded() -> dict[str, torch.Tensor]:
        """SGLang's own load under the present map."""
        model.load_weights(iter(tensors.items()))
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    first, before = adapter.fingerprint("all"), loaded()
    layout, different = update(adapter, tensors, before, model)
    same = adapter.fingerprint("all")
    moved = ExpertLocationMetadata.init_by_mapping(runner.model_config, MOVED, get_parallel().moe_ep_rank)
    get_global_expert_location_metadata().update(moved, update_layer_ids=[0, 1])
    then, after = adapter.fingerprint("all"), loaded()
    layout2, different2 = update(adapter, tensors, after, model)
    return {
        "different": different + different2,
        "held": first == same,
        "moved": first != then and layout != layout2,
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
    }


def rebinds(runner: Any) -> dict[str, bool]:
    """Which changes of a model change the fingerprint."""
    import torch

    adapter, model = adapter_of(runner), runner.model
    parameter = model.model.layers[1].mlp.down_proj.weight
    first = adapter.fingerprint("all")
    parameter.data.mul_(2)
    written = adapter.fingerprint("all")
    parameter.data = parameter.data.clone()
    copied = adapter.fingerprint("all")
    parameter.data = parameter.data.t().contiguous().t()
    turned = adapter.fingerprint("all")
    parameter.data = torch.cat([parameter.data, parameter.data])
    return {
        "written": written != first,
        "copied": copied != first,
        "turned": turned != first,
        "longer": adapter.fingerprint("all") not in (first, turned),
    }


def derived(runner: Any, reason: str) -> list[bytes]:
    """The contexts of an engine before and after one of its modules declares a cache that no update refreshes."""
    import msgspec

    adapter = adapter_of(runner)
    contexts = [adapter.context()]
    runner.model.model.layers[1].mlp._derived_weight_cache_error = reason
    contexts.append(adapter.context())
    return [msgspec.json.encode(context).decode() for context in contexts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


def test_experts_that_move_move_the_layout(folder: Path) -> None:
    path = toys.make("qwen3_moe", folder / "qwen3_moe")
    server = {"ep_num_redundant_experts": 2}
    for rank in shared().run("test_adapter:experts_move", path, tp=2, ep=2, server=server):
        assert rank["different"] == []
        assert rank["held"]
        assert rank["moved"]
        assert len(rank["changed"]) == 4
        assert all(".experts.w" in name for name in rank["changed"])


def test_only_what_moves_the_layout_changes_the_fingerprint(folder: Path) -> None:
    path = toys.make("qwen3", folder / "qwen3")
    (rank,) = shared().run("test_adapter:rebinds", path)
    assert rank == {"written": False, "copied": False, "turned": True, "longer": True}


def test_an_engine_with_derived_caches_is_refused_with_sglangs_own_reason(folder: Path) -> None:
    import msgspec
    import torch

    path, reason = toys.make("qwen3", folder / "qwen3"), "captured graphs keep a derived copy of these weights"
    (contexts,) = shared().run("test_adapter:derived", path, arguments={"reason": reason})
    fine, refused = [msgspec.json.decode(context, type=m.EngineContext) for context in contexts]
    trainer: Any = SimpleNamespace(device=torch.device("cpu"))
    _check_context("http://e", fine, trainer, LinkSettings())
    with pytest.raises(ConfigError, match=reason):
        _check_context("http://e", refused, trainer, LinkSettings())


def packing(runner: Any) -> dict[str, str]:
    """What is said about models whose quantisation method changes what was loaded, and which still load."""
    import torch
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from weightlink.plugins.sglang import rewritten

    class Method(QuantizeMethodBase):
        def apply(self, layer, *args, **kwargs):
            raise NotImplementedError

    class Plain(Method):
        def process_weights_after_loading(self, layer):
            layer.weight = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)

    class Swaps(Method):
        def process_weights_after_loading(self, layer):
            layer.weight.data.copy_(layer.weight.data.flip(0))

    class Turns(Method):
        def process_weights_after_loading(self, layer):
            layer.weight.data = layer.weight.data.t()

    class TurnsBack(Turns):
        def restore_weights_before_loading(self, layer):
            layer.weight.data = layer.weight.data.t()

    class SwapsAndSays(Swaps):
        def restore_weights_before_loading(self, layer):
            pass

    found = {}
    for kind in (Plain, Swaps, Turns, TurnsBack, SwapsAndSays):
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
        model[1].quant_method = kind()
        rewritten.watch(model)
        for _ in range(2):
            model[1].quant_method.process_weights_after_loading(model[1])
        found[kind.__name__] = rewritten.refusal(model)
    found["runner"] = rewritten.refusal(runner.model)
    return found


def test_what_a_quantisation_method_rewrites_is_refused_by_name(folder: Path) -> None:
    (found,) = shared().run("test_adapter:packing", toys.make("qwen3", folder / "qwen3"))
    print(found)
    for kind in ("Swaps", "Turns", "SwapsAndSays"):
        assert found[kind] == f"1.weight: {kind} rewrites it after loading, and SGLang cannot undo that"
    assert found["Plain"] == found["TurnsBack"] == found["runner"] == ""
