"""Vector code of C kernels: GCC vector extensions and intrinsics."""
