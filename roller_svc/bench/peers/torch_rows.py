"""Softmax, norms, attention and places of greatest elements as torch's calls."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from roller_svc.bench.peers.library import Slot, no_peer
from roller_svc.bench.peers.pointwise import Context
from roller_svc.bench.peers.rows import ArgMost, Attention, FixedNorm, Norm, Pattern, Softmax


def row_call(context: Context, pattern: Pattern, out: Slot, *, swapped: bool) -> Slot:
    """The pattern's result. `swapped`: of two vectors the first shifts and the second scales."""
    tensors, trace = context.tensors, context.trace
    match pattern:
        case Softmax(data=data, dims=dims):
            shape = tuple(tensors[data].value.shape)
            if list(dims) != list(range(dims[0], dims[-1] + 1)):
                raise no_peer("torch's softmax has one dimension")
            flat = (*shape[: dims[0]], -1, *shape[dims[-1] + 1 :])
            x, y = (trace.view(lambda v: v.view(flat), s) for s in (tensors[data], out))
            context.into("softmax", partial(torch.softmax, dim=dims[0]), x, out=y)
            return out
        case ArgMost(data=data, dim=dim, combine=combine):
            context.into(
                f"arg{combine.name.lower()}", partial(context.library.argmost(combine), dim=dim), tensors[data], out=out
            )
            return out
        case Norm():
            return _norm(context, pattern, swapped=swapped)
        case FixedNorm(data=data, mean=mean, variance=variance, vectors=vectors, eps=eps):
            ordered = vectors[::-1] if swapped else vectors
            given = [tensors[n] for n in (data, mean, variance, *ordered)]
            return trace.new("batch_norm", lambda *a: functional.batch_norm(*a, eps=eps), *given)
        case Attention(query=query, key=key, value=value, scale=scale):
            q = tensors[query]
            k = _transposed(context, tensors[key], swap=pattern.key_transposed)
            v = _transposed(context, tensors[value], swap=pattern.value_transposed)
            q, k, v = (trace.view(lambda t: t.unsqueeze(0) if t.ndim == 3 else t, t) for t in (q, k, v))
            shape = tuple(out.value.shape)
            found = trace.new(
                "scaled_dot_product_attention", partial(functional.scaled_dot_product_attention, scale=scale), q, k, v
            )
            return trace.view(lambda t: t.reshape(shape), found)


def _norm(context: Context, pattern: Norm, *, swapped: bool) -> Slot:
    """Over the last dimensions as a layer norm; over all but batch and channel as a group norm of each channel."""
    tensors, trace, eps = context.tensors, context.trace, pattern.eps
    data = tensors[pattern.data]
    shape = tuple(data.value.shape)
    ordered = [tensors[n] for n in (pattern.vectors[::-1] if swapped else pattern.vectors)]
    if pattern.dims == tuple(range(len(shape) - len(pattern.dims), len(shape))):
        reduced = tuple(shape[d] for d in pattern.dims)
        if all(tuple(v.value.shape) == reduced for v in ordered):
            if len(ordered) == 1:
                return trace.new("rms_norm", lambda x, w: functional.rms_norm(x, reduced, w, eps), data, *ordered)
            return trace.new("layer_norm", lambda x, *p: functional.layer_norm(x, reduced, *p, eps=eps), data, *ordered)
        if pattern.dims == tuple(range(2, len(shape))) and all(tuple(v.value.shape) == shape[1:2] for v in ordered):
            groups = shape[1]
            return trace.new("group_norm", lambda x, *p: functional.group_norm(x, groups, *p, eps=eps), data, *ordered)
    if pattern.dims == (0, *range(2, len(shape))) and all(tuple(v.value.shape) == shape[1:2] for v in ordered):
        weight, bias = [*ordered, None, None][:2]
        given = [s for s in (weight, bias) if s is not None]
        return trace.new(
            "batch_norm", lambda x, *wb: functional.batch_norm(x, None, None, *wb, training=True, eps=eps), data, *given
        )
    raise no_peer("torch has no norm over these dimensions")


def _transposed(context: Context, value: Slot, *, swap: bool) -> Slot:
    return context.trace.view(lambda t: t.transpose(-1, -2), value) if swap else value
