"""Operators that move blocks of elements: tile, depth_to_space, space_to_depth, col2im."""

from __future__ import annotations

import math

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import choice, integer, integers, required
from roller_svc.frontend.ops.text import affine, guard, product_term, statement, zero
from roller_svc.frontend.ops.windows import per_dimension, windows


def _tile(call: Call) -> str:
    x, repeats = call.x, call.integers("repeats")
    if len(repeats) != x.rank:
        raise call.wrong_parameter(f"repeats has {len(repeats)} numbers for {x.rank} dimensions")
    axes = call.axes(x.rank)
    index = [
        "0" if size == 1 else axis if count == 1 else f"{axis} % {size}"
        for axis, size, count in zip(axes, x.shape, repeats, strict=True)
    ]
    where = [(axis, size * count) for axis, size, count in zip(axes, x.shape, repeats, strict=True)]
    return statement(call.output, axes, "=", x.at(*index), where=where)


def _blocks(call: Call) -> tuple[int, tuple[str, str, str, str]]:
    call.check_rank(call.x, 4, "NCHW")
    return call.integer("block"), (call.axis("n"), call.axis("c"), call.axis("h"), call.axis("w"))


def _depth_to_space(call: Call) -> str:
    block, (n, c, h, w) = _blocks(call)
    _, channels, height, width = call.x.shape
    if channels % (block * block):
        raise call.wrong_shape(f"{channels} channels do not divide into blocks of {block} by {block}")
    count = channels // (block * block)
    if call.text("order") == "blocks_first":
        channel = f"({h} % {block} * {block} + {w} % {block}) * {count} + {c}"
    else:
        channel = f"({c} * {block} + {h} % {block}) * {block} + {w} % {block}"
    value = call.x.at(n, channel, f"{h} // {block}", f"{w} // {block}")
    return statement(call.output, (n, c, h, w), "=", value, where=[(c, count), (h, height * block), (w, width * block)])


def _space_to_depth(call: Call) -> str:
    block, (n, c, h, w) = _blocks(call)
    _, channels, height, width = call.x.shape
    if height % block or width % block:
        raise call.wrong_shape(f"{height} by {width} elements do not divide into blocks of {block} by {block}")
    place = f"{c} // {channels}"
    value = call.x.at(n, f"{c} % {channels}", f"{h} * {block} + {place} // {block}", f"{w} * {block} + {place} % {block}")
    where = [(c, channels * block * block), (h, height // block), (w, width // block)]
    return statement(call.output, (n, c, h, w), "=", value, where=where)


def _col2im(call: Call) -> str:
    """Return the sum over the windows that cover each element."""
    x, image, kernel = call.x, call.integers("image"), call.integers("kernel")
    call.check_rank(x, 3, "[batch, channels and window, windows]")
    if len(image) != len(kernel):
        raise call.wrong_parameter(f"image has {len(image)} dimensions, kernel {len(kernel)}")
    dims = len(image)
    strides = per_dimension(call, "stride", dims)
    shapes = windows(call, image, kernel)
    taps = math.prod(kernel)
    counts = [window.out for window in shapes]
    if x.shape[1] % taps or x.shape[2] != math.prod(counts):
        raise call.wrong_shape(
            f"`{x.name}` {list(x.shape)} must be [batch, a multiple of {taps}, {math.prod(counts)}] for these windows"
        )
    n, c = call.axis("n"), call.axis("c")
    out, tap = [call.axis(f"p{d}") for d in range(dims)], [call.axis(f"k{d}") for d in range(dims)]
    guards, column, row = list[str](), "", ""
    for d, window in enumerate(shapes):
        distance = affine([(out[d], 1), (tap[d], -window.dilation)], window.before)
        at = distance if strides[d] == 1 else f"({distance}) // {strides[d]}"
        guards += [f"{distance} >= 0", f"{at} < {counts[d]}"]
        guards += [f"({distance}) % {strides[d]} == 0"] if strides[d] > 1 else []
        column = f"{product_term(column, counts[d])} + {at}" if column else at
        row = f"{product_term(row, kernel[d])} + {tap[d]}" if row else tap[d]
    value = guard(x.at(n, f"{c} * {taps} + {row}", column), guards, zero(x.dtype))
    where = [(c, x.shape[1] // taps), *zip(out, image, strict=True), *zip(tap, kernel, strict=True)]
    return statement(call.output, (n, c, *out), "+=!", value, where=where)


_BLOCK = required(integer("block", None, "extent of a block in both directions", minimum=1))

OPERATORS = (
    Operator("tile", "The elements repeated along each dimension.", ("x",), _tile,
             (required(integers("repeats", None, "how often, along each dimension", minimum=1)),)),
    Operator("depth_to_space", "Channels (dimension 1 of 4) laid out as blocks of two spatial dimensions.", ("x",),
             _depth_to_space,
             (_BLOCK, choice("order", "blocks_first", ("blocks_first", "channels_first"),
                             "what varies slowest in the channels"))),
    Operator("space_to_depth", "Blocks of two spatial dimensions as channels (dimension 1 of 4).", ("x",),
             _space_to_depth, (_BLOCK,)),
    Operator("col2im", "Sum of windows at their places in an image.", ("x",), _col2im,
             (
                 required(integers("image", None, "extents of the image", minimum=1)),
                 required(integers("kernel", None, "extents of the window", minimum=1)),
                 integers("stride", 1, "steps of the window", minimum=1),
                 integers("padding", 0, "elements around the image that are dropped", minimum=0),
                 integers("dilation", 1, "steps inside of the window", minimum=1),
             )),
)  # fmt: skip
