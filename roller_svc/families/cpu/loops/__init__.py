"""Elementwise programs, row and column reductions on a CPU: loop nests."""
