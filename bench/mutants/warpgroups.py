"""Contractions of warpgroups, of the ways in which operands come and results go."""

from __future__ import annotations

from mutants.mutation import H200, Case, Tiles
from roller_svc.ir.constraints import OpClass

WGMMA = OpClass.WGMMA

BULK = Case(  # boxes both ways, two blocks that stay, an odd number of pieces of results
    "wgmma bulk", "wgmma", "C[m, n] +=! A[m, k] * B[n, k]", (("A", "float16", (296, 200)), ("B", "float16", (88, 200))),
    Tiles((128, 96, 64), (64, 96, 1), lanes=128, stages=3, blocks=2), target=H200, unit=WGMMA,
)  # fmt: skip
COPIED = Case(  # copies of threads, results through rooms of warps
    "wgmma copied", "wgmma", "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (130, 202)), ("B", "float16", (202, 66))),
    Tiles((128, 64, 32), (64, 64, 1), lanes=128, stages=4), target=H200, unit=WGMMA,
)  # fmt: skip
SHARED = Case(  # pairs of blocks that share tiles of B, which lies along n
    "wgmma cluster", "wgmma", "C[m, n] +=! A[m, k] * B[k, n]",
    (("A", "float16", (200, 200)), ("B", "float16", (200, 136))),
    Tiles((64, 128, 32), (64, 128, 1), lanes=128, stages=3, cluster=(2, 1)), target=H200, unit=WGMMA,
)  # fmt: skip
MOVED = Case(  # through registers, turned and rounded; results of 32 bits
    "wgmma moved", "wgmma", "C[m, n] +=! A[m, k] * B[k, n]", (("A", "float32", (72, 100)), ("B", "float32", (100, 40))),
    Tiles((64, 40, 32), (64, 40, 1), lanes=128, stages=2), target=H200, unit=WGMMA, allow_tf32=True,
)  # fmt: skip
