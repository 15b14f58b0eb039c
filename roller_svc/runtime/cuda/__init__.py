"""CUDA modules, arrays and the driver."""
