"""Why a cell of the families' table cannot be proven here. Family -> feature -> reason."""

from __future__ import annotations

_OSS_EXPERTS = "SGLang's own load of unquantised gpt-oss fails when experts are spread (biases of w2)"

LIMITS: dict[str, dict[str, str]] = {
    "bailing_moe": {
        "logits": "transformers has no Bailing MoE: test_moe.py compares with SGLang's own forward instead"
    },
    "bailing_moe_linear": {
        "logits": "Megatron-Core has no linear attention of this kind: the grid's toy has latent attention only"
    },
    "deepseek": {"engine KV copies": "latent attention has no key-value heads to copy"},
    "gpt_oss": dict.fromkeys(("engine EP", "engine EPxTP"), _OSS_EXPERTS),
}
