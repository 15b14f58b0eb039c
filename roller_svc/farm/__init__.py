"""Build farm: a queue of builds, the worker processes that run them, and the store of their results."""
