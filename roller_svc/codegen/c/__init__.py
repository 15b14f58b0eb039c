"""Code generator for CPUs: schedule trees → C source."""
