"""Kernels saved to a folder."""
