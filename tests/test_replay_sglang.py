"""The replay of SGLang's own loaders against SGLang's own load of the same checkpoint, on real model runners."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from toys import make
from warm import shared


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay-checkpoints")


def cell(runner: Any) -> dict[str, Any]:
    """Observes, then writes the checkpoint through regions and fills into poisoned memory. In the rank's process."""
    import torch
    from oracle import live, poison, write
    from safetensors.torch import load_file
    from weightlink.converters.replay import observe
    from weightlink.hooks.geometry import TensorSpec

    model = runner.model
    tensors = load_file(Path(runner.server_args.model_path) / "model.safetensors")
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]

    def resident() -> dict[str, tuple[int, bytes]]:
        found = {}
        for path, module in model.named_modules():
            for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
                if isinstance(value, torch.Tensor):
                    octets = torch.empty(0, dtype=torch.uint8).set_(value.data.untyped_storage())
                    found[f"{path}.{name}"] = (value.data_ptr(), octets.numpy().tobytes())
        return found

    before = resident()
    start = time.perf_counter()
    layout = observe(rank="rank", tensors=specs, load=model.load_weights, modules=[("", model)])
    seconds = time.perf_counter() - start
    unchanged = resident() == before
    params = live([("", model)], layout.params)
    loaded = [tensor for spec, tensor in zip(layout.params, params, strict=True) if spec.loaded]
    want = [tensor.clone() for tensor in loaded]
    poison(loaded)
    write(layout, params, tensors)
    names = [spec.name for spec in layout.params if spec.loaded]
    octets = [
        (a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(want, loaded, strict=True)
    ]
    used = {layout.tensors[i].name for i in layout.regions.tensor.tolist()}
    return {
        "unchanged": unchanged,
        "different": [name for name, (a, b) in zip(names, octets, strict=True) if not torch.equal(a, b)],
        "opaque": [f"{entry.name}: {entry.reason}" for entry in layout.opaque],
        "unused": sorted(set(tensors) - used),
        "fills": int(layout.fills.size.prod(axis=1).sum()),
        "derived": sorted(name for name in before if name.endswith((".w_kc", ".w_vc"))),
        "params": len(names),
        "microseconds": round(seconds / len(specs) * 1e6),
    }


CELLS = [
    ("qwen3", {"tp": 2}),
    ("qwen3", {"pp": 2}),
    ("qwen3", {}),
    ("llama_tied", {"tp": 2}),
    ("qwen2_moe", {"tp": 2}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("deepseek_v3", {"tp": 2}),
    ("deepseek_v3_fused", {"tp": 2, "ep": 2}),
]


@pytest.mark.parametrize(("family", "sizes"), CELLS, ids=[f"{f}-{s}" for f, s in CELLS])
def test_layout_predicts_sglangs_own_load(family: str, sizes: dict[str, int], checkpoints: Path) -> None:
    ranks = shared().run("test_replay_sglang:cell", make(family, checkpoints / family), **sizes)
    assert len(ranks) == sizes.get("tp", 1) * sizes.get("pp", 1)
    print(ranks)
    for rank in ranks:
        assert rank["unchanged"]
        assert rank["opaque"] == []
        assert rank["different"] == []
        assert rank["params"] >= 9
    unused = set.intersection(*(set(rank["unused"]) for rank in ranks))
    assert unused == set()
    if family in ("llama_tied", "qwen2_moe", "deepseek_v3", "deepseek_v3_fused"):
        assert sum(rank["fills"] for rank in ranks) > 0
    if family.startswith("deepseek_v3"):
        assert all(len(rank["derived"]) == 4 for rank in ranks)
