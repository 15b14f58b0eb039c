"""Bugs planted in generated CUDA kernels: the kernels, the bugs, and what the emulator makes of them."""
