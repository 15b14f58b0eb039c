"""Checks of attention and of dual GEMMs, on whatever kernels the model chooses."""

from __future__ import annotations

from collections.abc import Iterator

from roller_bench.gpu.cases.check import HALVES, Check, Inputs
from roller_bench.gpu.cases.warpgroups import UNIT

# name: (batch, heads, length) of the queries; (heads, length) of the keys; features; arguments of the operator
_ATTENTION = {
    "small": ((2, 3, 65), (3, 65), 64, ""),
    "square": ((1, 2, 128), (2, 128), 64, ""),
    "causal": ((2, 3, 97), (3, 97), 64, "causal=true"),
    "causal-square": ((1, 2, 192), (2, 192), 128, "causal=true"),
    "causal-later": ((1, 4, 33), (4, 130), 128, "causal=true"),
    "causal-shared": ((1, 8, 110), (2, 150), 80, "causal=true"),
    "shared-heads": ((1, 14, 40), (2, 75), 128, ""),
    "one-key-head": ((2, 8, 5), (1, 203), 64, ""),
    "decode": ((3, 16, 1), (4, 1029), 128, ""),
    "decode-odd-heads": ((2, 28, 1), (4, 777), 128, ""),
    "wide": ((1, 2, 70), (2, 81), 256, ""),
    "wide-causal": ((1, 2, 70), (2, 70), 256, "causal=true"),
    "odd-features": ((2, 2, 33), (1, 51), 13, ""),
    "narrow": ((2, 3, 65), (3, 65), 32, "scale=0.5"),
}
# The same on warpgroups: boxes of one head and of several, copies by threads, more tiles than run concurrently
_ON_WARPGROUPS = {
    "square": ((1, 2, 128), (2, 128), 64, ""),
    "causal-shared": ((1, 8, 110), (2, 150), 80, "causal=true"),
    "causal-square": ((1, 2, 192), (2, 192), 128, "causal=true"),
    "wide-causal": ((1, 2, 70), (2, 70), 256, "causal=true"),
    "copied": ((1, 3, 65), (3, 65), 36, ""),
    "many-tiles": ((4, 40, 130), (40, 70), 64, ""),
}


def attention_checks() -> Iterator[Check]:
    """Yield full and causal attention, prefill and decoding, grouped-query attention and all head dimensions."""
    for unit, shapes in ((None, _ATTENTION), (UNIT, _ON_WARPGROUPS)):
        for number, (name, ((batch, heads, queries), (key_heads, keys), features, more)) in enumerate(shapes.items()):
            dtype, causal = HALVES[number % 2], "causal" in more
            queried, seen = (batch, heads, queries, features), (batch, key_heads, keys, features)
            inputs = (("Q", (dtype, queried)), ("K", (dtype, seen)), ("V", (dtype, seen)))
            yield Check(
                f"{name}-{unit or 'chosen'}-{dtype}",
                "attention",
                f"O = attention(Q, K, V{', ' + more if more else ''})",
                inputs,
                unit=unit,
                finite=("V",) if causal else (),
            )
    yield Check(
        "mask-split",
        "attention",
        "O = attention(Q, K, V, M)",
        (
            ("Q", ("float16", (1, 4, 40, 64))),
            ("K", ("float16", (1, 4, 300, 64))),
            ("V", ("float16", (1, 4, 300, 64))),
            ("M", ("float16", (40, 300))),
        ),
        tiles=(("split_k", 2),),
    )
    yield from _written_out()
    yield from _gated()


def _written_out() -> Iterator[Check]:
    """Yield attention written as statements: with an input mask, and with fully masked rows."""
    halves: Inputs = (("q", ("float16", (2, 3, 70, 64))), ("k", ("float16", (2, 3, 77, 64))),
                      ("v", ("float16", (2, 3, 77, 64))))  # fmt: skip
    rest = (
        "x[b,h,s] >=! p[b,h,s,t]; e[b,h,s,t] = exp(p[b,h,s,t] - x[b,h,s]); z[b,h,s] +=! e[b,h,s,t]; "
        "o[b,h,s,d] +=! e[b,h,s,t] * v[b,h,t,d]; y[b,h,s,d] = o[b,h,s,d] / z[b,h,s]"
    )
    scores = "a[b,h,s,t] +=! q[b,h,s,d] * k[b,h,t,d]"
    yield Check(
        "mask-input",
        "attention",
        f"{scores}; p[b,h,s,t] = a[b,h,s,t] * 0.125 + m[b,s,t]; {rest}",
        (*halves, ("m", ("float16", (2, 70, 77)))),
    )
    yield Check(
        "rows-without-keys",
        "attention",
        f"{scores}; p[b,h,s,t] = (a[b,h,s,t] * 0.125).when([t + 5 <= s], const(-60000.0)); {rest}",
        halves,
        finite=("v",),
    )
    single = tuple((name, ("float32", shape)) for name, (_, shape) in halves)
    yield Check("float32", "attention", f"{scores}; p[b,h,s,t] = a[b,h,s,t] * 0.125; {rest}", single)


def _gated() -> Iterator[Check]:
    """Yield dual GEMMs: two contractions of the same rows and a gated product."""
    text = "g[m,f] +=! x[m,k] * wg[f,k]; u[m,f] +=! x[m,k] * wu[f,k]; y[m,f] = g[m,f] / (1.0 + exp(-g[m,f])) * u[m,f]"
    for name, rows, dtype in (("one-row", 1, "float16"), ("few-rows", 16, "float16"), ("many-rows", 150, "bfloat16")):
        yield Check(name, "gated", text, (("x", (dtype, (rows, 136))), ("wg", (dtype, (104, 136))), ("wu", (dtype, (104, 136)))))
