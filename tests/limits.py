"""Why a cell of the families' table cannot be proven here. Family -> feature -> reason."""

from __future__ import annotations

LIMITS: dict[str, dict[str, str]] = {
    "bailing_moe": {"logits": "transformers has no Bailing MoE: its authors' own code is the only reference"},
}
