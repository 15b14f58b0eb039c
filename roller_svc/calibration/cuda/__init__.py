"""Micro-benchmarks of a CUDA device."""
