"""A dense model of the wanted size as a Hugging Face checkpoint, for benchmarks that move a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from weightlink.plugins.bench.shapes import Dims

#: A dense decoder of 0.8 GB.
MIDDLE = Dims(layers=10, hidden=1536, inter=4800, heads=16, kv_heads=4, head=128, vocab=32000)


def write(folder: Path, dims: Dims) -> Path:
    """A Qwen3 with random weights and no tokenizer, in ``folder``. Written by hand: no import of any model's code."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.inter,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    made = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=made)
        for name, shape in _shapes(dims)
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(d: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (d.vocab, d.hidden)
    for n in range(d.layers):
        layer = {
            "input_layernorm": (d.hidden,),
            "self_attn.q_proj": (d.heads * d.head, d.hidden),
            "self_attn.k_proj": (d.kv_heads * d.head, d.hidden),
            "self_attn.v_proj": (d.kv_heads * d.head, d.hidden),
            "self_attn.q_norm": (d.head,),
            "self_attn.k_norm": (d.head,),
            "self_attn.o_proj": (d.hidden, d.heads * d.head),
            "post_attention_layernorm": (d.hidden,),
            "mlp.gate_proj": (d.inter, d.hidden),
            "mlp.up_proj": (d.inter, d.hidden),
            "mlp.down_proj": (d.hidden, d.inter),
        }
        for name, shape in layer.items():
            yield f"model.layers.{n}.{name}.weight", shape
    yield "model.norm.weight", (d.hidden,)
    yield "lm_head.weight", (d.vocab, d.hidden)
