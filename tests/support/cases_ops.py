"""What operators compute, in plain numpy: slow, obvious, and nothing of the project in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One use of an operator. `shapes` of floats, or arrays as they are; `expected` takes them."""

    operator: str
    operands: tuple[Any, ...]
    expected: Callable[..., Array]
    parameters: dict[str, Any] = field(default_factory=dict)
    low: float = -1.0

    @property
    def id(self) -> str:
        shown = "-".join(f"{key}{value}" for key, value in self.parameters.items())
        return f"{self.operator}-{shown}".replace(" ", "")

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(7)
        found = {}
        for name, operand in zip("abcdef", self.operands, strict=False):
            shape = operand if isinstance(operand, tuple) else None
            found[name] = operand if shape is None else rng.uniform(self.low, 1, shape).astype(np.float32)
        return found


def convolved(
    x: Array, w: Array, stride: Sequence[int], pads: Sequence[tuple[int, int]], dilation: Sequence[int], groups: int = 1
) -> Array:
    """Channels first, any number of spatial dimensions."""
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    spatial = x.ndim - 2
    out = [(x.shape[d + 2] - (w.shape[d + 2] - 1) * dilation[d] - 1) // stride[d] + 1 for d in range(spatial)]
    y = np.zeros((x.shape[0], w.shape[0], *out), np.float64)
    inner, outer = w.shape[1], w.shape[0] // groups
    for f in range(w.shape[0]):
        channels = slice(f // outer * inner, f // outer * inner + inner)
        for place in itertools.product(*map(range, out)):
            window = tuple(
                slice(p * s, p * s + (k - 1) * d + 1, d) for p, s, k, d in zip(place, stride, w.shape[2:], dilation, strict=True)
            )
            y[(slice(None), f, *place)] = (x[(slice(None), channels, *window)] * w[f]).reshape(x.shape[0], -1).sum(1)
    return y


def spread(x: Array, w: Array, stride: int, pad: int, more: int, groups: int = 1, dilation: int = 1) -> Array:
    """Transposed convolution over two dimensions, by adding every element's window into the result."""
    n, c, h, v = x.shape
    per_group, filters = c // groups, w.shape[1]
    reach = [(k - 1) * dilation + 1 for k in w.shape[2:]]
    y = np.zeros((n, filters * groups, (h - 1) * stride + reach[0] + more, (v - 1) * stride + reach[1] + more))
    for g, i, j, kh, kw in itertools.product(range(groups), range(h), range(v), range(w.shape[2]), range(w.shape[3])):
        channels = slice(g * per_group, (g + 1) * per_group)
        added = np.einsum("nc,cf->nf", x[:, channels, i, j], w[channels, :, kh, kw])
        y[:, g * filters : (g + 1) * filters, i * stride + kh * dilation, j * stride + kw * dilation] += added
    return y[:, :, pad : y.shape[2] - pad, pad : y.shape[3] - pad]


def pooled(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    pad: int,
    out: Sequence[int],
    *,
    mean: bool = False,
    include_pad: bool = True,
    dilation: int = 1,
) -> Array:
    """Two dimensions; only what is inside counts, unless include_pad says otherwise."""
    y = np.zeros((*x.shape[:2], *out))
    for i, j in itertools.product(*map(range, out)):
        inside, count = [], 0
        for kh, kw in itertools.product(range(kernel[0]), range(kernel[1])):
            at = i * stride[0] + kh * dilation - pad, j * stride[1] + kw * dilation - pad
            if all(0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)):
                inside.append(x[:, :, at[0], at[1]])
            count += all(a < size + pad for a, size in zip(at, x.shape[2:], strict=True))
        found = np.stack(inside)
        y[:, :, i, j] = found.sum(0) / (count if include_pad else len(inside)) if mean else found.max(0)
    return y


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    found: Array = e / e.sum(axis, keepdims=True)
    return found


def normed(x: Array, axes: tuple[int, ...], epsilon: float = 1e-5) -> Array:
    found: Array = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)
    return found


def attended(q: Array, k: Array, v: Array, mask: Array | None = None, *, causal: bool = False) -> Array:
    """[batch, heads, length, features]; heads of k and v are repeated."""
    k, v = (np.repeat(t, q.shape[-3] // t.shape[-3], axis=-3) if q.ndim > 2 else t for t in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    if causal:
        i, j = np.indices(scores.shape[-2:])
        scores = np.where(j <= i + scores.shape[-1] - scores.shape[-2], scores, -np.inf)
    return softmax(scores) @ v


def attended_pages(
    q: Array,
    k: Array,
    v: Array,
    pages: Array,
    lengths: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """[sequences, queries, heads, features] over pages [pages, keys, heads, features]: query by query, key by key."""
    y = np.zeros((*q.shape[:-1], v.shape[-1]))
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        end = int(lengths[b]) - q.shape[1] + 1 + i
        places = range(0 if window is None else max(end - window, 0), min(end, pages.shape[1] * k.shape[1]))
        rows = [(pages[b, n // k.shape[1]], n % k.shape[1], h // group) for n in places]
        if not rows:
            continue
        scores = np.array([q[b, i, h] @ k[row] for row in rows]) * scale
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        weights = softmax(np.append(scores, [] if sinks is None else sinks[h]))
        y[b, i, h] = weights[: len(rows)] @ np.array([v[row] for row in rows])
    return y


def rotated(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """[..., features]; the tables are [..., pairs] and broadcast."""
    pairs = cos.shape[-1]
    y = x.copy()
    for p in range(pairs):
        first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + pairs)
        y[..., first] = x[..., first] * cos[..., p] - x[..., second] * sin[..., p]
        y[..., second] = x[..., second] * cos[..., p] + x[..., first] * sin[..., p]
    return y


def recurrence(gate: Array, x: Array, axis: int, initial: Array | float = 0.0) -> Array:
    """h[t] = gate[t] * h[t - 1] + x[t] along an axis."""
    gates, values = (np.moveaxis(np.broadcast_to(a, np.broadcast_shapes(gate.shape, x.shape)), axis, 0) for a in (gate, x))
    states = [np.asarray(initial)]
    for g, v in zip(gates, values, strict=True):
        states.append(g * states[-1] + v)
    return np.moveaxis(np.stack(states[1:]), 0, axis)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def put(x: Array, index: tuple[Array, ...], updates: Array, combine: Callable[[Any, Any], Any] | None = None) -> Array:
    """Return a copy of x with updates written, or combined, one after the other."""
    y = x.copy()
    places = np.broadcast_arrays(*index)
    for place in np.ndindex(places[0].shape):
        at = tuple(int(part[place]) for part in places)
        y[at] = updates[place] if combine is None else combine(y[at], updates[place])
    return y


def overlapped(
    x: Array,
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
    dilation: Sequence[int],
) -> Array:
    """Windows added at their places in an image of two dimensions."""
    taps = math.prod(kernel)
    y = np.zeros((x.shape[0], x.shape[1] // taps, image[0] + 2 * pads[0], image[1] + 2 * pads[1]))
    counts = [(y.shape[d + 2] - (kernel[d] - 1) * dilation[d] - 1) // stride[d] + 1 for d in range(2)]
    for i, j, a, b in itertools.product(*map(range, (*counts, *kernel))):
        column = x[:, a * kernel[1] + b :: taps, i * counts[1] + j]
        y[:, :, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]] += column
    return y[:, :, pads[0] : y.shape[2] - pads[0], pads[1] : y.shape[3] - pads[1]]
