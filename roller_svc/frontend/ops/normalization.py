"""Normalisations: softmax, log_softmax, layer, lp, rms, batch, group and local response norms."""

from __future__ import annotations

import math
from functools import partial

from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import integer, number, required
from roller_svc.frontend.ops.text import (
    affine,
    broadcast,
    broadcast_shape,
    floating,
    guard,
    join_statements,
    power,
    root,
    statement,
    zero,
)

_EPSILON = number("epsilon", 1e-5, "is added to the variance")


def _softmax(call: Call, *, log: bool) -> str:
    x = call.x
    axis = call.one_axis(x.rank)
    axes = call.axes(x.rank)
    rest = axes[:axis] + axes[axis + 1 :]
    high, exp, total = call.intermediate("max"), call.intermediate("exp"), call.intermediate("sum")
    shifted = f"{x.at(*axes)} - {high}[{', '.join(rest)}]"
    at = ", ".join(rest)
    if log:
        last = f"{shifted} - log({total}[{at}])"
        sums = [statement(total, rest, "+=!", f"exp({shifted})")]
    else:
        last = f"{exp}[{', '.join(axes)}] / {total}[{at}]"
        sums = [
            statement(exp, axes, "=", f"exp({shifted})"),
            statement(total, rest, "+=!", f"{exp}[{', '.join(axes)}]"),
        ]
    return join_statements(statement(high, rest, ">=!", x.at(*axes)), *sums, statement(call.output, axes, "=", last))


