"""A case of attention → the times of every backend of torch's scaled_dot_product_attention that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from gpu_bench.samples import Attention
from gpu_bench.torch_timing import Work, replayed

Json = dict[str, Any]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
_MOST_REASON = 200


def attention_timed(shape: Attention, tensors: Mapping[str, Any]) -> Json:
    """The best backend's seconds, and those of each, or why it does not run. Torch's default scale is that of the
    corpus, the root of the features; the last query sees every key."""
    q, k, v = tensors.values()
    works = _works(shape, q, k, v)
    found: Json = {}
    for name, backend in BACKENDS.items():
        refusals = []
        for work in works:
            try:
                with sdpa_kernel(backend):
                    found[name] = min(replayed(work), found.get(name, float("inf")))
            except RuntimeError as refusal:  # what torch raises for a backend that does not take the shapes
                refusals.append(str(refusal).splitlines()[0][:_MOST_REASON])
        found.setdefault(name, "; ".join(dict.fromkeys(refusals)))
    ran = {name: seconds for name, seconds in found.items() if isinstance(seconds, float)}
    if not ran:
        return {"name": "torch attention", "error": "no backend runs it", "backends": found}
    best = min(ran, key=lambda name: ran[name])
    return {"name": f"torch attention, {best}", "seconds": ran[best], "backends": found}


def _works(shape: Attention, q: Any, k: Any, v: Any) -> list[Work]:
    """With heads that share keys as such, and with keys copied for each beforehand, which more backends take."""
    grouped = shape.heads != shape.key_heads
    square = shape.queries == shape.keys
    causal: dict[str, Any] = {}
    if shape.causal:
        causal = {"is_causal": True} if square else {"attn_mask": causal_lower_right(shape.queries, shape.keys)}
    works: list[Work] = []
    if grouped:
        works.append(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True, **causal))
        k, v = (one.repeat_interleave(shape.heads // shape.key_heads, dim=1) for one in (k, v))
    wide_k, wide_v = k, v
    works.append(lambda: scaled_dot_product_attention(q, wide_k, wide_v, **causal))
    return works
