"""Reductions: reduce_sum and similar, argmax, argmin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import Parameter, dtype, flag, integer, integers
from roller_svc.frontend.ops.text import floating, guard, join_statements, statement


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One reduction operator."""

    about: str
    sign: str  # combining sign
    of: str = "{0}"  # expression of an element
    then: str = ""  # expression of the result and `count`, the number of elements


_REDUCTIONS = {
    "sum": _Reduction("Sum", "+=!"),
    "prod": _Reduction("Product", "*=!"),
    "max": _Reduction("Greatest", ">=!"),
    "min": _Reduction("Least", "<=!"),
    "mean": _Reduction("Mean; of integers a float32", "+=!", then="{0} / {count}"),
    "all": _Reduction("1 where none is 0", "&=!"),
    "any": _Reduction("1 where one is not 0", "|=!"),
    "l1": _Reduction("Sum of the absolute values", "+=!", of="abs({0})"),
    "l2": _Reduction("Root of the sum of squares", "+=!", of="square({0})", then="sqrt({0})"),
    "sum_square": _Reduction("Sum of squares", "+=!", of="square({0})"),
    "log_sum": _Reduction("Logarithm of the sum", "+=!", then="log({0})"),
}


def _reduced_dimensions(call: Call) -> tuple[int, ...]:
    """Return the reduced dimensions; by default all."""
    rank = call.x.rank
    if not call.has("axis"):
        return tuple(range(rank))
    dimensions = [call.dimension(axis, rank, "axis") for axis in call.integers("axis")]
    if len(set(dimensions)) < len(dimensions):
        raise call.wrong_parameter("axis names a dimension twice")
    return tuple(sorted(dimensions))


def _result_index(call: Call, axes: tuple[str, ...], reduced: tuple[int, ...]) -> tuple[str, ...]:
    """Return the result's index."""
    if call.flag("keepdims"):
        return tuple("0" if d in reduced else axis for d, axis in enumerate(axes))
    return tuple(axis for d, axis in enumerate(axes) if d not in reduced)


def _reduce(call: Call, reduction: _Reduction) -> str:
    x, reduced = call.x, _reduced_dimensions(call)
    axes = call.axes(x.rank)
    index = _result_index(call, axes, reduced)
    is_mean = "{count}" in reduction.then
    value = floating(x.at(*axes), x.dtype) if is_mean else x.at(*axes)
    value = reduction.of.format(value)
    sign = reduction.sign if reduced else "="
    if not reduction.then:
        return statement(call.output, index, sign, value, dtype=call.dtype())
    total = call.intermediate("sum")
    count = math.prod(x.shape[d] for d in reduced)
    last = reduction.then.format(f"{total}[{', '.join(index)}]", count=count)
    return join_statements(
        statement(total, index, sign, value, dtype=call.dtype()),
        statement(call.output, index, "=", last),
    )


def _log_sum_exp(call: Call) -> str:
    x, reduced = call.x, _reduced_dimensions(call)
    axes = call.axes(x.rank)
    index = _result_index(call, axes, reduced)
    at = ", ".join(index)
    high, total = call.intermediate("max"), call.intermediate("sum")
    result = f"log({total}[{at}]) + {high}[{at}]"
    if x.dtype.is_float:  # exp(inf - inf) is NaN
        result = guard(f"{high}[{at}]", [f"isinf({high}[{at}])"], result)
    return join_statements(
        statement(high, index, ">=!" if reduced else "=", x.at(*axes)),
        statement(total, index, "+=!" if reduced else "=", f"exp({x.at(*axes)} - {high}[{at}])"),
        statement(call.output, index, "=", result),
    )


def _arg(call: Call, *, sign: str, role: str) -> str:
    """Return the statements of argmax or argmin: the first (or last) index of the extremum. NaN wins, as in numpy."""
    x = call.x
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    index = _result_index(call, axes, (axis,))
    best = call.intermediate(role)
    read, j = x.at(*axes), axes[axis]
    is_best = f"{read} == {best}[{', '.join(index)}]"
    is_best = f"({is_best}) | isnan({read})" if x.dtype.is_float else is_best
    last = call.flag("last")
    place = f"{j}.when([{is_best}], {-1 if last else x.shape[axis]})"
    return join_statements(
        statement(best, index, sign, read),
        statement(call.output, index, ">=!" if last else "<=!", place, dtype=call.dtype()),
    )


def _parameters(*more: Parameter) -> tuple[Parameter, ...]:
    return (
        integers("axis", None, "the dimensions that are joined; all by default"),
        flag("keepdims", "they stay, with extent 1"),
        *more,
    )


def _operator(name: str, reduction: _Reduction, write: Callable[[Call], str]) -> Operator:
    stated = dtype("dtype", None, "type in which they are joined, and of the result")
    return Operator(f"reduce_{name}", f"{reduction.about} of elements along axes.", ("x",), write, _parameters(stated))


OPERATORS = (
    *(_operator(name, found, partial(_reduce, reduction=found)) for name, found in _REDUCTIONS.items()),
    Operator(
        "reduce_log_sum_exp",
        "Logarithm of the sum of exponentials along axes, formed without overflow.",
        ("x",),
        _log_sum_exp,
        _parameters(),
    ),
    *(
        Operator(
            f"arg{role}",
            f"Where along an axis the {best} element is.",
            ("x",),
            partial(_arg, sign=sign, role=role),
            (
                integer("axis", -1, "the dimension"),
                flag("keepdims", "it stays, with extent 1"),
                flag("last", "the last such place, not the first"),
                dtype("dtype", "int64", "type of the result"),
            ),
        )
        for role, best, sign in (("max", "greatest", ">=!"), ("min", "least", "<=!"))
    ),
)
