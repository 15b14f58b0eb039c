"""Code generation: schedule trees → kernel source."""
