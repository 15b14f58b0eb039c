"""Benchmarks of kernels, compilation, the model and the service."""
