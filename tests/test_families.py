"""Families as data, and boxes of Megatron tensors cut by their rules, against element-by-element formulas."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weightlink.converters.families import BUILTIN, weightlink_families
from weightlink.converters.families.base import Family, Part, Rule, choose_family
from weightlink.converters.families.common import in_layer
from weightlink.converters.megatron import (
    read_layout,
    require_one_parameter,
    require_same_rotation,
    shards_of,
    sizes_of,
)
from weightlink.hooks import hookimpl
from weightlink.hooks.errors import LayoutError, NameMapError, PluginError
from weightlink.hooks.manager import PluginManager

FAMILIES = {family.name: family for family in BUILTIN}
QKV = "decoder.layers.3.self_attention.linear_qkv."


@dataclass
class Entry:
    """The attributes of a Megatron ShardedTensor, cut from a global tensor."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def cut(key: str, whole: torch.Tensor, start: int, end: int, **options: bool) -> Entry:
    return Entry(key, whole[start:end], tuple(whole.shape), (start, *[0] * (whole.dim() - 1)), **options)


def read(entries, family="qwen2", exclude=(), **sizes):
    family = family if isinstance(family, Family) else FAMILIES[family]
    layout, sources = read_layout(entries, family, sizes, dtype="float32", rank="trainer 0", exclude=exclude)
    return layout, [source.refresh() for source in sources]


def rows(layout, tensors):
    """(canonical name, canonical index) -> element, for every element of every region."""
    found = {}
    regions = layout.regions
    for row in range(len(regions)):
        spec = layout.tensors[regions.tensor[row]]
        dims = len(spec.shape)
        flat = tensors[regions.param[row]]
        view = flat.as_strided(
            regions.size[row, :dims].tolist(),
            regions.stride[row, :dims].tolist(),
            flat.storage_offset() + int(regions.offset[row]),
        )
        for local in torch.cartesian_prod(*map(torch.arange, view.shape)).reshape(-1, dims).tolist():
            index = tuple(
                int(lo) + k * int(step) for lo, step, k in zip(regions.lo[row], regions.step[row], local, strict=False)
            )
            assert (spec.name, index) not in found
            assert all(i < n for i, n in zip(index, spec.shape, strict=True))
            found[spec.name, index] = view[tuple(local)].item()
    return found


def megatron_row(kind: str, row: int, per_group: int, channels: int) -> int:
    """The global linear_qkv row of a Hugging Face row: groups of [queries, key, value]."""
    head, within = divmod(row, channels)
    if kind == "q":
        return head // per_group * (per_group + 2) * channels + head % per_group * channels + within
    return head * (per_group + 2) * channels + (per_group + (kind == "v")) * channels + within


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 4),
    per_group=st.integers(1, 3),
    channels=st.integers(1, 4),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    bias=st.booleans(),
)
def test_every_query_key_value_row_lands_where_the_formula_says(groups, per_group, channels, cuts, bias):
    total = groups * (per_group + 2) * channels
    whole = torch.arange(total, dtype=torch.float32) if bias else torch.arange(total * 2.0).reshape(total, 2)
    key = QKV + ("bias" if bias else "weight")
    bounds = sorted({0, total, *(round(share * total) for share in cuts)})
    sizes = {"groups": groups, "q": per_group * channels, "k": channels, "v": channels}
    found = {}
    for start, end in pairwise(bounds):  # ranks, also with cuts inside a group
        part = rows(*read([cut(key, whole, start, end)], **sizes))
        assert not part.keys() & found.keys()
        found |= part
    assert len(found) == whole.numel()
    for (name, index), value in found.items():
        kind = name.removeprefix("model.layers.3.self_attn.")[0]
        row = megatron_row(kind, index[0], per_group, channels)
        assert value == whole[(row, *index[1:])]


