"""Layouts of all ranks as one file, so that the costly part is done once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from weightlink.hooks.errors import ConfigError, LayoutError
from weightlink.hooks.geometry import Fills, Layout, Opaque, ParamSpec, Quantised, Regions, TensorSpec
from weightlink.plan import EngineLayouts

FORM = "weightlink layouts 2"


class _Rank(msgspec.Struct, frozen=True, array_like=True):
    """A layout without the names of its tensors: an engine's ranks share them."""

    rank: str
    params: tuple[ParamSpec, ...]
    regions: tuple[bytes, ...]
    fills: tuple[bytes, ...]
    opaque: tuple[Opaque, ...]
    quantised: tuple[Quantised, ...]


class _File(msgspec.Struct, frozen=True):
    form: str
    model: str
    trainer: str
    notes: tuple[str, ...]
    manifest: tuple[TensorSpec, ...]
    trainers: tuple[tuple[bytes, bytes], ...]
    engines: tuple[tuple[str, int, tuple[bytes, ...]], ...]


class Stored(msgspec.Struct, frozen=True):
    """All layouts of a plan.

    :param model: name of the model
    :param trainer: the trainer's layout as it was written
    :param notes: how the layouts were made
    :param engines: groups of equal engines: a label, how many, and the layouts of one
    """

    model: str
    trainer: str
    notes: tuple[str, ...]
    manifest: tuple[TensorSpec, ...]
    trainers: tuple[Layout, ...]
    engines: tuple[tuple[str, int, tuple[Layout, ...]], ...]

    def each_engine(self) -> list[EngineLayouts]:
        """Every engine by itself, with a name."""
        return [
            EngineLayouts(f"engine {group + 1}.{number + 1} ({label})", layouts)
            for group, (label, count, layouts) in enumerate(self.engines)
            for number in range(count)
        ]

    def save(self, path: Path) -> None:
        """Write the file. Raises :class:`ConfigError`."""
        places = {spec.name: n for n, spec in enumerate(self.manifest)}
        file = _File(
            FORM,
            self.model,
            self.trainer,
            self.notes,
            self.manifest,
            tuple((_column(_numbers(layout, places)), pack_rank(layout)) for layout in self.trainers),
            tuple((label, count, tuple(map(pack_rank, layouts))) for label, count, layouts in self.engines),
        )
        try:
            path.write_bytes(msgspec.msgpack.encode(file))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Stored:
        """Read the file. Raises :class:`ConfigError` for anything else, :class:`LayoutError` for a broken layout."""
        try:
            file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"cannot read layouts from {path}: {error}", expected=FORM) from error
        if file.form != FORM:
            raise ConfigError(f"{path} is of another form", expected=FORM, found=file.form)
        places = range(len(file.manifest))
        for numbers, _ in file.trainers:
            if not all(n in places for n in np.frombuffer(numbers, "<i8").tolist()):
                raise ConfigError(f"{path} names tensors that it does not have", expected=FORM)
        if not all(count > 0 for _, count, _ in file.engines):
            raise ConfigError(f"{path} has a group without engines", expected=FORM)
        return cls(
            file.model,
            file.trainer,
            file.notes,
            file.manifest,
            tuple(
                unpack_rank(data, tuple(file.manifest[n] for n in np.frombuffer(numbers, "<i8").tolist()))
                for numbers, data in file.trainers
            ),
            tuple(
                (label, count, tuple(unpack_rank(data, file.manifest) for data in ranks))
                for label, count, ranks in file.engines
            ),
        )


def pack_rank(layout: Layout) -> bytes:
    """A layout without its tensors."""
    return msgspec.msgpack.encode(
        _Rank(
            layout.rank,
            layout.params,
            tuple(_column(getattr(layout.regions, name)) for name in Regions.COLUMNS),
            tuple(_column(getattr(layout.fills, name)) for name in Fills.COLUMNS),
            layout.opaque,
            layout.quantised,
        )
    )


def unpack_rank(data: bytes, tensors: tuple[TensorSpec, ...]) -> Layout:
    """The inverse, over the tensors. Raises :class:`LayoutError`."""
    try:
        rank = msgspec.msgpack.decode(data, type=_Rank)
        regions = Regions(*_columns(rank.regions, Regions(), Regions.COLUMNS))
        fills = Fills(*_columns(rank.fills, Fills(), Fills.COLUMNS))
    except (msgspec.MsgspecError, ValueError) as error:
        raise LayoutError(f"not a layout: {error}") from error
    layout = Layout(rank.rank, tensors, rank.params, regions, fills, rank.opaque, rank.quantised)
    layout.validate()
    return layout


def _numbers(layout: Layout, places: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Where the layout's tensors are in the manifest."""
    return np.array([places[spec.name] for spec in layout.tensors], np.int64)


def _column(array: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _columns(data: tuple[bytes, ...], like: Any, names: tuple[str, ...]) -> list[npt.NDArray[Any]]:
    found = []
    for column, name in zip(data, names, strict=True):
        empty = getattr(like, name)
        flat = np.frombuffer(column, empty.dtype.newbyteorder("<")).astype(empty.dtype)
        found.append(flat.reshape(-1, *empty.shape[1:]))
    return found
