"""Kernel families of GPUs."""
