"""Attention: softmax(q kᵀ) v, with grouped heads, a mask, and causality; over tensors, or over pages of a cache."""

from __future__ import annotations

import math

from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import choice, flag, integer, number
from roller_svc.frontend.ops.rope import LAYOUTS
from roller_svc.frontend.ops.text import broadcast, broadcast_shape, guard, join_statements, lowest, statement
from roller_svc.ir.dtype import DType

MAX_LENGTH = 1 << 30  # of a sequence: differences of lengths are int32


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


def _paged_attention(call: Call) -> str:
    """Return attention whose scores have 32 bits and whose probabilities have the type of the values, for matrix units."""
    q, k, v, _, lengths = call.operands[:5]
    kind = DType.FLOAT64 if DType.FLOAT64 in (q.dtype, k.dtype) else DType.FLOAT32
    queries, keys = _check_cache(call)
    b, h, i, n, d, e = (call.axis(name) for name in "bhinde")
    row = (b, h) if q.rank == 3 else (b, i, h)
    dot, score, high = call.intermediate("dot"), call.intermediate("score"), call.intermediate("max")
    exp, total, mixed = call.intermediate("exp"), call.intermediate("sum"), call.intermediate("mixed")
    at, full = ", ".join(row), ", ".join((*row, n))
    length = _length(lengths, b)
    if queries > 1:
        length += f" - {queries - 1} + {i}"
    visible = [f"{n} < {length}"]
    if call.has("window"):
        visible.append(f"{n} >= {length} - {call.integer('window')}")
    scaled = f"{dot}[{full}] * {call.number('scale') if call.has('scale') else 1 / math.sqrt(q.shape[-1])!r}"
    if call.has("soft_cap"):
        cap = call.number("soft_cap")
        if cap <= 0:
            raise call.wrong_parameter(f"soft_cap must be more than 0, got {cap}")
        scaled = f"{cap!r} * tanh({scaled} / {cap!r})"
    sinks = call.operand(5)
    # One of the exponentials is 1 unless the row is empty: its results are then 0.
    sink = "" if sinks is None else f" + exp({sinks.at(h)} - {high}[{at}])"
    divisor = f"max({total}[{at}]{sink}, 1.0)"
    narrow = v.dtype if v.dtype.bytes == 2 else q.dtype
    is_narrow = max(v.dtype.bytes, narrow.bytes) == 2 and kind is DType.FLOAT32
    probability = f"{exp}[{full}]" + (f".cast(`{narrow.value}`)" if is_narrow else "")
    result = f"{mixed}[{at}, {e}] / {divisor}"
    return join_statements(
        statement(dot, (*row, n), "+=!", f"{q.at(*row, d)} * {_cached(call, k, h, n, d)}", where=((n, keys),), dtype=kind),
        statement(score, (*row, n), "=", guard(f"({scaled})", visible, lowest(kind))),
        statement(high, row, ">=!", f"{score}[{full}]"),
        statement(exp, (*row, n), "=", guard(f"exp({score}[{full}] - {high}[{at}])", visible, "0.0")),
        statement(total, row, "+=!", f"{exp}[{full}]"),
        statement(mixed, (*row, e), "+=!", f"{probability} * {_cached(call, v, h, n, e)}", dtype=kind),
        statement(call.output, (*row, e), "=", result if q.dtype is kind else f"({result}).cast(`{q.dtype.value}`)"),
    )


def _check_cache(call: Call) -> tuple[int, int]:
    """Return the queries of a sequence, and the most keys."""
    q, k, v, pages, lengths = call.operands[:5]
    if q.rank not in (3, 4) or not all(operand.dtype.is_float for operand in (q, k, v)):
        raise call.wrong_shape("q must be [sequences, heads, features] or [sequences, queries, heads, features], and floats")
    call.check_rank(k, 4, "[pages, keys of a page, heads, features]")
    if k.shape[:-1] != v.shape[:-1]:
        raise call.wrong_shape(f"k {list(k.shape)} and v {list(v.shape)} must differ in their features alone")
    if q.shape[-1] != k.shape[-1]:
        raise call.wrong_shape(f"q has {q.shape[-1]} features, k {k.shape[-1]}")
    page, heads = (k.shape[position] for position in _page_dimensions(call))
    if q.shape[-2] % heads:
        raise call.wrong_shape(f"the {q.shape[-2]} heads of q must be a multiple of the {heads} of k")
    call.check_rank(pages, 2, "[sequences, pages of a sequence]")
    call.check_shape(pages, (q.shape[0], pages.shape[1]))
    call.check_shape(lengths, q.shape[:1])
    if (sinks := call.operand(5)) is not None:
        call.check_shape(sinks, q.shape[-2:-1])
    return (q.shape[1] if q.rank == 4 else 1), pages.shape[1] * page


def _length(lengths: Operand, sequence: str) -> str:
    """Return the keys of a sequence; integers as int32, which holds differences of lengths."""
    load = lengths.at(sequence)
    if lengths.dtype.is_float or lengths.dtype is DType.INT32:
        return load
    if lengths.dtype.bytes >= DType.INT32.bytes:
        load = f"min({f'max({load}, 0)' if lengths.dtype.is_signed else load}, {MAX_LENGTH})"
    return f"{load}.cast(`int32`)"


def _page_dimensions(call: Call) -> tuple[int, int]:
    """Return the dimensions of a cache that are the keys of a page, and the heads."""
    return (1, 2) if call.text("layout") == "NHD" else (2, 1)


def _cached(call: Call, cache: Operand, h: str, n: str, feature: str) -> str:
    """Return the load of one element of a key or value."""
    page, heads = _page_dimensions(call)
    group = call.x.shape[-2] // cache.shape[heads]
    head = "0" if cache.shape[heads] == 1 else h if group == 1 else f"{h} // {group}"
    index = {page: f"{n} % {cache.shape[page]}", heads: head}
    return cache.at(call.operands[3].at(call.axis("b"), f"{n} // {cache.shape[page]}"), index[1], index[2], feature)


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
    Operator(
        "paged_attention",
        "Attention over a cache in pages: `q` [sequences, heads, features] or [sequences, queries, heads, features], `k` and "
        "`v` [pages, keys of a page, heads, features]. `pages` [sequences, pages] are those of a sequence in order, and "
        "`lengths` [sequences] its keys; its last query sees them all, each earlier one a key less. All `pages` must exist, "
        "and their unused keys and values be finite. `sinks` [heads] are scores of no value. A query that sees no key gives 0.",
        ("q", "k", "v", "pages", "lengths", "sinks"),
        _paged_attention,
        (
            number("scale", None, "factor of the scores; by default 1 over the root of the features"),
            integer("window", None, "number of the latest keys that a query sees; by default all", minimum=1),
            number("soft_cap", None, "scores become `soft_cap * tanh(score / soft_cap)`; by default they stay"),
            choice("layout", "NHD", LAYOUTS, "`HND` for `k` and `v` [pages, heads, keys of a page, features]"),
        ),
        needed=5,
    ),
)
