"""Parts of tensor-core kernels: fragments, staging, multistage pipeline, epilogue, stream-K."""
