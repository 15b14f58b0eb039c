"""Batches of estimates: many programs on many devices."""
