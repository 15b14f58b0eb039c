"""Measurements of the project itself."""
