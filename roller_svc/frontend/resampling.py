"""Resampling of dimensions by known positions, for every importer of models."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from roller_svc.frontend.graph_builder import Array, GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType

# Denominators of scales that an index formula is sought for.
_MAX_DENOMINATOR = 1 << 12


def add_selection(builder: GraphBuilder, x: Operand, indices: Mapping[int, tuple[Array, float]]) -> Operand:
    """Select elements along dimensions: by index arithmetic where a formula gives the indices, else by a gather.

    Args:
        builder: the graph.
        x: the tensor.
        indices: for each dimension, the elements that are selected, and their number for one of the operand.
    """
    formulas: dict[int, tuple[int, int, int]] = {}
    for axis, (index, scale) in indices.items():
        formula = fit_index(index, x.shape[axis], scale)
        if formula is None:
            x = builder.call("gather", [x, builder.add_constant(index, DType.INT64)], axis=axis)
        else:
            formulas[axis] = formula
    if not formulas:
        return x
    numerators, offsets, denominators = (tuple(formula[i] for formula in formulas.values()) for i in range(3))
    return builder.call(
        "resample_nearest",
        [x],
        axes=list(formulas),
        extents=[len(indices[axis][0]) for axis in formulas],
        numerators=numerators,
        offsets=offsets,
        denominators=denominators,
    )


def add_interpolation(builder: GraphBuilder, x: Operand, axis: int, starts: Array, weights: Array, scale: float) -> Operand:
    """Return weighted sums of neighbours along a dimension.

    Args:
        builder: the graph.
        x: the tensor.
        axis: the dimension.
        starts: the first neighbour of each element of the result. Neighbours outside are the nearest inside.
        weights: those of the neighbours, [elements, neighbours].
        scale: elements of the result for one of the operand.
    """
    dtype = DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32
    operands = [x, builder.add_constant(np.ascontiguousarray(weights.T).astype(dtype.value), dtype)]
    formula = fit_index(starts - starts.min(), int(np.ptp(starts)) + 1, scale)
    if formula is None:
        operands.append(builder.add_constant(starts, DType.INT64))
        return builder.call("resample", operands, axis=axis)
    a, b, c = formula
    # The formula holds between its bounds only; the least and the last position must be on it.
    exact = (np.arange(len(starts)) * a + b) // c + starts.min()
    if not np.array_equal(exact, starts):
        operands.append(builder.add_constant(starts, DType.INT64))
        return builder.call("resample", operands, axis=axis)
    return builder.call("resample", operands, axis=axis, numerator=a, offset=b + int(starts.min()) * c, denominator=c)


def fit_index(index: Array, size: int, scale: float) -> tuple[int, int, int] | None:
    """Return integers of a formula `(i * a + b) // c`, kept from 0 to size - 1, that gives these indices.

    None: there is none for a fraction near the scale.
    """
    count = len(index)
    slopes = [Fraction(1 / scale).limit_denominator(_MAX_DENOMINATOR), Fraction(size, count)]
    if count > 1:
        slopes += [Fraction(size - 1, count - 1), Fraction(int(index[-1] - index[0]), count - 1)]
    i = np.arange(count, dtype=np.int64)
    for slope in dict.fromkeys(slopes):
        for factor in (1, 2, 4):
            a, c = slope.numerator * factor, slope.denominator * factor
            below, above = index * c - i * a, (index + 1) * c - 1 - i * a
            low, high = below[index > 0], above[index < size - 1]
            least = int(low.max()) if low.size else min(int(above.min()), 0)
            most = int(high.min()) if high.size else max(least, 0)
            if least <= most:
                return a, min(max(0, least), most), c
    return None
