"""Checks of wgmma kernels: every way to load, split, multicast and store."""

from __future__ import annotations

from collections.abc import Iterator

from roller_bench.gpu.cases.check import HALVES, LAYOUTS, Check, product_check

UNIT = "wgmma"
# (m, n, k): whole tiles; partial tiles with row lengths that are multiples of 16 bytes (TMA), of 4 bytes (cp.async), of
# 2 bytes (element loads); less than one tile
_SHAPES = {"whole": (128, 192, 128), "by8": (200, 136, 72), "by2": (130, 66, 74), "odd": (131, 67, 77),
           "few": (9, 24, 40)}  # fmt: skip
_WHOLE, _BY8, _ODD = (256, 128, 192), (250, 136, 200), (203, 131, 197)  # 4 tiles of 64 rows
_HALF_PRODUCT = "S[m,n] +=! A[m,k].cast(`float32`) * B[n,k].cast(`float32`)"


def warpgroup_checks() -> Iterator[Check]:
    """Yield the small checks."""
    yield from _products()
    yield from _dual_gemms()
    yield from _work_splits()
    yield from _epilogues()
    yield from _images()


def large_warpgroup_checks() -> Iterator[Check]:
    """Yield checks that fill a device with persistent blocks, clusters and stream-K."""
    for name, tiles in (
        ("stay", ()),
        ("pairs-m", (("cluster_m", 2),)),
        ("pairs-n", (("cluster_n", 2),)),
        ("stream", (("stream_k", 132),)),
    ):
        yield product_check("wgmma-large", name, "bfloat16", (4096, 4096, 2048), "nt", unit=UNIT, tiles=tiles, product="mk,nk->mn")
    yield product_check("wgmma-large", "ragged", "float16", (5003, 3001, 2041), "nt", unit=UNIT, product="mk,nk->mn")
    yield product_check("wgmma-large", "deep", "bfloat16", (136, 264, 65544), "tn", unit=UNIT, product="km,kn->mn")


def _products() -> Iterator[Check]:
    """Yield every operand type, load method and operand major-ness."""
    for dtype in HALVES:
        for name, extents in _SHAPES.items():
            for layout in LAYOUTS:
                yield product_check("wgmma", name, dtype, extents, layout, unit=UNIT)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8", "uint8"):
        for name in ("whole", "by8", "odd"):
            yield product_check("wgmma", name, dtype, _SHAPES[name], "nt", unit=UNIT)
        yield product_check("wgmma", "turned", dtype, (96, 112, 160), "nn", unit=UNIT)
    for name, dtype in (("whole", "float8_e4m3fn"), ("by8", "float8_e5m2"), ("odd", "float8_e4m3fn")):
        yield _reduced_accumulation(name, dtype, _SHAPES[name])
    yield _reduced_accumulation("deep", "float8_e4m3fn", (72, 40, 4104))
    for name, layout in (("whole", "nt"), ("by8", "nt"), ("odd", "nt"), ("by8", "tn")):
        yield product_check("wgmma", f"tf32-{name}", "float32", _SHAPES[name], layout, unit=UNIT, allow_tf32=True)
    mixed = (("A", ("float8_e4m3fn", (100, 160))), ("B", ("float8_e5m2", (56, 160))))
    yield Check("two-float8", "wgmma", "C[m,n] +=! A[m,k].cast(`float32`) * B[n,k].cast(`float32`)", mixed, unit=UNIT)
    yield Check(
        "computed-operand",
        "wgmma",
        "C[m,n] +=! A[m,k] * relu(B[k,n])",
        (("A", ("float16", (200, 136))), ("B", ("float16", (136, 104)))),
        unit=UNIT,
    )
    yield Check(
        "batched",
        "wgmma",
        "C[b,m,n] +=! A[b,m,k] * B[b,k,n]",
        (("A", ("float16", (5, 200, 80))), ("B", ("float16", (5, 80, 88)))),
        unit=UNIT,
    )


def _reduced_accumulation(name: str, dtype: str, extents: tuple[int, int, int]) -> Check:
    """Return a float8 product that may accumulate in reduced precision between float32 promotions."""
    m, n, k = extents
    return Check(
        f"short-{name}-{dtype}",
        "wgmma",
        "C[m,n] +=! A[m,k].cast(`float32`) * B[n,k].cast(`float32`)",
        (("A", (dtype, (m, k))), ("B", (dtype, (n, k)))),
        unit=UNIT,
        allow_tf32=True,
    )


def _dual_gemms() -> Iterator[Check]:
    """Yield dual GEMMs: B operands by TMA, by cp.async, through registers, and in clusters."""
    for name, (m, n, k), tiles in (
        ("pair", (256, 128, 192), {}),
        ("pair-by8", (200, 136, 72), {}),
        ("pair-by2", (130, 66, 74), {}),
        ("pair-odd", (131, 67, 77), {}),
        ("pair-shared-m", (256, 128, 192), {"cluster_m": 2}),
        ("pair-stay", (250, 136, 200), {"blocks": 3}),
    ):
        for layout, place in (("nt", "f, k"), ("nn", "k, f")):
            weights = (n, k) if layout == "nt" else (k, n)
            text = (
                f"g[m, f] +=! x[m, k] * w[{place}]; u[m, f] +=! x[m, k] * v[{place}];"
                "y[m, f] = g[m, f] / (1.0 + exp(-g[m, f])) * u[m, f]"
            )
            inputs = (("x", ("bfloat16", (m, k))), ("w", ("bfloat16", weights)), ("v", ("bfloat16", weights)))
            yield Check(f"{name}-{layout}", "wgmma", text, inputs, unit=UNIT, tiles=tuple(tiles.items()))


