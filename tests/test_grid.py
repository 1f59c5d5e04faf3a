"""Trainer layout x engine layout on real Megatron ranks and real SGLang model runners, without servers.

``make test`` runs :data:`SPREAD`; ``make test-grid`` runs every trainer layout against every engine layout of a family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from grid import Cell, Grid, cases
from megatron_cpu import Megatron


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    with Megatron() as ranks:
        yield Grid(ranks, tmp_path_factory.mktemp("grid"))


#: One line per thing that could go wrong; what one layout shows need not be shown by another.
SPREAD = [
    Cell("qwen3", 2, {"tp": 2}, {"pp": 2}, dtype="bfloat16"),
    Cell("qwen3", 2, {"pp": 2}, {"tp": 2, "pp": 2}),
    Cell("qwen3_deep", 2, {"pp": 2, "vpp": 2}, {"tp": 2}),
    Cell("qwen3_deep", 2, {"pp": 2, "vpp": 2}, {"pp": 2}),
    Cell("qwen3_deep", 1, {}, {"pp": 2}),
    Cell("llama_tied", 2, {"pp": 2}, {"tp": 2}),
    Cell("llama_tied", 2, {"tp": 2}, {"pp": 2}),
    Cell("qwen2", 4, {"tp": 2, "cp": 2}, {"tp": 2}),
    Cell("qwen2", 2, {"tp": 2}, {"tp": 2}),
    Cell("qwen3_moe", 2, {"ep": 2}, {"tp": 2}, dtype="bfloat16"),
    Cell("qwen3_moe", 1, {}, {"tp": 2, "ep": 2}),
    Cell("qwen3_moe_uneven", 2, {"ep": 2}, {"tp": 2}),
    Cell("qwen3_moe_uneven", 2, {"tp": 2}, {"pp": 2}),
    Cell("qwen2_moe", 4, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2}),
    Cell("mixtral", 2, {"ep": 2}, {"tp": 2, "ep": 2}),
    Cell("glm4_moe", 4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"tp": 2}, dtype="bfloat16"),
    Cell("bailing_moe_v2", 2, {"tp": 2}, {"tp": 2}, dtype="bfloat16"),
    Cell("bailing_moe", 1, {}, {"tp": 2}),
    Cell("bailing_moe_latent", 2, {"tp": 2}, {"tp": 2}),
    Cell("glm4_moe_mtp", 2, {"ep": 2}, {"tp": 2}, draft=True),
    Cell("glm4", 2, {"tp": 2}, {"tp": 2}),
    Cell("qwen3", 2, {"tp": 2}, {"tp": 4, "rounded": False}),  # more ranks than key-value heads
    Cell("qwen3_moe", 2, {"ep": 2}, {"tp": 4, "rounded": False, "ep": 2}),  # experts cut in two ways
    Cell("qwen3_moe", 2, {"tp": 2}, {"tp": 4, "rounded": False, "server": {"attn_dp_size": 2}}),
    Cell("qwen3", 2, {"tp": 2}, {"tp": 2, "server": {"attn_dp_size": 2, "enable_dp_lm_head": True}}),
    Cell("qwen3_moe", 2, {"ep": 2, "grouped": True}, {"tp": 2}),
    Cell("gpt_oss", 2, {"tp": 2, "etp": 1}, {"tp": 2}),
    Cell("gpt_oss", 2, {"ep": 2}, {"pp": 2}, dtype="bfloat16"),
    Cell("qwen3_vl", 2, {"tp": 2}, {"tp": 2}),
    Cell("qwen3_vl", 2, {"pp": 2}, {"pp": 2}, dtype="bfloat16"),
    Cell("qwen3_vl_moe", 2, {"tp": 2}, {"tp": 2, "ep": 2}),
    Cell("qwen3_next", 2, {"tp": 2, "etp": 1}, {"tp": 2}),
    Cell("qwen3_5_moe", 2, {"ep": 2, "grouped": True}, {"pp": 2}, dtype="bfloat16"),
]

DENSE = (
    ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2}), (2, {"cp": 2}), (2, {})),
    ({}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}),
)
MOE = (
    (
        *DENSE[0],
        (2, {"ep": 2}),
        (2, {"tp": 2, "etp": 1}),
        (2, {"etp": 2}),
        (4, {"ep": 2, "pp": 2}),
        (4, {"ep": 2, "etp": 2}),
        (4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    ),
    (*DENSE[1], {"tp": 2, "ep": 2}),
)
#: Trainer layouts and engine layouts of each family. The full grid is every pair of them.
LAYOUTS = {
    "qwen3": DENSE,
    "qwen3_deep": ((*DENSE[0], (2, {"pp": 2, "vpp": 2})), DENSE[1]),
    "llama_tied": DENSE,
    "qwen2": DENSE,
    "qwen3_moe": MOE,
    "qwen3_moe_uneven": MOE,
    "qwen2_moe": MOE,
    "mixtral": MOE,
    "glm4": DENSE,
    "glm4_moe": MOE,
    "glm4_moe_air": MOE,
    "bailing_moe": MOE,
    "bailing_moe_v2": MOE,
    "bailing_moe_latent": MOE,
    "mistral": DENSE,
    "gpt_oss": (MOE[0], DENSE[1]),
    "qwen3_vl": DENSE,
    "qwen3_vl_moe": MOE,
    "qwen3_next": MOE,
    "qwen3_5": DENSE,
    "qwen3_5_moe": MOE,
    "qwen3_5_text": DENSE,
}
FULL = [
    Cell(family, world, trainer, engine)
    for family, (trainers, engines) in LAYOUTS.items()
    for world, trainer in trainers
    for engine in engines
]
#: Further engine layouts, each with two trainer layouts: more ranks than key-value heads, attention in data-parallel
#: groups, experts cut in two ways.
DENSE_TOPOLOGIES: tuple[dict[str, Any], ...] = (
    {"tp": 4, "rounded": False},
    {"tp": 2, "server": {"attn_dp_size": 2}},
    {"tp": 4, "rounded": False, "server": {"attn_dp_size": 2}},
    {"tp": 2, "server": {"attn_dp_size": 2, "enable_dp_lm_head": True}},
    {"tp": 2, "pp": 2, "server": {"attn_dp_size": 2}},
)
MOE_TOPOLOGIES: tuple[dict[str, Any], ...] = (
    *DENSE_TOPOLOGIES,
    {"tp": 4, "rounded": False, "ep": 2},
    {"tp": 4, "rounded": False, "ep": 4},
    {"tp": 2, "ep": 2, "pp": 2},
    {"tp": 4, "rounded": False, "ep": 2, "server": {"attn_dp_size": 2}},
    {"tp": 4, "rounded": False, "ep": 4, "server": {"attn_dp_size": 4}},
    {"tp": 4, "rounded": False, "server": {"attn_dp_size": 2, "moe_dense_tp_size": 1}},
)
FULL += [
    Cell(family, world, trainer, engine)
    for family, engines in (
        ("qwen3", DENSE_TOPOLOGIES),
        ("llama_tied", DENSE_TOPOLOGIES),
        ("qwen3_moe", MOE_TOPOLOGIES),
        ("glm4_moe", MOE_TOPOLOGIES),
    )
    for world, trainer in ((1, {}), (2, {"tp": 2}))
    for engine in engines
]


FULL += [
    Cell(family, world, trainer, engine, draft=True)
    for family in ("glm4_moe_mtp", "bailing_moe_mtp")
    for world, trainer in ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"ep": 2}))
    for engine in ({}, {"tp": 2}, {"tp": 2, "ep": 2})
]


@pytest.mark.parametrize("cell", cases(SPREAD))
def test_what_travels_equals_sglangs_own_load(grid: Grid, cell: Cell) -> None:
    grid.judge(cell)


@pytest.mark.grid
@pytest.mark.parametrize("cell", cases(cell for cell in FULL if cell not in SPREAD))
def test_the_full_grid(grid: Grid, cell: Cell) -> None:
    grid.judge(cell)
