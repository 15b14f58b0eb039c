"""Verification of compiled kernels: results, corpora, SASS lint."""
