"""Kernels saved to a directory."""
