"""Compile-time comparison with Triton and TileLang: cases, and hand-written kernels for each compiler."""
