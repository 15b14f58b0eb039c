"""Sliding windows of convolutions and pools: extents, indices, guards, layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roller_svc.frontend.ops.operator import Call
from roller_svc.frontend.ops.parameters import Value
from roller_svc.frontend.ops.text import affine

PADDINGS = ("valid", "same", "same_lower")
SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True, slots=True)
class Window:
    """One spatial dimension of a sliding window."""

    size: int  # of the input
    kernel: int
    stride: int
    dilation: int
    before: int  # padding
    after: int
    out: int  # extent of the output

    def term(self, out: str, kernel: str) -> str:
        """Return the index of the input."""
        terms = [(out, self.stride)] if self.kernel == 1 else [(out, self.stride), (kernel, self.dilation)]
        return affine(terms, -self.before)

    def guards(self, term: str) -> list[str]:
        """Return the conditions that keep the index inside; none if it cannot leave."""
        low = [f"{term} >= 0"] if self.before else []
        last = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation - self.before
        return [*low, f"{term} < {self.size}"] if last >= self.size else low

    def extents(self, out: str, kernel: str) -> list[tuple[str, int]]:
        """Return the extents that a statement must give: an axis that occurs only in arithmetic has none."""
        bare = self.term(out, kernel) == out and self.out == self.size
        return [] if bare else [(out, self.out)]


def layouts(spatial: int) -> tuple[str, str]:
    """Return the data layouts: channels before or after the spatial dimensions."""
    return f"NC{SPATIAL[spatial]}", f"N{SPATIAL[spatial]}C"


def weight_layouts(spatial: int) -> tuple[str, str, str]:
    return f"OI{SPATIAL[spatial]}", f"{SPATIAL[spatial]}IO", f"O{SPATIAL[spatial]}I"


def arrange(layout: str, axes: Mapping[str, str]) -> tuple[str, ...]:
    """Return indices in the order of a layout's letters."""
    return tuple(axes[letter] for letter in layout)


def sizes(layout: str, shape: Sequence[int]) -> dict[str, int]:
    """Return extents by the layout's letters."""
    return dict(zip(layout, shape, strict=True))


def per_dimension(call: Call, parameter: str, spatial: int) -> tuple[int, ...]:
    """Return one number for each spatial dimension. A single one is for all."""
    values = call.integers(parameter)
    if len(values) not in (1, spatial):
        raise call.wrong_parameter(f"{parameter} must be 1 number or {spatial}, got {len(values)}")
    return values * spatial if len(values) == 1 else values


def windows(call: Call, data: Sequence[int], kernel: Sequence[int]) -> tuple[Window, ...]:
    """Return the windows that stride, dilation, padding and ceil_mode of a call describe."""
    spatial = len(data)
    strides = per_dimension(call, "stride", spatial)
    dilations = per_dimension(call, "dilation", spatial) if call.has("dilation") else (1,) * spatial
    padding = call.parameters["padding"]
    ceil = bool(call.parameters.get("ceil_mode"))
    result = []
    for d in range(spatial):
        extent = (kernel[d] - 1) * dilations[d] + 1
        before, after = _padding(call, padding, d, spatial, (data[d], extent, strides[d]))
        slack = data[d] + before + after - extent
        out = (slack + strides[d] - 1 if ceil else slack) // strides[d] + 1
        if ceil and (out - 1) * strides[d] >= data[d] + before:
            out -= 1  # a window must begin inside
        if out < 1:
            message = f"the window has {extent} elements, the tensor {data[d]} and padding of {before + after}"
            raise call.wrong_shape(message)
        result.append(Window(data[d], kernel[d], strides[d], dilations[d], before, after, out))
    return tuple(result)


def explicit_padding(call: Call, d: int, spatial: int) -> tuple[int, int]:
    """Return explicit padding before and after dimension d."""
    padding = call.integers("padding")
    match len(padding):
        case 1:
            return padding[0], padding[0]
        case n if n == spatial:
            return padding[d], padding[d]
        case n if n == 2 * spatial:
            return padding[d], padding[d + spatial]
    raise call.wrong_parameter(f"padding must be 1 number, {spatial} or {2 * spatial}, got {len(padding)}")


def _padding(call: Call, value: Value, d: int, spatial: int, window: tuple[int, int, int]) -> tuple[int, int]:
    if not isinstance(value, str):
        return explicit_padding(call, d, spatial)
    if value == "valid":
        return 0, 0
    size, extent, stride = window
    missing = max(((size + stride - 1) // stride - 1) * stride + extent - size, 0)
    less, more = missing // 2, missing - missing // 2
    return (more, less) if value == "same_lower" else (less, more)
