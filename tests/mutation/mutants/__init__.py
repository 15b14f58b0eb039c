"""Mutants of generated CUDA kernels: the kernels, the seeded faults, and what the emulator finds."""
