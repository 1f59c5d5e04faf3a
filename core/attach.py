"""Connect: contexts, layouts, proof, plan, groups, handshake, in that order. Collective over the trainer's ranks."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from weightlink.client import EngineClient, fan_out, raise_failures
from weightlink.converters.megatron import require_one_parameter
from weightlink.declared import require_declared
from weightlink.encoded import encode, names_to_encode, require_encoder, require_one_format, require_taken
from weightlink.handshake import handshake
from weightlink.hooks import messages as m
from weightlink.hooks.errors import ConfigError, EngineUnavailable, ErrorInfo, PlanMismatch
from weightlink.hooks.geometry import Layout
from weightlink.plan import EngineLayouts, Plan, make_plan, owned_names, survey_of
from weightlink.program import Program, verify_local
from weightlink.relays import NOBODY
from weightlink.rendezvous import connect, local_address_towards, new_key
from weightlink.report import EngineLink
from weightlink.survey import Survey, merge_manifest
from weightlink.wire import Sender

if TYPE_CHECKING:
    import torch
    from weightlink.converters.encoders import Encoded
    from weightlink.group import TrainerGroup
    from weightlink.hooks.deadline import Deadline
    from weightlink.hooks.manager import PluginManager
    from weightlink.hooks.protocols import Channel, TrainingAdapter
    from weightlink.hooks.settings import LinkSettings


class _Head(msgspec.Struct, frozen=True):
    """What rank 0 tells the others of a plan: what it follows from."""

    survey: bytes
    names: tuple[str, ...]
    seconds: float
    keys: tuple[str, ...]
    engines: tuple[EngineLink, ...]
    encoded: tuple[str, ...] = ()


@dataclass
class Leg:
    """One engine's group as this trainer rank holds it."""

    name: str
    channel: Channel
    sender: Sender

    def close(self) -> None:
        """Leave the group. Safe to repeat."""
        self.channel.close()


@dataclass
class Attachment:
    """A proven plan and its formed groups, for one epoch."""

    epoch: int
    plan: Plan
    legs: list[Leg]
    plan_seconds: float
    contexts: tuple[m.EngineContext, ...]
    engines: tuple[EngineLink, ...]
    encoded: Encoded | None = None
    used: frozenset[int] = frozenset()

    def tensors(self, adapter: TrainingAdapter) -> Sequence[torch.Tensor]:
        """What the senders read: the adapter's live tensors, and what is encoded from them now."""
        live = adapter.tensors()
        return live if self.encoded is None else self.encoded.tensors(live, self.used)

    def close(self) -> None:
        """Leave every group. Safe to repeat."""
        for leg in self.legs:
            leg.close()


def attach(
    *,
    link: str,
    epoch: int,
    group: TrainerGroup,
    adapter: TrainingAdapter,
    clients: Sequence[EngineClient],
    settings: LinkSettings,
    plugins: PluginManager,
    deadline: Deadline,
) -> Attachment:
    """Form one epoch of a link. Raises the same error on every trainer rank; no byte of any weight has moved then.

    :param clients: one per engine, on rank 0; empty elsewhere
    """
    group.together(lambda: adapter.make_readable(deadline), deadline, "the trainer's weights to be readable")
    data = group.lead(
        lambda: msgspec.msgpack.encode(_contexts(clients, adapter, settings, plugins, deadline)),
        deadline,
        "engine contexts",
    )
    contexts = _contexts_decoder.decode(data)
    layout = group.together(
        lambda: replace(adapter.layout(contexts[0], settings.family, settings.exclude), host=platform.node()),
        deadline,
        "every trainer rank's layout",
    )
    packed = group.gather(layout.pack(), deadline, "every trainer rank's layout")
    made: list[Plan] = []

    def make() -> bytes:
        started = time.monotonic()
        plain = [Layout.unpack(p) for p in packed]
        layouts, engines, encoded = _layouts(plain, contexts, clients, adapter, settings, plugins, deadline)
        survey = survey_of(layouts, engines)
        names = tuple(e.name for e in engines)
        made.append(make_plan(survey, settings.wire, names=names, ignore=settings.ignore))
        seconds = time.monotonic() - started
        keys, data = tuple(new_key() for _ in clients), survey.pack()
        _offer(made[0], data, link, epoch, group, clients, keys, settings.engine_owned, deadline)
        return msgspec.msgpack.encode(_Head(data, names, seconds, keys, tuple(map(_engine_link, engines)), encoded))

    head = _head.decode(group.lead(make, deadline, "the plan"))

    def own() -> tuple[Plan, Encoded | None, list[Program]]:
        plan = made[0] if made else make_plan(
            Survey.unpack(head.survey), settings.wire, names=head.names, ignore=settings.ignore
        )  # fmt: skip
        encoded = encode(layout, head.encoded, contexts[0], plugins)
        return plan, encoded, _programs(plan, layout if encoded is None else encoded.layout, group)

    plan, encoded, programs = group.together(own, deadline, "every trainer rank to prove its part of the plan")

    legs: list[Leg] = []

    def join() -> None:
        _join(legs, link, epoch, group, adapter, clients, settings, plugins, plan, head, programs, deadline)

    try:
        group.together(join, deadline, "every rank to join the link's groups")
    except BaseException:
        for leg in legs:
            leg.close()
        raise
    used = frozenset(int(p) for program in programs for p in program.copies.param)
    return Attachment(epoch, plan, legs, head.seconds, contexts, head.engines, encoded, used)


