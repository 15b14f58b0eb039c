"""Operators that read at computed positions: grid_sample, roi_align, deform_conv2d."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from roller_svc.errors import ExprTypeError
from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import choice, flag, integer, integers, number
from roller_svc.frontend.ops.text import affine, guard, join_statements, statement
from roller_svc.frontend.ops.windows import explicit_padding, per_dimension

CUBIC = -0.75  # the free coefficient of cubic convolution (Keys, 1981)


@dataclass(frozen=True, slots=True)
class _Taps:
    """The neighbours of a position along one dimension."""

    before: int  # neighbours before the floor of the position
    weights: tuple[str, ...]  # of each neighbour, for the fraction {f}; empty: 1


def _near(distance: str) -> str:
    return f"(({CUBIC + 2!r} * {distance} - {CUBIC + 3!r}) * {distance} * {distance} + 1.0)"


def _far(distance: str) -> str:
    return f"((({CUBIC!r} * {distance} - {5 * CUBIC!r}) * {distance} + {8 * CUBIC!r}) * {distance} - {4 * CUBIC!r})"


_LINEAR = "where({t} == 0, 1.0 - {f}, {f})"  # of an axis {t} of two neighbours
_TAPS = {
    "nearest": _Taps(0, ("",)),
    "linear": _Taps(0, ("1.0 - {f}", "{f}")),
    "cubic": _Taps(1, (_far("({f} + 1.0)"), _near("{f}"), _near("(1.0 - {f})"), _far("(2.0 - {f})"))),
}


def _grid_sample(call: Call) -> str:
    """Return the statements: positions, indices and weights along each dimension, then a sum of products.

    The sum is written out, as its reads are few and at unrelated places.
    """
    x, grid = call.operands
    spatial = x.rank - 2
    if spatial < 1 or grid.rank != x.rank or grid.shape[0] != x.shape[0] or grid.shape[-1] != spatial:
        raise call.wrong_shape(
            f"`{grid.name}` {list(grid.shape)} must be [batch, ..., {max(spatial, 1)}] with "
            f"{x.rank} dimensions, for `{x.name}` {list(x.shape)}"
        )
    if not grid.dtype.is_float:
        raise ExprTypeError(f"{call.operator}: `{grid.name}` is {grid.dtype.value}; positions are floats")
    n, c, mode = call.axis("n"), call.axis("c"), call.text("mode")
    taps, out = _TAPS[mode], tuple(call.axis(f"o{d}") for d in range(spatial))
    place, lines = f"[{', '.join((n, *out))}]", list[str]()
    neighbours: list[list[tuple[str, str]]] = []  # of each dimension: index and weight of each neighbour
    for d, size in enumerate(x.shape[2:]):
        position = call.intermediate(f"position{d}")
        value = _unnormalized(call, grid.at(n, *out, str(spatial - 1 - d)), size)
        value = f"round({value})" if mode == "nearest" else value
        lines.append(statement(position, (n, *out), "=", _bounded(call, value, size)))
        here, listed = position + place, list[tuple[str, str]]()
        for tap, weight in enumerate(taps.weights):
            at, factor = call.intermediate(f"at{d}_{tap}"), call.intermediate(f"weight{d}_{tap}")
            index = affine([(f"floor({here})", 1)], tap - taps.before)
            lines.append(statement(at, (n, *out), "=", _tap_index(call, index, size)))
            if weight:
                value = weight.format(f=f"({here} - rfloor({here}))")
                lines.append(statement(factor, (n, *out), "=", value))
            listed.append((at + place, factor + place if weight else ""))
        neighbours.append(listed)
    terms = []
    for chosen in product(*neighbours):
        bounds = list(zip(chosen, x.shape[2:], strict=True))
        value = x.at(n, c, *(f"clip({at}, 0, {size - 1})" for (at, _), size in bounds))
        if call.text("padding") == "zeros":
            value = guard(value, [f"{at} {sign}" for (at, _), size in bounds for sign in (">= 0", f"< {size}")], "0")
        terms.append(" * ".join([value, *(weight for _, weight in chosen if weight)]))
    total = " + ".join(terms)
    if len(terms) > 1 and x.dtype.compute is not x.dtype:
        total = f"({total}).cast(`{x.dtype.value}`)"
    lines.append(statement(call.output, (n, c, *out), "=", total))
    return join_statements(*lines)


def _unnormalized(call: Call, value: str, size: int) -> str:
    """Return the position in elements of a coordinate from -1 to 1."""
    if call.flag("align_corners"):
        return f"({value} + 1.0) / 2.0 * {float(size - 1)!r}"
    return f"(({value} + 1.0) * {float(size)!r} - 1.0) / 2.0"


def _borders(call: Call, size: int) -> tuple[float, float]:
    return (0.0, size - 1.0) if call.flag("align_corners") else (-0.5, size - 0.5)


def _bounded(call: Call, value: str, size: int) -> str:
    """Return a position that is outside of the borders as the one that the padding takes it to."""
    padding, (low, high) = call.text("padding"), _borders(call, size)
    if padding == "zeros":
        return value
    if padding == "border":
        return f"where(({value} < {low!r}) | ({value} > {high!r}), clip({value}, 0.0, {size - 1.0!r}), {value})"
    if high == low:
        return f"0.0 * {value}"
    width = high - low
    distance = f"abs({value} - {low!r})"
    rest = f"fmod({distance}, {width!r})"
    odd = f"fmod(rfloor({distance} / {width!r}), 2.0) == 1.0"
    inside = f"({value} >= {low!r}) & ({value} <= {high!r})"
    return f"where({inside}, {value}, where({odd}, {high!r} - {rest}, {low!r} + {rest}))"


def _tap_index(call: Call, value: str, size: int) -> str:
    """Return the index of a neighbour; with zeros around it may be outside."""
    padding = call.text("padding")
    if padding == "zeros":
        return value
    if padding == "border":
        return f"clip({value}, 0, {size - 1})"
    if call.flag("align_corners"):
        period = max(2 * (size - 1), 1)
        return f"min(({value}) % {period}, {period} - ({value}) % {period})" if size > 1 else f"0 * ({value})"
    return f"min(({value}) % {2 * size}, {2 * size - 1} - ({value}) % {2 * size})"


def _roi_align(call: Call) -> str:
    x, rois, batch = call.operands
    call.check_rank(x, 4, "[batch, channels, height, width]")
    call.check_shape(batch, rois.shape[:1])
    call.check_shape(rois, (rois.shape[0], 4))
    samples, aligned = call.integer("samples"), call.flag("half_pixel")
    r, c = call.axis("r"), call.axis("c")
    lines, reads, weights, where, out = list[str](), list[str](), list[str](), list[tuple[str, int]](), list[str]()
    for d, (name, size) in enumerate(zip("hw", x.shape[2:], strict=True)):
        extent = call.integer(("height", "width")[d])
        o, s, t = call.axis(f"{name}o"), call.axis(f"s{name}"), call.axis(f"t{name}")
        start, width = call.intermediate(f"start_{name}"), call.intermediate(f"size_{name}")
        scale = repr(float(call.number("spatial_scale")))
        offset = " - 0.5" if aligned else ""
        first, last = (f"({rois.at(r, str(k))} * {scale}{offset})" for k in (1 - d, 3 - d))
        lines.append(statement(start, (r,), "=", first))
        length = f"{last} - {first}"
        lines.append(statement(width, (r,), "=", length if aligned else f"max({length}, 1.0)"))
        position = call.intermediate(f"position_{name}")
        step = f"(({s}.cast(`float32`) + 0.5) / {float(samples)!r} + {o}.cast(`float32`)) / {float(extent)!r}"
        span = [(o, extent), (s, samples)]
        lines.append(statement(position, (r, o, s), "=", f"{start}[{r}] + {step} * {width}[{r}]", where=span))
        here = f"{position}[{r}, {o}, {s}]"
        clamped = f"clip({here}, 0.0, {size - 1.0!r})"
        weight, at = call.intermediate(f"weight_{name}"), call.intermediate(f"at_{name}")
        value = _LINEAR.format(t=t, f=f"({clamped} - rfloor({clamped}))")
        value = f"where(({here} < -1.0) | ({here} > {float(size)!r}), 0.0, {value})"
        lines.append(statement(weight, (r, o, s, t), "=", value, where=[(t, 2)]))
        lines.append(statement(at, (r, o, s, t), "=", f"min(floor({clamped}) + {t}, {size - 1})", where=[(t, 2)]))
        weights.append(f"{weight}[{r}, {o}, {s}, {t}]")
        reads.append(f"clip({at}[{r}, {o}, {s}, {t}], 0, {size - 1})")
        out.append(o)
    value = " * ".join([x.at(batch.at(r), c, *reads), *weights])
    if call.text("mode") == "max":
        lines.append(statement(call.output, (r, c, *out), ">=!", value, where=where))
        return join_statements(*lines)
    total = call.intermediate("sum")
    lines.append(statement(total, (r, c, *out), "+=!", value, where=where))
    mean = f"{total}[{r}, {c}, {', '.join(out)}] / {float(samples * samples)!r}"
    lines.append(
        statement(call.output, (r, c, *out), "=", mean if x.dtype.compute is x.dtype else f"({mean}).cast(`{x.dtype.value}`)")
    )
    return join_statements(*lines)


def _deform_conv(call: Call) -> str:
    x, weight, offset = call.operands[:3]
    bias, mask = call.operand(3), call.operand(4)
    call.check_rank(x, 4, "[batch, channels, height, width]")
    call.check_rank(weight, 4, "[filters, channels, height, width]")
    groups, parts = call.integer("groups"), call.integer("offset_groups")
    kernel, channels, filters = weight.shape[2:], x.shape[1], weight.shape[0]
    if channels != weight.shape[1] * groups or filters % groups or channels % parts:
        raise call.wrong_shape(
            f"{channels} channels, {filters} filters of {weight.shape[1]} channels, {groups} groups "
            f"and {parts} groups of offsets do not fit"
        )
    strides, dilations = (per_dimension(call, name, 2) for name in ("stride", "dilation"))
    pads = [explicit_padding(call, d, 2) for d in range(2)]
    extents = tuple(
        (size + sum(pad) - (k - 1) * dilation - 1) // stride + 1
        for size, pad, k, stride, dilation in zip(x.shape[2:], pads, kernel, strides, dilations, strict=True)
    )
    taps = kernel[0] * kernel[1]
    call.check_shape(offset, (x.shape[0], parts * taps * 2, *extents))
    if mask is not None:
        call.check_shape(mask, (x.shape[0], parts * taps, *extents))
    n, f, c, g = (call.axis(name) for name in "nfcg")
    out, window = (call.axis("ho"), call.axis("wo")), (call.axis("kh"), call.axis("kw"))
    t = (call.axis("th"), call.axis("tw"))
    tap = f"{window[0]} * {kernel[1]} + {window[1]}"
    span = [(g, parts), *zip(window, kernel, strict=True), *zip(out, extents, strict=True)]
    place = (n, g, *window, *out)
    lines, reads, guards, weights = list[str](), list[str](), list[str](), list[str]()
    group = "0" if parts == 1 else f"{c} // {channels // parts}"
    inner = ", ".join((n, group, *window, *out))
    for d in range(2):
        position = call.intermediate(f"position_{'hw'[d]}")
        base = f"({out[d]} * {strides[d]} + {window[d]} * {dilations[d]} - {pads[d][0]}).cast(`float32`)"
        row = f"({g} * {taps} + {tap}) * 2 + {d}"
        lines.append(statement(position, place, "=", f"{base} + {offset.at(n, row, *out)}", where=span))
        here = f"{position}[{inner}]"
        at = f"floor({here}) + {t[d]}"
        reads.append(f"clip({at}, 0, {x.shape[2 + d] - 1})")
        guards += [f"{at} >= 0", f"{at} < {x.shape[2 + d]}"]
        weights.append(f"({_LINEAR.format(t=t[d], f=f'({here} - rfloor({here}))')})")
    columns = call.intermediate("columns")
    value = " * ".join([f"{x.at(n, c, *reads)}.when([{', '.join(guards)}], 0)", *weights])
    if mask is not None:
        row = tap if parts == 1 else f"({group}) * {taps} + {tap}"
        value += f" * {mask.at(n, row, *out)}"
    bounds = [*zip(window, kernel, strict=True), *zip(out, extents, strict=True), (t[0], 2), (t[1], 2)]
    lines.append(statement(columns, (n, c, *window, *out), "+=!", value, where=[(c, channels), *bounds]))
    channel = c if groups == 1 else f"{f} // {filters // groups} * {weight.shape[1]} + {c}"
    product = f"{columns}[{', '.join((n, channel, *window, *out))}] * {weight.at(f, c, *window)}"
    total = call.intermediate("sum")
    lines.append(statement(total, (n, f, *out), "+=!", product))
    result = f"{total}[{', '.join((n, f, *out))}]"
    if bias is not None:
        call.check_shape(bias, (filters,))
        result += f" + {bias.at(f)}"
    result = result if x.dtype.compute is x.dtype else f"({result}).cast(`{x.dtype.value}`)"
    lines.append(statement(call.output, (n, f, *out), "=", result))
    return join_statements(*lines)


OPERATORS = (
    Operator(
        "grid_sample",
        "Elements of `x` [batch, channels, spatial dimensions] at the positions of `grid` [batch, ..., dimensions]. "
        "A position has the last dimension first, and -1 and 1 are the ends.",
        ("x", "grid"),
        _grid_sample,
        (
            choice("mode", "linear", ("nearest", "linear", "cubic"), "interpolation"),
            choice("padding", "zeros", ("zeros", "border", "reflection"), "what is outside"),
            flag("align_corners", "the ends are the centres of the corner elements, else their outer edges"),
        ),
    ),
    Operator(
        "roi_align",
        "Means (or maxima) of samples of `x` in the cells of regions. A region is [x1, y1, x2, y2].",
        ("x", "rois", "batch"),
        _roi_align,
        (
            choice("mode", "avg", ("avg", "max"), "what is made of a cell's samples"),
            integer("height", 1, "cells of a region", minimum=1),
            integer("width", 1, "cells of a region", minimum=1),
            integer("samples", 1, "samples of a cell along each dimension", minimum=1),
            number("spatial_scale", 1.0, "elements of `x` for each unit of a region"),
            flag("half_pixel", "half an element is subtracted from positions", default=True),
        ),
    ),
    Operator(
        "deform_conv2d",
        "Convolution whose window is shifted by `offset`, at each of its elements, and weighted by `mask`.",
        ("x", "weight", "offset", "bias", "mask"),
        _deform_conv,
        (
            integers("stride", 1, "steps of the window", minimum=1),
            integers("padding", 0, "zeros around: one number, 2, or 2 before and 2 after", minimum=0),
            integers("dilation", 1, "steps inside of the window", minimum=1),
            integer("groups", 1, "number of groups, each convolved separately", minimum=1),
            integer("offset_groups", 1, "number of groups of channels with their own offsets", minimum=1),
        ),
        needed=3,
    ),
)
