"""Choices of a model by measurement: a tree of variables, and the search that calls of the model drive (ASTRA)."""
