"""Index arithmetic: row-major numbers."""

from __future__ import annotations

import itertools

from roller_svc.analysis.index_ranges import fold
from roller_svc.ir.index import linearize, num, ref


def test_points_have_row_major_numbers() -> None:
    extents = (2, 3, 4)
    number = linearize(zip(map(ref, "abc"), extents, strict=True))
    points = itertools.product(*map(range, extents))
    assert [fold(number, dict(zip("abc", point, strict=True))) for point in points] == [num(i) for i in range(24)]


def test_a_point_without_dimensions_has_number_0() -> None:
    assert linearize(()) == num(0)
    assert linearize([(ref("a"), 5)]) == ref("a")
