"""Checks of the findings of docs/gpu.md (generated kernels), which no device has run: a family for each finding."""

from __future__ import annotations

from collections.abc import Iterator

from roller_bench.gpu.cases.check import Check, Inputs, product_check
from roller_bench.gpu.cases.warpgroups import UNIT

_SOFTMAX = "h[i] >=! x[i,j]; t[i] +=! exp(x[i,j] - h[i]); y[i,j] = exp(x[i,j] - h[i]) / t[i]"
_LOG_SUM_EXP = "h[i] >=! x[i,j]; t[i] +=! exp(x[i,j] - h[i]); y[i] = log(t[i]) + h[i]"
_LAYER_NORM = (
    "s[i] +=! x[i,j]; u[i] = s[i] / 4097.0; q[i] +=! (x[i,j] - u[i]) * (x[i,j] - u[i]); "
    "y[i,j] = (x[i,j] - u[i]) * rsqrt(q[i] / 4097.0 + 1e-05)"
)
_PAGED = (
    "S[b,g,h,n] +=! Q[b,g,h,d] * K[T[b,n // 16],n % 16,g,d] where n in 500; A[b,g,h,n] = S[b,g,h,n] * 0.125; "
    "M[b,g,h] >=! A[b,g,h,n]; E[b,g,h,n] = exp(A[b,g,h,n] - M[b,g,h]); L[b,g,h] +=! E[b,g,h,n]; "
    "Y[b,g,h,d] +=! (E[b,g,h,n] / L[b,g,h]).cast(`bfloat16`) * V[T[b,n // 16],n % 16,g,d]"
)
_INT4 = "((q[n,k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * s[n,k // 128]"
_AWQ_SHIFT = "((n % 2 * 4 + n % 8 // 2) * 4)"
_AWQ = (
    f"((q[k,n // 8] >> {_AWQ_SHIFT}).call(`bitwise_and`, [15]) - (z[k // 128,n // 8] >> {_AWQ_SHIFT})"
    ".call(`bitwise_and`, [15])).cast(`float16`) * s[k // 128,n]"
)
_GPTQ = (
    "((q[k // 8,n] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - (z[k // 128,n // 8] >> (n % 8 * 4))"
    ".call(`bitwise_and`, [15]) - 1).cast(`float16`) * s[k // 128,n]"
)
_N, _K = 200, 1024
_LOOKED_UP = "t[(q[n,k // 2] >> ({place} * 4)).call(`bitwise_and`, [15])]"
_NVFP4 = _LOOKED_UP.format(place="k % 2") + ".cast(`float16`) * s[n,k // 16].cast(`float16`)"
_MXFP4 = _LOOKED_UP.format(place="k % 2") + ".cast(`bfloat16`) * exp2(e[n,k // 32].cast(`float32`) - 127.0).cast(`bfloat16`)"
_NF4 = f"({_LOOKED_UP.format(place='(1 - k % 2)')} * s[n,k // 64]).cast(`float16`)"
_BYTES = ("q", ("uint8", (_N, _K // 2)))


def finding_checks() -> Iterator[Check]:
    """Yield the checks, the latest code first, and the smallest check of each family first."""
    yield from _epilogues()
    yield from _reduction_clusters()
    yield from _packed_weights()
    yield from _decoding_attention()
    yield from _written_operands()
    yield from _joint_maps()
    yield from _rows()
    yield from _atomics()
    yield from _transposes()


def _atomics() -> Iterator[Check]:
    """Yield updates by `red` of every type, bins in shared memory, and a target that is overwritten."""
    family, ids = "atomics", ("at", ("int32", (3000,)))
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64"):
        yield Check(
            f"add-{dtype}",
            family,
            "grid[at[n],c] +=. x[n,c]",
            (("grid", (dtype, (500, 18))), ids, ("x", (dtype, (3000, 18)))),
            hints={"at": {"range": [0, 500]}},
        )
    yield Check(
        "bins",
        family,
        "grid[at[n]] +=. x[n]",
        (("grid", ("float32", (256,))), ids, ("x", ("float32", (3000,)))),
        hints={"at": {"range": [0, 256]}},
    )
    yield Check(
        "donated",
        family,
        "grid[at[n],c] +=. x[n,c]",
        (("grid", ("float32", (500, 17))), ids, ("x", ("float32", (3000, 17)))),
        hints={"at": {"range": [0, 500]}},
        donate=("grid",),
    )


def _transposes() -> Iterator[Check]:
    """Yield transposes whose rows no vector divides, staged in shared memory."""
    shapes = (("float16", (259, 517)), ("bfloat16", (389, 771)), ("int8", (518, 260)), ("int8", (515, 1021)))
    for dtype, shape in shapes:
        yield Check(f"{dtype}-{shape[0]}x{shape[1]}", "odd-transposes", "y[j,i] = x[i,j]", (("x", (dtype, shape)),))


def _written_operands() -> Iterator[Check]:
    """Yield products that write an operand to a workspace first, since TMA cannot take it; the model chooses."""
    family, size = "written-operands-large", (2048, 2048)
    yield Check(
        "tf32-nn", family, "C[m,n] +=! A[m,k] * B[k,n]", (("A", ("float32", size)), ("B", ("float32", size))), allow_tf32=True
    )
    yield Check(
        "int8-nn", family, "C[m,n] +=! A[m,k].cast(`int32`) * B[k,n].cast(`int32`)", (("A", ("int8", size)), ("B", ("int8", size)))
    )
    yield Check(
        "float8-nt",
        family,
        "C[m,n] +=! A[m,k].cast(`float32`) * B[n,k].cast(`float32`)",
        (("A", ("float8_e4m3fn", size)), ("B", ("float8_e4m3fn", size))),
    )
    yield Check(
        "int4",
        family,
        f"w[n,k] = {_INT4} where k in 2048; y[m,n] +=! x[m,k] * w[n,k]",
        (("x", ("float16", size)), ("q", ("int32", (2048, 256))), ("s", ("float16", (2048, 16)))),
    )


def _epilogues() -> Iterator[Check]:
    """Yield GELU epilogues, whose consumers take tiles in turn."""
    for family, (m, n, k), tiles in (
        ("ping-pong", (200, 136, 72), (("blocks", 3), ("pingpong", 1))),
        ("ping-pong-large", (2048, 2048, 256), ()),
    ):
        yield Check(
            "gelu",
            family,
            "s[m,n] +=! a[m,k] * b[k,n]; y[m,n] = gelu(s[m,n])",
            (("a", ("float16", (m, k))), ("b", ("float16", (k, n)))),
            unit=UNIT,
            tiles=tiles,
        )


def _rows() -> Iterator[Check]:
    """Yield rows of odd length: their first and last elements are peeled."""
    family = "peeled-rows"
    for dtype in ("bfloat16", "float32"):
        yield Check(f"layernorm-{dtype}", family, _LAYER_NORM, (("x", (dtype, (9, 4097))),))
        yield Check(f"softmax-{dtype}", family, _SOFTMAX, (("x", (dtype, (5, 50257))),))
        yield Check(f"logsumexp-{dtype}", family, _LOG_SUM_EXP, (("x", (dtype, (5, 50257))),))
    yield Check("short-rows", family, _SOFTMAX, (("x", ("bfloat16", (515, 257))),))
    yield Check("sums", family, "y[i] +=! x[i,j].cast(`int32`)", (("x", ("int8", (7, 20011))),))


def _joint_maps() -> Iterator[Check]:
    """Yield maps that one kernel computes, with casts that take one rounding."""
    yield Check("two", "joint-maps", "y[i] = x[i] * 2.0; z[i] = x[i] + 1.0", (("x", ("float32", (40003,))),))
    yield Check(
        "casts",
        "joint-maps",
        "y[i] = (x[i] * 2.0).cast(`float16`); z[i] = x[i].cast(`int8`); w[i] = x[i].cast(`float8_e4m3fn`)",
        (("x", ("float32", (8195,))),),
    )


def _decoding_attention() -> Iterator[Check]:
    """Yield one query of each head: keys split over blocks, and keys in pages."""
    cache = ("bfloat16", (1, 1, 2048, 128))
    yield Check(
        "pages",
        "decode-attention",
        _PAGED,
        (
            ("Q", ("bfloat16", (3, 2, 4, 64))),
            ("K", ("bfloat16", (100, 16, 2, 64))),
            ("V", ("bfloat16", (100, 16, 2, 64))),
            ("T", ("int32", (3, 32))),
        ),
        hints={"T": {"range": [0, 100]}},
        finite=("K", "V"),
    )
    yield Check(
        "split-keys",
        "decode-attention",
        "y = attention(q, k, v)",
        (("q", ("bfloat16", (1, 4, 1, 128))), ("k", cache), ("v", cache)),
    )


def _packed_weights() -> Iterator[Check]:
    """Yield products of few rows with packed weights, of 4 and 8 bits, in three orders, and looked up in tables."""
    along = (("q", ("int32", (_N, _K // 8))), ("s", ("float16", (_N, _K // 128))))
    groups, scales = _K // 128, ("s", ("float16", (_K // 128, _N)))
    formats: dict[str, tuple[str, str, Inputs]] = {
        "int4": (_INT4, "n,k", along),
        "awq": (_AWQ, "k,n", (("q", ("int32", (_K, _N // 8))), ("z", ("int32", (groups, _N // 8))), scales)),
        "gptq": (_GPTQ, "k,n", (("q", ("int32", (_K // 8, _N))), ("z", ("int32", (groups, _N // 8))), scales)),
        "int8": ("q[n,k].cast(`float16`) * s[n]", "n,k", (("q", ("int8", (_N, _K))), ("s", ("float16", (_N,))))),
        "float8": ("q[n,k].cast(`float16`) * s[n]", "n,k",
                   (("q", ("float8_e4m3fn", (_N, _K))), ("s", ("float16", (_N,))))),
        "nvfp4": (_NVFP4, "n,k", (_BYTES, ("t", ("float8_e5m2", (16,))), ("s", ("float8_e4m3fn", (_N, _K // 16))))),
        "mxfp4": (_MXFP4, "n,k", (_BYTES, ("t", ("float8_e5m2", (16,))), ("e", ("uint8", (_N, _K // 32))))),
        "nf4": (_NF4, "n,k", (_BYTES, ("t", ("float16", (16,))), ("s", ("float32", (_N, _K // 64))))),
    }  # fmt: skip
    for name, (value, index, inputs) in formats.items():
        for rows in (1, 4, 16, 64):
            yield Check(
                f"{name}-{rows}",
                "packed-weights",
                f"w[{index}] = {value} where n in {_N}, k in {_K}; y[m,n] +=! x[m,k] * w[{index}]",
                (("x", ("bfloat16" if name == "mxfp4" else "float16", (rows, _K))), *inputs),
                hints={"e": {"range": [120, 135]}} if name == "mxfp4" else {},
            )


def _reduction_clusters() -> Iterator[Check]:
    """Yield products whose parts along k a cluster adds through distributed shared memory."""
    for cluster in (2, 4, 8):
        yield product_check(
            "reduction-clusters", f"{cluster}", "float16", (130, 264, 520), "nn", unit=UNIT, tiles=(("cluster_k", cluster),)
        )
