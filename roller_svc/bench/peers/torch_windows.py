"""Convolutions and pooling as torch's calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from roller_svc.bench.peers.library import Function, Slot, no_peer
from roller_svc.bench.peers.nest import Nest, affine_index
from roller_svc.bench.peers.pointwise import Context, Pointwise
from roller_svc.bench.peers.windows import Convolution, Pooling, Window
from roller_svc.ir.program import Combine

_CONVOLUTIONS: dict[int, Function] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def convolve(context: Context, nest: Nest, found: Convolution, bias: Slot | None = None) -> Slot:
    """The convolution's result in the nest's order, an array of its own at every call."""
    trace = context.trace
    data = context.tensors[found.data.tensor]
    x = trace.view(lambda v: _batched(v.permute(found.order), len(found.batch)), data)
    w = _weight(context, nest, found)
    x, pads = _padded(context, x, found.windows, 0.0)
    call = _CONVOLUTIONS[len(found.windows)]
    arguments = [x, w] if bias is None else [x, w, bias]
    groups = nest.extents[found.group] if found.group else 1
    options: dict[str, Any] = {
        "stride": tuple(v.stride for v in found.windows), "padding": pads,
        "dilation": tuple(v.dilation for v in found.windows), "groups": groups,
    }  # fmt: skip
    y = trace.new(f"conv{len(found.windows)}d", lambda *a: call(*a, **options), *arguments)
    names = [*found.batch, *([found.group] if found.group else []), *found.filters, *(v.out for v in found.windows)]
    shape = tuple(nest.extents[n] for n in names)
    order = [names.index(a.name) for a in nest.spatial]
    return trace.view(lambda v: v.reshape(shape).permute(order), y)


def _batched(value: torch.Tensor, batch: int) -> torch.Tensor:
    """One batch dimension in front."""
    return value.unsqueeze(0) if batch == 0 else value


def _weight(context: Context, nest: Nest, found: Convolution) -> Slot:
    """Filters of all groups, channels of one, taps."""
    loops = Pointwise(context, nest)
    weight = loops.load(found.weight)
    names = [a.name for a in nest.axes]
    outer = [n for n in (found.group, *found.filters) if n]
    inner = [found.channel] if found.channel else []
    taps = [w.tap for w in found.windows if w.tap]
    order = [names.index(n) for n in (*outer, *inner, *taps)]
    rest = [d for d in range(len(names)) if d not in order]
    if any(weight.value.shape[d] != 1 for d in rest) or len(affine_index(found.weight) or ()) < len(taps):
        raise no_peer("the weight has axes that a convolution's has not")
    filters = math.prod(nest.extents[n] for n in outer)
    channels = nest.extents[found.channel] if found.channel else 1
    shape = (filters, channels, *(w.taps for w in found.windows))
    return context.trace.view(lambda v: v.permute(*rest, *order)[(0,) * len(rest)].reshape(shape), weight)


def _padded(
    context: Context, x: Slot, windows: Sequence[Window], fill: float, most: Sequence[int] | None = None
) -> tuple[Slot, tuple[int, ...]]:
    """The data, and the border that the call itself adds; where that cannot be, the data with its border."""
    if all(w.is_symmetric for w in windows) and (most is None or all(
        w.pad <= m for w, m in zip(windows, most, strict=True)
    )):  # fmt: skip
        return x, tuple(w.pad for w in windows)
    none = (0,) * len(windows)
    borders = [(w.pad, w.missing) for w in windows]
    if all(low <= 0 and high <= 0 for low, high in borders):
        first = x.value.ndim - len(windows)
        for dim, (w, (low, high)) in enumerate(zip(windows, borders, strict=True)):
            x = _narrowed(context, x, first + dim, -low, w.size + low + high)
        return x, none
    flat = [b for pair in reversed(borders) for b in pair]
    return context.trace.new("pad", lambda v: functional.pad(v, flat, value=fill), x), none


def _narrowed(context: Context, x: Slot, dim: int, start: int, size: int) -> Slot:
    return context.trace.view(lambda v: v.narrow(dim, start, size), x)


def pool(context: Context, nest: Nest, found: Pooling, out: Slot) -> Slot:
    """The pooled windows, in `out` where torch writes there."""
    trace, windows = context.trace, found.windows
    flat = len(windows) == 1
    count = max(2, len(windows))
    data = context.tensors[found.data.tensor]
    lasts = tuple(data.value.shape[-len(windows) :])
    x = trace.view(lambda v: v.reshape(-1, *([1] if flat else []), *lasts), data)
    most = [w.taps // 2 for w in windows]
    fill = 0.0 if found.combine is Combine.SUM else -math.inf
    ceil_mode = all(_ceils(w) for w in windows) and not all(w.is_symmetric for w in windows)
    if ceil_mode and all(w.pad <= m for w, m in zip(windows, most, strict=True)):
        pads = tuple(w.pad for w in windows)
    else:
        ceil_mode = False
        x, pads = _padded(context, x, windows, fill, most)
    extra = (0,) if flat else ()
    ones = (1,) if flat else ()
    sizes = {
        "kernel_size": (*ones, *(w.taps for w in windows)), "stride": (*ones, *(w.stride for w in windows)),
        "padding": (*extra, *pads), "ceil_mode": ceil_mode,
    }  # fmt: skip
    if found.combine is Combine.SUM:
        if any(w.dilation != 1 for w in windows) or not float(found.divisor).is_integer():
            raise no_peer("torch averages dense windows, by a whole number")
        result = trace.view(lambda v: v.view(-1, *([1] if flat else []), *(w.outs for w in windows)), out)
        call = torch._C._nn.avg_pool2d if count == 2 else torch._C._nn.avg_pool3d
        context.into("avg_pool", call, x, out=result, divisor_override=int(found.divisor), **sizes)
        return out
    sizes["dilation"] = (*ones, *(w.dilation for w in windows))
    call = functional.max_pool2d if count == 2 else functional.max_pool3d
    pooled = trace.new("max_pool", lambda v: call(v, **sizes), x)
    return trace.view(lambda v: v.reshape(nest.shape), pooled)


def _ceils(w: Window) -> bool:
    """Whether rounding up gives the outputs: a last window that is partly outside."""
    span = w.size + 2 * w.pad - w.dilation * (w.taps - 1) - 1
    outs = -(-span // w.stride) + 1
    if (outs - 1) * w.stride >= w.size + w.pad:
        outs -= 1
    return w.pad >= 0 and outs == w.outs
