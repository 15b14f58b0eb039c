"""Matrices: matmul, linear, gemm, determinant."""

from __future__ import annotations

from itertools import combinations

from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import choice, dtype, flag, number
from roller_svc.frontend.ops.text import (
    ACTIVATIONS,
    activate,
    broadcast,
    broadcast_index,
    broadcast_shape,
    contraction,
    join_statements,
    statement,
    widened,
)

_ACTIVATION = choice("activation", "none", tuple(ACTIVATIONS), "what is applied to the result")
_DTYPE = dtype("dtype", None, "type of the result, in which it is summed; that of the operands by default")


def _rows_columns(call: Call, operand: Operand, row: str, column: str, *, transposed: bool) -> tuple[str, ...]:
    """Return the axes of the last two dimensions, or of a single one."""
    if operand.rank == 0:
        raise call.wrong_shape(f"`{operand.name}` is a scalar")
    if operand.rank == 1:
        return (column if operand is call.x else row,)
    return (column, row) if transposed else (row, column)


def _extent(operand: Operand, axes: tuple[str, ...], axis: str) -> int:
    return operand.shape[operand.rank - len(axes) + axes.index(axis)]


def _matmul(call: Call) -> str:
    a, b = call.operands
    m, n, k = call.axis("m"), call.axis("n"), call.axis("k")
    left = _rows_columns(call, a, m, k, transposed=call.flag("transpose_a"))
    right = _rows_columns(call, b, k, n, transposed=call.flag("transpose_b"))
    if _extent(a, left, k) != _extent(b, right, k):
        raise call.wrong_shape(
            f"inner dimensions differ: `{a.name}` {list(a.shape)} has K={_extent(a, left, k)}, "
            f"`{b.name}` {list(b.shape)} has K={_extent(b, right, k)}"
        )
    leads = a.shape[: a.rank - len(left)], b.shape[: b.rank - len(right)]
    shape = broadcast_shape(call, leads)
    batch = tuple(call.axis(name) for name in (("b",) if len(shape) == 1 else [f"b{d}" for d in range(len(shape))]))
    reads = [
        widened(operand.at(*broadcast_index(lead, batch, shape), *axes), operand.dtype, call.dtype())
        for operand, lead, axes in zip((a, b), leads, (left, right), strict=True)
    ]
    index = (*batch, *(axis for axis in (m, n) if axis in left + right))
    return contraction(call, index, " * ".join(reads), ())


def _linear(call: Call) -> str:
    x, weight = call.operands[:2]
    call.check_rank(weight, 2, "[features out, features in]")
    if x.rank == 0 or x.shape[-1] != weight.shape[1]:
        raise call.wrong_shape(f"`{x.name}` {list(x.shape)} must end in the {weight.shape[1]} of `{weight.name}`")
    lead = (call.axis("m"),) if x.rank == 2 else tuple(call.axis(f"m{d}") for d in range(x.rank - 1))
    n, k = call.axis("n"), call.axis("k")
    bias = call.operand(2)
    if bias is not None:
        call.check_shape(bias, weight.shape[:1])
    body = " * ".join(widened(o.at(*index), o.dtype, call.dtype()) for o, index in ((x, (*lead, k)), (weight, (n, k))))
    return contraction(call, (*lead, n), body, (), None if bias is None else bias.at(n))


def _gemm(call: Call) -> str:
    a, b = call.operands[:2]
    call.check_rank(a, 2, "a matrix")
    call.check_rank(b, 2, "a matrix")
    m, n, k = call.axis("m"), call.axis("n"), call.axis("k")
    left = (k, m) if call.flag("transpose_a") else (m, k)
    right = (n, k) if call.flag("transpose_b") else (k, n)
    if _extent(a, left, k) != _extent(b, right, k):
        raise call.wrong_shape(
            f"inner dimensions differ: {list(a.shape)} has K={_extent(a, left, k)}, {list(b.shape)} has K={_extent(b, right, k)}"
        )
    c = call.operand(2)
    alpha, beta, activation = call.number("alpha"), call.number("beta"), call.text("activation")
    body = " * ".join(widened(o.at(*index), o.dtype, call.dtype()) for o, index in ((a, left), (b, right)))
    if alpha == 1 and activation == "none" and (c is None or beta == 0):
        return statement(call.output, (m, n), "+=!", body, dtype=call.dtype())
    total = call.intermediate("sum")
    value = f"{total}[{m}, {n}]" if alpha == 1 else f"{alpha!r} * {total}[{m}, {n}]"
    if c is not None and beta != 0:
        shape = _extent(a, left, m), _extent(b, right, n)
        if broadcast_shape(call, (c.shape, shape)) != shape:
            raise call.wrong_shape(f"`{c.name}` {list(c.shape)} does not broadcast to {list(shape)}")
        added = broadcast(c, (m, n), shape)
        value += f" + {added}" if beta == 1 else f" + {beta!r} * {added}"
    return join_statements(
        statement(total, (m, n), "+=!", body, dtype=call.dtype()),
        statement(call.output, (m, n), "=", activate(activation, value)),
    )


