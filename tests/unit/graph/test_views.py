"""Which nodes are views, and where they begin."""

from __future__ import annotations

import pytest
from graphs import add_input, builder_of

from roller_svc.graph.views import view_offset_elements


@pytest.mark.parametrize(
    ("operator", "parameters", "offset"),
    [
        ("reshape", {"shape": (6, 8)}, 0),
        ("squeeze", {"axis": (1,)}, 0),
        ("unsqueeze", {"axis": (0,)}, 0),
        ("identity", {}, 0),
        ("slice", {"starts": (2,), "stops": (4,), "axes": (0,)}, 24),
        ("slice", {"starts": (0,), "stops": (1,), "axes": (0,)}, 0),
        ("slice", {"starts": (4,), "stops": (8,), "axes": (2,)}, None),  # rows of it lie apart
        ("slice", {"starts": (0,), "stops": (4,), "axes": (0,), "steps": (2,)}, None),
        ("transpose", {"permutation": (0, 2, 1)}, 0),  # the dimension of one element moves
        ("transpose", {"permutation": (2, 1, 0)}, None),
        ("relu", {}, None),
        ("cast", {"dtype": "float64"}, None),
    ],
)
def test_views(operator: str, parameters: dict[str, object], offset: int | None) -> None:
    builder, _ = builder_of()
    builder.call(operator, [add_input(builder, "x", 4, 1, 12)], **parameters)
    assert view_offset_elements(builder.nodes[0]) == offset


def test_a_slice_of_a_row_is_a_view() -> None:
    builder, _ = builder_of()
    builder.call("slice", [add_input(builder, "x", 1, 12)], starts=(3,), stops=(7,), axes=(1,))
    assert view_offset_elements(builder.nodes[0]) == 3
