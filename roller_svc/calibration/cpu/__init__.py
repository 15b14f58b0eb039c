"""Micro-benchmarks of a CPU."""