def test_gate_and_up_under_one_key_and_under_two():
    gate, up = torch.arange(12.0).reshape(6, 2), 100 + torch.arange(12.0).reshape(6, 2)
    key = "decoder.layers.0.mlp.linear_fc1.weight"
    one = [
        Entry(key, gate[3:], (12, 2), (3, 0)),  # rank 1 of 2: the second half of each
        Entry(key, up[3:], (12, 2), (9, 0)),
    ]
    two = [cut(key + "_w", gate, 3, 6), cut(key + "_v", up, 3, 6)]
    want = {("model.layers.0.mlp.gate_proj.weight", (r, c)): gate[r, c].item() for r in range(3, 6) for c in range(2)}
    want |= {("model.layers.0.mlp.up_proj.weight", (r, c)): up[r, c].item() for r in range(3, 6) for c in range(2)}
    assert rows(*read(one, ffn=6)) == want
    assert rows(*read(two, ffn=6)) == want
    assert {spec.shape for spec in read(one, ffn=6)[0].tensors} == {(6, 2)}


def test_a_column_cut_and_a_strided_local_tensor():
    whole = torch.arange(30.0).reshape(5, 6)
    local = whole[:, 2:4]
    entry = Entry("decoder.layers.1.mlp.linear_fc2.weight", local, (5, 6), (0, 2))
    layout, tensors = read([entry])
    assert tensors[0].data_ptr() == local.data_ptr()
    assert layout.params[0].stride == (6, 1)
    found = rows(layout, tensors)
    assert found == {("model.layers.1.mlp.down_proj.weight", (r, c)): whole[r, c] for r in range(5) for c in (2, 3)}


@pytest.mark.parametrize(("start", "end", "held"), [(0, 4, range(4)), (4, 8, range(4, 7)), (8, 12, range(0))])
def test_vocabulary_padding_is_clipped(start, end, held):
    whole = torch.arange(24.0).reshape(12, 2)
    entry = cut("embedding.word_embeddings.weight", whole, start, end, allow_shape_mismatch=True)
    layout, tensors = read([entry], vocab=7)
    found = rows(layout, tensors)
    assert {index[0] for _, index in found} == set(held)
    assert all(spec.shape == (7, 2) for spec in layout.tensors)
    assert len(layout.params) == 1


def test_rows_that_do_not_match_the_configuration():
    whole = torch.zeros(12, 2)
    with pytest.raises(LayoutError, match="13") as small:
        read([cut("output_layer.weight", whole, 0, 12, allow_shape_mismatch=True)], vocab=13)
    assert small.value.tensor == "output_layer.weight"
    with pytest.raises(LayoutError):  # spare rows, but not declared as padding
        read([cut("embedding.word_embeddings.weight", whole, 0, 12)], vocab=7)
    with pytest.raises(LayoutError, match="linear_qkv"):
        read([cut(QKV + "weight", whole, 0, 12)], groups=2, q=2, k=1, v=1)
    with pytest.raises(NameMapError, match="ffn"):
        read([cut("decoder.layers.0.mlp.linear_fc1.weight", whole, 0, 12)], vocab=7)


def test_stacked_axes_are_refused():
    entry = Entry("decoder.layers.0.mlp.linear_fc2.weight", torch.zeros(5, 6), (2, 5, 6), (1, 0, 0), 1)
    with pytest.raises(LayoutError, match="stacked"):
        read([entry])


def test_unknown_keys_are_all_named_with_a_remedy():
    entries = [cut(key, torch.zeros(4, 2), 0, 4) for key in ("decoder.layers.7.mlp.mystery.weight", "vision.proj")]
    with pytest.raises(NameMapError) as raised:
        read(entries)
    assert "decoder.layers.7.mlp.mystery.weight" in raised.value.tensor
    assert "vision.proj" in raised.value.tensor
    assert 'Rule("decoder.layers.{L}.mlp.mystery.weight"' in raised.value.remedy


@pytest.mark.parametrize(
    "key",
    ["decoder.layers.7.mlp.experts.experts.31.mystery", "decoder.layers.7.scales.3", "tower.mlp.0.weight", "plain"],
)
def test_the_rule_that_the_error_proposes_works(key):
    with pytest.raises(NameMapError) as raised:
        read([cut(key, torch.zeros(4, 2), 0, 4)])
    proposed = raised.value.remedy.split('Rule("')[1].split('"')[0]
    family = Family("toy", (), (Rule(proposed, proposed),))
    assert family.match(key).parts[0].name == key
    assert family.match(key.replace("7", "12").replace("3", "5")) is not None


