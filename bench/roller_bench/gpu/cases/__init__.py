"""The checks: for every kernel family, programs with sizes that divide into tiles, that do not, tiny and large ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from roller_bench.gpu.cases.attention import attention_checks
from roller_bench.gpu.cases.check import HALVES, LAYOUTS, SHAPES, Check, product_check
from roller_bench.gpu.cases.findings import finding_checks
from roller_bench.gpu.cases.warpgroups import large_warpgroup_checks, warpgroup_checks
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.hardware import HardwareSpec, UnitKind

TINY = (3, 5, 7)
_KINDS = {"mma": UnitKind.MMA, "wgmma": UnitKind.WGMMA}


def checks() -> list[Check]:
    """Return all checks: those of findings first, then by family, small ones first."""
    programs = [dataclasses.replace(check, unit="mma") for check in _matrix_programs()]
    all_checks = [*finding_checks(), *_matrix(), *_matrix_splits(), *programs, *warpgroup_checks(),
             *attention_checks(), *_scalar(), *_maps(), *_layouts(), *_windows(), *_reductions(), *_rows(),
             *_indexed(), *_vectors(), *_large(), *large_warpgroup_checks()]  # fmt: skip
    return [dataclasses.replace(check, id=f"{check.family}/{check.id}") for check in all_checks]


def in_order_of_value(selected: Sequence[Check]) -> list[Check]:
    """Order checks for a run that may be cut: findings, then large ones, which take longest, then the others."""
    findings = {check.family for check in finding_checks()}
    return sorted(selected, key=lambda check: (check.family not in findings, not check.family.endswith("-large")))


def checks_for(hw: HardwareSpec) -> list[Check]:
    """Return the checks whose compute unit a device has."""
    return [check for check in checks() if _has_unit(check, hw)]


def _has_unit(check: Check, hw: HardwareSpec) -> bool:
    kind, dtype = _KINDS.get(check.unit or ""), dtype_named(check.inputs[0][1][0])
    return kind is None or any(unit.kind is kind and unit.in_dtype is dtype for unit in hw.units)


def _matrix() -> Iterator[Check]:
    """Yield every operand type; for 16 bits every load width in every layout."""
    for dtype in HALVES:
        for name, extents in SHAPES.items():
            for layout in LAYOUTS:
                yield product_check("mma", name, dtype, extents, layout, unit="mma")
        yield product_check("mma", "one-tile", dtype, (16, 16, 16), unit="mma")
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8", "uint8"):
        for name in ("whole", "by4", "odd"):
            yield product_check("mma", name, dtype, SHAPES[name], "nt", unit="mma")
    for name in ("whole", "by2", "odd"):
        yield product_check("mma", f"tf32-{name}", "float32", SHAPES[name], "tn", unit="mma", allow_tf32=True)


def _matrix_splits() -> Iterator[Check]:
    constraints = ({"split_k": 3}, {"stream_k": 5}, {"stream_k": 7, "stages": 3}, {"stages": 4}, {"raster": 2})
    for constraint in constraints:
        name = "-".join(f"{key}{value}" for key, value in constraint.items())
        tiles = tuple(sorted(constraint.items()))
        yield product_check("mma-split", f"{name}-whole", "float16", (256, 192, 512), unit="mma", tiles=tiles)
        yield product_check("mma-split", f"{name}-odd", "bfloat16", (131, 197, 387), "nt", unit="mma", tiles=tiles)


def _matrix_programs() -> Iterator[Check]:
    a, b = ("A", ("float16", (150, 88))), ("B", ("float16", (88, 104)))
    product = "S[m,n] +=! A[m,k].cast(`float32`) * B[k,n].cast(`float32`)"
    family = "mma-epilogue"
    yield Check(
        "bias-relu", family, f"{product}; C[m,n] = (S[m,n] + bias[n]).call(`max`, [0.0])", (a, b, ("bias", ("float32", (104,))))
    )
    yield Check(
        "residual-gelu",
        family,
        f"{product}; C[m,n] = gelu(S[m,n]).cast(`float16`) + R[m,n]",
        (a, b, ("R", ("float16", (150, 104)))),
    )
    yield Check("row-sum", family, f"{product}; T[m] +=! S[m,n]; C[m,n] = S[m,n] / (abs(T[m]) + 1.0)", (a, b))
    yield Check("scale-cast", family, f"{product}; C[m,n] = (S[m,n] * 0.0625).cast(`bfloat16`)", (a, b))
    wide = ("B", ("float16", (88, 1500)))
    narrow = ("B", ("float16", (88, 48)))
    for name, other in (("row-sum-alone", b), ("row-sum-alone-narrow", narrow), ("row-sum-alone-wide", wide)):
        yield Check(name, family, f"{product}; T[m] +=! S[m,n]", (a, other))
    softmax = "h[m] >=! S[m,n]; e[m,n] = exp(S[m,n] - h[m]); t[m] +=! e[m,n]; C[m,n] = e[m,n] / t[m]"
    yield Check("softmax", family, f"{product}; {softmax}", (a, b))
    yield Check("softmax-wide", family, f"{product}; {softmax}", (a, wide))
    family = "mma-shapes"
    yield Check(
        "batched", family, "C[b,m,n] +=! A[b,m,k] * B[b,k,n]", (("A", ("float16", (3, 70, 40))), ("B", ("float16", (3, 40, 56))))
    )
    yield Check(
        "conv-nhwc",
        family,
        "Y[n,y,x,f] +=! X[n,y*2+r,x*2+s,c] * W[r,s,c,f] where y in 11, x in 9",
        (("X", ("float16", (2, 23, 19, 24))), ("W", ("float16", (3, 3, 24, 40)))),
    )
    inside = "y+r-1 >= 0, y+r-1 < 14, x+s-1 >= 0, x+s-1 < 13"
    yield Check(
        "conv-nchw",
        family,
        f"Y[n,f,y,x] +=! X[n,c,y+r-1,x+s-1].when([{inside}], 0.0) * W[f,c,r,s] where y in 14, x in 13",
        (("X", ("bfloat16", (2, 16, 14, 13))), ("W", ("bfloat16", (33, 16, 3, 3)))),
    )


def _scalar() -> Iterator[Check]:
    family = "simt"
    for dtype in ("float32", "float64", "int32", "int64"):
        for name in ("whole", "odd"):
            yield product_check(family, name, dtype, SHAPES[name], unit="simt")
    for layout in LAYOUTS:
        yield product_check(family, "by2", "float32", SHAPES["by2"], layout, unit="simt")
    for dtype in ("float32", "float16", "float64"):
        yield product_check(family, "tiny", dtype, TINY)
    yield product_check(family, "half", "float16", SHAPES["odd"], "nt", unit="simt")
    yield product_check(family, "split", "float32", (67, 65, 1029), unit="simt", tiles=(("split_k", 3),))
    yield product_check(family, "stages", "float32", (128, 192, 256), unit="simt", tiles=(("stages", 3),))
    yield Check(
        "batched", family, "C[b,m,n] +=! A[b,k,m] * B[b,n,k]", (("A", ("float32", (5, 31, 45))), ("B", ("float32", (5, 37, 31))))
    )


def _maps() -> Iterator[Check]:
    family = "map"
    yield Check("add-4097", family, "y[i] = a[i] + b[i]", (("a", ("float32", (4097,))), ("b", ("float32", (4097,)))))
    yield Check("shifted", family, "y[i] = a[i + 1] * 2.0 - a[i] where i in 8191", (("a", ("float16", (8192,))),))
    yield Check("gelu-bf16", family, "y[i,j] = gelu(x[i,j] + b[j])", (("x", ("bfloat16", (37, 515))), ("b", ("bfloat16", (515,)))))
    yield Check(
        "bits",
        family,
        "y[i] = bitwise_xor(a[i] << 3, b[i] >> 1) % 7",
        (("a", ("int32", (1003,))), ("b", ("int32", (1003,)))),
        hints={"a": {"range": [0, 1 << 20]}},
    )
    yield Check("casts", family, "y[i] = x[i].cast(`float8_e4m3fn`); z[i] = x[i].cast(`int8`)", (("x", ("float32", (2050,))),))
    yield Check(
        "select",
        family,
        "y[i,j] = where(x[i,j] > 0.5, sin(x[i,j]), x[i,j] * m[j])",
        (("x", ("float64", (63, 130))), ("m", ("float64", (130,)))),
    )
    yield Check("scalar", family, "y[] = x[] + 1.0", (("x", ("float32", ())),))


def _layouts() -> Iterator[Check]:
    family = "layout"
    for dtype in ("float32", "float16", "int8"):
        yield Check(f"transpose-{dtype}", family, "y[j,i] = x[i,j]", (("x", (dtype, (517, 259))),))
    yield Check("permute", family, "y[d,b,a,c] = x[a,b,c,d]", (("x", ("float16", (5, 7, 33, 18))),))
    yield Check(
        "concat",
        family,
        "y[i,j] = a[i,j].when([j < 35], b[i,j-35]) where j in 102",
        (("a", ("float32", (40, 35))), ("b", ("float32", (40, 67)))),
    )
    yield Check("pad-reverse", family, "y[i] = x[999-i].when([i < 1000], 0.0) where i in 1023", (("x", ("float32", (1000,))),))
    yield Check("broadcast", family, "y[i,j,k] = x[i,k] where j in 65", (("x", ("bfloat16", (31, 129))),))


def _windows() -> Iterator[Check]:
    family = "window"
    inside = "y+r-1 >= 0, y+r-1 < 29, x+s-1 >= 0, x+s-1 < 31"
    for dtype in ("float32", "float16"):
        yield Check(
            f"depthwise-{dtype}",
            family,
            f"Y[n,c,y,x] +=! X[n,c,y+r-1,x+s-1].when([{inside}], 0.0) * W[c,r,s] where y in 29, x in 31",
            (("X", (dtype, (2, 5, 29, 31))), ("W", (dtype, (5, 3, 3)))),
        )
    yield Check(
        "maxpool",
        family,
        "Y[n,y,x] >=! X[n,y*2+r,x*2+s] where y in 27, x in 30, r in 3, s in 3",
        (("X", ("float32", (6, 55, 61))),),
    )
    yield Check("avgpool", family, "Y = avg_pool2d(X, kernel=3, stride=2, padding=1)", (("X", ("float32", (2, 6, 41, 43))),))
    yield Check(
        "stencil",
        family,
        "y[i,j] = (x[i,j+1] + x[i+2,j+1] + x[i+1,j] + x[i+1,j+2] - x[i+1,j+1] * 4.0) where i in 257, j in 301",
        (("x", ("float32", (259, 303))),),
    )


def _reductions() -> Iterator[Check]:
    family = "reduction"
    for dtype in ("float32", "float16", "float64"):
        yield Check(f"rows-{dtype}", family, "y[i] +=! x[i,j]", (("x", (dtype, (37, 1003))),))
        yield Check(f"columns-{dtype}", family, "y[j] +=! x[i,j]", (("x", (dtype, (1003, 37))),))
    yield Check("all", family, "y[] +=! x[i]", (("x", ("float32", (1048577,))),))
    yield Check("middle", family, "y[i,k] >=! x[i,j,k]", (("x", ("int32", (7, 301, 19))),))
    yield Check("product", family, "y[i] *=! x[i,j]", (("x", ("float32", (65, 33))),))
    yield Check("any", family, "y[i] |=! x[i,j] > 0.99", (("x", ("float32", (129, 257))),))
    yield Check(
        "argmax",
        family,
        "m[i] >=! x[i,j]; y[i] <=! j.when([m[i] == x[i,j]], 5003).cast(`int64`)",
        (("x", ("float32", (33, 5003))),),
    )
    yield Check(
        "argmin-one-row",
        family,
        "m[i] <=! x[i,j]; y[i] <=! j.when([m[i] == x[i,j]], 70001).cast(`int32`)",
        (("x", ("bfloat16", (1, 70001))),),
    )


def _rows() -> Iterator[Check]:
    family = "rows"
    softmax = "h[i] >=! x[i,j]; e[i,j] = exp(x[i,j] - h[i]); t[i] +=! e[i,j]; y[i,j] = e[i,j] / t[i]"
    for shape in ((1, 3), (67, 1000), (3, 50257)):
        yield Check(f"softmax-{shape[0]}x{shape[1]}", family, softmax, (("x", ("float32", shape)),))
    yield Check("softmax-half", family, softmax, (("x", ("float16", (130, 515))),))
    yield Check(
        "layernorm",
        family,
        "s[i] +=! x[i,j]; c[i,j] = x[i,j] - s[i] / 769.0; q[i] +=! c[i,j] * c[i,j]; "
        "y[i,j] = c[i,j] * rsqrt(q[i] / 769.0 + 1e-05) * w[j] + b[j]",
        (("x", ("float32", (43, 769))), ("w", ("float32", (769,))), ("b", ("float32", (769,)))),
    )
    yield Check(
        "rmsnorm",
        family,
        "q[i] +=! x[i,j].cast(`float32`) * x[i,j].cast(`float32`); "
        "y[i,j] = (x[i,j].cast(`float32`) * rsqrt(q[i] / 4096.0 + 1e-05)).cast(`bfloat16`) * w[j]",
        (("x", ("bfloat16", (5, 4096))), ("w", ("bfloat16", (4096,)))),
    )


def _indexed() -> Iterator[Check]:
    yield Check("gather", "gather", "y[n,c] = table[ids[n],c]", (("table", ("float16", (1000, 72))), ("ids", ("int32", (333,)))))
    target = (("grid", ("float32", (500, 17))), ("at", ("int32", (120,))), ("x", ("float32", (120, 17))))
    yield Check("set", "scatter", "grid[at[n],c] =. x[n,c]", target)
    crowded = {"at": {"range": [0, 9]}}
    yield Check("add-crowded", "scatter", "grid[at[n],c] +=. x[n,c]", target, hints=crowded)
    yield Check("greatest", "scatter", "grid[at[n],c] >=. x[n,c]", target, hints=crowded)
    counts = (("grid", ("int32", (64,))), ("at", ("int32", (4001,))))
    yield Check("histogram", "scatter", "grid[at[n]] +=. 1", counts)


def _vectors() -> Iterator[Check]:
    family = "gemv"
    for dtype, layout in (("float16", "nt"), ("float32", "nn"), ("bfloat16", "nn")):
        yield product_check(family, "m1", dtype, (1, 515, 1030), layout)
        yield product_check(family, "m3", dtype, (3, 512, 1024), layout)
    yield Check(
        "int4-weights",
        "dequantised",
        "w[n,k] = ((q[n,k/8] >> (k%8*4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * s[n,k/128] "
        "where k in 512; y[m,n] +=! x[m,k] * w[n,k]",
        (("x", ("float16", (17, 512))), ("q", ("int32", (96, 64))), ("s", ("float16", (96, 4)))),
        hints={"q": {"range": [0, (1 << 31) - 1]}},
    )
    yield Check(
        "int8-weights",
        "dequantised",
        "w[n,k] = q[n,k].cast(`float16`) * s[n]; y[m,n] +=! x[m,k] * w[n,k]",
        (("x", ("float16", (1, 1024))), ("q", ("int8", (130, 1024))), ("s", ("float16", (130,)))),
    )


def _large() -> Iterator[Check]:
    """Yield programs that fill a device in many waves or unevenly, or have more than 2^31 elements."""
    for name, dtype, extents, layout, tiles in (
        ("square", "float16", (4096, 4096, 4096), "nn", ()),
        ("square", "bfloat16", (4096, 4096, 4096), "nn", ()),
        ("ragged", "float16", (5003, 3001, 2041), "nt", ()),
        ("deep", "bfloat16", (136, 264, 65544), "tn", ()),
        ("stream", "float16", (2200, 2200, 4096), "nn", (("stream_k", 132),)),
    ):
        yield product_check(
            "mma-large", name, dtype, extents, layout, unit="mma", tiles=tiles, product=f"{','.join(LAYOUTS[layout])}->mn"
        )
    yield product_check("simt-large", "square", "float32", (2048, 2048, 1024), "nn", product="mk,kn->mn")
    yield Check("outer", "map-large", "y[i,j] = a[i] + b[j]", (("a", ("int8", (50021,))), ("b", ("int8", (43013,)))))
    yield Check("transpose", "layout-large", "y[j,i] = x[i,j]", (("x", ("float16", (16387, 8191))),))
    yield Check("columns", "reduction-large", "y[j] +=! x[i,j]", (("x", ("float32", (32771, 1031))),))
    yield Check(
        "softmax",
        "rows-large",
        "h[i] >=! x[i,j]; e[i,j] = exp(x[i,j] - h[i]); t[i] +=! e[i,j]; y[i,j] = e[i,j] / t[i]",
        (("x", ("float16", (1027, 32001))),),
    )
