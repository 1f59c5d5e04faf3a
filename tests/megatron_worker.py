"""Cases on real Megatron ranks. Started by megatron_cpu.py: imports Megatron once, then forks each case's ranks."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import toys
from safetensors.torch import load_file, save_file
from weightlink.converters.checkpoint import context_from_checkpoint
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import WeightlinkError
from weightlink.hooks.manager import PluginManager
from weightlink.plugins.megatron import MegatronAdapter, load_hf
from weightlink.plugins.megatron import cpu as megatron_cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(path: str, dtype: str = "float32", **parallel: Any) -> list[Any]:
    torch.manual_seed(100 + dist.get_rank())
    return megatron_cpu.build_model(context_from_checkpoint(Path(path)).hf_config, dtype=DTYPES[dtype], **parallel)


def logits(path: str, tp: int, ids: list[list[int]], **parallel: Any) -> Any:
    """Logits of the model that our rules loaded, cut to the true vocabulary."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    (model,) = build(path, tp=tp, **parallel)
    load_hf(model, path, timeout=30)
    tokens = torch.tensor(ids)
    positions, mask = megatron_cpu.causal_inputs(tokens)
    with torch.no_grad():
        out = gather_from_tensor_model_parallel_region(model.eval()(tokens, positions, mask))
    hf = context_from_checkpoint(Path(path)).hf_config
    return out[..., : hf.get("text_config", hf)["vocab_size"]].tolist()


def layout(path: str, out: str, fill: str = "rules", dtype: str = "float32", **parallel: Any) -> Any:
    """Writes this rank's packed layout and its live tensors, filled by our rules or by the formulas below."""
    chunks = build(path, dtype, **parallel)
    if fill == "rules":
        load_hf(chunks, path, timeout=30, ignore=toys.COPIES)
    else:
        fill_by_formula(chunks, Path(path))
    adapter = MegatronAdapter(chunks)
    context = context_from_checkpoint(Path(path))
    described = adapter.layout(context, None)
    rank = dist.get_rank()
    (Path(out) / f"{rank}.layout").write_bytes(described.pack())
    save_file({str(i): t.contiguous() for i, t in enumerate(adapter.tensors())}, Path(out) / f"{rank}.safetensors")
    return [param.name for param in described.params]