def _grouped_matmul(call: Call) -> str:
    x, weight, ids = call.operands
    call.check_rank(x, 2, "[rows, features in]")
    call.check_rank(weight, 3, "[groups, features in, features out]")
    call.check_shape(ids, x.shape[:1])
    if x.shape[1] != weight.shape[1]:
        raise call.wrong_shape(f"`{x.name}` {list(x.shape)} must end in the {weight.shape[1]} of `{weight.name}`")
    m, n, k = call.axis("m"), call.axis("n"), call.axis("k")
    reads = [(x, (m, k)), (weight, (ids.at(m), k, n))]
    return contraction(call, (m, n), " * ".join(widened(o.at(*at), o.dtype, call.dtype()) for o, at in reads), ())


MAX_DETERMINANT = 6


def _determinant(call: Call) -> str:
    """Return the determinants of the last rows of each set of columns, from two rows to all (Laplace)."""
    x = call.x
    size = x.shape[-1] if x.rank >= 2 else 0
    if not size or x.shape[-2] != size or size > MAX_DETERMINANT:
        raise call.wrong_shape(f"`{x.name}` {list(x.shape)} must be square matrices of at most {MAX_DETERMINANT} rows")
    lead = tuple(call.axis(name) for name in (("b",) if x.rank == 3 else [f"b{d}" for d in range(x.rank - 2)]))
    last = str(size - 1)
    minors: dict[tuple[int, ...], str] = {(column,): x.at(*lead, last, str(column)) for column in range(size)}
    lines = [statement(call.output, lead, "=", minors[0,])] if size == 1 else []
    for rows in range(2, size + 1):
        larger: dict[tuple[int, ...], str] = {}
        for columns in combinations(range(size), rows):
            value = ""
            for i, column in enumerate(columns):
                term = f"{x.at(*lead, str(size - rows), str(column))} * {minors[columns[:i] + columns[i + 1 :]]}"
                value += f" {'-' if i % 2 else '+'} {term}" if value else term
            name = call.output if rows == size else call.intermediate("minor" + "".join(map(str, columns)))
            lines.append(statement(name, lead, "=", value))
            larger[columns] = f"{name}[{', '.join(lead)}]"
        minors = larger
    return join_statements(*lines)


OPERATORS = (
    Operator(
        "matmul",
        "Product of matrices, as numpy's: leading dimensions broadcast, a single dimension is a vector.",
        ("a", "b"),
        _matmul,
        (
            flag("transpose_a", "the last two dimensions of `a` are swapped"),
            flag("transpose_b", "the last two dimensions of `b` are swapped"),
            _ACTIVATION,
            _DTYPE,
        ),
    ),
    Operator(
        "linear",
        "A layer of a network: `x` [..., in] times `weight` [out, in], plus `bias` [out].",
        ("x", "weight", "bias"),
        _linear,
        (_ACTIVATION, _DTYPE),
        needed=2,
    ),
    Operator(
        "gemm",
        "`alpha` times the product of two matrices, plus `beta` times `c`, which broadcasts.",
        ("a", "b", "c"),
        _gemm,
        (
            number("alpha", 1.0, "factor of the product"),
            number("beta", 1.0, "factor of `c`"),
            flag("transpose_a", "`a` is [k, m]"),
            flag("transpose_b", "`b` is [n, k]"),
            _ACTIVATION,
            _DTYPE,
        ),
        needed=2,
    ),
    Operator(
        "grouped_matmul",
        "Product of each row of `x` [rows, in] with the matrix of its group, as of its expert (MoE): `weight` [groups, in, out], "
        "`ids` [rows].",
        ("x", "weight", "ids"),
        _grouped_matmul,
        (_ACTIVATION, _DTYPE),
    ),
    Operator("determinant", f"Determinants of square matrices of at most {MAX_DETERMINANT} rows.", ("x",), _determinant),
)
