"""Pooling: max_pool and avg_pool over one to three spatial dimensions, and global pools."""

from __future__ import annotations

import math
from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import Parameter, choice, flag, integers, required
from roller_svc.frontend.ops.text import floating, guard, join_statements, lowest, statement, zero
from roller_svc.frontend.ops.windows import PADDINGS, SPATIAL, Window, arrange, layouts, per_dimension, sizes, windows


def _pool(call: Call, spatial: int, *, mean: bool) -> str:
    layout, letters, x = call.text("layout"), SPATIAL[spatial], call.x
    call.check_rank(x, spatial + 2, layout)
    data = sizes(layout, x.shape)
    kernel = per_dimension(call, "kernel", spatial)
    if not call.has("stride"):
        call = Call(call.operator, call.operands, call.output, {**call.parameters, "stride": kernel}, call.names)
    windows_by_letter = dict(zip(letters, windows(call, [data[s] for s in letters], kernel), strict=True))
    out = {s: call.axis(f"{s.lower()}o") for s in letters}
    taps = {s: call.axis(f"k{s.lower()}") for s in letters}
    n, c = call.axis("n"), call.axis("c")
    terms = {s: windows_by_letter[s].term(out[s], taps[s]) for s in letters}
    guards = [g for s in letters for g in windows_by_letter[s].guards(terms[s])]
    where = [e for s in letters for e in windows_by_letter[s].extents(out[s], taps[s])]
    where += [(taps[s], windows_by_letter[s].kernel) for s in letters if windows_by_letter[s].kernel > 1]
    index = arrange(layout, {"N": n, "C": c} | out)
    value = guard(x.at(*arrange(layout, {"N": n, "C": c} | terms)), guards, (zero if mean else lowest)(x.dtype))
    if not mean:
        return statement(call.output, index, ">=!", value, where=where)
    total = call.intermediate("sum")
    include_pad = call.flag("count_include_pad")
    counts = [_count(windows_by_letter[s], out[s], include_pad=include_pad) for s in letters]
    return join_statements(
        statement(total, index, "+=!", floating(value, x.dtype), where=where),
        statement(call.output, index, "=", f"{total}[{', '.join(index)}] / {_product(counts)}"),
    )


def _count(window: Window, out: str, *, include_pad: bool) -> int | str:
    """Return the number of elements of a dimension in a window's mean."""
    low = -window.before if include_pad else 0
    high = window.size + (window.after if include_pad else 0)
    first = f"{out} * {window.stride}" if window.stride > 1 else out
    start, stop = (_plus(first, offset) for offset in (-window.before, window.kernel - window.before))
    end = (window.out - 1) * window.stride + window.kernel - window.before
    if end <= high and low <= -window.before:
        return window.kernel
    stop = f"min({stop}, {high})" if end > high else stop
    start = f"max({start}, {low})" if low > -window.before else f"({start})" if window.before else start
    return f"({stop} - {start})"


def _plus(text: str, offset: int) -> str:
    return text if offset == 0 else f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"


def _product(counts: list[int | str]) -> str:
    whole = math.prod(count for count in counts if isinstance(count, int))
    texts = [count for count in counts if isinstance(count, str)]
    if not texts:
        return str(whole)
    factors = texts if whole == 1 else [*texts, str(whole)]
    return factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"


def _global(call: Call, spatial: int, *, mean: bool) -> str:
    layout, letters, x = call.text("layout"), SPATIAL[spatial], call.x
    call.check_rank(x, spatial + 2, layout)
    data = sizes(layout, x.shape)
    axes = {"N": call.axis("n"), "C": call.axis("c")}
    read = x.at(*arrange(layout, axes | {s: call.axis(s.lower()) for s in letters}))
    index = arrange(layout, axes | dict.fromkeys(letters, "0"))
    if not mean:
        return statement(call.output, index, ">=!", read)
    total = call.intermediate("sum")
    count = math.prod(data[s] for s in letters)
    return join_statements(
        statement(total, index, "+=!", floating(read, x.dtype)),
        statement(call.output, index, "=", f"{total}[{', '.join(index)}] / {count}"),
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


OPERATORS = (
    *(
        Operator(
            f"max_pool{spatial}d",
            "Greatest element of each window; padding is less than any.",
            ("x",),
            partial(_pool, spatial=spatial, mean=False),
            (*_parameters(spatial), integers("dilation", 1, "steps inside of the window", minimum=1)),
        )
        for spatial in (1, 2, 3)
    ),
    *(
        Operator(
            f"avg_pool{spatial}d",
            "Mean of each window.",
            ("x",),
            partial(_pool, spatial=spatial, mean=True),
            (*_parameters(spatial), flag("count_include_pad", "padding counts, as zeros", default=True)),
        )
        for spatial in (1, 2, 3)
    ),
    *(
        Operator(
            f"global_{name}_pool{spatial}d",
            f"{about} of each channel; the spatial dimensions stay, with extent 1.",
            ("x",),
            partial(_global, spatial=spatial, mean=name == "avg"),
            (_layout(spatial),),
        )
        for name, about in (("avg", "Mean"), ("max", "Greatest element"))
        for spatial in (1, 2, 3)
    ),
)