def fill_by_formula(chunks: list[Any], path: Path) -> None:
    """Fills the model without our rules: whole tensors in Megatron's order, cut by Megatron's boxes."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    hf = context_from_checkpoint(path).hf_config
    weights = load_file(path / "model.safetensors")
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    names = {
        "decoder.final_layernorm.weight": "model.norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
        "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }

    def whole(shard: Any) -> torch.Tensor:
        if shard.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            name = "model.embed_tokens.weight" if shard.key.startswith("emb") else "lm_head.weight"
            return F.pad(weights[name], (0, 0, 0, shard.global_shape[0] - hf["vocab_size"]), value=-1.0)
        if shard.key in names:
            return weights[names[shard.key]]
        _, _, layer, rest = shard.key.split(".", 3)
        base = f"model.layers.{layer}."
        if not rest.startswith("self_attention.linear_qkv.") or rest.endswith("layer_norm_weight"):
            return weights[base + names[rest]]
        kind = rest.rsplit(".", 1)[1]
        q, k, v = (weights[f"{base}self_attn.{x}_proj.{kind}"].unflatten(0, (groups, -1)) for x in "qkv")
        assert q.shape[1] == heads // groups * k.shape[1]
        return torch.cat([q, k, v], dim=1).flatten(0, 1)

    def visit(item: Any) -> None:
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, list):
            for value in item:
                visit(value)
        elif isinstance(item, ShardedTensor):
            box = tuple(slice(o, o + n) for o, n in zip(item.global_offset, item.local_shape, strict=True))
            with torch.no_grad():
                item.data.copy_(whole(item)[box])

    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True, "singleton_local_shards": True})
        apply_factories(state)
        visit(state)


def stale(path: str, overlap: bool) -> Any:
    """What is resident after ``optimizer.step()``, before and after ``make_readable``, and the optimizer's own values.

    All tensors as bf16 bit patterns: ``resident`` and ``readable`` by key, ``master`` as (module path, start, values)
    of this rank's fp32 shards, rounded.
    """
    chunks = build(path, "bfloat16")
    load_hf(chunks, path, timeout=30)
    ddp, optimizer = megatron_cpu.wrap_for_training(chunks, lr=1e-2, overlap=overlap, bucket_size=10000)
    adapter = MegatronAdapter(ddp)
    described = adapter.layout(context_from_checkpoint(Path(path)), None)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        ids = torch.randint(0, 200, (1, 12))
        megatron_cpu.train_step(ddp, optimizer, [(ids, ids.roll(-1, 1))])

    def bits() -> dict[str, list[int]]:
        live = zip(described.params, adapter.tensors(), strict=True)
        return {param.name: tensor.reshape(-1).view(torch.int16).tolist() for param, tensor in live}

    resident = bits()
    try:
        MegatronAdapter(chunks).make_readable(Deadline.after(30))
        unwrapped = ""
    except WeightlinkError as error:
        unwrapped = f"{type(error).__name__}: {error}"
    adapter.make_readable(Deadline.after(30))
    (inner,) = optimizer.chained_optimizers
    master = []
    for name, param in chunks[0].named_parameters():
        if getattr(param, "main_param", None) is not None:
            span = inner._get_model_param_range_map(param)["param"]
            value = param.main_param.detach().to(torch.bfloat16).reshape(-1).view(torch.int16)
            master.append((name, span.start, value.tolist()))
    return {"resident": resident, "readable": bits(), "master": master, "unwrapped": unwrapped}


def train(path: str, steps: int, dtype: str, **parallel: Any) -> Any:
    """Losses of some steps on one batch, and whether the tied copies of the embeddings stayed equal."""
    chunks = build(path, dtype, **parallel)
    load_hf(chunks, path, timeout=30)
    ddp, optimizer = megatron_cpu.wrap_for_training(chunks, lr=3e-3)
    ids = (torch.arange(24) * 7 % 200).reshape(2, 12)
    losses = [megatron_cpu.train_step(ddp, optimizer, [(ids, ids.roll(-1, 1))] * 2) for _ in range(steps)]
    adapter = MegatronAdapter(ddp)
    described = adapter.layout(context_from_checkpoint(Path(path)), None)
    sums = {
        param.name: tensor.double().sum().item()
        for param, tensor in zip(described.params, adapter.tensors(), strict=True)
    }
    return {"losses": losses, "sums": sums}


def errors(path: str, **parallel: Any) -> Any:
    """Messages of what must be refused, by name of the fault."""
    chunks = build(path, **parallel)
    context = context_from_checkpoint(Path(path))
    found = {}

    def attempt(fault: str, adapter: MegatronAdapter, call: str = "layout") -> None:
        try:
            adapter.tensors() if call == "tensors" else adapter.layout(context, None)
        except WeightlinkError as error:
            found[fault] = f"{type(error).__name__}: {error}"

    adapter = MegatronAdapter(chunks)
    attempt("tensors before layout", adapter, "tensors")
    attempt("nothing wrong", adapter)
    attempt("nothing wrong", adapter, "tensors")
    layer = chunks[0].decoder.layers[0]
    layer.register_parameter("surprise", torch.nn.Parameter(torch.zeros(3)))
    attempt("unknown parameter", MegatronAdapter(chunks))
    attempt("unknown parameter later", adapter, "tensors")
    del layer.surprise
    attempt("nothing wrong again", adapter, "tensors")
    proj = layer.self_attention.linear_proj
    plain = proj.weight
    with torch.no_grad():
        proj.weight = torch.nn.Parameter(plain.to(torch.float8_e4m3fn), requires_grad=False)
        attempt("fp8", MegatronAdapter(chunks))
        proj.weight = torch.nn.Parameter(torch.Tensor._make_subclass(Quantised, plain.detach()), requires_grad=False)
        attempt("subclass", MegatronAdapter(chunks))
        proj.weight = torch.nn.Parameter(plain.detach().clone().t().contiguous().t())
        attempt("other strides", adapter, "tensors")
        proj.weight = plain
        proj.sharded_state_dict = lambda *args, **options: copied(type(proj).sharded_state_dict(proj, *args, **options))
        attempt("copy", MegatronAdapter(chunks))
        del proj.sharded_state_dict
    nbytes = plain.untyped_storage().nbytes()
    plain.untyped_storage().resize_(0)
    attempt("released", adapter, "tensors")
    plain.untyped_storage().resize_(nbytes)
    embedding = chunks[0].embedding.word_embeddings
    vocabulary = context.hf_config["vocab_size"]
    context.hf_config["vocab_size"] = embedding.weight.shape[0] + 1
    attempt("vocabulary too small", MegatronAdapter(chunks))
    context.hf_config["vocab_size"] = vocabulary
    context.hf_config["tie_word_embeddings"] = not context.hf_config.get("tie_word_embeddings")
    attempt("tied differently", MegatronAdapter(chunks))
    return found


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A module's sharded entries on memory of their own, as Megatron's legacy grouped experts give them."""
    for entry in state.values():
        if isinstance(entry.data, torch.Tensor):
            entry.data = entry.data.detach().clone()
    return state


