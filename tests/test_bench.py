"""``weightlink bench``: a smoke run of each benchmark at a tiny size, and the form of what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weightlink.hooks.errors import ConfigError
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, build_plan
from weightlink.plugins.bench import command, planner
from weightlink.plugins.bench.results import Case
from weightlink.plugins.bench.shapes import LARGE, MIXED, Dims, shape


def bench(*arguments: str, folder: Path) -> dict[str, Any]:
    """Runs the command as a user does; what it wrote as JSON."""
    out = folder / "bench.json"
    command = [sys.executable, "-m", "weightlink.cli", "bench", *arguments, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def require_form(report: dict[str, Any], name: str, cases: list[tuple[str, str]]) -> None:
    assert set(report) == {"bench", "machine", "results"}
    assert report["bench"] == name
    assert report["machine"]["cores"] >= 1
    assert [(row["case"], row["variant"]) for row in report["results"]] == cases
    for row in report["results"]:
        assert row["value"] > 0
        assert row["reference"] > 0
        assert row["ratio"] == pytest.approx(row["reference"] / row["value"])
        assert row["unit"]


def test_the_wire_bench_measures_every_case(tmp_path: Path) -> None:
    report = bench("wire", "--size", "0.002", "--runs", "2", folder=tmp_path)
    cases = [(case, world) for case in ("large", "mixed") for world in ("1+1", "2+2")]
    require_form(report, "wire", cases)
    assert [row["runs"] for row in report["results"]] == [2] * 4


def test_the_memory_bench_counts_what_is_beyond_the_weights(tmp_path: Path) -> None:
    report = bench("memory", "--size", "0.05", "--runs", "3", folder=tmp_path)
    require_form(report, "memory", [("steady", "")])
    assert report["results"][0]["reference"] == 2


def test_the_fanout_bench_sends_once_what_four_engines_take(tmp_path: Path) -> None:
    report = bench("fanout", "--size", "0.02", "--runs", "2", folder=tmp_path)
    require_form(report, "fanout", [("relayed", "1+4")])
    detail = report["results"][0]["detail"]
    assert 4 * detail["GB sent by the trainer"] == pytest.approx(detail["GB without relays"])


@pytest.mark.server
def test_the_overhead_bench_pushes_to_a_real_server(tmp_path: Path) -> None:
    report = bench("overhead", "--runs", "2", folder=tmp_path)
    require_form(report, "overhead", [("cached", "2+2")])
    assert report["results"][0]["detail"]["bytes"] > 0


@pytest.mark.server
def test_the_update_bench_proves_every_way_and_measures_it(tmp_path: Path) -> None:
    report = bench("update", "--size", "0.001", "--runs", "1", folder=tmp_path)
    ways = ("vs-distributed", "vs-tensor", "vs-disk")
    require_form(report, "update", [(way, world) for world in ("2+2", "2+2 sends") for way in ways])
    assert [row["runs"] for row in report["results"]] == [1] * 6
    assert report["results"][0]["detail"]["GB"] > 0.002


def test_the_planner_bench_measures_every_case_beside_awex(tmp_path: Path) -> None:
    svg = tmp_path / "curve.svg"
    report = bench("planner", "--size", "0.02", "--runs", "1", "--svg", str(svg), folder=tmp_path)
    one = [(side, kind) for side in ("trainer", "engine") for kind in ("", " cpu", " memory")]
    cases = [("awex-global", ""), ("awex-pruned", "trainer"), ("awex-pruned", "engine"), ("balance", ""), ("bytes", "")]
    cases += [("1t-rank", side + kind) for side, kind in one] + [("curve", str(n)) for n in (4, 4, 8, 16, 32)]
    require_form(report, "planner", cases)
    quality = {row["case"]: row for row in report["results"] if row["case"] in ("balance", "bytes")}
    assert quality["bytes"]["value"] == 1.0
    assert 1.0 - 1e-9 <= quality["balance"]["value"] <= 1.05
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_both_planners_are_given_the_same_cuts() -> None:
    from weightlink.plugins.bench.cuts import mixture

    case = mixture(layers=8, experts=128, hidden=256, inter=384, vocab=1280)
    trainers, engine = case.layouts()
    metadata = case.metadata()[1]
    for n in (0, 2, 5, 10, 20):  # cut, whole, cut along columns, experts
        cut, meta = case.cuts[n], metadata[n]
        told = {(s.global_rank, s.global_offset, s.shape) for replica in meta.replicas for s in replica.shards}
        ours = set()
        for rank, layout in enumerate(trainers):
            for row, tensor in enumerate(layout.regions.tensor.tolist()):
                if layout.tensors[tensor].name == cut.name:
                    dims = len(cut.shape)
                    lo, size = (tuple(getattr(layout.regions, c)[row][:dims].tolist()) for c in ("lo", "size"))
                    ours.add((rank, lo, size))
        assert ours == told
    assert (len(trainers), len(engine)) == (256, 128)


@pytest.mark.parametrize("arguments", [["none"], ["wire", "--case", "none"]])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "weightlink.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "expected: " + ("wire, " if len(arguments) == 1 else "large, mixed") in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["wire", "--svg", "curve.svg"], "expected: planner"),
        (["overhead", "--size", "2"], "expected: wire, fanout, planner, memory, update"),
        (["planner", "update", "--max-peers", "2"], "expected: wire, fanout, memory"),
        (["planner", "--timeout", "9"], "expected: wire, fanout, overhead, memory, update"),
        (["wire", "--json", "none/bench.json"], "cannot write none/bench.json: none is no folder"),
        (["planner", "--svg", "."], "cannot write .: it is a folder"),
    ],
)
def test_what_would_be_lost_or_left_unheeded_is_refused_before_anything_is_measured(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "weightlink.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr


def test_a_benchmark_says_what_it_runs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "NEEDS", ("awex==0.0.1", "no-such-distribution"))
    with pytest.raises(ConfigError, match="awex") as raised:
        command.bench(["planner"], svg=None)
    assert raised.value.expected == "awex==0.0.1"


def test_a_higher_ratio_is_better_in_both_units() -> None:
    seconds = Case.paired("c", [1.0, 2.0, 4.0], [2.0, 4.0, 8.0], unit="s")
    speed = Case.paired("c", [2.0, 4.0, 8.0], [1.0, 2.0, 4.0], unit="GB/s", more_is_better=True)
    assert (seconds.ratio, speed.ratio) == (2.0, 2.0)
    assert seconds.values is not None
    assert (seconds.values.min, seconds.values.median, seconds.values.max) == (1.0, 2.0, 4.0)


@pytest.mark.parametrize("world", [(1, 1), (2, 2)])
@pytest.mark.parametrize("dims", [LARGE, MIXED], ids=["large", "mixed"])
@pytest.mark.parametrize("size", [1.0, 0.002])
def test_the_shapes_are_whole_and_of_the_class_that_they_claim(dims: Dims, world: tuple[int, int], size: float) -> None:
    scaled = dims.scaled(size)
    made = shape(scaled, *world)
    plan = build_plan(made.trainers, [EngineLayouts("engine", made.engines)], WireSettings())  # proves coverage
    assert scaled.hidden != scaled.inter
    if size == 1.0:
        assert 0.9e9 < plan.total_bytes < 1.3e9
        programs = [plan.send_program(0, rank) for rank in range(world[0])]
        packed = sum(int(p.copies.nbytes[p.buckets.direct[p.copies.bucket] == 0].sum()) for p in programs)
        share = packed / plan.total_bytes
        assert share < 0.1 if dims is LARGE else share > 0.7
    assert len(np.unique(plan.engines[0].bucket_src)) == world[0]
