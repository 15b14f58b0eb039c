"""Schedule trees → CUDA and HIP source."""
