"""TensorProgram → kernel groups."""
