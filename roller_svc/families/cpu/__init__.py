"""Kernel families of CPUs."""
