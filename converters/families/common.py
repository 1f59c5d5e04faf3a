"""Rules that several families share. Those made by :func:`in_layer` are for decoder layers."""

from __future__ import annotations

from dataclasses import replace

from weightlink.converters.families.rules import Rule


def in_layer(*rules: Rule, source: str = "decoder.layers.{L}.", target: str = "model.layers.{L}.") -> tuple[Rule, ...]:
    """The rules with Megatron's and Hugging Face's prefix of decoder layer ``{L}``."""
    return tuple(rule.prefixed(source, target) for rule in rules)


def inside(rules: tuple[Rule, ...], source: str, target: str) -> tuple[Rule, ...]:
    """The rules for a model that is a part of another one: ``source`` before every key, ``target`` in place of the
    names' ``model.``; names outside it (the head) stay."""

    def name(text: str) -> str:
        return target + text.removeprefix("model.") if text.startswith("model.") else text

    return tuple(
        replace(
            rule,
            key=source + rule.key,
            to=name(rule.to)
            if isinstance(rule.to, str)
            else tuple(replace(part, name=name(part.name)) for part in rule.parts),
        )
        for rule in rules
    )


def zero_centred(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules for an HF model whose norms hold their scale less one."""
    return tuple(replace(rule, centred=rule.norm) for rule in rules)


EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "vocab"),)),
    Rule("output_layer.weight", (("lm_head.weight", "vocab"),)),
    Rule("decoder.final_layernorm.weight", "model.norm.weight", norm=True),
)

#: Transformer Engine fuses the norms into the linear layers; the local spec keeps modules of their own.
NORMS = in_layer(
    Rule("input_layernorm.weight", "input_layernorm.weight", norm=True),
    Rule("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", norm=True),
    Rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", norm=True),
    Rule("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", norm=True),
)

ATTENTION = in_layer(
    Rule(
        "self_attention.linear_qkv.weight",
        (("self_attn.q_proj.weight", "q"), ("self_attn.k_proj.weight", "k"), ("self_attn.v_proj.weight", "v")),
        groups="groups",
    ),
    Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

QKV_BIAS = in_layer(
    Rule(
        "self_attention.linear_qkv.bias",
        (("self_attn.q_proj.bias", "q"), ("self_attn.k_proj.bias", "k"), ("self_attn.v_proj.bias", "v")),
        groups="groups",
    ),
)

#: Megatron's ``add_bias_linear`` gives every linear layer one.
OUTPUT_BIAS = in_layer(Rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias"))

MLP_BIAS = in_layer(
    Rule("mlp.linear_fc1.bias", (("mlp.gate_proj.bias", "ffn"), ("mlp.up_proj.bias", "ffn"))),
    Rule("mlp.linear_fc1.bias_w", "mlp.gate_proj.bias"),
    Rule("mlp.linear_fc1.bias_v", "mlp.up_proj.bias"),
    Rule("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
)

QK_NORM = in_layer(
    Rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", norm=True),
    Rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", norm=True),
)

#: With ``singleton_local_shards`` gate and up have keys of their own (``_w``, ``_v``); without it they share one.
MLP = in_layer(
    Rule("mlp.linear_fc1.weight", (("mlp.gate_proj.weight", "ffn"), ("mlp.up_proj.weight", "ffn"))),
    Rule("mlp.linear_fc1.weight_w", "mlp.gate_proj.weight"),
    Rule("mlp.linear_fc1.weight_v", "mlp.up_proj.weight"),
    Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)

EXPERTS = in_layer(
    Rule("mlp.router.weight", "mlp.gate.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc1.weight_w", "mlp.experts.{E}.gate_proj.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc1.weight_v", "mlp.experts.{E}.up_proj.weight"),
    Rule("mlp.experts.experts.{E}.linear_fc2.weight", "mlp.experts.{E}.down_proj.weight"),
)

ROUTER_BIAS = in_layer(Rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"))


def shared_experts(name: str) -> tuple[Rule, ...]:
    """Megatron's shared experts, which are one MLP, under Hugging Face's ``mlp.<name>``."""
    gate, up, down = (f"mlp.{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return in_layer(
        Rule("mlp.shared_experts.linear_fc1.weight", ((gate, "shared_ffn"), (up, "shared_ffn"))),
        Rule("mlp.shared_experts.linear_fc1.weight_w", gate),
        Rule("mlp.shared_experts.linear_fc1.weight_v", up),
        Rule("mlp.shared_experts.linear_fc2.weight", down),
    )
