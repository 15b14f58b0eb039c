"""GEMM on the FMA units of a GPU (SIMT)."""
