"""TensorProgram → calls of a library."""
