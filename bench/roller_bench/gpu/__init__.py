"""Checks and measurements of every kernel family on an NVIDIA device (docs/gpu.md)."""
