"""Limits on programs."""

from __future__ import annotations

MAX_TEXT_BYTES = 64 * 1024
MAX_STATEMENTS = 64
MAX_EXPANDED_STATEMENTS = 192  # with those of operator calls, of which a selection has some fifty
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 2**48
MAX_BRACKET_DEPTH = 64
# Depth of the syntax tree: passes recurse, some with three frames per level, on a stack of 1000.
MAX_TREE_DEPTH = 128
MAX_NAME_CHARACTERS = 128
MAX_CONDITIONS = 64
# Axes of one statement: the contraction of two tensors of 16 dimensions has at most this many.
MAX_AXES = 32
