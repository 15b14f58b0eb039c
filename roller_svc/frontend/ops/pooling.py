"""Pooling: max_pool, max_pool_indices, avg_pool, lp_pool over one to three spatial dimensions, and global pools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import Parameter, choice, dtype, flag, integers, number, required
from roller_svc.frontend.ops.text import (
    floating,
    guard,
    join_statements,
    least,
    power,
    product_term,
    root,
    statement,
    zero,
)
from roller_svc.frontend.ops.windows import PADDINGS, SPATIAL, Window, arrange, layouts, per_dimension, sizes, windows


@dataclass(frozen=True, slots=True)
class _Pool:
    """The windows of a call and what each reads."""

    letters: str
    windows: Mapping[str, Window]
    out: Mapping[str, str]  # axis of the output by letter
    terms: Mapping[str, str]  # index of the input by letter
    lead: Mapping[str, str]  # axes N and C
    index: tuple[str, ...]  # of the output
    read: str
    guards: list[str]
    where: list[tuple[str, int]]


def _windows_of(call: Call, spatial: int) -> _Pool:
    layout, letters, x = call.text("layout"), SPATIAL[spatial], call.x
    call.check_rank(x, spatial + 2, layout)
    data = sizes(layout, x.shape)
    kernel = per_dimension(call, "kernel", spatial)
    if not call.has("stride"):
        call = Call(call.operator, call.operands, call.output, {**call.parameters, "stride": kernel}, call.names)
    windows_by_letter = dict(zip(letters, windows(call, [data[s] for s in letters], kernel), strict=True))
    out = {s: call.axis(f"{s.lower()}o") for s in letters}
    taps = {s: call.axis(f"k{s.lower()}") for s in letters}
    lead = {"N": call.axis("n"), "C": call.axis("c")}
    terms = {s: windows_by_letter[s].term(out[s], taps[s]) for s in letters}
    guards = [g for s in letters for g in windows_by_letter[s].guards(terms[s])]
    where = [e for s in letters for e in windows_by_letter[s].extents(out[s], taps[s])]
    where += [(taps[s], windows_by_letter[s].kernel) for s in letters if windows_by_letter[s].kernel > 1]
    index, read = arrange(layout, lead | out), x.at(*arrange(layout, lead | terms))
    return _Pool(letters, windows_by_letter, out, terms, lead, index, read, guards, where)


def _max(call: Call, spatial: int) -> str:
    pool = _windows_of(call, spatial)
    value = guard(pool.read, pool.guards, least(call.x.dtype))
    return statement(call.output, pool.index, ">=!", value, where=pool.where)


def _max_indices(call: Call, spatial: int) -> str:
    """Return the statements of the greatest element and of the first place that has it. NaN counts as greatest."""
    pool, x = _windows_of(call, spatial), call.x
    data = sizes(call.text("layout"), x.shape)
    best = call.intermediate("max")
    is_best = f"{pool.read} == {best}[{', '.join(pool.index)}]"
    is_best = f"({is_best}) | isnan({pool.read})" if x.dtype.is_float else is_best
    order = reversed(pool.letters) if call.flag("column_major") else pool.letters
    place = pool.lead["N"] if x.type.elements < 1 << 31 else f"{pool.lead['N']}.cast(`int64`)"
    for letter, term in (("C", pool.lead["C"]), *((s, pool.terms[s]) for s in order)):
        place = f"{product_term(place, data[letter])} + {term}"
    value = guard(f"({place})", [*pool.guards, is_best], str(x.type.elements))
    return join_statements(
        statement(best, pool.index, ">=!", guard(pool.read, pool.guards, least(x.dtype)), where=pool.where),
        statement(call.output, pool.index, "<=!", value, where=pool.where, dtype=call.dtype()),
    )


def _mean(call: Call, spatial: int) -> str:
    pool, x = _windows_of(call, spatial), call.x
    value = floating(guard(pool.read, pool.guards, zero(x.dtype)), x.dtype)
    total = call.intermediate("sum")
    include_pad = call.flag("count_include_pad")
    counts = [_count(pool.windows[s], pool.out[s], include_pad=include_pad) for s in pool.letters]
    return join_statements(
        statement(total, pool.index, "+=!", value, where=pool.where),
        statement(call.output, pool.index, "=", f"{total}[{', '.join(pool.index)}] / {_product(counts)}"),
    )


def _norm(call: Call, spatial: int) -> str:
    pool, x, total = _windows_of(call, spatial), call.x, call.intermediate("sum")
    value = guard(power(call, floating(pool.read, x.dtype)), pool.guards, "0.0")
    return join_statements(
        statement(total, pool.index, "+=!", value, where=pool.where),
        statement(call.output, pool.index, "=", root(call, f"{total}[{', '.join(pool.index)}]")),
    )


def _count(window: Window, out: str, *, include_pad: bool) -> int | str:
    """Return the number of elements of a dimension in a window's mean."""
    low = -window.before if include_pad else 0
    high = window.size + (window.after if include_pad else 0)
    first = f"{out} * {window.stride}" if window.stride > 1 else out
    end = (window.out - 1) * window.stride + (window.kernel - 1) * window.dilation + 1 - window.before
    if end <= high and low <= -window.before:
        return window.kernel
    if window.dilation > 1:
        return _count_dilated(window, first, low, high)
    start, stop = (_plus(first, offset) for offset in (-window.before, window.kernel - window.before))
    stop = f"min({stop}, {high})" if end > high else stop
    start = f"max({start}, {low})" if low > -window.before else f"({start})" if window.before else start
    return f"({stop} - {start})"


