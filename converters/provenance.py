"""Where the elements of a tensor come from, followed through the operators of a weight loader.

A :class:`Tracker` is a dispatch mode. Tensors without data stand for checkpoint tensors; every storage that the loader
makes from them carries pieces that say which checkpoint elements it would hold. A write to memory that existed before
is recorded instead of executed.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weightlink.converters import affine
from weightlink.converters.affine import Affine, TooComplex
from weightlink.converters.cells import CONSTANT, Cell, Lost, Piece, Write, dtype_name, key, sources_of
from weightlink.converters.operators import RULES, Moves, Rule, pairs, rule_of, span, tensors, without_data
from weightlink.hooks.errors import ReplayError
from weightlink.hooks.geometry import CASTABLE, QUANTISED, Quantised, TensorSpec


class Tracker(TorchDispatchMode):  # type: ignore[misc]
    """Follows one run of a loader.

    :param specs: the canonical tensors
    :param resident: storages of the weights, by :func:`key`
    :param rank: for messages
    """

    def __init__(self, specs: Sequence[TensorSpec], resident: Set[int], rank: str) -> None:
        super().__init__()
        self.specs = specs
        self.resident = resident
        self.rank = rank
        self.cells: dict[int, Cell] = {}
        self.writes: list[Write] = []
        self.touched: int | None = None
        self.foreign: ReplayError | None = None
        self.closed = False
        self.thread = threading.get_ident()
        # Canonical tensors whose value became a number since the last name, and ever; whether any weight's value did.
        self._during: int | None = None
        # Canonical tensors that were written to a weight, by storage; those behind the inputs of the present operator.
        self._stored: dict[int, set[int]] = {}
        self._behind: frozenset[int] = frozenset()
        self._recent: frozenset[int] = frozenset()
        self._numbers: frozenset[int] = frozenset()
        self._number_read = False

    def canonical(self, index: int) -> torch.Tensor:
        """A data-less tensor that stands for canonical tensor ``index``."""
        spec = self.specs[index]
        dtype = getattr(torch, spec.dtype)
        tensor = torch.empty(spec.shape, dtype=dtype, device="meta")
        whole = Affine(0, 0, ((tensor.numel(), 1, 1),))
        cell = Cell(dtype)
        cell.add([Piece(index, 0.0, None, whole)] if tensor.numel() else [])
        self._adopt(tensor, cell)
        return tensor

    def next_name(self, index: int) -> None:
        """The loader takes tensor ``index``: copies no longer depend on numbers read from earlier ones."""
        self._during = index
        self._recent = frozenset()

    def contents(self, tensor: torch.Tensor) -> frozenset[int]:
        """Canonical tensors that went into ``tensor``, which the loader left somewhere."""
        cell = self.cells.get(key(tensor))
        return cell.sources if cell is not None else frozenset()

    def quantised(self) -> tuple[Quantised, ...]:
        """Canonical numbers that went into memory of a dtype that a cast does not lead to."""
        plain = {n for n, spec in enumerate(self.specs) if spec.dtype in CASTABLE}
        lost = [(w.lost.sources & plain, dtype_name(w.dtype)) for w in self.writes if w.lost is not None]
        found = {(n, dtype): None for sources, dtype in lost if dtype in QUANTISED for n in sorted(sources)}
        return tuple(Quantised(self.specs[n].name, dtype) for n, dtype in found)

    def check_thread(self) -> None:
        """Raises :class:`ReplayError` outside the thread that runs the replay."""
        if threading.get_ident() != self.thread:
            name = threading.current_thread().name
            self.foreign = ReplayError(
                f"thread {name!r} took part in a loader replay",
                rank=self.rank,
                expected="all loading in the thread that called load_weights",
                remedy="make the loader run inline for tensors on the meta device",
            )
            raise self.foreign

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.closed:
            return func(*args, **kwargs)
        rule = RULES.get(func) or rule_of(func)
        if rule.kind == "view":
            try:
                return func(*args, **kwargs)
            except Exception:
                self._touch([self.cells.get(key(tensor)) for tensor in tensors(args, kwargs)])
                raise
        if rule.kind == "decompose":
            with self:
                return func.decompose(*args, **kwargs)
        inputs = list(tensors(args, kwargs))
        cells = [self.cells.get(key(tensor)) for tensor in inputs]
        self._touch(cells)
        self._behind = self._read_through(rule, args, kwargs, inputs, cells)
        if rule.kind == "number":
            return self._number(func, args, kwargs, inputs, cells)
        if rule.kind == "write":
            return self._write(func, rule, args, kwargs, inputs, cells)
        return self._make(func, rule, args, kwargs, inputs, cells)

    def _read_through(
        self, rule: Rule, args: tuple[Any, ...], kwargs: Any, inputs: list[torch.Tensor], cells: list[Cell | None]
    ) -> frozenset[int]:
        """Canonical tensors that were written to the weights that an operator reads, directly or before."""
        assigned = {id(t) for t in rule.targets(args, kwargs)} if rule.writes is not None else ()
        found: frozenset[int] = frozenset()
        for tensor, cell in zip(inputs, cells, strict=True):
            if cell is not None:
                found |= cell.behind
            elif id(tensor) not in assigned:
                found |= self._stored.get(key(tensor), frozenset())
        return found

    def _touch(self, cells: Iterable[Cell | None]) -> None:
        for cell in cells:
            if cell is not None and cell.sources:
                self.touched = max(cell.sources)

    def _hollow(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are not really there."""
        if tensor.device.type == "meta":
            return True
        cell = self.cells.get(key(tensor))
        return cell is not None and bool(cell.sources)

    def _number(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, inputs: list[torch.Tensor], cells: list[Cell | None]
    ) -> Any:
        cell = cells[0]
        if self._hollow(inputs[0]):
            self._read(cell.sources if cell is not None else frozenset())
            return torch.ones((), dtype=inputs[0].dtype).item()
        self._number_read = self._number_read or cell is None or not cell.plain
        return func(*args, **kwargs)

    def _read(self, sources: frozenset[int]) -> None:
        """The loader learns a value that is not there."""
        self._recent |= sources
        self._numbers |= self._recent
        self._number_read = True

    def _make(
        self,
        func: Any,
        rule: Rule,
        args: tuple[Any, ...],
        kwargs: Any,
        inputs: list[torch.Tensor],
        cells: list[Cell | None],
    ) -> Any:
        """An operator that writes nothing: run it, without data if its inputs have none, and say what came out."""
        known = {key(tensor) for tensor in inputs}
        if rule.kind == "fresh":
            out = func(*args, **kwargs)
            for tensor in inputs:
                if key(tensor) not in self.resident and key(tensor) not in self.cells:
                    self._adopt(tensor, Cell(tensor.dtype, plain=True))
            return out
        hollow = any(self._hollow(tensor) for tensor in inputs)
        if hollow and _returns_bool(func):
            self._read(_union(cells))
            return True
        if hollow:
            run_args, run_kwargs = without_data(args), without_data(dict(kwargs))
            if run_kwargs.get("device") is not None:
                run_kwargs["device"] = torch.device("meta")
            run_kwargs.pop("pin_memory", None)
            out = func(*run_args, **run_kwargs)
        else:
            out = func(*args, **kwargs)
        results = list(tensors((out,), {}))
        if not results and hollow:
            raise NotImplementedError(f"the loader branches on the values of a tensor ({func})")
        plain = all(cell is not None and cell.plain for cell in cells)
        for tensor in results:
            if key(tensor) in known:
                continue
            cell = Cell(tensor.dtype, behind=self._behind, plain=plain and tensor.device.type != "meta")
            if rule.constant is not None:
                value = rule.constant(args, kwargs)
                cell.plain = value is not None and tensor.device.type != "meta"
                if value is not None:
                    cell.add(_fill(value, tensor))
            elif rule.moves is not None:
                self._move(cell, rule.moves, args, kwargs, tensor, cells)
            elif inputs:
                cell.lose(Lost(f"computed by {func}", _union(cells)))
            else:
                cell.lose(Lost(f"made by {func}"))
            self._adopt(tensor, cell)
        return out

    def _move(
        self, cell: Cell, moves: Moves, args: tuple[Any, ...], kwargs: Any, out: torch.Tensor, cells: list[Cell | None]
    ) -> None:
        try:
            for item in moves(args, kwargs, out):
                if isinstance(item[0], torch.Tensor):
                    found = self._trace(item[0], item[1], out.dtype)
                    if isinstance(found, Lost):
                        cell.lose(found._replace(sources=_union(cells)))
                        return
                    cell.add(found)
                elif item[1].numel:
                    cell.add([Piece(CONSTANT, _rounded(item[0], out.dtype), None, item[1])])
        except TooComplex:
            cell.lose(Lost("moved in too many pieces", _union(cells)))

    def _trace(self, source: torch.Tensor, view: Affine, dtype: torch.dtype) -> list[Piece] | Lost:
        """What ``view`` (source address -> destination address) brings to a destination of ``dtype``."""
        if not view.numel:
            return []
        cell = self.cells.get(key(source))
        if cell is None:
            return Lost("copied from memory that existed before")
        if _turned(source):
            return Lost("copied from a view that negates what it shows", cell.sources)
        if cell.lost:
            return Lost(cell.lost, cell.sources, cell.barred)
        if source.dtype != cell.dtype:
            return Lost(f"{dtype_name(cell.dtype)} reinterpreted as {dtype_name(source.dtype)}", cell.sources)
        found: list[Piece] = []
        covered = 0
        for piece in cell.pieces:
            if not affine.overlaps(view, piece.map):
                continue
            if cell.plain and not _holds(source, piece):
                return Lost("changed outside the dispatcher", cell.sources)
            moved = self._cast(piece, source.dtype, dtype)
            for part in affine.compose(view, piece.map):
                if isinstance(moved, Lost):
                    return Lost(moved.reason, cell.sources)  # whatever else is copied with it
                covered += part.numel
                found.append(moved._replace(map=part))
        if covered != view.numel:
            return Lost("copied from elements that nothing was written to", cell.sources)
        return found

    def _cast(self, piece: Piece, before: torch.dtype, after: torch.dtype) -> Piece | Lost:
        if before == after:
            return piece
        if piece.source == CONSTANT:
            return piece._replace(value=_rounded(piece.value, after))
        names = {dtype_name(before), dtype_name(after)}
        if not names <= CASTABLE:
            return Lost(
                f"{dtype_name(before)} cast to {dtype_name(after)}: casting is not quantising",
                frozenset({piece.source}),
                _quantised(after),
            )
        exact = after == torch.float32
        if piece.rounded is None:
            exact = exact or dtype_name(after) == self.specs[piece.source].dtype
            return piece if exact else piece._replace(rounded=after)
        if exact or after == piece.rounded:
            return piece
        return Lost(
            f"rounded to {dtype_name(piece.rounded)} and then to {dtype_name(after)}", frozenset({piece.source})
        )

    # --- writes -----------------------------------------------------------------------------------------------------

    def _write(
        self,
        func: Any,
        rule: Rule,
        args: tuple[Any, ...],
        kwargs: Any,
        inputs: list[torch.Tensor],
        cells: list[Cell | None],
    ) -> Any:
        targets = list(rule.targets(args, kwargs))
        held = all(key(target) in self.cells for target in targets)
        plain = all(cell is not None and cell.plain for cell in cells)
        execute = held and not any(self._hollow(tensor) for tensor in inputs)
        if rule.writes is not None:
            for target, source in rule.writes(args):
                self._record(target, source)
        else:
            for target in targets:
                how = "written" if "out" in kwargs else "changed in place"
                self._lose(target, Lost(f"{how} by {func}", _union(cells)), assigned="out" in kwargs)
        for target in targets:
            cell = self.cells.get(key(target))
            if cell is not None:
                cell.plain = cell.plain and plain and execute
                cell.behind |= self._behind
        if execute:
            return func(*args, **kwargs)
        return self._unexecuted(func, args, kwargs, targets)

    def _unexecuted(self, func: Any, args: tuple[Any, ...], kwargs: Any, targets: list[torch.Tensor]) -> Any:
        """What an operator that was not executed returns."""
        returns = func._schema.returns
        if not returns:
            return None
        if len(returns) == len(targets) and all(r.alias_info is not None for r in returns):
            return targets[0] if len(targets) == 1 else tuple(targets)
        raise NotImplementedError(f"{func} writes to a weight and returns something else")

    def _record(self, target: torch.Tensor, source: torch.Tensor | float) -> None:
        """Element-wise assignment of ``source`` to ``target``."""
        if not target.numel():
            return
        found = self._assigned(target, source)
        cell = self.cells.get(key(target))
        if cell is None and not isinstance(found, Lost):
            # One cast from the canonical dtype must give what the loader's own chain of casts gives.
            bad = next((p for p in found if p.source != CONSTANT and p.rounded not in (None, target.dtype)), None)
            if bad is not None:
                found = Lost(f"rounded to {dtype_name(bad.rounded or target.dtype)} on the way", sources_of(found))
        if _turned(target):
            found = Lost(
                "written through a view that negates", found.sources if isinstance(found, Lost) else sources_of(found)
            )
        if cell is not None and target.dtype != cell.dtype:
            found = Lost(f"written as {dtype_name(target.dtype)}", sources_of(found))
        if isinstance(found, Lost):
            if isinstance(source, torch.Tensor) and source.dtype != target.dtype and _quantised(target.dtype):
                found = found._replace(barred=True)
            self._lose(target, found)
        elif cell is None:
            self._keep(target, tuple(found), None, None)
        else:
            try:
                over = span(target)
                cell.pieces = [p._replace(map=part) for p in cell.pieces for part in affine.subtract(p.map, over)]
                cell.add(found)
            except TooComplex:
                cell.lose(Lost("moved in too many pieces", sources_of(found)))

    def _assigned(self, target: torch.Tensor, source: torch.Tensor | float) -> list[Piece] | Lost:
        """What element-wise assignment of ``source`` leaves in ``target``."""
        found: list[Piece] | Lost
        if isinstance(source, torch.Tensor):
            wide = source if source.shape == target.shape else source.expand(target.shape)
            cell = self.cells.get(key(source))
            try:
                found = self._trace(wide, pairs(wide, target), target.dtype)
            except TooComplex:
                found = Lost("moved in too many pieces", self.contents(source))
            if isinstance(found, Lost) and cell is not None and cell.plain and source.numel() == 1:
                found = _fill(float(source.item()), target)
        else:
            found = _fill(source, target)
        if self._recent:
            return Lost("depends on a number read from a checkpoint tensor", self._recent | sources_of(found))
        if self._number_read and not isinstance(found, Lost) and any(p.source == CONSTANT and p.value for p in found):
            return Lost("a constant that may depend on a number read from a weight", self._numbers | sources_of(found))
        return found

    def _lose(self, target: torch.Tensor, lost: Lost, *, assigned: bool = True) -> None:
        if not target.numel():
            return
        cell = self.cells.get(key(target))
        if cell is not None:
            cell.lose(lost)
            return
        # What is computed may depend on every number that the loader knows by now.
        lost = lost._replace(sources=lost.sources | self._numbers)
        self._keep(target, (), lost, span(target) if assigned else None)

    def _keep(self, target: torch.Tensor, pieces: tuple[Piece, ...], lost: Lost | None, over: Affine | None) -> None:
        low, high = span(target).bounds()
        storage, sources = key(target), sources_of(list(pieces)) if lost is None else lost.sources | self._behind
        self._stored.setdefault(storage, set()).update(sources)
        self.writes.append(Write(storage, target.dtype, low, high, pieces, lost, self._during, self._behind, over))

    def _adopt(self, tensor: torch.Tensor, cell: Cell) -> None:
        """Registers a new storage until it is freed. Tensors without data cost nothing and are kept to the end."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if tensor.device.type == "meta":
            cell.alive = storage
        else:
            # An address may be used again as soon as its storage is freed.
            cells = self.cells
            cell.alive = weakref.ref(storage, lambda _: cells.pop(number, None))
        self.cells[number] = cell


def _union(cells: Iterable[Cell | None]) -> frozenset[int]:
    return frozenset().union(*(cell.sources for cell in cells if cell is not None))


def _holds(tensor: torch.Tensor, piece: Piece) -> bool:
    """Whether real memory still has the constant that was seen written to it; a kernel may have changed it unseen."""
    sizes, strides = [d[0] for d in piece.map.dims], [d[1] for d in piece.map.dims]
    found = tensor.as_strided(sizes, strides, piece.map.at)
    return bool((found.isnan() if math.isnan(piece.value) else found == piece.value).all())


def _turned(tensor: torch.Tensor) -> bool:
    """Whether the tensor shows other values than its memory holds: a negative or conjugate view."""
    return bool(tensor.is_neg() or tensor.is_conj())


def _quantised(dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` mean nothing without a scale."""
    return bool(dtype.itemsize == 1 and dtype != torch.bool)


def _returns_bool(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "bool"


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def _fill(value: float, target: torch.Tensor) -> list[Piece]:
    if not target.numel():
        return []
    return [Piece(CONSTANT, _rounded(value, target.dtype), None, span(target))]
