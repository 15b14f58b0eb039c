"""Windows that slide over spatial dimensions: extents, indices, guards, layouts. For convolutions and pools."""

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
    """One spatial dimension: `size` elements, `before` and `after` more around them, an output for each step."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    out: int

    def term(self, out: str, kernel: str) -> str:
        """The index of the input."""
        terms = [(out, self.stride)] if self.kernel == 1 else [(out, self.stride), (kernel, self.dilation)]
        return affine(terms, -self.before)

    def guards(self, term: str) -> list[str]:
        """What keeps the index inside; nothing where it cannot leave."""
        low = [f"{term} >= 0"] if self.before else []
        last = (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation - self.before
        return [*low, f"{term} < {self.size}"] if last >= self.size else low

    def extents(self, out: str, kernel: str) -> list[tuple[str, int]]:
        """Extents that the text must state: an axis inside of arithmetic has none by itself."""
        bare = self.term(out, kernel) == out and self.out == self.size
        return [] if bare else [(out, self.out)]


def layouts(spatial: int) -> tuple[str, str]:
    """How data may lie: channels before or after the spatial dimensions."""
    return f"NC{SPATIAL[spatial]}", f"N{SPATIAL[spatial]}C"


def weight_layouts(spatial: int) -> tuple[str, str, str]:
    return f"OI{SPATIAL[spatial]}", f"{SPATIAL[spatial]}IO", f"O{SPATIAL[spatial]}I"


def arranged(layout: str, axes: Mapping[str, str]) -> tuple[str, ...]:
    """Indices in the order of a layout's letters."""
    return tuple(axes[letter] for letter in layout)


def sizes(layout: str, shape: Sequence[int]) -> dict[str, int]:
    """Extents by the layout's letters."""
    return dict(zip(layout, shape, strict=True))


def per_dimension(call: Call, parameter: str, spatial: int) -> tuple[int, ...]:
    """One number for each spatial dimension; a single one is for all."""
    given = call.integers(parameter)
    if len(given) not in (1, spatial):
        raise call.wrong_parameter(f"{parameter} must be 1 number or {spatial}, not {len(given)}")
    return given * spatial if len(given) == 1 else given


def windows(call: Call, data: Sequence[int], kernel: Sequence[int]) -> tuple[Window, ...]:
    """The windows that stride, dilation, padding and ceil_mode of a call describe."""
    spatial = len(data)
    strides = per_dimension(call, "stride", spatial)
    dilations = per_dimension(call, "dilation", spatial) if call.has("dilation") else (1,) * spatial
    padding = call.parameters["padding"]
    ceil = bool(call.parameters.get("ceil_mode"))
    result = []
    for d in range(spatial):
        reach = (kernel[d] - 1) * dilations[d] + 1
        before, after = _padding(call, padding, d, spatial, (data[d], reach, strides[d]))
        room = data[d] + before + after - reach
        if room < 0:
            message = f"the window takes {reach} elements, the tensor has {data[d]} and padding of {before + after}"
            raise call.wrong_shape(message)
        out = -(-room // strides[d]) + 1 if ceil else room // strides[d] + 1
        if ceil and (out - 1) * strides[d] >= data[d] + before:
            out -= 1  # a window must begin inside
        result.append(Window(data[d], kernel[d], strides[d], dilations[d], before, after, out))
    return tuple(result)


def explicit_padding(call: Call, d: int, spatial: int) -> tuple[int, int]:
    """Padding in numbers, before and after dimension d."""
    given = call.integers("padding")
    match len(given):
        case 1:
            return given[0], given[0]
        case n if n == spatial:
            return given[d], given[d]
        case n if n == 2 * spatial:
            return given[d], given[d + spatial]
    raise call.wrong_parameter(f"padding must be 1 number, {spatial} or {2 * spatial}, not {len(given)}")


def _padding(call: Call, value: Value, d: int, spatial: int, window: tuple[int, int, int]) -> tuple[int, int]:
    if not isinstance(value, str):
        return explicit_padding(call, d, spatial)
    if value == "valid":
        return 0, 0
    size, reach, stride = window
    missing = max(((size + stride - 1) // stride - 1) * stride + reach - size, 0)
    less, more = missing // 2, missing - missing // 2
    return (more, less) if value == "same_lower" else (less, more)
