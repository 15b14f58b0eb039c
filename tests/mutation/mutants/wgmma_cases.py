"""Contractions on warpgroups: every way to load operands and store results, and every operand type."""

from __future__ import annotations

from roller_svc.ir.constraints import OpClass
from tests.mutation.mutants.mutation import H200, Case, Tiles

WGMMA = OpClass.WGMMA

BULK = Case(  # boxes both ways, two blocks that stay, an odd number of pieces of results
    "wgmma bulk",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[n, k]",
    (("A", "float16", (296, 200)), ("B", "float16", (88, 200))),
    Tiles((128, 96, 64), (64, 96, 1), lanes=128, stages=3, blocks=2),
    target=H200,
    unit=WGMMA,
)
PINGPONG = Case(  # two consumers take an odd number of tiles in turn
    "wgmma ping-pong",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[n, k]; Y[m, n] = tanh(C[m, n])",
    (("A", "float16", (296, 136)), ("B", "float16", (88, 136))),
    Tiles((64, 96, 64), (64, 96, 1), lanes=128, stages=2, blocks=1, pingpong=True),
    target=H200,
    unit=WGMMA,
)
COPIED = Case(  # copies of threads, results through rooms of warps
    "wgmma copied",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (130, 202)), ("B", "float16", (202, 66))),
    Tiles((128, 64, 32), (64, 64, 1), lanes=128, stages=4),
    target=H200,
    unit=WGMMA,
)
SHARED = Case(  # pairs of blocks that share tiles of B, which lies along n
    "wgmma cluster",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (200, 200)), ("B", "float16", (200, 136))),
    Tiles((64, 128, 32), (64, 128, 1), lanes=128, stages=3, cluster=(2, 1)),
    target=H200,
    unit=WGMMA,
)
MOVED = Case(  # through registers, turned and rounded; results of 32 bits
    "wgmma moved",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float32", (72, 100)), ("B", "float32", (100, 40))),
    Tiles((64, 40, 32), (64, 40, 1), lanes=128, stages=2),
    target=H200,
    unit=WGMMA,
    allow_tf32=True,
)
INT8 = Case(  # rows of 64 bytes, two pieces of columns
    "wgmma int8",
    "wgmma",
    "C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)",
    (("A", "int8", (100, 160)), ("B", "uint8", (48, 160))),
    Tiles((64, 48, 64), (64, 48, 1), lanes=128, stages=2),
    target=H200,
    unit=WGMMA,
    ranges=(("A", -128, 128), ("B", 0, 256)),
)
FLOAT8 = Case(  # rows of 32 bytes, one operand through registers, turned
    "wgmma float8",
    "wgmma",
    "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)",
    (("A", "float8_e4m3fn", (64, 96)), ("B", "float8_e5m2", (96, 56))),
    Tiles((64, 56, 32), (64, 56, 1), lanes=128, stages=2),
    target=H200,
    unit=WGMMA,
    allow_tf32=True,
)
K_SPLIT = Case(  # pairs of blocks that each have half of k
    "wgmma k split",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[n, k]",
    (("A", "float16", (100, 320)), ("B", "float16", (72, 320))),
    Tiles((64, 72, 64), (64, 72, 1), lanes=128, stages=2, cluster_k=2),
    target=H200,
    unit=WGMMA,
)
FLOAT8_SUMS = Case(  # terms of one sign, whose short sums lose all the same way
    "wgmma float8 sums",
    "wgmma",
    "C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`)",
    (("A", "float8_e4m3fn", (64, 2048)), ("B", "float8_e4m3fn", (24, 2048))),
    Tiles((64, 24, 128), (64, 24, 1), lanes=128, stages=3),
    target=H200,
    unit=WGMMA,
    allow_tf32=True,
    ranges=(("A", 0, 1), ("B", 0, 1)),
)
WINDOW = Case(  # boxes of im2col, borders of zeros, two steps of channels
    "wgmma window",
    "wgmma",
    "Y[b, y, x, f] +=! X[b, y + r - 1, x + s - 1, c].when([y + r >= 1, y + r < 9, x + s >= 1, "
    "x + s < 11], 0.0) * W[f, r, s, c] where r in 3, s in 3, y in 8, x in 10",
    (("X", "float16", (2, 8, 10, 64)), ("W", "float16", (40, 3, 3, 64))),
    Tiles((64, 40, 32), (64, 40, 1), lanes=128, stages=3),
    target=H200,
    unit=WGMMA,
)
ALONG = Case(  # both along m and n, two fragments of rows, a bias, batches in turns
    "wgmma along m and n",
    "wgmma",
    "C[b, m, n] +=! A[b, k, m] * B[b, k, n]; Y[b, m, n] = relu(C[b, m, n] + v[n])",
    (("A", "float16", (2, 72, 200)), ("B", "float16", (2, 72, 96)), ("v", "float16", (96,))),
    Tiles((1, 128, 64, 32), (1, 128, 64, 1), lanes=128, stages=3, blocks=3),
    target=H200,
    unit=WGMMA,
)
PACKED = Case(  # words of eight k-tiles in registers, eleven k-tiles
    "wgmma packed",
    "wgmma",
    "W[n, k] = ((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) "
    "* S[n, k // 64] where n in 72, k in 704; C[m, n] +=! A[m, k] * W[n, k]",
    (("A", "float16", (70, 704)), ("Q", "int32", (72, 88)), ("S", "float16", (72, 11))),
    Tiles((64, 72, 64), (64, 72, 1), lanes=128, stages=3),
    target=H200,
    unit=WGMMA,
)
FOUR = Case(  # two by two blocks that share both
    "wgmma four blocks",
    "wgmma",
    "C[m, n] +=! A[k, m] * B[k, n]",
    (("A", "float16", (200, 304)), ("B", "float16", (200, 280))),
    Tiles((128, 128, 32), (64, 128, 1), lanes=128, stages=2, cluster=(2, 2)),
    target=H200,
    unit=WGMMA,
)
PARTS = Case(  # copies of threads, a last part that is shorter
    "wgmma split-k",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[n, k]",
    (("A", "bfloat16", (70, 330)), ("B", "bfloat16", (40, 330))),
    Tiles((64, 40, 32), (64, 40, 1), lanes=128, stages=3, split_k=3),
    target=H200,
    unit=WGMMA,
)
STREAM = Case(  # whole tiles and parts of tiles
    "wgmma stream-k",
    "wgmma",
    "C[m, n] +=! A[m, k] * B[n, k]",
    (("A", "float16", (130, 328)), ("B", "float16", (72, 328))),
    Tiles((64, 64, 32), (64, 64, 1), lanes=128, stages=3, stream_k=5),
    target=H200,
    unit=WGMMA,
)
ELEMENTS = Case(  # element by element, one operand computed, two warpgroups
    "wgmma elements",
    "wgmma",
    "C[m, n] +=! A[m, k] * relu(B[n, k])",
    (("A", "float16", (129, 77)), ("B", "float16", (35, 77))),
    Tiles((128, 40, 32), (64, 40, 1), lanes=128, stages=2),
    target=H200,
    unit=WGMMA,
)
