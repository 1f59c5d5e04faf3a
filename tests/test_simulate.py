"""``weightlink plan`` and ``simulate``: layouts against those of real ranks, the clock, the picture."""

from __future__ import annotations

import dataclasses
import json
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from grid import Grid
from layouts import contiguous, random_side, random_tensors
from megatron_cpu import Megatron
from rich.console import Console
from torch import nn
from typer.testing import CliRunner
from warm import shared
from weightlink.cli import build
from weightlink.converters.replay import observe
from weightlink.converters.snapshot import Snapshot
from weightlink.hooks.errors import ConfigError, CoverageError
from weightlink.hooks.geometry import Layout, ParamSpec, RegionBuilder, TensorSpec
from weightlink.hooks.manager import PluginManager
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, build_plan, make_plan, survey_of
from weightlink.plugins.simulate import layouts, models
from weightlink.plugins.simulate.clock import Links, lower_bound, run
from weightlink.plugins.simulate.command import placed
from weightlink.plugins.simulate.figures import figures, least_possible
from weightlink.plugins.simulate.notation import Engine, Trainer, engines_of, speed
from weightlink.plugins.simulate.picture import draw, traffic_of
from weightlink.plugins.simulate.repeat import Repeated, kinds_of_layers, reduced, repeat, same_regions
from weightlink.plugins.simulate.stored import Stored

LINKS = Links(intra=4e6, inter=1e6, copy=1e12, latency=0.0, per_node=1)


def test_layouts_are_read_as_they_are_written() -> None:
    assert Trainer.parse("tp4,pp4,ep16,etp1,last22") == Trainer(world=64, tp=4, pp=4, ep=16, etp=1, last=22)
    assert Trainer.parse("tp2, world=8").world == 8
    assert engines_of("2*tp8 + 128:ep128,dp-attention") == (
        Engine(count=2, tp=8),
        Engine(tp=128, ep=128, dp_attention=128),
    )
    assert engines_of("tp8,pp2,dp-attention4")[0].world == 16
    assert (speed("50GB/s"), speed("400 Gb/s")) == (50e9, 50e9)


@pytest.mark.parametrize(
    "text", ["tp", "tp0", "tp00", "tp²", "tp2,", "tp2,tp4", "xp3", "tp2,world=3", "world=00", "dp-attention"]
)
def test_a_trainer_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Trainer.parse(text)


@pytest.mark.parametrize(
    "text", ["x*tp2", "²*tp2", "0*tp8", "0:tp2", "*tp2", "", "tp8+", "8:tp4", "9:pp2", "tp4,ep3", "tp4,dp-attention3"]
)
def test_an_engine_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        engines_of(text)


