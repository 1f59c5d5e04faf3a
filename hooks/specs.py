"""All hooks, in one file. A plugin is a module or object with functions marked ``@hookimpl``, registered under the
entry-point group ``weightlink``. Built-ins are registered the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import typer
    from weightlink.hooks.protocols import Encoder, Family, LocalEngine, TrainingAdapter, Transport

PROJECT = "weightlink"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def weightlink_training_adapter(model: object) -> TrainingAdapter | None:
    """The adapter for a trainer's model, or None if this plugin does not know it.

    :param model: what the user gave to :func:`weightlink.connect`: a module or a list of model chunks
    """


@hookspec(firstresult=True)
def weightlink_local_engine(engine: object) -> LocalEngine | None:
    """An engine that lives in this process, or None if this plugin does not know it.

    :param engine: an entry of ``engines`` that the user gave to :func:`weightlink.connect` and that is not a URL
    """


@hookspec
def weightlink_families() -> Sequence[Family]:
    """Model families: rules from a trainer's native parameter names to Hugging Face names, as data."""
    raise NotImplementedError


@hookspec
def weightlink_encoders() -> Sequence[Encoder]:
    """Quantised checkpoint formats, by their ``name``: what an engine that keeps its weights quantised is sent."""
    raise NotImplementedError


@hookspec
def weightlink_transports() -> Sequence[Transport]:
    """Transports, by their ``name``."""
    raise NotImplementedError


@hookspec
def weightlink_update_event(event: str, fields: Mapping[str, Any]) -> None:
    """Follows updates on trainer rank 0.

    :param event: ``started``, ``phase``, ``committed`` or ``failed``
    :param fields: ``link``, ``update``, ``version`` and, by event, ``phase``, ``seconds``, ``report``, ``error``
    """


@hookspec
def weightlink_cli_commands(app: typer.Typer) -> None:
    """Adds commands to the ``weightlink`` command line.

    :param app: the application to add commands to
    """
