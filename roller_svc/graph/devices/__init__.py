"""Graphs over several devices: labels, cuts, and plans with copies."""
