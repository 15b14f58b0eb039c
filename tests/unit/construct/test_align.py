"""Extents that alignment rules allow, on axes that no power of two divides."""

from __future__ import annotations

import pytest

from roller_svc.construct.align import matrix_tile_multiples, round_up


@pytest.mark.parametrize("rows", [129, 257, 300, 513, 1025, 2049, 4097])
def test_three_warpgroups_are_tried_where_they_pad_no_more_than_two(rows: int) -> None:
    assert 3 in matrix_tile_multiples(rows, 64, 0.2, 3)


@pytest.mark.parametrize("rows", [256, 1024, 4096])
def test_powers_of_two_have_no_other_counts(rows: int) -> None:
    counts = matrix_tile_multiples(rows, 64, 0.2, 8)
    assert all(count.bit_count() == 1 for count in counts)


def test_the_shape_bounds_the_padding_of_larger_tiles() -> None:
    assert all(count == 1 or round_up(7, 4 * count) <= 14 for count in matrix_tile_multiples(7, 4, 1.0, 8))
