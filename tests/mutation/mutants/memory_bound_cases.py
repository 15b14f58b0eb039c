"""Maps, reductions, windows, gathers and scatters: kernels that memory bounds."""

from __future__ import annotations

from tests.mutation.mutants.mutation import Case, Tiles

MAP = Case(
    "map",
    "map",
    "C[m, n] = A[m, n] * B[n] + A[m, n]",
    (("A", "float32", (100, 100)), ("B", "float32", (100,))),
    Tiles((32, 104), (1, 8)),
)
MAP_TAIL = Case("map with a tail", "map", "C[m] = A[m] * A[m]", (("A", "float16", (10003,)),), Tiles((4096,), (32,)))
TRANSPOSE = Case("transpose", "transpose", "C[n, m] = A[m, n]", (("A", "float32", (100, 130)),), Tiles((64, 32), (2, 8)))
ROW_SUM = Case("row sum", "reduction", "C[m] +=! A[m, n]", (("A", "float32", (50, 1001)),), Tiles((2, 512), (1, 1), lanes=128))
ROW_MAX = Case(
    "row maximum",
    "reduction",
    "C[m] >=! A[m, n] - 5.0",
    (("A", "float32", (3, 2503)),),
    Tiles((1, 1024), (1, 1), lanes=1024),
)
WARP_SUM = Case("sum by warps", "reduction", "C[m] +=! A[m, n]", (("A", "float16", (21, 1000)),), Tiles((4, 256), (1, 8), lanes=32))
COLUMN_SUM = Case("column sum", "reduction", "C[n] +=! A[m, n]", (("A", "float32", (1000, 50)),), Tiles((8, 128), (2, 1), lanes=32))
GRID_SUM = Case(
    "sum over blocks",
    "reduction over blocks",
    "C[0] +=! A[m]",
    (("A", "float32", (100003,)),),
    Tiles((4096,), (1,), lanes=512, split_k=16),
)
SOFTMAX = Case(
    "softmax",
    "softmax",
    "M[m] >=! A[m, n]; E[m, n] = exp(A[m, n] - M[m]); S[m] +=! E[m, n]; C[m, n] = E[m, n] / S[m]",
    (("A", "float32", (21, 1001)),),
    Tiles((4, 1024), (1, 1), lanes=64),
    ranges=(("A", -130, -110),),
)
NORM = Case(
    "layer norm",
    "norm",
    "S[m] +=! A[m, n]; V[m] +=! (A[m, n] - S[m] / 2000.0) * (A[m, n] - S[m] / 2000.0);"
    "C[m, n] = (A[m, n] - S[m] / 2000.0) / sqrt(V[m] / 2000.0 + 1e-5) * G[n]",
    (("A", "float32", (4, 2000)), ("G", "float32", (2000,))),
    Tiles((1, 2048), (1, 4), lanes=64),
)
ODD_NORM = Case(
    "norm of odd rows",
    "norm",
    "V[m] +=! A[m, n] * A[m, n]; C[m, n] = A[m, n] / sqrt(V[m] / 523.0 + 1e-5) * G[n]",
    (("A", "float16", (67, 523)), ("G", "float16", (523,))),
    Tiles((4, 1024), (2, 8), lanes=64),
)
DEPTHWISE = Case(
    "depthwise",
    "window",
    "O[n, c, h, w] +=! X[n, c, h + r, w + s] * K[c, r, s] where h in 30, w in 30",
    (("X", "float32", (2, 4, 32, 32)), ("K", "float32", (4, 3, 3))),
    Tiles((1, 4, 30, 16, 9), (1, 1, 2, 4, 1)),
)
POOL = Case(
    "pooling",
    "window",
    "O[n, h, w] >=! X[n, h * 2 + r - 1, w * 2 + s - 1].when([h * 2 + r - 1 >= 0, h * 2 + r - 1 < 31,"
    " w * 2 + s - 1 >= 0, w * 2 + s - 1 < 31], -1e30) - 5.0 where h in 16, w in 16, r in 3, s in 3",
    (("X", "float32", (6, 31, 31)),),
    Tiles((2, 16, 16, 9), (1, 1, 8, 1)),
)
GEMV = Case(
    "matrix by vector",
    "gemv",
    "C[m] +=! A[m, k] * B[k]",
    (("A", "float16", (98, 1000)), ("B", "float16", (1000,))),
    Tiles((20, 512), (4, 8), lanes=32),
)
THIN = Case(
    "thin product",
    "gemv",
    "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (3, 1000)), ("B", "float16", (1000, 200))),
    Tiles((3, 16, 64), (3, 8, 1), lanes=16),
)
SCATTER = Case(
    "scatter",
    "scatter",
    "C[I[i], n] +=. A[i, n]",
    (("C", "float32", (8, 30)), ("I", "int32", (100,)), ("A", "float32", (100, 30))),
    Tiles((16, 32), (2, 8)),
)
SCATTER_BYTES = Case(
    "scatter of bytes",
    "scatter",
    "C[I[i]] +=. A[i]",
    (("C", "int8", (9,)), ("I", "int32", (500,)), ("A", "int8", (500,))),
    Tiles((64,), (2,)),
)
SCATTER_HALVES = Case(
    "scatter of halves",
    "scatter",
    "C[I[i]] +=. A[i]",
    (("C", "float16", (9,)), ("I", "int32", (100,)), ("A", "float16", (100,))),
    Tiles((64,), (2,)),
)
GREATEST = Case(
    "greatest by place",
    "scatter",
    "C[I[i]] >=. A[i]",
    (("C", "float32", (60,)), ("I", "int32", (100,)), ("A", "float32", (100,))),
    Tiles((64,), (2,)),
)
GATHER = Case(
    "gather",
    "gather",
    "Y[i, n] = T[I[i], n]",
    (("T", "float16", (50, 36)), ("I", "int64", (45,))),
    Tiles((64, 64), (1, 8)),
)
