"""The vision tower of Qwen3-VL and Qwen3.5, as Megatron-Bridge builds it from Megatron's own layers."""

from itertools import product

from weightlink.converters.families.common import in_layer, inside
from weightlink.converters.families.rules import Part, Rule


def _named(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    """Weight and bias of each pair of modules."""
    return tuple(Rule(f"{key}.{kind}", f"{name}.{kind}") for (key, name), kind in product(pairs, ("weight", "bias")))


def _qkv(kind: str) -> Rule:
    """Megatron keeps each head's query, key and value together; HF has all queries, all keys, all values."""
    parts = tuple(
        Part(f"attn.qkv.{kind}", rows="vit_head", at=at, size="3*vit_heads*vit_head")
        for at in ("0", "vit_heads*vit_head", "2*vit_heads*vit_head")
    )
    return Rule(f"self_attention.linear_qkv.{kind}", parts, groups="vit_heads")


_LAYERS = in_layer(
    _qkv("weight"),
    _qkv("bias"),
    *_named(
        ("input_layernorm", "norm1"),
        ("pre_mlp_layernorm", "norm2"),
        ("self_attention.linear_proj", "attn.proj"),
        ("mlp.linear_fc1", "mlp.linear_fc1"),
        ("mlp.linear_fc2", "mlp.linear_fc2"),
    ),
    *(
        Rule(f"{linear}.layer_norm_{kind}", f"{norm}.{kind}")
        for linear, norm in (("self_attention.linear_qkv", "norm1"), ("mlp.linear_fc1", "norm2"))
        for kind in ("weight", "bias")
    ),
    source="vision_model.decoder.layers.{L}.",
    target="model.visual.blocks.{L}.",
)

_MERGER = _named(("patch_norm", "norm"), ("linear_fc1", "linear_fc1"), ("linear_fc2", "linear_fc2"))

VISION = (
    *_LAYERS,
    *_named(("vision_model.patch_embed.proj", "model.visual.patch_embed.proj")),
    Rule("vision_model.pos_embed.weight", "model.visual.pos_embed.weight"),
    *in_layer(*_MERGER, source="vision_model.merger.", target="model.visual.merger."),
    *in_layer(
        *_MERGER,
        source="vision_model.decoder.deepstack_merger_list.{L}.",
        target="model.visual.deepstack_merger_list.{L}.",
    ),
)


def with_vision(text: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a text model, which may be trained alone or beside its tower, and those of the tower."""
    target = "model.language_model."
    return inside(text, "", target) + inside(text, "language_model.", target) + VISION
