"""Binaries → runs on arrays: CPU, CUDA, timing, and kernels saved to a folder."""
