"""Convolutions: conv1d, conv2d, conv3d, depthwise_conv2d."""

from __future__ import annotations

from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import Parameter, choice, dtype, integer, integers
from roller_svc.frontend.ops.text import ACTIVATIONS, contraction, guard, widened, zero
from roller_svc.frontend.ops.windows import PADDINGS, SPATIAL, arrange, layouts, sizes, weight_layouts, windows


def _convolution(call: Call, spatial: int, *, depthwise: bool = False) -> str:
    x, weight = call.operands[:2]
    layout, weight_layout = call.text("layout"), call.text("weight_layout")
    call.check_rank(x, spatial + 2, layout)
    call.check_rank(weight, spatial + 2, weight_layout)
    data, kernel = sizes(layout, x.shape), sizes(weight_layout, weight.shape)
    groups = data["C"] if depthwise else call.integer("groups")
    _check_channels(call, data["C"], kernel["O"], kernel["I"], groups)
    letters = SPATIAL[spatial]
    window_list = windows(call, [data[s] for s in letters], [kernel[s] for s in letters])
    out = {s: call.axis(f"{s.lower()}o") for s in letters}
    taps = {s: call.axis(f"k{s.lower()}") for s in letters}
    n, f, c = call.axis("n"), call.axis("f"), call.axis("c")
    terms = {s: w.term(out[s], taps[s]) for s, w in zip(letters, window_list, strict=True)}
    guards = [g for s, w in zip(letters, window_list, strict=True) for g in w.guards(terms[s])]
    channel = _channel(f, c, kernel["I"], kernel["O"] // groups, groups)
    read = x.at(*arrange(layout, {"N": n, "C": channel} | terms))
    inner = "0" if kernel["I"] == 1 else c
    tap = {s: "0" if w.kernel == 1 else taps[s] for s, w in zip(letters, window_list, strict=True)}
    factor = weight.at(*arrange(weight_layout, {"O": f, "I": inner} | tap))
    body = " * ".join(
        widened(value, operand.dtype, call.dtype())
        for value, operand in ((guard(read, guards, zero(x.dtype)), x), (factor, weight))
    )
    where = [e for s, w in zip(letters, window_list, strict=True) for e in w.extents(out[s], taps[s])]
    bias = call.operand(2)
    if bias is not None:
        call.check_shape(bias, (kernel["O"],))
    index = arrange(layout, {"N": n, "C": f} | out)
    return contraction(call, index, body, where, None if bias is None else bias.at(f))


def _check_channels(call: Call, channels: int, filters: int, inner: int, groups: int) -> None:
    if channels % groups or filters % groups:
        raise call.wrong_shape(f"channels and filters must be multiples of groups={groups}, got {channels} and {filters}")
    if inner * groups != channels:
        raise call.wrong_shape(
            f"the weight's channels times groups must be the tensor's {channels} channels, got {inner} times {groups}"
        )


def _channel(filter_: str, inner: str, channels: int, filters: int, groups: int) -> str:
    """Return the index of the input's channel. `channels` and `filters` are those of one group."""
    if groups == 1:
        return inner if channels > 1 else "0"
    group = filter_ if filters == 1 else f"{filter_} // {filters}"
    if channels == 1:
        return group
    return f"{group} * {channels} + {inner}"


def _parameters(spatial: int, *, grouped: bool = True) -> tuple[Parameter, ...]:
    about = f"zeros around: one number, {spatial}, or {spatial} before and {spatial} after"
    return (
        integers("stride", 1, "steps of the window", minimum=1),
        integers(
            "padding", 0, about if spatial > 1 else "zeros around: one number, or before and after", minimum=0, names=PADDINGS
        ),
        integers("dilation", 1, "steps inside of the window", minimum=1),
        *([integer("groups", 1, "number of groups, each convolved separately", minimum=1)] if grouped else []),
        choice("layout", layouts(spatial)[0], layouts(spatial), "order of the dimensions of data and result"),
        choice("weight_layout", weight_layouts(spatial)[0], weight_layouts(spatial), "order of those of the weight"),
        choice("activation", "none", tuple(ACTIVATIONS), "what is applied to the result"),
        dtype("dtype", None, "type of the result, in which it is summed"),
    )


OPERATORS = (
    *(
        Operator(
            f"conv{spatial}d",
            f"Convolution over {spatial} dimension{'s' if spatial > 1 else ''}; `weight` is [filters, channels, "
            f"window], `bias` [filters].",
            ("x", "weight", "bias"),
            partial(_convolution, spatial=spatial),
            _parameters(spatial),
            needed=2,
        )
        for spatial in (1, 2, 3)
    ),
    Operator(
        "depthwise_conv2d",
        "Convolution of each channel by itself; `weight` is [channels times filters of each, 1, height, width].",
        ("x", "weight", "bias"),
        partial(_convolution, spatial=2, depthwise=True),
        _parameters(2, grouped=False),
        needed=2,
    ),
)
