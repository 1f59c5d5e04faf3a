"""Draft models beside the target: SGLang's own choice of runners, on real model runners of one process per rank.

Speculative decoding itself needs a GPU. The draft is built as SGLang's draft worker builds it, its head and embedding
are the target's, and what is judged is its own load of the same checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import toys
from plain import PlainTrainer
from safetensors.torch import load_file, save_file
from warm import shared
from weightlink.hooks.geometry import Layout
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, build_plan, owned_names


def with_draft(family: str, folder: Path) -> Path:
    """A checkpoint with a layer for multi-token prediction, shaped like its last layer."""
    plain, path = toys.make(family, folder / family), folder / f"{family}-draft"
    if path.exists():
        return path
    path.mkdir()
    torch.manual_seed(5)
    tensors = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    if family == "deepseek_v3":
        draft = f"model.layers.{config['num_hidden_layers']}."
        norms, joint = ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
    else:
        config |= {"architectures": ["MiMoForCausalLM"]}
        draft = "model.mtp_layers.0."
        norms, joint = ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj"
    layer = {
        draft + n.removeprefix(last): torch.randn_like(t.float()).to(t.dtype) for n, t in tensors.items() if last in n
    }
    layer |= {f"{draft}{name}.weight": noise(hidden) for name in norms}
    layer[f"{draft}{joint}.weight"] = noise(hidden, 2 * hidden)
    save_file({**tensors, **layer}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def scheduler(runner: Any) -> Any:
    """A scheduler with the target and a draft as far as weight updates see it: SGLang's own manager chooses."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    server = runner.server_args
    config = ModelConfig.from_server_args(server, is_draft_model=True)
    draft = type(runner)(
        model_config=config, mem_fraction_static=0.5, gpu_id=0, nccl_port=0, server_args=server, is_draft_worker=True
    )
    with mock.patch("torch.cuda.synchronize"):
        draft.model.set_embed_and_head(*runner.model.get_embed_and_head())
    target = SimpleNamespace(model_runner=runner, _model_runner=runner)
    target.weight_update_runners = functools.partial(TpModelWorker.weight_update_runners, target)
    drafting = SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=[draft]))
    drafting.weight_update_runners = functools.partial(BaseSpecWorker.weight_update_runners, drafting)
    updater = SchedulerWeightUpdaterManager(
        tp_worker=target,
        draft_worker=drafting,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
    )
    return SimpleNamespace(
        server_args=server, tp_worker=target, draft_worker=drafting, weight_updater=updater, draft=draft
    )


