"""Run compiled kernels on arrays: CPU, CUDA, emulator, timing, and kernels saved to a directory."""