def _count_dilated(window: Window, first: str, low: int, high: int) -> str:
    """Return the number of a window's elements from `low` up to `high`."""
    less = window.dilation - 1
    before, stop = window.before + less + low, window.before + less + high
    taken = f"min(({stop} - {first}) // {window.dilation}, {window.kernel})"
    return f"({taken} - max(({before} - {first}) // {window.dilation}, 0))"


def _plus(text: str, offset: int) -> str:
    return text if offset == 0 else f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"


def _product(counts: list[int | str]) -> str:
    whole = math.prod(count for count in counts if isinstance(count, int))
    texts = [count for count in counts if isinstance(count, str)]
    if not texts:
        return str(whole)
    factors = texts if whole == 1 else [*texts, str(whole)]
    return factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"


def _whole(call: Call, spatial: int) -> tuple[str, tuple[str, ...], int]:
    """Return an element of the input, the index of its channel's result, and the number of elements of a channel."""
    layout, letters, x = call.text("layout"), SPATIAL[spatial], call.x
    call.check_rank(x, spatial + 2, layout)
    data = sizes(layout, x.shape)
    axes = {"N": call.axis("n"), "C": call.axis("c")}
    read = x.at(*arrange(layout, axes | {s: call.axis(s.lower()) for s in letters}))
    return read, arrange(layout, axes | dict.fromkeys(letters, "0")), math.prod(data[s] for s in letters)


def _global_max(call: Call, spatial: int) -> str:
    read, index, _ = _whole(call, spatial)
    return statement(call.output, index, ">=!", read)


def _global_mean(call: Call, spatial: int) -> str:
    read, index, count = _whole(call, spatial)
    total = call.intermediate("sum")
    return join_statements(
        statement(total, index, "+=!", floating(read, call.x.dtype)),
        statement(call.output, index, "=", f"{total}[{', '.join(index)}] / {count}"),
    )


def _global_norm(call: Call, spatial: int) -> str:
    read, index, _ = _whole(call, spatial)
    total = call.intermediate("sum")
    return join_statements(
        statement(total, index, "+=!", power(call, floating(read, call.x.dtype))),
        statement(call.output, index, "=", root(call, f"{total}[{', '.join(index)}]")),
    )


def _layout(spatial: int) -> Parameter:
    return choice("layout", layouts(spatial)[0], layouts(spatial), "order of the dimensions")


def _parameters(spatial: int) -> tuple[Parameter, ...]:
    return (
        required(integers("kernel", None, "extents of the window", minimum=1)),
        integers("stride", None, "steps of the window; by default its extents", minimum=1),
        integers("padding", 0, "elements around that are no element", minimum=0, names=PADDINGS),
        flag("ceil_mode", "a window that begins inside may end outside"),
        _layout(spatial),
    )


_DILATION = integers("dilation", 1, "steps inside of the window", minimum=1)
_P = number("p", 2.0, "the power, more than 0")


def _windowed(name: str, about: str, write: Callable[..., str], *more: Parameter) -> Iterable[Operator]:
    """Return the operator of windows over one, two and three dimensions."""
    for spatial in SPATIAL:
        parameters = (*_parameters(spatial), _DILATION, *more)
        yield Operator(f"{name}{spatial}d", about, ("x",), partial(write, spatial=spatial), parameters)


def _of_channels(name: str, about: str, write: Callable[..., str], *more: Parameter) -> Iterable[Operator]:
    """Return the operator of whole channels over one, two and three dimensions."""
    about = f"{about}; the spatial dimensions stay, with extent 1."
    for spatial in SPATIAL:
        yield Operator(f"{name}{spatial}d", about, ("x",), partial(write, spatial=spatial), (_layout(spatial), *more))


OPERATORS = (
    *_windowed("max_pool", "Greatest element of each window; padding is less than any.", _max),
    *_windowed(
        "max_pool_indices",
        "Where in the whole tensor, as one number, the greatest element of each window is first.",
        _max_indices,
        flag("column_major", "the spatial dimensions are numbered from the last to the first"),
        dtype("dtype", "int64", "type of the result"),
    ),
    *_windowed("lp_pool", "Root `p` of the sum of the powers `p` of the magnitudes in each window.", _norm, _P),
    *_of_channels("global_lp_pool", "Root `p` of the sum of the powers `p` of each channel's magnitudes", _global_norm, _P),
    *_windowed("avg_pool", "Mean of each window.", _mean, flag("count_include_pad", "padding counts, as zeros", default=True)),
    *_of_channels("global_avg_pool", "Mean of each channel", _global_mean),
    *_of_channels("global_max_pool", "Greatest element of each channel", _global_max),
)
