"""Whole models: graph → passes → kernels → one program."""