@pytest.mark.parametrize("text", ["50", "fast", "0GB/s", "1.2.3GB/s", "5XB/s"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        speed(text)


def test_every_kept_model_has_what_its_kind_needs() -> None:
    for name in models.names():
        found, config = models.read(name)
        assert found == name
        assert config["moe_intermediate_size"] < config["intermediate_size"]
    with pytest.raises(ConfigError, match="no such model"):
        models.read("nothing")


def rows_of(sizes: list[tuple[int, int]], ranks: int, who: str) -> list[Layout]:
    """One float32 tensor per entry ``(rank, elements)``, whole on that rank."""
    specs = tuple(TensorSpec(f"t{n}", (size,), "float32") for n, (_, size) in enumerate(sizes))
    found = []
    for rank in range(ranks):
        regions, params = RegionBuilder(), []
        for n, (owner, size) in enumerate(sizes):
            if owner == rank:
                regions.add(n, len(params), lo=[0], size=[size], step=[1], offset=0, stride=[1])
                params.append(ParamSpec(f"t{n}", (size,), "float32", len(params), 0, contiguous((size,))))
        found.append(Layout(f"{who} {rank}", specs, tuple(params), regions.build()))
    return found


def plan_of(sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> Plan:
    trainers = rows_of(sources, 2, "trainer")
    return build_plan(trainers, [EngineLayouts("e", rows_of(targets, 2, "rank"))], WireSettings())


def test_two_pairs_take_as_long_as_one_and_a_shared_receiver_twice() -> None:
    size = 250_000  # 1 MB, one second on a link between machines
    apart = run(plan_of([(0, size), (1, size)], [(0, size), (1, size)]), LINKS)
    together = run(plan_of([(0, size), (1, size)], [(1, size), (1, size)]), LINKS)
    assert apart.seconds == pytest.approx(1.0, rel=1e-3)
    assert together.seconds == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("engines", [2, 4, 9])
def test_a_chain_of_engines_takes_hardly_longer_than_one(engines: int) -> None:
    """One trainer rank, ten buckets of a tenth of a second each. Without relays its link carries everything."""
    sizes = [(0, 25_000)] * 10
    every = [EngineLayouts(f"e{n}", rows_of(sizes, 1, "rank")) for n in range(engines)]
    wire = WireSettings(bucket_bytes=100_000, direct_bytes=50_000)
    relayed, direct = (
        build_plan(rows_of(sizes, 1, "trainer"), every, msgspec.structs.replace(wire, relay=relay))
        for relay in (True, False)
    )
    assert run(direct, LINKS).seconds == pytest.approx(engines, rel=1e-3)
    timeline = run(relayed, LINKS)
    assert timeline.seconds == pytest.approx(1.0 + 0.1 * (engines - 1), rel=1e-3)
    assert lower_bound(relayed, LINKS) == pytest.approx(1.0)
    assert timeline.nbytes.sum() == relayed.total_bytes == direct.total_bytes
    # A relay sends nothing that it does not have yet.
    base = relayed.trainers
    for n in np.flatnonzero(timeline.src >= base):
        same = (timeline.dst == timeline.src[n]) & (timeline.end <= timeline.start[n] + 1e-3)
        sent_before = ((timeline.src == timeline.src[n]) & (timeline.start <= timeline.start[n])).sum()
        assert same.sum() >= sent_before
    traffic, rows, columns = traffic_of(timeline)
    assert (rows, columns) == (1 + engines, engines)
    assert traffic.sum() == timeline.nbytes.sum()
    assert "engine ranks that relay" in draw(timeline, "a chain")


def test_devices_of_one_machine_use_its_links() -> None:
    made = plan_of([(0, 250_000), (1, 250_000)], [(0, 250_000), (1, 250_000)])
    near = run(made, Links(intra=4e6, inter=1e6, copy=1e12, latency=0.0, per_node=4))
    assert near.seconds == pytest.approx(0.25, rel=1e-3)
    slow = run(made, Links(intra=4e6, inter=1e6, copy=2e6, latency=0.125, per_node=4))
    assert slow.seconds == pytest.approx(0.125 + 0.5 + 0.25 + 0.5, rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_beats_its_links_and_the_picture_shows_every_byte(seed: int) -> None:
    rng = random.Random(seed)
    tensors = random_tensors(rng, 12, dims=3)
    trainers = random_side(rng, "trainer", tensors, 3, padding=True, replicas=True)
    engines = [
        EngineLayouts(f"e{n}", random_side(rng, "rank", tensors, 5, padding=True, replicas=True)) for n in (1, 2)
    ]
    made = build_plan(trainers, engines, WireSettings(bucket_bytes=4096, max_peers=rng.randint(1, 3)))
    timeline = run(made, LINKS)
    assert timeline.seconds >= lower_bound(made, LINKS) > 0
    assert (timeline.end > timeline.start).all()
    traffic, rows, columns = traffic_of(timeline)
    assert (rows, columns) == (3, 10)
    assert traffic.sum() == sum(engine.bucket_bytes.sum() for engine in made.engines)
    picture = ElementTree.fromstring(draw(timeline, "<a & b>"))
    cells = [e for e in picture.iter() if e.tag.endswith("rect")]
    assert len(cells) > np.count_nonzero(traffic)
    found = figures(made, trainers, engines)
    assert found.total == found.needed == made.total_bytes
    assert found.balance >= 1.0 - 1e-9


def test_the_least_possible_load_is_found_between_replicas() -> None:
    assert least_possible(np.array([6.0, 2.0]), [(0,), (0, 1)], 2) == pytest.approx(6.0, rel=0.05)
    assert least_possible(np.array([6.0, 6.0, 3.0]), [(0, 1), (1, 2), (2,)], 3) == pytest.approx(5.0, rel=0.05)
    for seed in range(5):
        rng = random.Random(seed)
        demand = np.array([rng.random() for _ in range(6)])
        assert least_possible(demand, [(0, 1, 2)] * 6, 3) <= demand.sum() / 3 + 1e-9


class Layered(nn.Module):
    """Layers of two kinds; the loader stacks two matrices of each and, if asked, reaches into another layer."""

    def __init__(self, widths: list[int], crossing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(7, 4), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(4, 2 * width, device="meta") for width in widths)
        self.crossing = crossing

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data.copy_(tensor)
                continue
            _, number, part = name.split(".")
            layer = self.layers[int(number)]
            target = self.layers[1] if self.crossing and int(number) == 2 else layer
            if part == "bias":
                layer.bias.data.zero_()
                layer.bias.data[: len(tensor)].copy_(tensor)
            else:
                at = 0 if part == "a" else tensor.shape[0]
                target.weight.data[at : at + tensor.shape[0]].copy_(tensor)


WIDTHS = [3, 5, 5, 3, 5]


def layered_manifest() -> list[TensorSpec]:
    found = [TensorSpec("embed", (7, 4), "float32")]
    for number, width in enumerate(WIDTHS):
        found += [TensorSpec(f"layers.{number}.{part}", (width, 4), "float32") for part in "ab"]
        found.append(TensorSpec(f"layers.{number}.bias", (width,), "float32"))
    return found


@pytest.mark.parametrize("which", [0, -1])
def test_one_layer_of_each_kind_repeated_is_the_whole_replay(which: int) -> None:
    model, manifest = Layered(WIDTHS), layered_manifest()
    held = [(h.name, tuple(h.data.shape), str(h.data.dtype), h.kind) for h in Snapshot([("", model)]).held]
    kinds = kinds_of_layers(manifest, held, model)
    assert kinds == [[0, 3], [1, 2, 4]]

    def replay(tensors: list[TensorSpec]) -> Layout:
        return observe(rank="r", tensors=tensors, load=model.load_weights, modules=[("", model)])

    part = reduced(manifest, kinds, which)
    assert len(part) == 1 + 2 * 3
    found = repeat(replay(part), manifest, kinds, which)
    assert isinstance(found, Repeated)
    whole = replay(manifest)
    assert same_regions(found.layout, whole)
    assert len(whole.fills) == 5


def test_a_loader_that_reaches_into_another_layer_is_not_repeated() -> None:
    model, manifest = Layered(WIDTHS, crossing=True), layered_manifest()
    kinds = [[0, 3], [2, 4]]
    part = reduced(manifest, kinds, 0)
    layout = observe(rank="r", tensors=part, load=model.load_weights, modules=[("", model)])
    assert isinstance(repeat(layout, manifest, kinds, 0), str)


FAMILY = "deepseek_v3_deep"
TRAINER = "tp2,pp2,ep2,etp1"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterable[tuple[Path, list[Layout]]]:
    """A checkpoint, and the layouts of real Megatron ranks that trained it."""
    with Megatron() as ranks:
        grid = Grid(ranks, tmp_path_factory.mktemp("grid"))
        checkpoint = grid.checkpoint(FAMILY, "bfloat16")
        out = tmp_path_factory.mktemp("trainer")
        ranks.run("layout", 4, path=str(checkpoint), out=str(out), dtype="bfloat16", tp=2, pp=2, ep=2, etp=1)
        yield checkpoint, [Layout.unpack((out / f"{rank}.layout").read_bytes()) for rank in range(4)]


def test_layouts_without_machines_are_those_of_real_ranks(
    real: tuple[Path, list[Layout]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint, trained = real
    name, config = models.read(str(checkpoint))
    sizes = Trainer.parse(TRAINER)
    made = layouts.make(name, config, sizes, TRAINER, engines_of("2*tp2,ep2"), Console(stderr=True))
    assert len(made.trainers) == len(trained)
    for ours, theirs in zip(made.trainers, trained, strict=True):
        assert ours.tensors == theirs.tensors
        assert ours.params == theirs.params
        assert same_regions(ours, theirs)
    (tmp_path / "manifest.json").write_text(
        json.dumps([{"name": t.name, "shape": t.shape, "dtype": t.dtype} for t in made.manifest])
    )
    arguments = {"out": str(tmp_path), "draft": False}
    shared().run("grid:engine_cell", checkpoint, tp=2, ep=2, rounded=False, arguments=arguments)
    (label, count, ranks) = made.engines[0]
    assert (label, count, len(ranks)) == ("tp2,ep2", 2, 2)
    for rank, ours in enumerate(ranks):
        theirs = Layout.unpack((tmp_path / f"engine{rank}.layout").read_bytes())
        assert len(ours.regions) > 4 * 3 * 3
        assert same_regions(ours, theirs)
        # What SGLang computes itself may differ: the runner lengthens its table of rotations.
        mine, real_ones = (
            [(p.name, p.shape, p.dtype, p.storage) for p in layout.params if p.loaded] for layout in (ours, theirs)
        )
        assert mine == real_ones
    # Kept, read again, planned and played by the commands.
    kept, svg, out = tmp_path / "kept", tmp_path / "a.svg", tmp_path / "out.json"
    made.save(kept)
    assert same_regions(Stored.load(kept).engines[0][2][1], ranks[1])
    arguments_ = [
        "simulate",
        "--load",
        str(kept),
        "--svg",
        str(svg),
        "--json",
        str(out),
        "--ignore",
        "model.layers.4.*",
    ]
    done = CliRunner().invoke(build(PluginManager(entry_points=False)), arguments_, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["plan"]["total"] == report["plan"]["needed"] > 0
    assert report["predicted"]["seconds"] >= report["predicted"]["lower_bound"] > 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(PluginManager(entry_points=False)), arguments)
    return done.exit_code, done.output


def test_plan_proves_what_it_prints(tmp_path: Path) -> None:
    """Three equal engines; then one of which a rank leaves a region out, for which there is no plan."""
    rng = random.Random(8)
    tensors = tuple(random_tensors(rng, 9))
    trainers = tuple(random_side(rng, "trainer", tensors, 3, padding=False, replicas=True))
    ranks = tuple(random_side(rng, "rank", tensors, 2, padding=True, replicas=False))
    kept, out = tmp_path / "kept", tmp_path / "out.json"
    Stored("toy", "3 ranks", ("made by hand",), tensors, trainers, (("2 ranks", 3, ranks),)).save(kept)
    code, printed = command("plan", "--load", str(kept), "--json", str(out), "--max-peers", "2")
    assert code == 0, printed
    plan = json.loads(out.read_text())["plan"]
    assert plan["total"] == plan["needed"] == 3 * 4 * sum(int(np.prod(t.shape)) for t in tensors)
    assert plan["tensors"] == len(tensors)
    assert "3 x 2 ranks" in printed
    assert "made by hand" in printed

    r = ranks[1].regions
    spoilt = (ranks[0], dataclasses.replace(ranks[1], regions=r.take(np.arange(len(r) - 1))))
    Stored("toy", "3 ranks", (), tensors, trainers, (("2 ranks", 1, spoilt),)).save(kept)
    done = CliRunner().invoke(build(PluginManager(entry_points=False)), ["plan", "--load", str(kept)])
    assert isinstance(done.exception, CoverageError)
    assert tensors[int(r.tensor[-1])].name in str(done.exception)
    assert "pass ignore" in str(done.exception)


def test_senders_serve_their_own_machine_first() -> None:
    """Four trainer ranks that hold everything, on machines of three: the last is on that of the first two receivers,
    which take no more than it has to send."""
    (whole,) = rows_of([(0, 1000)] * 8, 1, "trainer")
    trainers = [dataclasses.replace(whole, rank=f"trainer {n}") for n in range(4)]
    ranks = rows_of([(n % 2, 1000) for n in range(8)], 2, "rank")
    survey = survey_of(trainers, [EngineLayouts(f"e{n}", ranks) for n in range(2)])
    near = placed(survey, 3)
    assert near.trainers.hosts == ("machine 0",) * 3 + ("machine 1",)
    assert [side.hosts for side in near.engines] == [("machine 1",) * 2, ("machine 2",) * 2]
    served = []
    for each in (survey, near):
        made = make_plan(each, WireSettings(relay=False), names=["e0", "e1"])
        traffic, _, _ = traffic_of(run(made, LINKS))
        assert traffic.sum(1) == pytest.approx(traffic.sum() / 4, rel=0.1)
        served.append(traffic[3, :2].sum() / traffic[3].sum())
    assert served[0] < 0.5
    assert served[1] == 1.0


def test_a_file_that_cannot_be_written_is_told_before_there_is_a_plan(tmp_path: Path) -> None:
    for name, option in (("plan", "--json"), ("simulate", "--svg"), ("plan", "--save"), ("demo", "--json")):
        done = CliRunner().invoke(build(PluginManager(entry_points=False)), [name, option, str(tmp_path / "no" / "x")])
        assert isinstance(done.exception, ConfigError)
        assert "cannot write" in str(done.exception)


def test_a_file_that_holds_no_layouts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match="cannot read layouts"):
        Stored.load(tmp_path / "x")
