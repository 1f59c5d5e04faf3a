"""``weightlink plan`` and ``weightlink simulate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from weightlink.cli import JsonOption, require_writable, write_json
from weightlink.hooks.errors import ConfigError
from weightlink.hooks.settings import WireSettings
from weightlink.plan import EngineLayouts, Plan, make_plan, prove_engine, survey_of
from weightlink.plugins.demo.processes import interruptible
from weightlink.plugins.simulate import layouts, models
from weightlink.plugins.simulate.clock import Links, Timeline, lower_bound, run
from weightlink.plugins.simulate.figures import Figures, Spread, figures
from weightlink.plugins.simulate.notation import Trainer, engines_of, speed
from weightlink.plugins.simulate.picture import draw
from weightlink.plugins.simulate.stored import Stored
from weightlink.survey import Survey

ModelArgument = Annotated[
    str | None,
    typer.Argument(help=f"A Hugging Face folder, a config.json, or one of: {', '.join(models.names())}."),
]
TrainerOption = Annotated[
    str | None,
    typer.Option(help="Megatron's sizes: tp4,pp4,ep16,etp1,world=64; vppN, cpN; firstN, lastN layers of a stage."),
]
EnginesOption = Annotated[
    str | None, typer.Option(help="SGLang's sizes: 2*tp8, or tp8,ep8, or 128:ep128,dp-attention; several with +.")
]
SaveOption = Annotated[Path | None, typer.Option(help="Keep the layouts in this file.")]
LoadOption = Annotated[Path | None, typer.Option(help="Take the layouts from a file that --save wrote.")]
IgnoreOption = Annotated[
    list[str] | None, typer.Option(help="Canonical name or pattern that no engine takes; may be repeated.")
]
BucketOption = Annotated[int, typer.Option(help="MiB of a bucket.", min=1, max=2048)]
DirectOption = Annotated[int, typer.Option(help="KiB from which a copy has a bucket to itself.", min=1, max=1 << 30)]
PeersOption = Annotated[int, typer.Option(help="Buckets that a rank sends, or receives, per round.", min=1, max=1024)]
RelayOption = Annotated[bool, typer.Option(help="Engines of equal layout may relay to one another.")]
JobsOption = Annotated[
    int | None, typer.Option(help="Ranks whose layouts are made at a time; all cores if left out.", min=1)
]
NodeOption = Annotated[int, typer.Option(help="Devices of a machine; trainers come first.", min=1)]
_WIRE = WireSettings()
_PER_NODE = 8


def plan(
    model: ModelArgument = None,
    trainer: TrainerOption = None,
    engines: EnginesOption = None,
    gpus_per_node: NodeOption = _PER_NODE,
    save: SaveOption = None,
    load: LoadOption = None,
    ignore: IgnoreOption = None,
    bucket: BucketOption = _WIRE.bucket_bytes >> 20,
    direct: DirectOption = _WIRE.direct_bytes >> 10,
    max_peers: PeersOption = _WIRE.max_peers,
    relay: RelayOption = _WIRE.relay,
    jobs: JobsOption = None,
    json: JsonOption = None,
) -> None:
    """Make and prove the plan of an update without GPUs or weights, and say what it costs.

    The layouts come from Megatron's and SGLang's own models on the meta device.
    """
    require_writable(save, json)
    console = Console(stderr=json == "-")
    with interruptible():
        stored = _layouts(model, trainer, engines, save, load, console, jobs)
        _, found = _plan(stored, _wire(bucket, direct, max_peers, relay), gpus_per_node, ignore, console, prove=True)
    _show(stored, found, console)
    if json is not None:
        write_json(json, {"model": stored.model, "notes": stored.notes, "plan": found})


def simulate(
    model: ModelArgument = None,
    trainer: TrainerOption = None,
    engines: EnginesOption = None,
    intra: Annotated[str, typer.Option(help="Speed of a device within its machine, per direction.")] = "300GB/s",
    inter: Annotated[str, typer.Option(help="Speed of a device to other machines, per direction.")] = "50GB/s",
    copy: Annotated[str, typer.Option(help="Speed of packing and unpacking on a device.")] = "1000GB/s",
    latency: Annotated[float, typer.Option(help="Microseconds before a message's first byte.", min=0)] = 20.0,
    gpus_per_node: NodeOption = _PER_NODE,
    svg: Annotated[Path | None, typer.Option(help="Draw traffic and timeline into this file.")] = None,
    save: SaveOption = None,
    load: LoadOption = None,
    ignore: IgnoreOption = None,
    bucket: BucketOption = _WIRE.bucket_bytes >> 20,
    direct: DirectOption = _WIRE.direct_bytes >> 10,
    max_peers: PeersOption = _WIRE.max_peers,
    relay: RelayOption = _WIRE.relay,
    jobs: JobsOption = None,
    json: JsonOption = None,
) -> None:
    """Predict the time of an update on given links, without GPUs or weights.

    Ranks take their buckets in the order of the rounds, two rounds in flight per direction; links are shared equally.
    """
    links = Links(
        intra=speed(intra), inter=speed(inter), copy=speed(copy), latency=latency * 1e-6, per_node=gpus_per_node
    )
    require_writable(save, svg, json)
    console = Console(stderr=json == "-")
    with interruptible():
        stored = _layouts(model, trainer, engines, save, load, console, jobs)
        wire = _wire(bucket, direct, max_peers, relay)
        made, found = _plan(stored, wire, gpus_per_node, ignore, console, prove=False)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("buckets", total=found.messages)
            timeline = run(made, links, lambda done: progress.update(task, completed=done))
    least = lower_bound(made, links)
    _show(stored, found, console)
    reached = least / timeline.seconds if timeline.seconds else 1.0
    console.print(
        f"predicted: {timeline.seconds:.3f} s; the busiest link alone at full speed: {least:.3f} s ({reached:.0%})",
        style="bold",
        highlight=False,
    )
    if svg is not None:
        _write_svg(svg, timeline, stored)
        console.print(f"drawn: {svg}", style="dim", highlight=False, soft_wrap=True)
    if json is not None:
        predicted = {"seconds": timeline.seconds, "lower_bound": least, "links": links}
        write_json(json, {"model": stored.model, "notes": stored.notes, "plan": found, "predicted": predicted})


def _layouts(
    model: str | None,
    trainer: str | None,
    engines: str | None,
    save: Path | None,
    load: Path | None,
    console: Console,
    jobs: int | None,
) -> Stored:
    if load is not None:
        if model or trainer or engines or save:
            raise ConfigError("--load takes the place of the model, both layouts and --save", found=load)
        return Stored.load(load)
    if not (model and trainer and engines):
        raise ConfigError(
            "a plan needs a model and two layouts",
            expected="MODEL --trainer tp4,pp4 --engines 2*tp8, or --load FILE",
        )
    sizes, groups = Trainer.parse(trainer), engines_of(engines)
    name, config = models.read(model)
    stored = layouts.make(name, config, sizes, trainer, groups, console, jobs)
    if save is not None:
        stored.save(save)
    return stored


def _wire(bucket: int, direct: int, max_peers: int, relay: bool) -> WireSettings:
    return WireSettings(bucket_bytes=bucket << 20, direct_bytes=direct << 10, max_peers=max_peers, relay=relay)


def _plan(
    stored: Stored, wire: WireSettings, per_node: int, ignore: list[str] | None, console: Console, *, prove: bool
) -> tuple[Plan, Figures]:
    """The plan, and what it costs.

    :param prove: also the proof that every engine rank makes for itself at connect
    """
    each: list[EngineLayouts] = stored.each_engine()
    with console.status("planning"):
        survey = placed(survey_of(stored.trainers, each), per_node)
        made = make_plan(survey, wire, names=[engine.name for engine in each], ignore=ignore or ())
        found = figures(made, stored.trainers, each)
    if prove:
        first = 0
        for label, count, _ in stored.engines:
            with console.status(f"proving {label}"):
                prove_engine(made, first, each[first])
                for rank, layout in enumerate(stored.trainers):
                    made.send_program(first, rank, layout)  # refuses a cast that loses more than precision
            first += count
    return made, found


def placed(survey: Survey, per_node: int) -> Survey:
    """The survey with ranks on machines of ``per_node`` devices, in order: the trainer's, then each engine's.

    Layouts from the meta device have no machine, and a plan prefers senders and relays on the receiver's own.
    """
    sides = [survey.trainers, *survey.engines]
    ends = np.cumsum([len(side) for side in sides])
    named = [f"machine {n // per_node}" for n in range(int(ends[-1]))]
    put = [replace(side, hosts=tuple(named[end - len(side) : end])) for side, end in zip(sides, ends, strict=True)]
    return replace(survey, trainers=put[0], engines=tuple(put[1:]))


def _show(stored: Stored, found: Figures, console: Console) -> None:
    engines = " + ".join(f"{count} x {label}" if count > 1 else label for label, count, _ in stored.engines)
    shown = Table(title=f"{stored.model}: {stored.trainer} -> {engines}", title_justify="left", show_header=False)
    shown.add_column(style="dim")
    shown.add_column(justify="right")
    for name, value in rows(stored, found):
        shown.add_row(name, value)
    console.print(shown, highlight=False)
    for note in stored.notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)


def rows(stored: Stored, found: Figures) -> list[tuple[str, str]]:
    """The figures in words."""
    over = found.total / found.needed - 1 if found.needed else 0.0
    return [
        ("ranks", f"{len(stored.trainers)} -> {sum(n * len(ranks) for _, n, ranks in stored.engines)}"),
        ("tensors", f"{found.tensors:,}"),
        ("regions", f"{found.regions[0]:,} -> {found.regions[1]:,}"),
        ("bytes of an update", f"{_bytes(found.total)} (lower bound {_bytes(found.needed)}, {over:+.1%})"),
        ("sent per trainer rank", _spread(found.sent)),
        ("received per engine rank", _spread(found.received)),
        ("most loaded sender", f"{found.balance:.3f} x the least possible, {_bytes(found.ideal)}"),
        ("engines that others relay to", f"{found.relayed}"),
        ("rounds", " + ".join(f"{n:,}" for n in found.rounds)),
        ("messages", f"{found.messages:,}"),
        ("staging memory, sender / receiver", f"{_bytes(found.staging[0])} / {_bytes(found.staging[1])}"),
        ("weights per trainer rank", _spread(found.weights[0])),
        ("weights per engine rank", _spread(found.weights[1])),
    ]


def _spread(value: Spread) -> str:
    return f"{_bytes(value.least)} to {_bytes(value.most)}, mean {_bytes(value.mean)}"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value / 1e3:.1f} kB"


def _write_svg(path: Path, timeline: Timeline, stored: Stored) -> None:
    engines = " + ".join(f"{count} x {label}" for label, count, _ in stored.engines)
    try:
        path.write_text(draw(timeline, f"{stored.model}: {stored.trainer} -> {engines}"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
