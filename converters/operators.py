"""What a weight loader's operators do to the elements of their inputs: move them, write them, or compute.

An operator without a rule of its own gets one from its schema; whatever is not known to be pure movement counts as
computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from weightlink.converters import affine
from weightlink.converters.affine import Affine, TooComplex

aten = torch.ops.aten

#: A copy within one operator: source tensor and ``source address -> destination address``.
Copy = tuple[torch.Tensor, Affine]
#: A constant within one operator: its value and the addresses that it fills.
Fill = tuple[float, Affine]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def pairs(source: torch.Tensor, target: torch.Tensor) -> Affine:
    """``source address -> target address`` of two tensors of one shape."""
    dims = zip(target.shape, source.stride(), target.stride(), strict=True)
    return Affine(source.storage_offset(), target.storage_offset(), tuple(d for d in dims if d[0] != 1))


def span(tensor: torch.Tensor) -> Affine:
    """A tensor's elements: storage address -> 0."""
    return Affine(
        tensor.storage_offset(), 0, tuple((n, s, 0) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )


Moves = Callable[[Args, Kwargs, torch.Tensor], Iterable[Copy | Fill]]
Constant = Callable[[Args, Kwargs], float | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator is treated.

    :param kind: ``view``, ``make`` (returns new memory), ``write``, ``fresh`` (wraps memory made outside the
        dispatcher), ``number`` (a tensor's value as a Python number) or ``decompose`` (made of other operators)
    :param moves: for ``make``: the copies and fills that give the result, once its shape and strides are known
    :param constant: for ``make``: the value that every element of the result has, None if it has none
    :param writes: for ``write``: element-wise assignments ``(target, source)``; None if the operator computes
    :param targets: for ``write``: the tensors that it writes
    """

    kind: str
    moves: Moves | None = None
    constant: Constant | None = None
    writes: Callable[[Args], Iterable[tuple[torch.Tensor, torch.Tensor | float]]] | None = None
    targets: Callable[[Args, Kwargs], Iterable[torch.Tensor]] = lambda args, kwargs: ()


def tensors(args: Iterable[Any], kwargs: Kwargs) -> Iterator[torch.Tensor]:
    """Every tensor among an operator's arguments, also inside lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def without_data(value: Any) -> Any:
    """``value`` with every tensor replaced by one that has no data."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(without_data(item) for item in value)
    if isinstance(value, dict):
        return {name: without_data(item) for name, item in value.items()}
    return value


def _clone(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    yield args[0], pairs(args[0], out)


def _cat(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    at = 0
    for tensor in args[0]:
        if tensor.shape == (0,):
            continue
        yield tensor, pairs(tensor, out.narrow(dim, at, tensor.shape[dim]))
        at += tensor.shape[dim]


def _stack(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, tensor in enumerate(args[0]):
        yield tensor, pairs(tensor, out.select(dim, i))


def _pad(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy | Fill]:
    source, widths = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    inner, box = source, []
    for d in range(source.dim()):
        position = 2 * (source.dim() - 1 - d)
        left, right = widths[position : position + 2] if position < len(widths) else (0, 0)
        cut = max(0, -left)
        kept = max(0, source.shape[d] - cut - max(0, -right))
        inner = inner.narrow(d, min(cut, source.shape[d]), kept)
        box.append((max(0, left), kept, 1))
    if inner.numel():
        target = out
        for d, (lo, n, _) in enumerate(box):
            target = target.narrow(d, lo, n)
        yield inner, pairs(inner, target)
        for part in affine.complement(span(out), box):
            yield float(value), part
    else:
        yield float(value), span(out)


def _select(source: torch.Tensor, dim: int, index: torch.Tensor, out: torch.Tensor) -> Iterator[Copy]:
    """``out`` takes the entries ``index`` of ``source`` along ``dim``; the index has one dimension and real values."""
    if index.device.type == "meta" or index.dtype in (torch.bool, torch.uint8):
        raise TooComplex
    length = source.shape[dim]
    at = 0
    for first, count, step in affine.runs([i % length for i in index.reshape(-1).tolist()]):
        target = out.narrow(dim, at, count)
        stride = source.stride(dim)
        dims = [
            (n, stride * step if d == dim else s, t)
            for d, (n, s, t) in enumerate(zip(target.shape, source.stride(), target.stride(), strict=True))
        ]
        yield source, Affine(source.storage_offset() + first * stride, target.storage_offset(), tuple(dims))
        at += count


def _index_select(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    yield from _select(args[0], args[1] % args[0].dim(), args[2], out)


def _index(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    used = [(d, index) for d, index in enumerate(args[1]) if index is not None]
    if len(used) != 1:
        raise TooComplex
    dim, index = used[0]
    if index.dim() != 1:
        raise TooComplex
    yield from _select(args[0], dim, index, out)


def _flip(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    source = args[0]
    turned = {d % source.dim() for d in args[1]}
    at, dims = source.storage_offset(), []
    for d, (n, s, t) in enumerate(zip(source.shape, source.stride(), out.stride(), strict=True)):
        if d in turned:
            at += (n - 1) * s
        dims.append((n, -s if d in turned else s, t))
    yield source, Affine(at, out.storage_offset(), tuple(dims))


def _repeat(args: Args, kwargs: Kwargs, out: torch.Tensor) -> Iterator[Copy]:
    source, times = args[0], list(args[1])
    extra = len(times) - source.dim()
    dims = []
    for d, (count, stride) in enumerate(zip(times, out.stride(), strict=True)):
        n = source.shape[d - extra] if d >= extra else 1
        dims.append((count, 0, stride * n))
        if d >= extra:
            dims.append((n, source.stride(d - extra), stride))
    yield source, Affine(source.storage_offset(), out.storage_offset(), tuple(d for d in dims if d[0] != 1))


def _constant(position: int) -> Constant:
    def value(args: Args, kwargs: Kwargs) -> float | None:
        found = args[position] if len(args) > position else kwargs["fill_value"]
        return float(found) if not isinstance(found, complex) else None

    return value


def _foreach(args: Args) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(args[0], args[1], strict=True)


def _first(args: Args, kwargs: Kwargs) -> Iterator[torch.Tensor]:
    yield from args[0] if isinstance(args[0], list | tuple) else args[:1]


def _assign(args: Args) -> Iterator[tuple[torch.Tensor, Any]]:
    yield args[0], args[1]


def _moving(moves: Moves) -> Rule:
    return Rule("make", moves=moves)


def _making(constant: Constant) -> Rule:
    return Rule("make", constant=constant)


def _always(value: float | None) -> Rule:
    return _making(lambda args, kwargs: value)


RULES: dict[Any, Rule] = {
    aten.clone.default: _moving(_clone),
    aten._to_copy.default: _moving(_clone),
    aten.cat.default: _moving(_cat),
    aten.stack.default: _moving(_stack),
    aten.constant_pad_nd.default: _moving(_pad),
    aten.index_select.default: _moving(_index_select),
    aten.index.Tensor: _moving(_index),
    aten.flip.default: _moving(_flip),
    aten.repeat.default: _moving(_repeat),
    aten.lift_fresh.default: Rule("fresh"),
    aten._local_scalar_dense.default: Rule("number"),
    aten.copy_.default: Rule("write", writes=_assign, targets=_first),
    aten.fill_.Scalar: Rule("write", writes=_assign, targets=_first),
    aten.fill_.Tensor: Rule("write", writes=_assign, targets=_first),
    aten.zero_.default: Rule("write", writes=lambda args: [(args[0], 0.0)], targets=_first),
    aten._foreach_copy_.default: Rule("write", writes=_foreach, targets=_first),
    aten._foreach_zero_.default: Rule("write", writes=lambda args: [(t, 0.0) for t in args[0]], targets=_first),
    **{
        getattr(aten, name).default: _always(value)
        for names, value in (
            (("zeros", "zeros_like", "new_zeros"), 0.0),
            (("ones", "ones_like", "new_ones"), 1.0),
            (("empty_like", "empty_strided", "new_empty", "new_empty_strided"), None),
        )
        for name in names
    },
    aten.empty.memory_format: _always(None),
    aten.full.default: _making(_constant(1)),
    aten.full_like.default: _making(_constant(1)),
    aten.new_full.default: _making(_constant(2)),
}


def rule_of(func: Any) -> Rule:
    """The rule for an operator that has none of its own, from its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        raise NotImplementedError(f"{func} has no schema to tell what it writes")
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:

        def targets(args: Args, kwargs: Kwargs) -> Iterator[torch.Tensor]:
            for position, name in written:
                value = args[position] if position < len(args) else kwargs.get(name)
                yield from tensors((value,), {})

        rule = Rule("write", targets=targets)
    elif schema.returns and all(r.alias_info is not None for r in schema.returns):
        rule = Rule("view")
    elif torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        rule = Rule("decompose")
    else:
        rule = Rule("make")
    RULES[func] = rule
    return rule
