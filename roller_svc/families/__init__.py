"""Kernel families: one folder for each kind of kernel on each kind of unit."""
