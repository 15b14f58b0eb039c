"""Semantics of a program: interpreter, rounding bounds, comparison, test inputs."""
