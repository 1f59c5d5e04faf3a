"""The public API: :func:`connect` and :class:`Link`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from weightlink.attach import Attachment, attach
from weightlink.client import EngineClient, HttpClient, LocalClient, fan_out, raise_failures
from weightlink.group import TrainerGroup
from weightlink.hooks import messages as m
from weightlink.hooks.deadline import Deadline
from weightlink.hooks.errors import ConfigError, LayoutMoved, PlanMismatch, VersionError, WeightlinkError, describe
from weightlink.hooks.manager import PluginManager
from weightlink.hooks.settings import LinkSettings, WireSettings
from weightlink.rendezvous import local_address_towards
from weightlink.report import EngineLink, UpdateReport
from weightlink.update import Update, failure

if TYPE_CHECKING:
    import torch.distributed as dist
    from weightlink.hooks.protocols import TrainingAdapter

logger = logging.getLogger("weightlink")

_CLOSE_SECONDS = 30.0


def connect(
    model: object,
    engines: Sequence[object],
    *,
    group: dist.ProcessGroup | None = None,
    plugins: PluginManager | None = None,
    **settings: Any,
) -> Link:
    """Connect a trainer's model to running engines. Collective: every trainer rank calls it with equal arguments.

    :param model: a Megatron-Core module or a list of model chunks, or whatever an installed plugin knows
    :param engines: base URLs of engines that run with weightlink, or engine objects that live in the process of
        trainer rank 0 (``sglang.Engine``; None in their place on the other ranks)
    :param group: the trainer's ranks; the default process group if None, this process alone if there is none
    :param settings: fields of :class:`LinkSettings` (``timeout``, ``token``, ``host``, ``pause_mode``, ``strict``,
        ``min_engines``, ``selector``, ``family``, ``exclude``, ``ignore``, ``engine_owned``) and of
        :class:`WireSettings` (``transport``, ``bucket_bytes``, ``direct_bytes``, ``max_peers``, ``relay``,
        ``coalesce``)
    :raises WeightlinkError: the same on every rank; no weight has been changed then
    """
    chosen = _settings(settings)
    names = [e if isinstance(e, str) else f"engine {n} (in process)" for n, e in enumerate(engines)]
    if not names or len(set(names)) != len(names):
        raise ConfigError("engines must be a non-empty list of different URLs or engine objects", found=names)
    deadline = Deadline.after(chosen.timeout)
    manager = plugins or PluginManager()
    link = Link(names, engines, group, chosen, manager, deadline)
    try:
        link._start(model, deadline)
    except BaseException as error:
        link._abandon(error)
        raise
    return link


def _settings(values: dict[str, Any]) -> LinkSettings:
    wire = {name: values.pop(name) for name in WireSettings.__struct_fields__ if name in values}
    unknown = sorted(set(values) - set(LinkSettings.__struct_fields__))
    if unknown:
        known = sorted({*LinkSettings.__struct_fields__, *WireSettings.__struct_fields__} - {"wire"})
        raise ConfigError(f"unknown setting {unknown[0]!r}", expected=", ".join(known))
    if values.get("min_engines") is not None:
        # Chains are all or nothing: an engine that may stay away would keep those behind it waiting.
        if wire.get("relay"):
            raise ConfigError("engines that may fail alone cannot relay to one another", expected="relay=False",
                              found=f"min_engines={values['min_engines']}")  # fmt: skip
        wire["relay"] = False
    try:
        return msgspec.convert({**values, **({"wire": wire} if wire else {})}, LinkSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid setting: {error}") from error


class Link:
    """One trainer connected to one or more engines. Every method is collective over the trainer's ranks.

    Use as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        names: Sequence[str],
        engines: Sequence[object],
        group: dist.ProcessGroup | None,
        settings: LinkSettings,
        plugins: PluginManager,
        deadline: Deadline,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.settings = settings
        self.version: int | None = None
        #: What connecting found out about each engine; the same on every trainer rank.
        self.engines: tuple[EngineLink, ...] = ()
        self._names = tuple(names)
        self._engines = tuple(engines)
        self._plugins = plugins
        self._epoch = 0
        self._attachment: Attachment | None = None
        self._closed = False
        self._clients: list[EngineClient] = []
        self._adapter: TrainingAdapter | None = None
        self._group = TrainerGroup.form(group, lambda: self._host(settings), deadline)

    def _host(self, settings: LinkSettings) -> str:
        if settings.host is not None:
            return settings.host
        for engine in self._engines:
            if isinstance(engine, str):
                client = HttpClient(engine, None)
                client.close()
                return local_address_towards(client.host, client.port)
        return "127.0.0.1"

    def _start(self, model: object, deadline: Deadline) -> None:
        self.id = self._group.broadcast(self.id.encode(), deadline, "the link's id").decode()

        def start() -> TrainingAdapter:
            if self._group.rank == 0:
                self._clients = [self._client(n, e) for n, e in zip(self._names, self._engines, strict=True)]
            return self._plugins.training_adapter(model)

        # The token stays out of it: it would end up in an error message.
        shown = msgspec.structs.replace(self.settings, token=None)
        mark = f"engines {', '.join(self._names)}; {shown}"
        self._adapter = self._group.together(start, deadline, "every trainer rank to start the link", mark=mark)
        self._attach(deadline)

    def _client(self, name: str, engine: object) -> EngineClient:
        if isinstance(engine, str):
            return HttpClient(engine, self.settings.token)
        return LocalClient(name, self._plugins.local_engine(engine))

    def _abandon(self, error: BaseException) -> None:
        """Leave what never became a link, together: the rank that hosts the store must not go before the others have
        read the verdict."""
        self._closed = True
        self._drop()
        for client in self._clients:
            client.close()
        try:
            self._group.close(Deadline.after(_CLOSE_SECONDS))
        except WeightlinkError as failed:
            error.add_note(f"leaving the link failed too: {failed}")

    def _attach(self, deadline: Deadline) -> None:
        self._epoch += 1
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
        attachment = attach(
            link=self.id,
            epoch=self._epoch,
            group=self._group,
            adapter=self._require_adapter(),
            clients=self._clients,
            settings=self.settings,
            plugins=self._plugins,
            deadline=deadline,
        )
        self._attachment, self.engines = attachment, attachment.engines
        if self._group.rank == 0:
            for engine in self.engines:
                if engine.opaque:
                    logger.info(
                        "%s: %d tensors go through its own loader, with %d bytes of memory per rank and update: %s",
                        engine.name,
                        len(engine.opaque),
                        engine.staged,
                        "; ".join(f"{name} ({reason})" for name, reason in engine.opaque),
                    )

    def _require_adapter(self) -> TrainingAdapter:
        if self._adapter is None or self._closed:
            raise ConfigError("the link is closed")
        return self._adapter

    def push(self, version: int, *, timeout: float | None = None) -> UpdateReport:
        """Send the resident weights to every engine as version ``version``, in one transaction.

        :param version: higher than the engines' committed version
        :param timeout: seconds for this push; the link's own timeout if None
        :returns: the update's record, equal on every rank
        :raises UpdateFailed: an engine did not commit; it is unready until the next push, which heals it
        :raises WeightlinkError: the update was refused; every engine serves its old version
        """
        if self._closed:
            raise ConfigError("the link is closed")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 63:
            raise ConfigError("a version is a non-negative integer of at most 63 bits", found=repr(version))
        deadline = Deadline.after(timeout if timeout is not None else self.settings.timeout)
        self._group.start()
        try:
            return self._update(version, deadline)
        except LayoutMoved as moved:  # nothing was written: look at the engines again, once
            logger.warning("an engine's layout has moved; it is observed again: %s", moved)
            return self._update(version, deadline)

    def _update(self, version: int, deadline: Deadline) -> UpdateReport:
        """One update, over a new attachment if there is none."""
        if self._attachment is None:
            self._attach(deadline)
        attachment = self._attachment
        if attachment is None:
            raise PlanMismatch("the link has no plan")
        update = Update(
            link=self.id,
            group=self._group,
            adapter=self._require_adapter(),
            clients=self._clients,
            settings=self.settings,
            attachment=attachment,
            version=version,
            deadline=deadline,
        )
        self._event("started", update=update.id, version=version)
        try:
            outcome = update.run()
        except WeightlinkError as error:
            if not isinstance(error, VersionError):  # every other refusal may mean that the engine has forgotten us
                self._drop()
            self._event("failed", update=update.id, version=version, error=describe(error))
            raise
        except BaseException:
            self._drop()
            raise
        if outcome.report.failures:
            self._drop()
        if outcome.error:
            failed = failure(outcome)
            self._event("failed", update=update.id, version=version, error=describe(failed))
            raise failed
        self.version = version
        self._event("committed", update=update.id, version=version, report=outcome.report)
        return outcome.report

    def _drop(self) -> None:
        """Groups that failed once are not used again: the next push forms new ones, under a new epoch."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    def _event(self, event: str, **fields: Any) -> None:
        if self._group.rank == 0:
            self._plugins.update_event(event, link=self.id, **fields)

    def close(self) -> None:
        """Leave the engines and tear every group down. Safe to repeat; raises if an engine could not be told."""
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after(min(self.settings.timeout, _CLOSE_SECONDS))
        self._drop()
        _, failures = fan_out(self._clients, lambda c: c.send(m.Detach(deadline.remaining() or 0.1, self.id), deadline))
        for client in self._clients:
            client.close()
        self._group.close(deadline)
        raise_failures(failures, "leave the link")

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except WeightlinkError as failed:
            if error is None:
                raise
            error.add_note(f"closing the link failed too: {failed}")
