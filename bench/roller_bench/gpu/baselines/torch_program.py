"""Translate a program into a function of torch tensors, written for torch.compile: array operations, no loops."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch.nn import functional

from roller_bench.baselines.torch_library import FUNCTIONS, torch_dtype
from roller_bench.baselines.translate.nest import Nest, affine_index, index_range, nest_of
from roller_bench.baselines.translate.products import factors_of
from roller_bench.baselines.translate.windows import Convolution, convolution_of
from roller_svc.errors import BuildError
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram

Tensors = Mapping[str, torch.Tensor]
_MAX_COPIES = 2  # materialised copies of an element in an einsum operand
_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {
    1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d,
}  # fmt: skip


def torch_function(program: TensorProgram) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function of the inputs in order that returns the outputs.

    Raises BuildError (no-peer) for programs without an efficient torch equivalent: scatters, some operators, and
    windows that are not one of torch's convolutions.
    """
    if any(statement.kind is StatementKind.SCATTER for statement in program.statements):
        raise BuildError("torch baseline: scatter is not supported", code="no-peer")
    nests = tuple((statement, nest_of(statement)) for statement in program.statements)

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = dict(zip((name for name, _ in program.inputs), inputs, strict=True))
        for statement, nest in nests:
            tensors[statement.output] = _statement_tensor(statement, nest, tensors)
        return tuple(tensors[out.tensor] for out in program.outputs)

    return function


def _statement_tensor(statement: TensorExpr, nest: Nest, tensors: Tensors) -> torch.Tensor:
    """Compute the output of a statement. Sums of products become an einsum or a convolution."""
    dtype = torch_dtype(statement.type.dtype)
    result = _reduction(nest, tensors) if nest.combine is not None else _Body(nest, tensors).whole(nest.body)
    return result.to(dtype).expand(nest.shape).reshape(statement.type.shape)


def _reduction(nest: Nest, tensors: Tensors) -> torch.Tensor:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    conv = convolution_of(nest, shapes)
    if conv is not None and not conv.scales and not conv.divisors and _is_plain(conv):
        return _convolution(nest, conv, *_data_and_weight(nest, conv, tensors))
    if nest.dtype.is_float and (product := _einsum_product(nest, tensors)) is not None:
        return product
    value = _Body(nest, tensors).whole(nest.body)
    dims = tuple(range(len(nest.spatial), len(nest.axes)))
    match nest.combine:
        case Combine.SUM:
            return value.sum(dims, dtype=torch_dtype(nest.dtype))
        case Combine.MAX | Combine.ANY:
            return value.amax(dims)
        case Combine.MIN | Combine.ALL:
            return value.amin(dims)
        case _:
            return value.flatten(len(nest.spatial)).prod(-1)


def _einsum_product(nest: Nest, tensors: Tensors) -> torch.Tensor | None:
    """Compute a sum of products as an einsum, or return None if it is not one.

    Factors that do not vary along the summed axes are applied to the result.
    """
    factors = factors_of(nest)
    if factors is None or not _is_contraction(nest, factors.varying):
        return None
    _check_copies(nest, factors.varying, tensors)
    body, letters = _Body(nest, tensors), dict(zip((a.name for a in nest.axes), string.ascii_letters, strict=False))
    terms, values = [], []
    for factor in factors.varying:
        own = axes_of(factor)
        value = body.value(factor)
        values.append(value[tuple(slice(None) if axis.name in own else 0 for axis in nest.axes)])
        terms.append("".join(letters[axis.name] for axis in nest.axes if axis.name in own))
    common = reduce(torch.promote_types, (value.dtype for value in values))
    used_letters = set().union(*terms)
    spatial = [axis.name for axis in nest.spatial]
    output_term = "".join(letters[name] for name in spatial if letters[name] in used_letters)
    result = torch.einsum(f"{','.join(terms)}->{output_term}", *(value.to(common) for value in values))
    result = result[tuple(slice(None) if letters[name] in used_letters else None for name in spatial)]
    for one in factors.scales:
        result = result * body.outer(one)
    for one in factors.divisors:
        result = result / body.outer(one)
    return result


