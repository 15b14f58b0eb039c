"""Checks of compiled kernels: corpora, results, SASS lint."""
