"""Parse stride, padding and extents of sliding windows from the expression of a corpus case."""

from __future__ import annotations

import re

# An index such as `HO * 2 + KH - 1`: stride and padding.
_STRIDED = re.compile(r"\w+(?: \* (\d+))?(?: \+ \w+)?(?: - (\d+))?")
_KERNEL = re.compile(r"K[HW] in (\d+)")


def windows(expression: str, dimensions: int) -> tuple[list[int], list[int]] | None:
    """Return the strides and paddings of the last two dimensions of the first tensor read.

    Returns None if its indices do not describe windows.
    """
    read = re.search(r"=!? \w+\[([^\]]*)\]", expression)
    indices = read[1].split(", ") if read else []
    matches = [_STRIDED.fullmatch(index) for index in indices[-2:]]
    if len(indices) != dimensions or len(matches) != 2 or not all(matches):
        return None
    pairs = [(int(match[1] or 1), int(match[2] or 0)) for match in matches if match is not None]
    return [stride for stride, _ in pairs], [padding for _, padding in pairs]


def kernel_extents(expression: str) -> list[int]:
    """Return both extents of a pooling window."""
    return [int(extent) for extent in _KERNEL.findall(expression)]
