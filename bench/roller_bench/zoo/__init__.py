"""Whole models against other engines: one process for each model, engine and number of threads."""
