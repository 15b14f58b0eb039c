"""Attention baselines: every backend of torch's scaled_dot_product_attention, with and without repeated keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from roller_bench.gpu.baselines import Variant
from roller_bench.gpu.samples import Attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


def attention_variants(shape: Attention, tensors: Mapping[str, Any]) -> list[Variant]:
    """Return a variant for each backend. Torch's default scale, 1 / sqrt(features), is that of the corpus."""
    calls = _calls(shape, *tensors.values())
    return [
        Variant(f"torch attention, {backend}{how}", call, partial(sdpa_kernel, which))
        for backend, which in BACKENDS.items()
        for how, call in calls.items()
    ]


def _calls(shape: Attention, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls: grouped-query attention, and keys repeated for each head, which more backends support."""
    causal: dict[str, Any] = {}
    if shape.causal:
        square = shape.queries == shape.keys
        causal = {"is_causal": True} if square else {"attn_mask": causal_lower_right(shape.queries, shape.keys)}
    if shape.heads == shape.key_heads:
        return {"": lambda: scaled_dot_product_attention(q, k, v, **causal)}
    wide_k, wide_v = (tensor.repeat_interleave(shape.heads // shape.key_heads, dim=1) for tensor in (k, v))
    return {
        "": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True, **causal),
        ", keys copied": lambda: scaled_dot_product_attention(q, wide_k, wide_v, **causal),
    }