def everything(models: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all parameters, buffers and tensor attributes (``w_kc``, ``w_vc``) of several models."""
    found = {}
    for prefix, model in models.items():
        for path, module in model.named_modules():
            for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}:{path}.{name}"] = value.detach().clone()
    return found


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert set(a) == set(b)
    return [n for n in a if not torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))]


def refused(adapter: Any, params: Any) -> str:
    """What an update of the target alone is told after a failed one of both models."""
    from weightlink.hooks.errors import ConflictError

    adapter.begin(params)
    try:
        adapter.begin([param for param in params if not param.name.startswith("draft.")])
    except ConflictError as error:
        return str(error)
    finally:
        adapter.begin(params)
        adapter.finish()
    return ""


def cell(runner: Any, selector: str, out: str) -> dict[str, Any]:
    """One update of the selected models, written by the layout into poisoned memory."""
    from grid import world_rank
    from oracle import POISON, write
    from weightlink.hooks.geometry import TensorSpec
    from weightlink.plugins.sglang.adapter import SGLangAdapter
    from weightlink.plugins.sglang.rank import place

    made = scheduler(runner)
    adapter = SGLangAdapter(made, place(), ("p2p",))
    tensors = load_file(Path(runner.server_args.model_path) / "model.safetensors")
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
    models = {"target": runner.model, "draft": made.draft.model}
    before = everything(models)
    print_before = adapter.fingerprint(selector)
    layout = adapter.observe(specs, "hf", selector)
    observed = different(before, everything(models))

    posts = {name: 0 for name in models}

    def counted(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        posts[name] += 1
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, model in models.items():
            if hasattr(model, "post_load_weights"):
                new = functools.partial(counted, name, model.post_load_weights)
                stack.enter_context(mock.patch.object(model, "post_load_weights", new))
        adapter.begin(layout.params)
        params = adapter.tensors(layout.params)
        for spec, tensor in zip(layout.params, params, strict=True):
            if spec.loaded:
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)
        selected = [m for n, m in models.items() if selector in ("all", n)]
        for module in [module for model in selected for module in model.modules()]:
            for derived in ("w_kc", "w_vc"):
                if isinstance(getattr(module, derived, None), torch.Tensor):
                    getattr(module, derived).data.fill_(7)
        poisoned = different(before, everything(models))
        write(layout, params, tensors)
        adapter.finish()
    used = {layout.tensors[i].name for i in layout.regions.tensor.tolist()}
    (Path(out) / str(world_rank())).write_bytes(layout.pack())
    return {
        "conflict": refused(adapter, layout.params) if selector == "all" else "",
        "refusal": adapter.context().refusal,
        "observed": observed,
        "poisoned": poisoned,
        "different": different(before, everything(models)),
        "opaque": [f"{o.name}: {o.reason}" for o in layout.opaque],
        "posts": posts,
        "names": [p.name for p in layout.params if p.loaded],
        "unused": sorted(set(tensors) - used),
        "fingerprint": [print_before, adapter.fingerprint(selector)],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.mark.parametrize(
    ("family", "selector", "sizes"),
    [
        ("deepseek_v3", "all", {"tp": 2}),
        ("deepseek_v3", "draft", {"tp": 2, "ep": 2}),
        ("deepseek_v3", "target", {"tp": 2, "server": {"attn_dp_size": 2}}),
        ("qwen2", "all", {"tp": 2}),
        ("qwen2", "draft", {}),
    ],
    ids=str,
)
def test_the_selected_models_become_what_sglang_loads(
    folder: Path, tmp_path: Path, family: str, selector: str, sizes: dict[str, Any]
) -> None:
    path = with_draft(family, folder)
    ranks = shared().run("test_drafts:cell", path, arguments={"selector": selector, "out": str(tmp_path)}, **sizes)
    own = {"target": "target:model.layers.", "draft": ("draft:model.decoder.", "draft:model.mtp_block.")}
    for rank in ranks:
        assert rank["refusal"] == ""
        assert rank["observed"] == []
        assert rank["opaque"] == []
        assert rank["different"] == []
        assert len(set(rank["fingerprint"])) == 1
        drafts = [name for name in rank["names"] if name.startswith("draft.")]
        assert bool(drafts) == (selector != "target")
        assert (len(drafts) < len(rank["names"])) == (selector != "draft")
        for model in ("target", "draft"):
            chosen = selector in ("all", model)
            assert rank["posts"][model] == (1 if chosen and family == "deepseek_v3" else 0), "post-load runs once"
            assert chosen == any(name.startswith(own[model]) for name in rank["poisoned"])
    unused = set.intersection(*(set(rank["unused"]) for rank in ranks))
    if selector == "all":
        assert unused == set()
        assert all("left other models half written: draft" in rank["conflict"] for rank in ranks)
    # The proof that every element is written once, over both models and what they share.
    context: Any = SimpleNamespace(dtype="bfloat16")
    trainer = PlainTrainer(load_file(path / "model.safetensors")).layout(context, None)
    layouts = [Layout.unpack((tmp_path / str(n)).read_bytes()) for n in range(len(ranks))]
    trainer = dataclasses.replace(trainer, tensors=layouts[0].tensors)  # the router's bias stays float32
    engine = EngineLayouts("engine", layouts)
    build_plan([trainer], [engine], WireSettings(), ignore=tuple(unused))
    assert owned_names(engine) == tuple(sorted({p.name for x in layouts for p in x.params if not p.loaded}))
