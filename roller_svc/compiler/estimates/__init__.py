"""Estimates of many programs on many devices, in batches."""
