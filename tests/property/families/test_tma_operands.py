"""Random operands: what TMA brings of them, if it can, is what their own index arithmetic says, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from tma_copies import arrived, value

from roller_svc.analysis.operand import Operand
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile, plan_tma_load
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import AxisRole, TileAxis
from roller_svc.ir.index import add, le, logical_and, lt, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, TensorType
from roller_svc.ir.tensor_map import Swizzle

EXTENTS = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 24])


@dataclass(frozen=True)
class Access:
    """An operand's load of a tensor of float16."""

    operand: Operand
    shape: tuple[int, ...]
    axis: TileAxis
    k: TileAxis
    batch: tuple[TileAxis, ...]

    def element(self, at: dict[str, np.ndarray]) -> np.ndarray:
        """Positions in memory + 1 where the guard holds, 0 elsewhere."""
        source, guard = self.operand.source, self.operand.guard
        assert source is not None
        address = np.zeros(1, np.int64)
        for index, size in zip(source.index, self.shape, strict=True):
            address = address * size + value(index, at)
        return address + 1 if guard is None else np.where(value(guard, at).astype(bool), address + 1, 0)


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    """Each dimension moves with one axis or slides over two, perhaps in steps, from an offset on, or cut off by a guard
    at one or both ends; the last one moves with the innermost axis of k or of m."""
    m = [Axis(f"m{i}", draw(EXTENTS), AxisKind.SPATIAL) for i in range(draw(st.integers(1, 3)))]
    k = [Axis(f"k{i}", draw(EXTENTS), AxisKind.REDUCE) for i in range(draw(st.integers(1, 3)))]
    batch = [Axis("b", draw(st.integers(1, 3)), AxisKind.SPATIAL)] if draw(st.booleans()) else []
    along_k = draw(st.booleans())
    lead = (k if along_k else m)[-1]
    others = draw(st.permutations([a for a in (*batch, *m, *k) if a is not lead]))
    shape: list[int] = []
    index: list[Expr] = []
    guard: Expr | None = None
    while others:
        taken = [others.pop() for _ in range(min(len(others), draw(st.sampled_from([1, 1, 1, 2]))))]
        steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in taken]
        place, low, high, guard = _placed(draw, taken, steps, guard)
        index.append(place)
        shape.append(max(1, high - low))
    row = lead.extent + draw(st.sampled_from([0, 0, 8, 40]))
    index.append(add(ref(lead.name), num(draw(st.sampled_from([0, 0, 0, row - lead.extent])))))
    shape.append(-(-row // 8) * 8)
    load = Load("A", tuple(index), DType.FLOAT16)
    operand = Operand(load, DType.FLOAT16, load, guard, DType.FLOAT16, along_k, 1)
    roles = TileAxis("m", AxisRole.M, tuple(m)), TileAxis("k", AxisRole.K, tuple(k))
    return Access(operand, tuple(shape), *roles, tuple(TileAxis(b.name, AxisRole.BATCH, (b,)) for b in batch))


def _placed(draw: st.DrawFn, axes: list[Axis], steps: list[int], guard: Expr | None) -> tuple[Expr, int, int, Expr | None]:
    """An index that stays within [0, high) where the guard holds; some start before 0, some end behind `high`."""
    before, behind = (draw(st.sampled_from([0, 0, 1, 2])) for _ in range(2))
    place: Expr = num(-before)
    for axis, step in zip(axes, steps, strict=True):
        place = add(place, mul(ref(axis.name), num(step)))
    last = sum((a.extent - 1) * s for a, s in zip(axes, steps, strict=True)) - before
    high = max(1, last + 1 - behind)
    if before:
        guard = logical_and(guard, le(num(0), place))
    if last >= high:
        guard = logical_and(guard, lt(place, num(high)))
    return place, 0, high, guard


def _matches(access: Access, tile: TmaTile, number: int, step: int, batch: dict[str, int]) -> None:
    view = tile.tensor_map("view", "a", Swizzle.NONE)
    memory = np.arange(1, math.prod(access.shape) + 1)
    assert view.end_bytes <= memory.size * 2
    walk, first = tile.k_order, number * tile.extent
    room = np.full((tile.extent, walk.depth), -1)
    target = room if tile.k_major else room.T
    for box in tile.boxes:
        c, o = (tuple(int(value(e, batch)) for e in es) for es in tile.coordinates(num(first), num(step), box))
        columns = slice(box.panel * tile.panel, (box.panel + 1) * tile.panel)
        target[box.row : box.row + tile.rows, columns] = arrived(view, memory, c, o)
    place = (first + np.arange(tile.extent))[:, None]
    element = int(value(walk.inner_position(num(step), num(0)), {})) + np.arange(walk.depth)[None, :]
    here = int(value(walk.k_position(num(step), num(0)), {})) + np.arange(walk.depth)[None, :]
    at: dict[str, np.ndarray] = {name: np.asarray(b) for name, b in batch.items()}
    for axis, position in ((access.axis, place % access.axis.extent), (access.k, here % access.k.extent)):
        for member in reversed(axis.members):
            at[member.name] = position % member.extent
            position = position // member.extent
    wanted = np.where(element < walk.inner, np.broadcast_to(access.element(at), room.shape), 0)
    inside = np.broadcast_to(place < access.axis.extent, room.shape)
    assert np.array_equal(room[inside], wanted[inside])


@given(accesses(), st.data())
@settings(max_examples=examples(250))
def test_what_arrives_is_the_operand(access: Access, data: st.DataObject) -> None:
    types = {"A": TensorType(DType.FLOAT16, access.shape)}
    feed = plan_tma_load(access.operand, DType.FLOAT16, (access.axis, access.k), access.batch, types)
    if isinstance(feed, str):  # a guard that never holds
        assert "guard" in feed
        return
    depth = data.draw(st.sampled_from([8, 16, 32]))
    for outer in range(len(access.k.members)):
        walk = KTileOrder.within(access.k, outer, depth)
        for extent in (8, 16, 64):
            tile = feed.tile(extent, walk, 8 if extent == 8 else min(depth, 16) if feed.k_major else 16)
            if isinstance(tile, str):
                continue
            last = -(-access.axis.extent // extent) - 1
            for number, step in {(0, 0), (last, walk.steps - 1), (last // 2, walk.steps // 2)}:
                batch = {b.name: data.draw(st.integers(0, b.extent - 1)) for b in access.batch}
                _matches(access, tile, number, step, batch)
