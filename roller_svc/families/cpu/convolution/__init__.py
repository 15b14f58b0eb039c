"""Direct convolution on a CPU: staged input patches, packed weights, the micro-kernel of GEMM."""