def test_a_number_that_a_key_states_fits_only_that_number():
    rules = (Rule("tower.{L}.mlp.0.w", "blocks.{L}.first"), Rule("tower.{L}.mlp.2.w", "blocks.{L}.second"))
    family = Family("toy", (), rules)
    assert family.match("tower.5.mlp.0.w").parts[0].name == "blocks.5.first"
    assert family.match("tower.5.mlp.2.w").parts[0].name == "blocks.5.second"
    assert family.match("tower.5.mlp.1.w") is None
    stacked = Family("toy", (), (Rule("tower.{E}.mlp.2.w", "x", stack="n"),))
    assert stacked.match("tower.5.mlp.2.w").index == 5


@pytest.mark.parametrize("names", ["b", "b.{E}"])
def test_parameters_that_a_rule_gives_one_name_are_no_replicas(names):
    """Each on a rank of its own (stages, expert parallel): nothing else would tell them from replicas."""
    family = Family("toy", (), (Rule("a.{E}.w", names),))
    layouts = []
    for rank in range(3):
        whole = torch.full((4, 2), float(rank))
        found, _ = read_layout(
            [cut(f"a.{rank % 2}.w", whole, 0, 4)], family, {}, dtype="float32", rank=f"trainer {rank}"
        )
        layouts.append(found)
    layouts.append(read_layout([], family, {}, dtype="float32", rank="trainer 3")[0])
    if names == "b.{E}":
        require_one_parameter(layouts)
        return
    with pytest.raises(LayoutError, match="two different parameters") as raised:
        require_one_parameter(layouts)
    assert (raised.value.tensor, raised.value.rank, raised.value.found) == ("b", "trainer 1", "a.1.w")
    assert "a.0.w, as on trainer 0" in raised.value.expected


def test_the_manifests_dtype_is_the_engines_and_the_parameters_its_own():
    entries = [cut("decoder.final_layernorm.weight", torch.zeros(4), 0, 4)]
    layout, _ = read_layout(entries, FAMILIES["llama"], {}, dtype="bfloat16", rank="trainer 0")
    assert [spec.dtype for spec in layout.tensors] == ["bfloat16"]
    assert layout.params[0].dtype == "float32"


def test_aliases_share_a_storage_number():
    whole = torch.zeros(10, 2)
    layout, _ = read(
        [
            cut("decoder.layers.0.mlp.linear_fc1.weight_w", whole, 0, 5),
            cut("decoder.layers.0.mlp.linear_fc1.weight_v", whole, 5, 10),
            cut("decoder.final_layernorm.weight", torch.zeros(3), 0, 3),
        ]
    )
    assert [(p.storage, p.start) for p in layout.params] == [(0, 0), (0, 10), (1, 0)]


def test_nested_state_dicts_and_other_objects():
    entry = cut("decoder.final_layernorm.weight", torch.zeros(3), 0, 3)
    state = {"a": [entry, {"b": (entry,)}], "extra": object(), "n": 3, "t": torch.zeros(2)}
    assert list(shards_of(state)) == [entry, entry]


def test_sizes_come_from_the_configuration():
    class Config:
        num_attention_heads = 6
        num_query_groups = None
        kv_channels = 5
        ffn_hidden_size = 96
        num_moe_experts = True  # not a number

    found = sizes_of(Config, {"vocab_size": 11})
    assert found == {"heads": 6, "groups": 6, "qpg": 1, "head": 5, "q": 5, "k": 5, "v": 5, "ffn": 96, "vocab": 11}


def test_another_pairing_of_rotary_rows_is_refused():
    class Config:
        rotary_interleaved = True

    with pytest.raises(LayoutError, match="rotary_interleaved=False"):
        require_same_rotation(Config, FAMILIES["llama"], "trainer 0")
    require_same_rotation(Config, Family("toy", (), (), rotary_interleaved=True), "trainer 0")


