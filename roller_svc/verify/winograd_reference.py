"""A program with a convolution by Winograd's algorithm: the reference computes its values and rounding bounds.

The transforms and products are statements of their own. So the bounds of the results follow from what they round,
multiply and cancel, not from a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.analysis.sum_of_products import product_of, sum_of_products
from roller_svc.analysis.winograd import TAPS, Matrix, Transforms, first_of_tile, place_in_tile, tile_of, transforms
from roller_svc.errors import InvariantError, require
from roller_svc.families.common.cpu.image_space import ImageWindowDim, image_space, tiled_dims
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Op, OpKind, Select, axes_of, substitute
from roller_svc.ir.group import TileSpace
from roller_svc.ir.index import add, logical_and, lt, mul, num, ref
from roller_svc.ir.program import (
    Axis,
    AxisKind,
    Combine,
    StatementKind,
    TensorExpr,
    TensorProgram,
    TensorType,
    identity,
)

FILTERS, INPUTS, OUTPUTS = "winograd.G", "winograd.B", "winograd.A"  # inputs: the transforms


def transformed_program(program: TensorProgram, space: TileSpace) -> tuple[TensorProgram, dict[str, NDArray[Any]]]:
    """Return the program with the convolution of a tile space transformed, and its additional inputs."""
    matrices = transforms(space.winograd_tile)
    image = image_space(space)
    if image is None:
        raise InvariantError("expected the tile space of a convolution")
    windows = {axis.name for slide in image.window_dims for axis in (slide.pixel, slide.tap) if axis is not None}
    statement = next(s for s in program.statements if s.kind is StatementKind.REDUCE and windows <= s.extents.keys())
    expansion = _Expansion(statement, matrices, tiled_dims(image))
    statements = [t for s in program.statements for t in (expansion.statements() if s is statement else (s,))]
    arrays = {
        FILTERS: _array(matrices.filters, np.float64),
        INPUTS: _array(matrices.inputs, np.float32),
        OUTPUTS: _array(matrices.outputs, np.float32),
    }
    types = {FILTERS: DType.FLOAT64, INPUTS: DType.FLOAT32, OUTPUTS: DType.FLOAT32}
    inputs = tuple((name, TensorType(types[name], array.shape)) for name, array in arrays.items())
    return replace(program, inputs=(*program.inputs, *inputs), statements=tuple(statements)), arrays


def _array(matrix: Matrix, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    return np.array([[float(x) for x in row] for row in matrix], dtype)


@dataclass(frozen=True, slots=True)
class _Expansion:
    statement: TensorExpr
    matrices: Transforms
    windows: tuple[ImageWindowDim, ...]  # that are transformed, one or two

    def statements(self) -> tuple[TensorExpr, ...]:
        """Return the statements of transformed weights, transformed inputs, products and outputs.

        The image has the output positions. Both operands of a grouped convolution may have its filters.
        """
        factors = require(sum_of_products(self.statement), "products of a convolution").factors
        pixels = set(self._pixels)
        weights = product_of([factor for factor in factors if pixels.isdisjoint(axes_of(factor))])
        source = product_of([factor for factor in factors if not pixels.isdisjoint(axes_of(factor))])
        u = self._transformed("U", weights, self._taps(TAPS), FILTERS, {})
        tiles = {s.pixel.name: first_of_tile(ref(s.pixel.name), self.matrices.m, s.dilation) for s in self.windows}
        v = self._transformed("V", self._within(source), self._taps(self.matrices.size), INPUTS, tiles)
        m = self._products(u, v)
        return u, v, m, self._outputs(m)

    @property
    def _pixels(self) -> tuple[str, ...]:
        return tuple(slide.pixel.name for slide in self.windows)

    @property
    def _positions(self) -> tuple[Axis, ...]:
        """Return the axes of a position in a tile."""
        names = ("winograd.a", "winograd.b")[: len(self.windows)]
        return tuple(Axis(name, self.matrices.size, AxisKind.SPATIAL) for name in names)

    def _taps(self, extent: int) -> tuple[Axis, ...]:
        return tuple(Axis(require(slide.tap, "taps of a window").name, extent, AxisKind.REDUCE) for slide in self.windows)

    def _within(self, source: Expr) -> Expr:
        """Return the source, 0 beyond the coordinates that the outputs need."""
        inside: Expr | None = None
        for slide, tap in zip(self.windows, self._taps(TAPS), strict=True):
            position = add(ref(slide.pixel.name), mul(ref(tap.name), num(slide.dilation)))
            inside = logical_and(inside, lt(position, num(slide.input_extent(slide.pixel.extent))))
        if inside is None:
            return source
        return Select(inside, Cast(source, DType.FLOAT32, implicit=True), identity(Combine.SUM, DType.FLOAT32), DType.FLOAT32)

    def _transformed(self, name: str, value: Expr, taps: tuple[Axis, ...], matrix: str, moved: dict[str, Expr]) -> TensorExpr:
        """Return name[a, b, ...] = sum over taps of M[a, i] * M[b, j] * value, for one or two dimensions."""
        dtype = DType.FLOAT64 if matrix == FILTERS else DType.FLOAT32
        used = axes_of(value) - {tap.name for tap in taps}
        spatial = (*self._positions, *(self._tile_axis(a) for a in self.statement.axes if a.name in used))
        body: Expr = Cast(substitute(value, moved), dtype, implicit=True)
        for position, tap in zip(self._positions, taps, strict=True):
            factor = Load(matrix, (ref(position.name), ref(tap.name)), dtype)
            body = Op(OpKind.MUL, (factor, body), dtype)
        return self._sum(name, spatial, taps, body)

    def _tile_axis(self, axis: Axis) -> Axis:
        """Return an axis over tiles for one over output positions; any other as a spatial one."""
        dilation = next((slide.dilation for slide in self.windows if slide.pixel.name == axis.name), None)
        extent = axis.extent if dilation is None else -(-axis.extent // (self.matrices.m * dilation)) * dilation
        return Axis(axis.name, extent, AxisKind.SPATIAL)

    def _products(self, u: TensorExpr, v: TensorExpr) -> TensorExpr:
        """Return M[a, b, ...] = sum over channels of U * V."""
        both = {axis.name: axis for axis in (*v.spatial, *u.spatial)}
        taps = {tap.name for tap in self._taps(TAPS)}
        channels = [axis for axis in self.statement.reduced if axis.name not in taps]
        spatial = (*self._positions, *(self._tile_axis(axis) for axis in self.statement.spatial))
        loads = [Load(t.output, tuple(ref(a.name) for a in t.spatial), DType.FLOAT32) for t in (u, v)]
        reduced = tuple(Axis(axis.name, both[axis.name].extent, AxisKind.REDUCE) for axis in channels)
        return self._sum("M", spatial, reduced, Op(OpKind.MUL, tuple(loads), DType.FLOAT32))

    def _outputs(self, m: TensorExpr) -> TensorExpr:
        """Return the statement's results = sum over a, b of A[p, a] * A[q, b] * M[a, b, ...], for one or two dimensions."""
        tile, slides = self.matrices.m, {slide.pixel.name: slide for slide in self.windows}
        index = [tile_of(ref(a.name), tile, slides[a.name].dilation) if a.name in slides else ref(a.name) for a in m.spatial]
        body: Expr = Load(m.output, tuple(index), DType.FLOAT32)
        for slide, position in zip(self.windows, self._positions, strict=True):
            place = place_in_tile(ref(slide.pixel.name), tile, slide.dilation)
            factor = Load(OUTPUTS, (place, ref(position.name)), DType.FLOAT32)
            body = Op(OpKind.MUL, (factor, body), DType.FLOAT32)
        reduced = tuple(replace(axis, kind=AxisKind.REDUCE) for axis in self._positions)
        return replace(self.statement, axes=(*self.statement.spatial, *reduced), body=body)

    def _sum(self, name: str, spatial: Sequence[Axis], reduced: tuple[Axis, ...], body: Expr) -> TensorExpr:
        output = f"winograd.{name}.{self.statement.output}"
        type_ = TensorType(DType.FLOAT32, tuple(axis.extent for axis in spatial))
        return TensorExpr(
            output,
            output,
            StatementKind.REDUCE,
            type_,
            (*spatial, *reduced),
            tuple(ref(a.name) for a in spatial),
            body,
            Combine.SUM,
        )