def _is_contraction(nest: Nest, factors: Sequence[Expr]) -> bool:
    """Return whether several factors have each summed axis, and not all have the same axes.

    Compilers fuse the product of equal shapes with its sum.
    """
    axes = [axes_of(one) for one in factors]
    shared = all(sum(axis.name in own for own in axes) > 1 for axis in nest.reduced)
    return shared and len({frozenset(own) for own in axes}) > 1


def _check_copies(nest: Nest, factors: Sequence[Expr], tensors: Tensors) -> None:
    for load in (load for one in factors for load in loads_of(one)):
        iterations = math.prod(nest.extents[name] for name in axes_of(load))
        if iterations > _MAX_COPIES * tensors[load.tensor].numel():
            raise BuildError(f"torch would materialise the windows of {load.tensor}", code="no-peer")


def _is_plain(conv: Convolution) -> bool:
    """Return whether torch supports the borders, and both tensors fit after a permutation of dimensions."""
    dims = affine_index(conv.weight) or ()
    bare_dims = all(len(one.coeffs) == 1 and one.coeffs[0][1] == 1 and not one.offset for one in dims)
    distinct = len({one.coeffs[0][0] for one in dims if one.coeffs}) == len(dims)
    one_batch = len(conv.batch) == 1 and len(conv.filters) <= 1
    return bare_dims and distinct and one_batch and all(w.is_symmetric and w.tap for w in conv.windows)


def library_convolution(program: TensorProgram, tensors: Tensors) -> tuple[str, Callable[[], torch.Tensor]] | None:
    """Return torch's call for a program that is one convolution, else None.

    Channels-last images use torch's channels_last format, for which cuDNN has own kernels. Weights are converted to it
    beforehand.
    """
    if len(program.statements) != 1 or program.statements[0].kind is not StatementKind.REDUCE:
        return None
    nest = nest_of(program.statements[0])
    conv = convolution_of(nest, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if conv is None or conv.scales or conv.divisors or not _is_plain(conv):
        return None
    data, weight = _data_and_weight(nest, conv, tensors)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.ndim)
    if last is None or not data.is_contiguous(memory_format=last):
        return f"torch conv{data.ndim - 2}d", lambda: _convolution(nest, conv, data, weight)
    weight = weight.contiguous(memory_format=last)
    return f"torch conv{data.ndim - 2}d, channels last", lambda: _convolution(nest, conv, data, weight)


