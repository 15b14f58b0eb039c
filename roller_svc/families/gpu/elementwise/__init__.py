"""Elementwise kernels on a GPU."""
