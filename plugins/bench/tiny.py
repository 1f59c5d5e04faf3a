"""A model of a few hundred kilobytes as a Hugging Face checkpoint, for benchmarks of everything but the bytes."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights and no tokenizer, in ``folder``. No matrix is square."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=250,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
