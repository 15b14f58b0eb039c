"""The text of a case of the corpus → stride, padding and extents of its windows."""

from __future__ import annotations

import re

# An index of the corpus's windows, `HO * 2 + KH - 1`: stride and padding.
_STRIDED = re.compile(r"\w+(?: \* (\d+))?(?: \+ \w+)?(?: - (\d+))?")
_KERNEL = re.compile(r"K[HW] in (\d+)")


def windows(expression: str, dimensions: int) -> tuple[list[int], list[int]] | None:
    """Stride and padding of both spatial dimensions, which are the last of the first tensor that is read; None where
    its indices are no windows."""
    read = re.search(r"=!? \w+\[([^\]]*)\]", expression)
    indices = read[1].split(", ") if read else []
    found = [_STRIDED.fullmatch(index) for index in indices[-2:]]
    if len(indices) != dimensions or len(found) != 2 or not all(found):
        return None
    pairs = [(int(one[1] or 1), int(one[2] or 0)) for one in found if one is not None]
    return [stride for stride, _ in pairs], [padding for _, padding in pairs]


def kernel_extents(expression: str) -> list[int]:
    """Of pooling, both extents of the window."""
    return [int(extent) for extent in _KERNEL.findall(expression)]
