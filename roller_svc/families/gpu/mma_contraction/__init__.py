"""GEMM on tensor cores by warps: `mma.sync` and MFMA."""