class Quantised(torch.Tensor):
    """Stands for a quantised tensor class: its dtype says nothing about what its memory holds."""


def rebind(path: str) -> Any:
    """The live tensors after every parameter was rebound to a doubled copy."""
    chunks = build(path)
    adapter = MegatronAdapter(chunks)
    adapter.layout(context_from_checkpoint(Path(path)), None)
    before = [tensor.clone() for tensor in adapter.tensors()]
    with torch.no_grad():
        for param in chunks[0].parameters():
            param.data = param.data * 2
    return [bool(torch.equal(new, old * 2)) for new, old in zip(adapter.tensors(), before, strict=True)]


def load_errors(paths: dict[str, str], model: str, **parallel: Any) -> Any:
    """Messages of loads that must fail."""
    chunks = build(model, **parallel)
    found = {}
    for fault, path in paths.items():
        before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        try:
            load_hf(chunks, path, timeout=30)
        except WeightlinkError as error:
            found[fault] = f"{type(error).__name__}: {error}"
        after = [p.detach() for chunk in chunks for p in chunk.parameters()]
        found[fault + " changed"] = not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return found


def recognised(path: str) -> Any:
    """How many parameters the adapter finds that the plugin manager gives for a model in its different forms."""
    from megatron.core.transformer.module import Float16Module

    chunks = build(path, "bfloat16")
    ddp, _ = megatron_cpu.wrap_for_training(chunks, lr=1e-3)
    forms = {
        "plain": chunks[0],
        "list": chunks,
        "float16": Float16Module(chunks[0].config, chunks[0]),
        "ddp": ddp,
        "mixed": [chunks[0], torch.nn.Linear(2, 3)],
    }
    found = {}
    for form, model in forms.items():
        try:
            adapter = PluginManager(entry_points=False).training_adapter(model)
            found[form] = len(adapter.layout(context_from_checkpoint(Path(path)), None).params)
        except WeightlinkError as error:
            found[form] = type(error).__name__
    return found


def absent(path: str, done: str) -> str:
    """What rank 0 is told when the other rank never joins the load."""
    chunks = build(path)
    limit = time.monotonic() + 30
    while dist.get_rank() == 1 and not Path(done).exists() and time.monotonic() < limit:
        time.sleep(0.02)
    try:
        if dist.get_rank() == 0:
            load_hf(chunks, path, timeout=1.0)
    except WeightlinkError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Path(done).touch()
    return ""


def find(case: str) -> Callable[..., Any]:
    """A function of this file, or of another test module as ``module:function``."""
    module, _, name = case.rpartition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module) if module else sys.modules[__name__], name)
    return found


def rank_main(request: dict[str, Any], rank: int) -> None:
    """One forked rank: joins the group, runs the case, writes its answer."""
    os.dup2(2, 1)
    folder = Path(request["folder"])
    answer: dict[str, Any]
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=request["world"],
            timeout=datetime.timedelta(seconds=request["timeout"]),
        )
        answer = {"result": find(request["case"])(**request["params"])}
    except Exception:  # noqa: BLE001 - any failure is the answer
        answer = {"error": traceback.format_exc()}
    (folder / f"{rank}.partial").write_text(json.dumps(answer))
    os.rename(folder / f"{rank}.partial", folder / f"{rank}.json")


def end_children(pid: int) -> None:
    """Megatron's saves leave helper processes behind, which would outlive a rank that ends without cleaning up."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def run_case(request: dict[str, Any]) -> list[Any]:
    """Forks the ranks and waits for them; ranks that outlive the time limit, or a failed peer, are killed."""
    pids = {}
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(request, rank)
            finally:
                end_children(os.getpid())
                os._exit(0)
        pids[pid] = rank
    limit = time.monotonic() + request["timeout"]
    folder = Path(request["folder"])
    while pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            path = folder / f"{pids.pop(pid)}.json"
            if not path.exists() or "error" in json.loads(path.read_text()):
                limit = min(limit, time.monotonic() + 5.0)
        elif time.monotonic() > limit:
            for left in pids:
                end_children(left)
                os.kill(left, signal.SIGKILL)
            limit = float("inf")
        else:
            time.sleep(0.01)
    paths = [folder / f"{rank}.json" for rank in range(request["world"])]
    return [json.loads(p.read_text()) if p.exists() else {"error": "killed, or died silently"} for p in paths]


def main() -> None:
    """Answers one JSON request per line."""
    megatron_cpu.install_cpu_patches()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    replies.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(run_case(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
