"""GEMM on tensor cores by warpgroups: `wgmma`, TMA and warp specialisation."""
