"""GLM-4 (dense): gate and up projection in one matrix, interleaved rotary embeddings.

The 0414 models have further norms after attention and MLP. Megatron-Core itself has no place for those; trainers add
them to the layer, or to its two parts.
"""

from weightlink.converters.families.base import Family, Part, Rule
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, NORMS, QKV_BIAS, in_layer

GATE_UP = "mlp.gate_up_proj.weight"

MLP = in_layer(
    Rule("mlp.linear_fc1.weight", ((GATE_UP, "2*ffn"),)),
    Rule("mlp.linear_fc1.weight_w", (Part(GATE_UP, rows="ffn", every="2*ffn"),)),
    Rule("mlp.linear_fc1.weight_v", (Part(GATE_UP, rows="ffn", every="2*ffn", at="ffn"),)),
    Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)

OUTPUT_NORMS = in_layer(
    Rule("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", norm=True),
    Rule("self_attention.post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", norm=True),
    Rule("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", norm=True),
    Rule("mlp.post_mlp_layernorm.weight", "post_mlp_layernorm.weight", norm=True),
)

FAMILY = Family(
    "glm4",
    ("Glm4ForCausalLM", "GlmForCausalLM"),
    EMBEDDINGS + NORMS + ATTENTION + QKV_BIAS + MLP + OUTPUT_NORMS,
    rotary_interleaved=True,
)
