"""Attention: softmax(q kᵀ) v, with grouped heads, a mask, and causality."""

from __future__ import annotations

import math

from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import flag, number
from roller_svc.frontend.ops.text import broadcast, broadcast_shape, guard, join_statements, lowest, statement


def _attention(call: Call) -> str:
    q, k, v = call.operands[:3]
    _check(call, q, k, v)
    lead = (
        tuple(call.axis(name) for name in ("b", "h")[4 - q.rank :])
        if q.rank <= 4
        else tuple(call.axis("h" if d == q.rank - 3 else f"b{d}") for d in range(q.rank - 2))
    )
    i, j, d, e = call.axis("i"), call.axis("j"), call.axis("d"), call.axis("e")
    shared = _shared_heads(lead, q, k)
    scale = call.number("scale") if call.has("scale") else 1 / math.sqrt(q.shape[-1])
    dot, score, high = call.intermediate("dot"), call.intermediate("score"), call.intermediate("max")
    exp, total, mixed = call.intermediate("exp"), call.intermediate("sum"), call.intermediate("mixed")
    row, full = ", ".join((*lead, i)), ", ".join((*lead, i, j))
    scaled = f"{dot}[{full}] * {scale!r}" + _mask(call, (*lead, i, j), (*q.shape[:-1], k.shape[-2]))
    guards = _causal(call, i, j, q.shape[-2], k.shape[-2])
    return join_statements(
        statement(dot, (*lead, i, j), "+=!", f"{q.at(*lead, i, d)} * {k.at(*shared, j, d)}"),
        statement(score, (*lead, i, j), "=", guard(f"({scaled})", guards, lowest(q.dtype)) if guards else scaled),
        statement(high, (*lead, i), ">=!", f"{score}[{full}]"),
        statement(exp, (*lead, i, j), "=", guard(f"exp({score}[{full}] - {high}[{row}])", guards, "0.0")),
        statement(total, (*lead, i), "+=!", f"{exp}[{full}]"),
        statement(mixed, (*lead, i, e), "+=!", f"{exp}[{full}] * {v.at(*shared, j, e)}"),
        statement(call.output, (*lead, i, e), "=", f"{mixed}[{row}, {e}] / {total}[{row}]"),
    )


def _check(call: Call, q: Operand, k: Operand, v: Operand) -> None:
    if q.rank < 2 or not q.rank == k.rank == v.rank:
        raise call.wrong_shape(
            "q, k and v must be [..., heads, length, features] with equal numbers of dimensions, "
            f"got {q.rank}, {k.rank} and {v.rank} dimensions"
        )
    if not all(operand.dtype.is_float for operand in (q, k, v)):
        raise call.wrong_shape("q, k and v must be floats")
    if q.shape[-1] != k.shape[-1]:
        raise call.wrong_shape(f"q has {q.shape[-1]} features, k {k.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise call.wrong_shape(f"k {list(k.shape)} and v {list(v.shape)} must differ in their features alone")
    if q.shape[:-3] != k.shape[:-3] or (q.rank > 2 and q.shape[-3] % k.shape[-3]):
        raise call.wrong_shape(
            f"q {list(q.shape)} and k {list(k.shape)}: leading dimensions must be equal, but for heads of k that several of q share"
        )


def _shared_heads(lead: tuple[str, ...], q: Operand, k: Operand) -> tuple[str, ...]:
    """Return the leading indices of k and v. Several heads of q may share one of theirs (grouped queries)."""
    if q.rank == 2 or q.shape[-3] == k.shape[-3]:
        return lead
    return (*lead[:-1], "0" if k.shape[-3] == 1 else f"{lead[-1]} // {q.shape[-3] // k.shape[-3]}")


def _mask(call: Call, axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    mask = call.operand(3)
    if mask is None:
        return ""
    if broadcast_shape(call, (mask.shape, shape)) != shape:
        raise call.wrong_shape(f"`{mask.name}` {list(mask.shape)} does not broadcast to {list(shape)}")
    return f" + {broadcast(mask, axes, shape)}"


def _causal(call: Call, i: str, j: str, queries: int, keys: int) -> list[str]:
    """Return the causal guards. Queries are the last ones of the sequence, so the last query sees every key."""
    if not call.flag("causal"):
        return []
    if queries > keys:
        raise call.wrong_shape(f"causal attention must have at least one key for each query, got {keys} keys and {queries} queries")
    return [f"{j} <= {i}" + (f" + {keys - queries}" if keys > queries else "")]


OPERATORS = (
    Operator(
        "attention",
        "`q` [..., heads, queries, features], `k` and `v` [..., heads, keys, features], of which several heads of `q` "
        "may share one; `mask` is added to the scores and broadcasts.",
        ("q", "k", "v", "mask"),
        _attention,
        (
            flag("causal", "a query sees no later keys; the last query sees all"),
            number("scale", None, "factor of the scores; by default 1 over the root of the features"),
        ),
        needed=3,
    ),
)