def test_a_zero_centred_norm_is_sent_with_one_added_and_loaded_with_one_taken():
    live = torch.tensor([-0.5, 0.25, 0.0], dtype=torch.bfloat16)
    plain = torch.tensor([[1.0, 2.0]])
    entries = [
        cut("decoder.final_layernorm.weight", live, 0, 3),
        cut("decoder.layers.0.mlp.linear_fc2.weight", plain, 0, 1),
    ]
    layout, (norm, other) = read_layout(
        entries, FAMILIES["llama"], {}, dtype="bfloat16", rank="trainer 0", zero_centred=True
    )
    assert layout.params[0].dtype == "float32"
    assert norm.refresh().tolist() == [0.5, 1.25, 1.0]
    live.mul_(2)
    assert norm.refresh().tolist() == [0.0, 1.5, 1.0]
    assert other.refresh() is other.live
    norm.sent.fill_(3.0)
    norm.store()
    assert live.tolist() == [2.0, 2.0, 2.0]


def test_excluded_parameters_need_no_rule():
    entries = [cut(key, torch.zeros(3), 0, 3) for key in ("decoder.final_layernorm.weight", "vision.proj")]
    layout, _ = read(entries, exclude=["vision.*"])
    assert [param.name for param in layout.params] == ["decoder.final_layernorm.weight"]
    assert type(layout).unpack(layout.pack()).excluded == ("vision.proj",)


