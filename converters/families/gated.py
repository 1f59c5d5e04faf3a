"""Rules for attention with an output gate and for gated delta nets."""

from weightlink.converters.families.common import in_layer
from weightlink.converters.families.rules import Part, Rule

_NET = "self_attention."
_KEYS, _VALUES = "gdn_groups*gdn_k", "gdn_groups*gdn_v"

#: Each group holds queries, their gates, keys, values; HF's q_proj has every head's gate after the head.
GATED_ATTENTION = in_layer(
    Rule(
        "self_attention.linear_qkv.weight",
        (
            Part("self_attn.q_proj.weight", rows="head", units="qpg", every="2*head"),
            Part("self_attn.q_proj.weight", rows="head", units="qpg", every="2*head", at="head"),
            Part("self_attn.k_proj.weight", rows="k"),
            Part("self_attn.v_proj.weight", rows="v"),
        ),
        groups="groups",
    ),
    Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)


def _packed(part: str, name: str, rows: str, every: str, at: str) -> Rule:
    """Rows of each key head, which HF packs with other rows of that head."""
    return Rule(_NET + part, (Part(name, rows=rows, units="gdn_groups", every=every, at=at),))


def _conv(part: str, rows: str, at: str) -> Rule:
    name = "linear_attn.conv1d.weight"
    return Rule(_NET + f"conv1d.weight.{part}", (Part(name, rows=rows, at=at, size=f"2*{_KEYS}+{_VALUES}"),))


#: What all gated delta nets have in common: everything but the input projection.
DELTA_NET = in_layer(
    Rule(_NET + "in_proj.layer_norm_weight", "input_layernorm.weight", norm=True, centred=True),
    _conv("query", _KEYS, "0"),
    _conv("key", _KEYS, _KEYS),
    _conv("value", _VALUES, f"2*{_KEYS}"),
    Rule(_NET + "A_log", "linear_attn.A_log"),
    Rule(_NET + "dt_bias", "linear_attn.dt_bias"),
    # The one norm of these models that HF does not centre at zero.
    Rule(_NET + "out_norm.weight", "linear_attn.norm.weight", norm=True),
    Rule(_NET + "out_proj.weight", "linear_attn.out_proj.weight"),
)

_QKVZ, _BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"

#: HF packs ``[query, key, values, gates]`` and ``[beta, alpha]`` of each key head.
PACKED_INPUTS = in_layer(
    _packed("in_proj.weight.query", _QKVZ, "gdn_k", "2*gdn_k+2*gdn_v", "0"),
    _packed("in_proj.weight.key", _QKVZ, "gdn_k", "2*gdn_k+2*gdn_v", "gdn_k"),
    _packed("in_proj.weight.value", _QKVZ, "gdn_v", "2*gdn_k+2*gdn_v", "2*gdn_k"),
    _packed("in_proj.weight.z", _QKVZ, "gdn_v", "2*gdn_k+2*gdn_v", "2*gdn_k+gdn_v"),
    _packed("in_proj.weight.beta", _BA, "gdn_heads", "2*gdn_heads", "0"),
    _packed("in_proj.weight.alpha", _BA, "gdn_heads", "2*gdn_heads", "gdn_heads"),
)


def _input(part: str, rows: str, at: str) -> Rule:
    name = "linear_attn.in_proj_qkv.weight"
    return Rule(_NET + f"in_proj.weight.{part}", (Part(name, rows=rows, at=at, size=f"2*{_KEYS}+{_VALUES}"),))


#: HF keeps queries, keys and values in one tensor, one after the other.
PLAIN_INPUTS = in_layer(
    _input("query", _KEYS, "0"),
    _input("key", _KEYS, _KEYS),
    _input("value", _VALUES, f"2*{_KEYS}"),
    Rule(_NET + "in_proj.weight.z", "linear_attn.in_proj_z.weight"),
    Rule(_NET + "in_proj.weight.beta", "linear_attn.in_proj_b.weight"),
    Rule(_NET + "in_proj.weight.alpha", "linear_attn.in_proj_a.weight"),
)
