"""Transposed convolutions: conv_transpose1d, conv_transpose2d, conv_transpose3d."""

from __future__ import annotations

from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import choice, dtype, integer, integers
from roller_svc.frontend.ops.text import ACTIVATIONS, affine, contraction, guard, zero
from roller_svc.frontend.ops.windows import SPATIAL, arrange, explicit_padding, layouts, per_dimension, sizes


def _transposed(call: Call, spatial: int) -> str:
    x, weight = call.operands[:2]
    layout, letters = call.text("layout"), SPATIAL[spatial]
    call.check_rank(x, spatial + 2, layout)
    call.check_rank(weight, spatial + 2, f"IO{letters}")
    data, kernel = sizes(layout, x.shape), sizes(f"IO{letters}", weight.shape)
    groups, channels, filters = call.integer("groups"), data["C"], kernel["O"]
    if kernel["I"] != channels or channels % groups:
        raise call.wrong_shape(f"the weight has {kernel['I']} channels, the tensor {channels}, in {groups} groups")
    n, f, c = call.axis("n"), call.axis("f"), call.axis("c")
    out = {s: call.axis(f"{s.lower()}o") for s in letters}
    taps = {s: call.axis(f"k{s.lower()}") for s in letters}
    terms, guards, where = {}, list[str](), [] if groups == 1 else [(f, filters * groups), (c, channels // groups)]
    for d, s in enumerate(letters):
        extent, terms[s], conditions = _dimension(call, d, data[s], kernel[s], (out[s], taps[s], spatial))
        guards += conditions
        where.append((out[s], extent))
    inner = c if groups == 1 else f"{f} // {filters} * {channels // groups} + {c}"
    outer = f if groups == 1 else f"{f} % {filters}"
    read = x.at(*arrange(layout, {"N": n, "C": inner} | terms))
    body = f"{guard(read, guards, zero(x.dtype))} * {weight.at(inner, outer, *(taps[s] for s in letters))}"
    bias = call.operand(2)
    if bias is not None:
        call.check_shape(bias, (filters * groups,))
    index = arrange(layout, {"N": n, "C": f} | out)
    return contraction(call, index, body, where, None if bias is None else bias.at(f))


def _dimension(call: Call, d: int, size: int, kernel: int, axes: tuple[str, str, int]) -> tuple[int, str, list[str]]:
    """Return the extent of the result, the index of the input, and the guards of the input's elements."""
    out, tap, spatial = axes
    stride = per_dimension(call, "stride", spatial)[d]
    dilation = per_dimension(call, "dilation", spatial)[d]
    more = per_dimension(call, "output_padding", spatial)[d]
    before, after = explicit_padding(call, d, spatial)
    kernel_span = (kernel - 1) * dilation
    extent = (size - 1) * stride + kernel_span + 1 - before - after + more
    if extent < 1:
        raise call.wrong_shape(f"padding of {before} and {after} leaves an empty dimension")
    at = affine([(out, 1), (tap, -dilation)], before)
    guards = [f"{at} >= 0"] if kernel_span > before else []
    if stride > 1:
        guards.append(f"({at}) % {stride} == 0")
    index = f"({at}) // {stride}" if stride > 1 else at
    if extent - 1 + before >= size * stride:
        guards.append(f"{index} < {size}")
    return extent, index, guards


OPERATORS = tuple(
    Operator(
        f"conv_transpose{spatial}d",
        "Transposed convolution, which spreads each element over a window; `weight` is [channels, filters of a group, window].",
        ("x", "weight", "bias"),
        partial(_transposed, spatial=spatial),
        (
            integers("stride", 1, "steps of the window in the result", minimum=1),
            integers("padding", 0, "elements cut off around the result", minimum=0),
            integers("output_padding", 0, "elements added behind the result", minimum=0),
            integers("dilation", 1, "steps inside of the window", minimum=1),
            integer("groups", 1, "number of groups, each convolved separately", minimum=1),
            choice("layout", layouts(spatial)[0], layouts(spatial), "order of the dimensions of data and result"),
            choice("activation", "none", tuple(ACTIVATIONS), "what is applied to the result"),
            dtype("dtype", None, "type of the result, in which it is summed"),
        ),
        needed=2,
    )
    for spatial in (1, 2, 3)
)
