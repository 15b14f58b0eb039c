"""GEMM on a CPU: packed panels and a register-blocked micro-kernel (BLIS)."""