PARTS = {
    # Each: rule, sizes, and for a global row of the Megatron tensor its (name, canonical row).
    "component to interleaved groups": (
        Rule("w", (Part("x", rows="a", units="n", every="2*a+b", at="a"),)),
        {"a": 3, "b": 2, "n": 4},
        12,
        lambda row: ("x", row // 3 * 8 + 3 + row % 3),
    ),
    "gate and up of alternate rows": (
        Rule("w", (Part("x", "1", "f", "2", "0"), Part("x", "1", "f", "2", "1"))),
        {"f": 5},
        10,
        lambda row: ("x", row % 5 * 2 + row // 5),
    ),
    "groups of query and gate to heads": (
        Rule(
            "w",
            (Part("q", "h", "m", "2*h", "0"), Part("q", "h", "m", "2*h", "h"), Part("k", "h")),
            groups="g",
        ),
        {"h": 3, "m": 2, "g": 2},
        2 * 15,
        lambda row: (
            ("k", row // 15 * 3 + row % 15 - 12)
            if row % 15 >= 12
            else ("q", (row // 15 * 2 + row % 15 % 6 // 3) * 6 + row % 15 // 6 * 3 + row % 3)
        ),
    ),
    "grouped rows to one fused tensor": (
        Rule("w", (Part("x", "q", size="g*q+g*k"), Part("x", "k", at="g*q", size="g*q+g*k")), groups="g"),
        {"q": 4, "k": 3, "g": 3},
        21,
        lambda row: ("x", row // 7 * 4 + row % 7 if row % 7 < 4 else 12 + row // 7 * 3 + row % 7 - 4),
    ),
}


@pytest.mark.parametrize("case", PARTS)
@given(cuts=st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=25, deadline=None)
def test_parts_put_every_row_where_the_formula_says(case, cuts):
    rule, sizes, total, formula = PARTS[case]
    whole = torch.arange(total * 2.0).reshape(total, 2)
    bounds = sorted({0, total, *(round(share * total) for share in cuts)})
    found = {}
    for start, end in pairwise(bounds):
        found |= rows(*read([cut("w", whole, start, end)], Family("toy", (), (rule,)), **sizes))
    want = {(name, (row, c)): whole[r, c] for r in range(total) for name, row in [formula(r)] for c in range(2)}
    assert found == want


def test_transposed_and_stacked():
    rule = Rule("e.{E}.w", (Part("x", "1", "f", "2", "1"),), transpose=True, stack="n")
    whole = torch.arange(15.0).reshape(5, 3)
    entry = Entry("e.2.w", whole[2:, 1:], (5, 3), (2, 1))
    layout, tensors = read([entry], Family("toy", (), (rule,)), f=5, n=4)
    assert layout.tensors[0].shape == (4, 3, 10)
    assert rows(layout, tensors) == {("x", (2, c, 2 * r + 1)): whole[r, c] for r in range(2, 5) for c in (1, 2)}
    with pytest.raises(LayoutError, match="below 4"):
        read([Entry("e.4.w", whole, (5, 3), (0, 0))], Family("toy", (), (rule,)), f=5, n=4)


@pytest.mark.parametrize(
    "rule",
    [
        Rule("a.{L}.w", "b.{E}.w"),
        Rule("w", (("x", "n-1"),)),
        Rule("w", (("x", ""), ("y", "n"))),
        Rule("w", "x", stack="n"),
        Rule("w", ()),
        Rule("a.{L}.b.{L}.w", "x.{L}"),
        Rule("a.weight{E}", "x.{E}"),
    ],
)
def test_rules_that_no_model_could_resolve(rule):
    with pytest.raises(PluginError, match="toy"):
        Family("toy", (), (rule,))


def test_families_are_chosen_by_architecture_or_by_name():
    families = PluginManager(entry_points=False, builtins=["weightlink.converters.families"]).families()
    assert set(families) == {family.name for family in weightlink_families()}
    assert choose_family(families, "Qwen3ForCausalLM").name == "qwen3"
    assert choose_family(families, "Qwen3ForCausalLM", "llama").name == "llama"
    with pytest.raises(NameMapError, match="LlamaForCausalLM"):
        choose_family(families, "MambaForCausalLM")
    with pytest.raises(NameMapError, match="qwen3"):
        choose_family(families, "LlamaForCausalLM", "lama")


def test_a_plugin_brings_a_family():
    class Plugin:
        @hookimpl
        def weightlink_families(self):
            return [Family("toy", ("ToyForCausalLM",), in_layer(Rule("a.{E}.w", "b.{E}.v")))]

    manager = PluginManager(entry_points=False, builtins=["weightlink.converters.families"])
    manager.register(Plugin(), origin="a test")
    family = choose_family(manager.families(), "ToyForCausalLM")
    assert family.match("decoder.layers.12.a.3.w").parts[0].name == "model.layers.12.b.3.v"
    assert family.match("decoder.layers.12.a.3") is None

    class Stranger:
        name = "stranger"
        architectures = ("StrangerForCausalLM",)

    with pytest.raises(PluginError, match="stranger"):
        choose_family({"stranger": Stranger()}, "StrangerForCausalLM")


def test_two_rules_for_one_key():
    with pytest.raises(PluginError, match="two rules"):
        Family("toy", (), (Rule("a.{L}.w", "x"), Rule("a.{E}.w", "y")))
    with pytest.raises(PluginError, match="two rules"):
        Family("toy", (), (Rule("a.{L}.w", "x"), Rule("a.3.w", "y")))


def test_two_parameters_that_disagree_on_a_shape():
    entries = [
        cut("decoder.layers.0.input_layernorm.weight", torch.zeros(3), 0, 3),
        cut("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", torch.zeros(4), 0, 4),
    ]
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.input_layernorm\.weight"):
        read(entries)


def test_numbers_in_names_may_be_expressions():
    rule = Rule("mtp.{L}.a.{E}.w", "layers.{L+layers}.b.{2*E+1}.v")
    family = Family("toy", (), (rule,))
    assert family.match("mtp.1.a.3.w", {"layers": 61}).parts[0].name == "layers.62.b.7.v"
    with pytest.raises(NameMapError, match="layers"):
        family.match("mtp.1.a.3.w", {"experts": 4})
    for wrong in ("x.{layers}.v", "x.{E+layers}.v", "x.{L-1}.v", "x.{}.v"):
        with pytest.raises(PluginError, match="toy"):
            Family("toy", (), (Rule("mtp.{L}.w", wrong),))