def _contexts(
    clients: Sequence[EngineClient],
    adapter: TrainingAdapter,
    settings: LinkSettings,
    plugins: PluginManager,
    deadline: Deadline,
) -> tuple[m.EngineContext, ...]:
    """Every engine's context, checked against the trainer and one another before anything is built."""
    replies, failures = fan_out(clients, lambda c: c.send(m.Describe(deadline.check("contexts")), deadline))
    raise_failures(failures, "describe themselves")
    contexts = []
    for client in clients:
        context = replies[client.name].context
        if context is None:
            raise EngineUnavailable("the engine did not describe itself", rank=client.name)
        _check_context(client.name, context, adapter, settings)
        require_encoder(client.name, context, plugins)
        contexts.append(context)
    first = contexts[0]
    for client, context in zip(clients, contexts, strict=True):
        if (context.architecture, context.dtype) != (first.architecture, first.dtype):
            raise ConfigError(
                "the engines of one link must serve the same model in the same dtype",
                rank=client.name,
                expected=f"{first.architecture} in {first.dtype}",
                found=f"{context.architecture} in {context.dtype}",
            )
    require_one_format([client.name for client in clients], contexts)
    return tuple(contexts)


def _check_context(name: str, context: m.EngineContext, adapter: TrainingAdapter, settings: LinkSettings) -> None:
    if context.protocol != m.PROTOCOL:
        raise ConfigError(
            "the engine speaks another version of the protocol",
            rank=name,
            expected=m.PROTOCOL,
            found=f"{context.protocol} (weightlink {context.weightlink_version})",
            remedy="install the same weightlink on both sides",
        )
    if context.refusal:
        raise ConfigError(f"the engine cannot be updated online: {context.refusal}", rank=name)
    if context.device != adapter.device.type:
        raise ConfigError(
            "trainer and engine weights are on different kinds of device",
            rank=name,
            expected=adapter.device.type,
            found=context.device,
        )
    if settings.wire.transport not in context.transports:
        raise ConfigError(
            "the engine does not have the link's transport",
            rank=name,
            expected=settings.wire.transport,
            found=", ".join(context.transports) or "none",
        )
    if context.device == "cuda":
        import torch

        ours = ".".join(map(str, torch.cuda.nccl.version()))
        theirs = context.versions.get("nccl", "unknown")
        if theirs != ours:
            raise ConfigError(
                "trainer and engine have different NCCL versions", rank=name, expected=ours, found=theirs,
                remedy="install the same torch, or the same nvidia-nccl wheel, on both sides",
            )  # fmt: skip


def _layouts(
    layouts: Sequence[Layout],
    contexts: Sequence[m.EngineContext],
    clients: Sequence[EngineClient],
    adapter: TrainingAdapter,
    settings: LinkSettings,
    plugins: PluginManager,
    deadline: Deadline,
) -> tuple[Sequence[Layout], list[EngineLayouts], tuple[str, ...]]:
    """What is to be planned, and the names of the tensors that are sent in encoded form."""
    if adapter.kind == "megatron":
        require_one_parameter(layouts)
    engines = _observe(layouts, contexts, clients, adapter, settings, deadline)
    names = names_to_encode(engines, contexts[0], plugins)
    if names:
        made = [encode(layout, names, contexts[0], plugins) for layout in layouts]
        encoded = [layout if e is None else e.layout for layout, e in zip(layouts, made, strict=True)]
        engines = _observe(encoded, contexts, clients, adapter, settings, deadline)
        require_taken(engines, layouts, encoded)
        layouts = encoded
    require_declared(settings, layouts, [layout for engine in engines for layout in engine.layouts])
    return layouts, engines, names


def _observe(
    layouts: Sequence[Layout],
    contexts: Sequence[m.EngineContext],
    clients: Sequence[EngineClient],
    adapter: TrainingAdapter,
    settings: LinkSettings,
    deadline: Deadline,
) -> list[EngineLayouts]:
    """Every engine's layouts over the manifest of the trainer's."""
    manifest = merge_manifest(layouts)
    request = m.Observe(deadline.check("layouts"), manifest, adapter.kind, settings.pause_mode, settings.selector)
    replies, failures = fan_out(clients, lambda c: c.send(request, deadline))
    raise_failures(failures, "describe their layouts")
    engines = [
        EngineLayouts(
            client.name,
            [Layout.unpack(data) for data in replies[client.name].layouts],
            context.owns_weights,
            settings.engine_owned,
        )
        for client, context in zip(clients, contexts, strict=True)
    ]
    for engine, context in zip(engines, contexts, strict=True):
        if len(engine.layouts) != context.world:
            raise PlanMismatch(
                "an engine answered with the wrong number of layouts",
                rank=engine.name,
                expected=context.world,
                found=len(engine.layouts),
            )
    return engines


