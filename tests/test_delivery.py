"""What the replay cannot follow goes through the engine's own loader: real SGLang models, judged by their own load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from warm import shared


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delivery")


def mamba2() -> tuple[Any, dict[str, torch.Tensor]]:
    """SGLang's Mamba2 (``A = -exp(A_log)`` in its loader) and a checkpoint by transformers."""
    import transformers
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.models.mamba2 import Mamba2ForCausalLM

    config = transformers.Mamba2Config(
        vocab_size=250, hidden_size=128, num_hidden_layers=2, num_heads=8, head_dim=32, n_groups=2, state_size=24,
        expand=2, tie_word_embeddings=False,
    )  # fmt: skip
    # SGLang expects what older files have.
    config.intermediate_size, config.rms_norm = config.expand * config.hidden_size, True
    torch.manual_seed(0)
    state = transformers.Mamba2ForCausalLM(config).state_dict()
    with set_default_torch_dtype(torch.bfloat16):
        model = Mamba2ForCausalLM(config)
    return model, {name: torch.randn_like(t).to(torch.bfloat16) for name, t in state.items()}


def qwen3_next() -> tuple[Any, dict[str, torch.Tensor]]:
    """SGLang's Qwen3-Next: the loader of a zero-centred norm also keeps ``weight + 1``, which nothing else renews."""
    import transformers
    from sglang.srt.configs import Qwen3NextConfig
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM

    config = transformers.Qwen3NextConfig(
        vocab_size=250, hidden_size=128, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, head_dim=48, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=24, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = {}
    for name, t in transformers.Qwen3NextForCausalLM(config).state_dict().items():
        value = torch.randn_like(t).to(torch.bfloat16)
        path, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            tensors[name] = value
            continue
        for n, expert in enumerate(value):  # checkpoints have experts apart
            parts = {"gate_proj": expert[:64], "up_proj": expert[64:]} if last == "gate_up_proj" else {last: expert}
            tensors.update({f"{path}.{n}.{part}.weight": w.contiguous() for part, w in parts.items()})
    plain = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    own = Qwen3NextConfig(**plain, full_attention_interval=2)
    with set_default_torch_dtype(torch.bfloat16):
        return Qwen3NextForCausalLM(own), tensors


def coupled(runner: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """DeepSeek-V3 whose fused ``q_a_proj`` and ``kv_a_proj_with_mqa`` are computed with, in layer 1 only."""
    from safetensors.torch import load_file
    from sglang.srt.model_loader.weight_utils import composed_weight_loader

    fused = runner.model.model.layers[1].self_attn.fused_qkv_a_proj_with_mqa.weight
    loader = fused.weight_loader
    del fused.weight_loader
    fused.weight_loader = composed_weight_loader(loader, lambda p: 1.5 * p.data)
    return runner.model, load_file(Path(runner.server_args.model_path) / "model.safetensors")


class Wrapper(torch.nn.Module):
    """As multi-modal models hold a language model: without a ``post_load_weights`` of their own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.language_model = model

    def load_weights(self, weights: Any) -> None:
        self.language_model.load_weights(weights)


def wrapped(runner: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """DeepSeek-V3 in a model whose ``w_kc`` and ``w_vc`` SGLang does not renew after an update without loader."""
    from safetensors.torch import load_file

    return Wrapper(runner.model), load_file(Path(runner.server_args.model_path) / "model.safetensors")


def plain(runner: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The runner's own model and checkpoint."""
    from safetensors.torch import load_file

    return runner.model, load_file(Path(runner.server_args.model_path) / "model.safetensors")


KINDS = {
    "mamba2": lambda _: mamba2(),
    "qwen3_next": lambda _: qwen3_next(),
    "coupled": coupled,
    "wrapped": wrapped,
    "plain": plain,
}


def cell(runner: Any, kind: str) -> dict[str, Any]:
    """An update by the adapter: regions into poisoned memory, then its loader. In a rank's process."""
    from oracle import deliver, live, poison, write
    from test_adapter import adapter_of
    from weightlink.hooks.geometry import TensorSpec

    model, tensors = KINDS[kind](runner)
    runner.model = model
    adapter = adapter_of(runner)
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    calls = {"load": 0, "post": 0}
    for name, count in (("load_weights", "load"), ("post_load_weights", "post")):
        if hasattr(model, name):
            counted(type(model), name, calls, count)

    model.load_weights(iter(tensors.items()))
    runner.weight_updater.end_weight_update(run_post_load=True)
    layout = adapter.observe(specs, "hf", "all")
    params = live([("", model)], layout.params)
    computed = {entry.param for entry in layout.opaque}
    mine = [n for n, p in enumerate(layout.params) if (p.loaded or n in computed) and not p.staged]
    own, names = [params[n] for n in mine], [layout.params[n].name for n in mine]
    derived = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in ("w_kc", "w_vc") and isinstance(value, torch.Tensor)
    }
    want, wanted = [t.clone() for t in own], {name: t.clone() for name, t in derived.items()}
    poison([*own, *derived.values()])
    adapter.begin(layout.params)
    write(layout, params, tensors)
    calls.update(load=0, post=0)
    deliver(layout, params, lambda weights: adapter.load(list(weights)))
    adapter.finish()
    return {
        "different": [n for n, a, b in zip(names, want, own, strict=True) if not same(a, b)]
        + [n for n, t in wanted.items() if not same(t, derived[n])],
        "opaque": [(o.name, o.delivered) for o in layout.opaque],
        "staged": [p.name for p in layout.params if p.staged],
        "bytes": layout.staged_bytes,
        "calls": calls,
        "params": len(names),
        "derived": len(derived),
    }


def counted(owner: type, name: str, calls: dict[str, int], count: str) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[count] += 1
        return real(*args, **kwargs)

    setattr(owner, name, call)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_post_transformed_weights_of_mamba(folder: Path) -> None:
    ranks = shared().run("test_delivery:cell", toys.make("qwen3", folder / "qwen3"), tp=2, arguments={"kind": "mamba2"})
    print(ranks)
    for rank in ranks:
        assert rank["different"] == []
        logs = [f"backbone.layers.{n}.mixer.A_log" for n in range(2)]
        assert {name for name, _ in rank["opaque"]} == {*logs, *(f"model.layers.{n}.mixer.A" for n in range(2))}
        assert all(delivered for _, delivered in rank["opaque"])
        assert rank["staged"] == logs
        assert rank["bytes"] == 2 * 8 * 4  # fp32, as the parameter that is made of it
        assert rank["calls"]["load"] == 1


def test_a_coupled_group_goes_in_one_call_and_post_load_runs_once(folder: Path) -> None:
    ranks = shared().run(
        "test_delivery:cell", toys.make("deepseek_v3", folder / "deepseek_v3"), tp=2, arguments={"kind": "coupled"}
    )
    print(ranks)
    for rank in ranks:
        assert rank["different"] == []
        attention = "model.layers.1.self_attn"
        assert rank["staged"] == [f"{attention}.kv_a_proj_with_mqa.weight", f"{attention}.q_a_proj.weight"]
        assert all(delivered for _, delivered in rank["opaque"])
        assert rank["calls"] == {"load": 1, "post": 1}
        assert rank["derived"] == 4


def test_derived_weights_that_sglang_does_not_renew(folder: Path) -> None:
    ranks = shared().run(
        "test_delivery:cell", toys.make("deepseek_v3", folder / "deepseek_v3"), tp=2, arguments={"kind": "wrapped"}
    )
    print(ranks)
    for rank in ranks:
        assert rank["different"] == []
        assert rank["derived"] == 4
        assert rank["staged"] == [f"model.layers.{n}.self_attn.kv_b_proj.weight" for n in range(2)]
        assert all(delivered for _, delivered in rank["opaque"])
        assert rank["calls"] == {"load": 1, "post": 0}


def test_zero_centred_norms_of_qwen3_next(folder: Path) -> None:
    ranks = shared().run(
        "test_delivery:cell", toys.make("qwen3", folder / "qwen3"), tp=2, arguments={"kind": "qwen3_next"}
    )
    print(ranks)
    for rank in ranks:
        assert rank["different"] == []
        assert all(delivered for _, delivered in rank["opaque"])
        assert len(rank["staged"]) == 7
        assert all(name.endswith("norm.weight") for name in rank["staged"])
        assert {name.rpartition(".")[2] for name, _ in rank["opaque"]} == {"gemma_weight", "weight"}
        assert rank["bytes"] == 2 * (5 * 128 + 2 * 48)
