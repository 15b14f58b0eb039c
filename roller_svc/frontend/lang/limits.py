"""What a program may not exceed."""

from __future__ import annotations

MAX_TEXT_BYTES = 64 * 1024
MAX_STATEMENTS = 64
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 2**48
MAX_BRACKET_DEPTH = 64
# Of the syntax tree: passes over it recurse, some with three frames a level, on a stack of 1000.
MAX_TREE_DEPTH = 128
MAX_NAME_CHARACTERS = 128
MAX_CONDITIONS = 64
# Of one statement: two tensors of 16 dimensions contracted have at most so many.
MAX_AXES = 32