def _scaled(call: Call, value: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """Multiply by the weight and add the bias, if given. Both broadcast."""
    for operand, sign in zip(call.operands[1:3], ("*", "+"), strict=False):
        if broadcast_shape(call, (operand.shape, shape)) != shape:
            raise call.wrong_shape(f"`{operand.name}` {list(operand.shape)} does not broadcast to {list(shape)}")
        value += f" {sign} {broadcast(operand, axes, shape)}"
    return value


def _layer_norm(call: Call) -> str:
    x = call.x
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    rest, count = axes[:axis], math.prod(x.shape[axis:])
    total, mean, squares = call.intermediate("sum"), call.intermediate("mean"), call.intermediate("squares")
    at = ", ".join(rest)
    centred = f"({x.at(*axes)} - {mean}[{at}])"
    value = f"{centred} * rsqrt({squares}[{at}] / {count} + {call.number('epsilon')!r})"
    return join_statements(
        statement(total, rest, "+=!", x.at(*axes)),
        statement(mean, rest, "=", f"{total}[{at}] / {count}"),
        statement(squares, rest, "+=!", f"square{centred}"),
        statement(call.output, axes, "=", _scaled(call, value, axes, x.shape)),
    )


def _lp_norm(call: Call) -> str:
    x = call.x
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    rest, total = axes[:axis] + axes[axis + 1 :], call.intermediate("sum")
    at = f"{total}[{', '.join(rest)}]"
    return join_statements(
        statement(total, rest, "+=!", power(call, floating(x.at(*axes), x.dtype))),
        statement(call.output, axes, "=", f"where({at} == 0, 0.0, {x.at(*axes)} / {root(call, at)})"),
    )


def _rms_norm(call: Call) -> str:
    x = call.x
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    rest, count, squares = axes[:axis], math.prod(x.shape[axis:]), call.intermediate("squares")
    value = f"{x.at(*axes)} * rsqrt({squares}[{', '.join(rest)}] / {count} + {call.number('epsilon')!r})"
    return join_statements(
        statement(squares, rest, "+=!", f"square({x.at(*axes)})"),
        statement(call.output, axes, "=", _scaled(call, value, axes, x.shape)),
    )


def _batch_norm(call: Call) -> str:
    x, scale, bias, mean, variance = call.operands
    axis, axes = call.one_axis(x.rank), call.axes(x.rank)
    for operand in call.operands[1:]:
        call.check_shape(operand, (x.shape[axis],))
    c = axes[axis]
    value = f"({x.at(*axes)} - {mean.at(c)}) * rsqrt({variance.at(c)} + {call.number('epsilon')!r}) * {scale.at(c)} + {bias.at(c)}"
    return statement(call.output, axes, "=", value)


def _group_norm(call: Call) -> str:
    x, groups = call.x, call.integer("groups")
    if x.rank < 2 or x.shape[1] % groups:
        raise call.wrong_shape(f"dimension 1 of `{x.name}` {list(x.shape)} does not divide into {groups} groups")
    size = x.shape[1] // groups
    n, g, c = call.axis("n"), call.axis("g"), call.axis("c")
    rest = tuple(call.axis(f"s{d}") for d in range(x.rank - 2))
    count = size * math.prod(x.shape[2:])
    total, mean, squares = call.intermediate("sum"), call.intermediate("mean"), call.intermediate("squares")
    inside = x.at(n, _of_group(g, c, size), *rest)
    where = () if size == 1 else ((g, groups), (c, size))
    group = c if size == 1 else f"{c} // {size}"
    value = f"({x.at(n, c, *rest)} - {mean}[{n}, {group}]) * rsqrt({squares}[{n}, {group}] / {count} + {call.number('epsilon')!r})"
    return join_statements(
        statement(total, (n, g), "+=!", inside, where=where),
        statement(mean, (n, g), "=", f"{total}[{n}, {g}] / {count}"),
        statement(squares, (n, g), "+=!", f"square({inside} - {mean}[{n}, {g}])", where=where),
        statement(call.output, (n, c, *rest), "=", _by_channel(call, value, c)),
    )


def _lrn(call: Call) -> str:
    x, size = call.x, call.integer("size")
    axes, axis, j = call.axes(x.rank), call.one_axis(x.rank), call.axis("t")
    before = (size - 1) // 2
    place = affine([(axes[axis], 1), (j, 1)], -before)
    read = x.at(*axes[:axis], place, *axes[axis + 1 :])
    squares = call.intermediate("squares")
    total = guard(f"square({read})", [f"{place} >= 0", f"{place} < {x.shape[axis]}"], zero(x.dtype))
    alpha, beta, bias = (call.number(name) for name in ("alpha", "beta", "bias"))
    scale = f"{float(bias)!r} + {float(alpha / size)!r} * {squares}[{', '.join(axes)}]"
    return join_statements(
        statement(squares, axes, "+=!", total, where=[(axes[axis], x.shape[axis]), (j, size)]),
        statement(call.output, axes, "=", f"{x.at(*axes)} / pow({scale}, {float(beta)!r})"),
    )


def _of_group(group: str, channel: str, size: int) -> str:
    return group if size == 1 else f"{group} * {size} + {channel}"


def _by_channel(call: Call, value: str, channel: str) -> str:
    operands: tuple[Operand, ...] = call.operands[1:3]
    for operand, sign in zip(operands, ("*", "+"), strict=False):
        call.check_shape(operand, call.x.shape[1:2])
        value += f" {sign} {operand.at(channel)}"
    return value


OPERATORS = (
    Operator(
        "softmax",
        "Exponentials that sum to 1 along an axis, formed without overflow.",
        ("x",),
        partial(_softmax, log=False),
        (integer("axis", -1, "the dimension"),),
    ),
    Operator(
        "log_softmax",
        "The logarithm of softmax, formed without overflow.",
        ("x",),
        partial(_softmax, log=True),
        (integer("axis", -1, "the dimension"),),
    ),
    Operator(
        "layer_norm",
        "Mean 0 and variance 1 over the dimensions from `axis` on, then times `weight`, plus `bias`.",
        ("x", "weight", "bias"),
        _layer_norm,
        (integer("axis", -1, "the first of the dimensions"), _EPSILON),
        needed=1,
    ),
    Operator(
        "lp_norm",
        "Divided by the root `p` of the sum of the powers `p` of magnitudes along an axis; 0 where that is 0.",
        ("x",),
        _lp_norm,
        (integer("axis", -1, "the dimension"), number("p", 2.0, "the power, more than 0")),
    ),
    Operator(
        "rms_norm",
        "Mean square 1 over the dimensions from `axis` on, then times `weight`.",
        ("x", "weight"),
        _rms_norm,
        (integer("axis", -1, "the first of the dimensions"), number("epsilon", 1e-5, "is added to the mean square")),
        needed=1,
    ),
    Operator(
        "batch_norm",
        "Each channel by the mean and variance given: what the layer does once it is trained.",
        ("x", "scale", "bias", "mean", "variance"),
        _batch_norm,
        (integer("axis", 1, "the dimension of the channels"), _EPSILON),
    ),
    Operator(
        "group_norm",
        "Mean 0 and variance 1 over each group of channels (dimension 1) with all that lies behind; as many groups as "
        "channels is an instance norm.",
        ("x", "weight", "bias"),
        _group_norm,
        (integer("groups", 1, "how many groups", minimum=1), _EPSILON),
        needed=1,
    ),
    Operator(
        "local_response_norm",
        "`x` over a power of the mean square of its neighbours along `axis`, from `(size - 1) // 2` before on.",
        ("x",),
        _lrn,
        (
            required(integer("size", None, "how many neighbours", minimum=1)),
            number("alpha", 1e-4, "factor of the mean square"),
            number("beta", 0.75, "the power"),
            number("bias", 1.0, "is added to the mean square times `alpha`"),
            integer("axis", 1, "the dimension of the channels"),
        ),
    ),
)