def _work_splits() -> Iterator[Check]:
    """Yield persistent blocks, multicast loads, split-K and stream-K."""
    for_all_loads = ({"blocks": 3}, {"split_k": 3}, {"stream_k": 5}, {"split_k": 2, "blocks": 4}, {"stages": 2},
                  {"blocks": 3, "raster": 2}, {"blocks": 3, "pingpong": 1}, {"cluster_k": 2},
                  {"cluster_k": 8})  # fmt: skip
    for_tma = ({"cluster_m": 2}, {"cluster_n": 2}, {"cluster_m": 2, "cluster_n": 2}, {"cluster_m": 2, "blocks": 4},
                {"cluster_n": 2, "split_k": 2}, {"cluster_m": 2, "blocks": 4, "pingpong": 1},
                {"cluster_m": 2, "cluster_k": 4})  # fmt: skip
    for constraint in (*for_all_loads, *for_tma):
        name = "-".join(f"{key.replace('_', '')}{value}" for key, value in constraint.items())
        tiles = tuple(sorted(constraint.items()))
        yield product_check("wgmma-shared", f"{name}-whole", "float16", _WHOLE, "nt", unit=UNIT, tiles=tiles)
        yield product_check("wgmma-shared", f"{name}-by8", "bfloat16", _BY8, "nn", unit=UNIT, tiles=tiles)
        if constraint in for_all_loads:
            yield product_check("wgmma-shared", f"{name}-odd", "float16", _ODD, "nt", unit=UNIT, tiles=tiles)


def _epilogues() -> Iterator[Check]:
    """Yield epilogues, with 16-bit results that TMA can store and with others."""
    family, a, b = "wgmma-epilogue", ("A", ("float16", (200, 136))), ("B", ("float16", (104, 136)))
    yield Check("plain-half", family, "C[m,n] +=! A[m,k] * B[n,k]", (a, b), unit=UNIT)
    yield Check("plain-float", family, _HALF_PRODUCT, (a, b), unit=UNIT)
    yield Check("turned", family, f"{_HALF_PRODUCT}; C[n,m] = S[m,n].cast(`float16`)", (a, b), unit=UNIT)
    yield Check("odd-columns", family, "C[m,n] +=! A[m,k] * B[n,k]", (a, ("B", ("float16", (103, 136)))), unit=UNIT)
    yield Check(
        "bias-relu",
        family,
        f"{_HALF_PRODUCT}; C[m,n] = (S[m,n] + bias[n]).call(`max`, [0.0])",
        (a, b, ("bias", ("float32", (104,)))),
        unit=UNIT,
    )
    yield Check(
        "residual-gelu",
        family,
        f"{_HALF_PRODUCT}; C[m,n] = gelu(S[m,n]).cast(`float16`) + R[m,n]",
        (a, b, ("R", ("float16", (200, 104)))),
        unit=UNIT,
    )
    yield Check(
        "scale-cast",
        family,
        f"{_HALF_PRODUCT}; C[m,n] = (S[m,n] * v[m]).cast(`bfloat16`)",
        (a, b, ("v", ("float32", (200,)))),
        unit=UNIT,
    )


def _images() -> Iterator[Check]:
    """Yield convolutions of one, two and three dimensions, with padding, strides and dilation."""
    family = "wgmma-images"
    inside = "y+r-1 >= 0, y+r-1 < 14, x+s-1 >= 0, x+s-1 < 13"
    yield Check(
        "line",
        family,
        "Y[n,x,f] +=! X[n,x+s,c] * W[s,c,f] where x in 60",
        (("X", ("float16", (3, 62, 64))), ("W", ("float16", (3, 64, 40)))),
        unit=UNIT,
    )
    yield Check(
        "border",
        family,
        f"Y[n,y,x,f] +=! X[n,y+r-1,x+s-1,c].when([{inside}], 0.0) * W[r,s,c,f] where y in 14, x in 13",
        (("X", ("bfloat16", (2, 14, 13, 32))), ("W", ("bfloat16", (3, 3, 32, 40)))),
        unit=UNIT,
    )
    yield Check(
        "steps",
        family,
        "Y[n,y,x,f] +=! X[n,y*2+r,x*2+s,c] * W[r,s,c,f] where y in 11, x in 9",
        (("X", ("float16", (2, 23, 19, 64))), ("W", ("float16", (3, 3, 64, 40)))),
        unit=UNIT,
    )
    yield Check(
        "gaps",
        family,
        "Y[n,y,x,f] +=! X[n,y+r*2,x+s*2,c] * W[r,s,c,f] where y in 11, x in 9",
        (("X", ("float16", (2, 15, 13, 64))), ("W", ("float16", (3, 3, 64, 40)))),
        unit=UNIT,
    )
    yield Check(
        "volume",
        family,
        "Y[n,z,y,x,f] +=! X[n,z+t,y+r,x+s,c] * W[t,r,s,c,f] where z in 5, y in 6, x in 7",
        (("X", ("float16", (2, 7, 8, 9, 64))), ("W", ("float16", (3, 3, 3, 64, 40)))),
        unit=UNIT,
    )
    yield Check(
        "int8",
        family,
        "Y[n,y,x,f] +=! X[n,y+r,x+s,c].cast(`int32`) * W[f,r,s,c].cast(`int32`) where y in 9, x in 10",
        (("X", ("int8", (2, 11, 12, 64))), ("W", ("int8", (48, 3, 3, 64)))),
        unit=UNIT,
    )
    yield Check(
        "channels-first",
        family,
        f"Y[n,f,y,x] +=! X[n,c,y+r-1,x+s-1].when([{inside}], 0.0) * W[f,c,r,s] where y in 14, x in 13",
        (("X", ("bfloat16", (2, 16, 14, 13))), ("W", ("bfloat16", (33, 16, 3, 3)))),
        unit=UNIT,
    )
