"""Resampling along dimensions, from which resizing is made: resample_nearest, resample."""

from __future__ import annotations

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import integer, integers, required
from roller_svc.frontend.ops.text import affine, statement

# Sums of at most this many products are written out; longer ones are reductions.
MAX_UNROLLED_TAPS = 4


def _position(axis: str, extent: int, numerator: int, offset: int, denominator: int) -> tuple[str, int, int]:
    """Return `(axis * numerator + offset) // denominator` with its lowest and highest value."""
    text = affine([(axis, numerator)], offset) if numerator else str(offset)
    low, high = offset // denominator, ((extent - 1) * numerator + offset) // denominator
    if denominator > 1:
        text = f"({text}) // {denominator}" if text != axis else f"{axis} // {denominator}"
    return text, low, high


def _inside(text: str, low: int, high: int, size: int) -> str:
    """Return an index that is kept inside."""
    text = f"max({text}, 0)" if low < 0 else text
    return f"min({text}, {size - 1})" if high >= size else text


def _resample_nearest(call: Call) -> str:
    x = call.x
    dims = [call.dimension(d, x.rank, "axes") for d in call.integers("axes")]
    lists = [call.integers(name) for name in ("extents", "numerators", "offsets", "denominators")]
    if len(set(dims)) < len(dims) or any(len(values) != len(dims) for values in lists):
        raise call.wrong_parameter("axes must be different, and the other lists must have a number for each")
    axes = call.axes(x.rank)
    index, where = list(axes), list[tuple[str, int]]()
    for d, extent, numerator, offset, denominator in zip(dims, *lists, strict=True):
        text, low, high = _position(axes[d], extent, numerator, offset, denominator)
        index[d] = _inside(text, low, high, x.shape[d])
        where.append((axes[d], extent))
    return statement(call.output, axes, "=", x.at(*index), where=where)


def _resample(call: Call) -> str:
    x, weights = call.operands[:2]
    starts = call.operand(2)
    call.check_rank(weights, 2, "[taps, extent]")
    taps, extent = weights.shape
    d, axes = call.one_axis(x.rank), call.axes(x.rank)
    if starts is not None:
        call.check_shape(starts, (extent,))
        first, low, high = starts.at(axes[d]), -1, x.shape[d]
    else:
        numbers = (call.integer(name) for name in ("numerator", "offset", "denominator"))
        first, low, high = _position(axes[d], extent, *numbers)

    def product(tap: str) -> str:
        index = list(axes)
        index[d] = _inside(first if tap == "0" else f"{first} + {tap}", low, high + taps - 1, x.shape[d])
        return f"{x.at(*index)} * {weights.at(tap, axes[d])}"

    where = [(axes[d], extent)]
    if taps <= MAX_UNROLLED_TAPS:
        value = " + ".join(product(str(tap)) for tap in range(taps))
        return statement(call.output, axes, "=", value, where=where)
    tap = call.axis("t")
    return statement(call.output, axes, "+=!", product(tap), where=[*where, (tap, taps)])


OPERATORS = (
    Operator(
        "resample_nearest",
        "Elements at `(i * numerator + offset) // denominator` of some dimensions, kept inside.",
        ("x",),
        _resample_nearest,
        (
            required(integers("axes", None, "the dimensions")),
            required(integers("extents", None, "extents of the result along them", minimum=1)),
            required(integers("numerators", None, "a number for each", minimum=0)),
            required(integers("offsets", None, "a number for each")),
            required(integers("denominators", None, "a number for each", minimum=1)),
        ),
    ),
    Operator(
        "resample",
        "Weighted sums of neighbours along a dimension, which begin at `starts` or at `(i * numerator + offset) // "
        "denominator`. Neighbours outside are the nearest inside. `weights` is [taps, extent].",
        ("x", "weights", "starts"),
        _resample,
        (
            integer("axis", -1, "the dimension"),
            integer("numerator", 1, "of the first neighbour", minimum=0),
            integer("offset", 0, "of the first neighbour"),
            integer("denominator", 1, "of the first neighbour", minimum=1),
        ),
        needed=2,
    ),
)