def _offer(
    plan: Plan,
    survey: bytes,
    link: str,
    epoch: int,
    group: TrainerGroup,
    clients: Sequence[EngineClient],
    keys: Sequence[str],
    engine_owned: tuple[str, ...],
    deadline: Deadline,
) -> None:
    """Every engine rank proves its own program before any group is formed."""
    numbers = {client.name: n for n, client in enumerate(clients)}
    # One key per pair of neighbours, by the number of the second.
    hops = {number: new_key() for number, engine in enumerate(plan.engines) if engine.relay != NOBODY}

    def offer(client: EngineClient) -> m.Reply:
        number = numbers[client.name]
        world = plan.engines[number].world
        request = m.Attach(
            deadline.check("the engines to accept the plan"),
            link,
            epoch,
            group.host,
            group.port,
            keys[number],
            group.size,
            group.size + world,
            plan.wire,
            plan.digest,
            survey,
            number,
            engine_owned,
            hops.get(number, ""),
            hops.get(plan.passes_to(number), ""),
        )
        return client.send(request, deadline)

    _, failures = fan_out(clients, offer)
    raise_failures(failures, "accept the plan")


def _engine_link(engine: EngineLayouts) -> EngineLink:
    opaque = tuple(dict.fromkeys((o.name, o.reason) for layout in engine.layouts for o in layout.opaque))
    staged = max((layout.staged_bytes for layout in engine.layouts), default=0)
    return EngineLink(name=engine.name, owned=owned_names(engine), opaque=opaque, staged=staged)


def _programs(plan: Plan, layout: Layout, group: TrainerGroup) -> list[Program]:
    """This rank's programs, each proven to read this rank's own regions."""
    numbers = {spec.name: n for n, spec in enumerate(plan.manifest)}
    tensor_of = np.array([numbers[spec.name] for spec in layout.tensors], np.int64)
    programs = [plan.send_program(number, group.rank, layout) for number in range(len(plan.engines))]
    for program in programs:
        verify_local(program, layout, tensor_of, rank=group.name)
    return programs


def _join(
    legs: list[Leg],
    link: str,
    epoch: int,
    group: TrainerGroup,
    adapter: TrainingAdapter,
    clients: Sequence[EngineClient],
    settings: LinkSettings,
    plugins: PluginManager,
    plan: Plan,
    head: _Head,
    programs: Sequence[Program],
    deadline: Deadline,
) -> None:
    """Form the groups, engines and trainer at the same time, and add them to ``legs``.

    An engine that fails to join leaves the trainer's ranks waiting for it inside the group's constructor, which cannot
    be interrupted. So they wait in a thread, and leave it behind when rank 0 hears of the failure."""
    flag = f"join-failed/{epoch}"
    failures: dict[str, ErrorInfo] = {}
    errors: list[Exception] = []

    def ask() -> None:
        _, failed = fan_out(clients, lambda c: c.send(m.Join(deadline.check("join"), link, epoch), deadline))
        failures.update(failed)
        if failed:
            group.flag(flag)

    def enter() -> None:
        try:
            transport = plugins.transport(settings.wire.transport)
            host = group.host if group.rank == 0 else local_address_towards(group.host, group.port)
            for number, program in enumerate(programs):
                channel = transport.open(
                    # A client of its own: while one call waits in a store's client, every other call on it waits too.
                    connect(group.host, group.port, deadline),
                    key=head.keys[number],
                    rank=group.rank,
                    size=group.size + plan.engines[number].world,
                    host=host,
                    device=adapter.device,
                    wire=settings.wire,
                    deadline=deadline,
                )
                try:
                    handshake(channel, program.pair_digests(), adapter.device, deadline)
                    sender = Sender(program, settings.wire, adapter.device)
                except BaseException:
                    channel.abort()
                    channel.close()
                    raise
                legs.append(Leg(head.names[number], channel, sender))
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits for this one
            errors.append(error)

    threads = [_start(enter)]
    if group.rank == 0:
        threads.append(_start(ask))
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.02)
        if threads[0].is_alive() and group.flagged(flag):
            break
    raise_failures(failures, "join the link's groups")
    if not group.flagged(flag) and errors:  # else rank 0 raises the engine's own error on every rank
        raise errors[0]


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="weightlink-join", daemon=True)
    thread.start()
    return thread


_contexts_decoder = msgspec.msgpack.Decoder(tuple[m.EngineContext, ...])
_head = msgspec.msgpack.Decoder(_Head)