def _data_and_weight(nest: Nest, conv: Convolution, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and weight as views in torch's order of dimensions."""
    names = [one.coeffs[0][0] for one in affine_index(conv.weight) or ()]
    windows, outer = conv.windows, [name for name in (conv.group, *conv.filters) if name]
    order_of_dims = [*outer, *([conv.channel] if conv.channel else []), *(str(w.tap) for w in windows)]
    channels = nest.extents[conv.channel] if conv.channel else 1
    weight = tensors[conv.weight.tensor].permute([names.index(name) for name in order_of_dims])
    weight = weight.reshape(math.prod(nest.extents[name] for name in outer), channels, *(w.taps for w in windows))
    return tensors[conv.data.tensor].permute(conv.order), weight


def _convolution(nest: Nest, conv: Convolution, data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    windows, outer = conv.windows, [name for name in (conv.group, *conv.filters) if name]
    result = _CONVOLUTIONS[len(windows)](
        data,
        weight,
        None,
        tuple(w.stride for w in windows),
        tuple(w.pad for w in windows),
        tuple(w.dilation for w in windows),
        nest.extents[conv.group] if conv.group else 1,
    )
    order = [*conv.batch, *outer, *(w.out for w in windows)]
    result = result.reshape([nest.extents[name] for name in order])
    return result.permute([order.index(axis.name) for axis in nest.spatial])


class _Body:
    """Evaluates expressions to tensors with one dimension for each axis of the nest (extent 1 if constant along it)."""

    def __init__(self, nest: Nest, tensors: Tensors) -> None:
        self._nest = nest
        self._tensors = tensors
        self._device = next(iter(tensors.values())).device

    def whole(self, expr: Expr) -> torch.Tensor:
        return self.value(expr).expand([axis.extent for axis in self._nest.axes])

    def outer(self, expr: Expr) -> torch.Tensor:
        """Evaluate an expression that is constant along the reduced axes."""
        return self.value(expr)[(..., *([0] * len(self._nest.reduced)))]

    def value(self, expr: Expr) -> torch.Tensor:
        match expr:
            case Const(value=number, dtype=dtype):
                ones = [1] * len(self._nest.axes)
                return torch.full(ones, number, dtype=torch_dtype(dtype), device=self._device)
            case AxisRef(name=name):
                return self._axis(name)
            case Cast(arg=arg, dtype=dtype):
                return self.value(arg).to(torch_dtype(dtype))
            case Select(cond=cond, then=then, otherwise=otherwise):
                return torch.where(self.value(cond).bool(), self.value(then), self.value(otherwise))
            case Load():
                result = self._slice(expr, self._tensors[expr.tensor])
                return self._gather(expr, self._tensors[expr.tensor]) if result is None else result
            case Op(kind=kind, args=args):
                return self._compute(kind, args, torch_dtype(expr.dtype))
        raise BuildError(f"torch has no {type(expr).__name__}", code="no-peer")

    def _compute(self, kind: OpKind, args: Sequence[Expr], dtype: torch.dtype) -> torch.Tensor:
        values = [self.value(arg) for arg in args]
        if kind is OpKind.RELU:
            return torch.relu(values[0])
        if kind in (OpKind.ISNAN, OpKind.ISINF):
            return (torch.isnan if kind is OpKind.ISNAN else torch.isinf)(values[0])
        function = FUNCTIONS.get(kind)
        if function is None:
            raise BuildError(f"torch has no {kind.value}", code="no-peer")
        result: torch.Tensor = function(*values)
        return result if result.dtype is torch.bool else result.to(dtype)

    def _axis(self, name: str) -> torch.Tensor:
        names = [axis.name for axis in self._nest.axes]
        shape = [-1 if one == name else 1 for one in names]
        return torch.arange(self._nest.extents[name], device=self._device).view(shape)

    def _slice(self, load: Load, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a view if each dimension is indexed by an axis of its own or a constant, else None."""
        index = affine_index(load)
        if index is None:
            return None
        order: list[str] = []
        for dim, one in reversed(list(enumerate(index))):
            low, high = index_range(one, self._nest.extents)
            if low < 0 or high >= tensor.shape[dim] or len(one.coeffs) > 1:
                return None
            if not one.coeffs:
                tensor = tensor.select(dim, one.offset)
                continue
            (name, step) = one.coeffs[0]
            if step < 1 or name in order:
                return None
            tensor = tensor[(slice(None),) * dim + (slice(one.offset, high + 1, step),)]
            order.insert(0, name)
        names = [axis.name for axis in self._nest.axes if axis.name in order]
        tensor = tensor.permute([order.index(name) for name in names])
        return tensor[tuple(slice(None) if axis.name in names else None for axis in self._nest.axes)]

    def _gather(self, load: Load, tensor: torch.Tensor) -> torch.Tensor:
        """Gather by index tensors.

        Out-of-bounds indices are clamped: a condition around the load discards their values.
        """
        if not load.index:
            return tensor.reshape([1] * len(self._nest.axes))
        indices = []
        for index, size in zip(load.index, tensor.shape, strict=True):
            index_values, form = self.value(index).long(), affine(index)
            low, high = (0, size) if form is None else index_range(form, self._nest.extents)
            indices.append(index_values if low >= 0 and high < size else index_values.clamp(0, size - 1))
        return tensor[tuple(indices)]
