"""gpt-oss: biases, attention sinks, and experts stacked in one HF tensor, transposed, gate and up rows alternating."""

from weightlink.converters.families.base import Family
from weightlink.converters.families.common import ATTENTION, EMBEDDINGS, NORMS, OUTPUT_BIAS, QKV_BIAS, in_layer
from weightlink.converters.families.rules import Part, Rule

_EXPERT = "mlp.experts.experts.{E}."


def _every_other(key: str, name: str, at: str, *, transpose: bool) -> Rule:
    part = Part(name, rows="1", units="moe_ffn", every="2", at=at)
    return Rule(_EXPERT + key, (part,), transpose=transpose, stack="experts")


_SINKS = in_layer(Rule("self_attention.core_attention.softmax_offset", "self_attn.sinks"))

_EXPERTS = in_layer(
    Rule("mlp.router.weight", "mlp.router.weight"),
    Rule("mlp.router.bias", "mlp.router.bias"),
    _every_other("linear_fc1.weight_w", "mlp.experts.gate_up_proj", "0", transpose=True),
    _every_other("linear_fc1.weight_v", "mlp.experts.gate_up_proj", "1", transpose=True),
    _every_other("linear_fc1.bias_w", "mlp.experts.gate_up_proj_bias", "0", transpose=False),
    _every_other("linear_fc1.bias_v", "mlp.experts.gate_up_proj_bias", "1", transpose=False),
    Rule(_EXPERT + "linear_fc2.weight", "mlp.experts.down_proj", transpose=True, stack="experts"),
    Rule(_EXPERT + "linear_fc2.bias", "mlp.experts.down_proj_bias", stack="experts"),
)

FAMILY = Family(
    "gpt_oss", ("GptOssForCausalLM",), EMBEDDINGS + NORMS + ATTENTION + QKV_BIAS + OUTPUT_BIAS + _SINKS + _EXPERTS
)
