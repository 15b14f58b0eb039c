"""TMA loads of operand tiles, checked element by element against the operands' index arithmetic."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from cases_matrix import contraction
from tma_copies import arrived, value

from roller_svc import hardware
from roller_svc.analysis.operand import Operand, operands
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaLoadPlan, TmaTile, plan_tma_load
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.index import mul, num, ref
from roller_svc.ir.tensor_map import MapMode, Swizzle

HOPPER = hardware.load("nvidia-h200-sxm")


def feeds(group: KernelGroup) -> tuple[TmaLoadPlan | str, TmaLoadPlan | str]:
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    batch = group.space.role(AxisRole.BATCH)
    a, b = operands(group)
    types = dict(group.inputs)
    return plan_tma_load(a, a.memory_dtype, (m, k), batch, types), plan_tma_load(b, b.memory_dtype, (n, k), batch, types)


def joint_walk(group: KernelGroup, depth: int) -> KTileOrder:
    """The walk of k that boxes of both operands admit, with as few members as may be one value at a time."""
    (k,), found = group.space.role(AxisRole.K), feeds(group)
    walks = (KTileOrder.within(k, outer, depth) for outer in range(len(k.members)))
    return next(w for w in walks if all(isinstance(feed, TmaLoadPlan) and feed.supports(w) for feed in found))


def member_values(axis: TileAxis, place: np.ndarray) -> dict[str, np.ndarray]:
    values = {}
    for member in reversed(axis.members):
        values[member.name] = place % member.extent
        place = place // member.extent
    return values


class Case:
    """One operand of a contraction and memory for it, every element another number but 0."""

    def __init__(self, group: KernelGroup, which: int) -> None:
        self.operand: Operand = operands(group)[which]
        feed = feeds(group)[which]
        assert isinstance(feed, TmaLoadPlan), feed
        self.feed = feed
        self.batch = group.space.role(AxisRole.BATCH)
        assert self.operand.source is not None
        self.shape = dict(group.inputs)[self.operand.source.tensor].shape
        self.memory = np.arange(1, math.prod(self.shape) + 1)

    def wanted(self, place: np.ndarray, k: np.ndarray, batch: dict[str, int]) -> np.ndarray:
        """Elements at places of m or n and of k that exist."""
        source, guard = self.operand.source, self.operand.guard
        assert source is not None
        at = {**batch, **member_values(self.feed.axis, place), **member_values(self.feed.k, k)}
        inside = np.ones(np.broadcast(place, k).shape, bool) if guard is None else value(guard, at).astype(bool)
        address = np.zeros(inside.shape, np.int64)
        for index, size in zip(source.index, self.shape, strict=True):
            address = address * size + value(index, at)
        return np.where(inside, self.memory[np.where(inside, address, 0)], 0)

    def points(self, extent: int, steps: int, most: int) -> Iterator[tuple[int, int, dict[str, int]]]:
        """(tile, step, batch): all, or ends and some between."""
        tiles = range(-(-self.feed.axis.extent // extent))
        every = list(itertools.product(tiles, range(steps), *(range(m.extent) for b in self.batch for m in b.members)))
        some = every if len(every) <= most else [every[0], every[-1], *random.Random(3).sample(every, most)]
        names = [m.name for b in self.batch for m in b.members]
        return ((tile, step, dict(zip(names, batch, strict=True))) for tile, step, *batch in some)

    def check(self, tile: TmaTile, most: int = 40) -> None:
        """All elements of some tiles."""
        view = tile.tensor_map("map", "x", Swizzle.NONE)
        place_, step_ = mul(ref("tile"), num(tile.extent)), ref("step")
        starts = [(box, tile.coordinates(place_, step_, box)) for box in tile.boxes]
        assert view.end_bytes <= self.memory.size * view.dtype.bytes
        walk, axis, k = tile.k_order, self.feed.axis.extent, self.feed.k.extent
        for number, step, batch in self.points(tile.extent, walk.steps, most):
            first = number * tile.extent
            room = np.full((tile.extent, walk.depth), -1)
            at = {**batch, "tile": number, "step": step}
            for box, start in starts:
                c, o = (tuple(int(value(e, at)) for e in expressions) for expressions in start)
                brought = arrived(view, self.memory, c, o)
                assert brought.shape == (tile.rows, tile.panel)
                rows, row = (
                    slice(box.row, box.row + tile.rows),
                    slice(box.panel * tile.panel, (box.panel + 1) * tile.panel),
                )
                target = room if tile.k_major else room.T
                assert (target[rows, row] == -1).all()
                target[rows, row] = brought
            assert (room >= 0).all()
            place = (first + np.arange(tile.extent))[:, None]
            element = np.arange(walk.depth)[None, :]
            in_row = int(value(walk.inner_position(num(step), num(0)), {})) + element
            here = int(value(walk.k_position(num(step), num(0)), {})) + element
            exists = (in_row < walk.inner) & (place < axis)
            wanted = np.where(in_row < walk.inner, self.wanted(place % axis, here % k, batch), 0)
            checked = np.broadcast_to(place < axis, room.shape)  # rows beyond the end are never stored
            assert exists.any()
            assert np.array_equal(room[checked], np.broadcast_to(wanted, room.shape)[checked]), (number, step, batch)


def made(case: Case, extent: int, walk: KTileOrder, panel: int) -> TmaTile:
    tile = case.feed.tile(extent, walk, panel)
    assert isinstance(tile, TmaTile), tile
    return tile


PRODUCTS = {
    "nn": ("C[m, n] +=! A[m, k] * B[k, n]", (200, 136), (136, 264)),
    "nt": ("C[m, n] +=! A[m, k] * B[n, k]", (200, 136), (264, 136)),
    "tn": ("C[m, n] +=! A[k, m] * B[k, n]", (136, 200), (136, 264)),
    "tt": ("C[m, n] +=! A[k, m] * B[n, k]", (136, 200), (264, 136)),
    "batched": ("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", (3, 200, 136), (3, 136, 264)),
    "shared weights": ("C[b, m, n] +=! A[b, m, k] * B[k, n]", (3, 200, 136), (136, 264)),
    "heads": ("C[b, h, m, n] +=! A[b, m, h, k] * B[b, n, h, k]", (2, 40, 3, 136), (2, 72, 3, 136)),
    "two k": ("C[m, n] +=! A[m, j, k] * B[j, n, k]", (72, 3, 136), (3, 264, 136)),
    "permuted": ("C[m, n] +=! A[i, m, k] * B[k, i, n]", (5, 72, 64), (64, 5, 264)),
    "two m": ("C[x, y, n] +=! A[y, x, k] * B[k, n]", (24, 7, 136), (136, 264)),
    "three m": ("C[x, n, y, z] +=! A[z, x, y, k] * B[k, n]", (3, 5, 16, 136), (136, 264)),
    "sliced": ("C[m, n] +=! A[m + 3, k + 8] * B[k + 2, n + 4] where m in 190, n in 99, k in 120",
               (200, 136), (136, 264)),
    "strided": ("C[m, n] +=! A[2 * m, k] * B[3 * k, n] where m in 100, k in 40", (200, 136), (136, 264)),
}  # fmt: skip


def product(name: str) -> KernelGroup:
    text, a, b = PRODUCTS[name]
    shapes = (f"float16 {' '.join(map(str, shape))}" for shape in (a, b))
    return contraction(text, HOPPER, **dict(zip("AB", shapes, strict=True)))


@pytest.mark.parametrize("which", [0, 1], ids="ab")
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, which: int) -> None:
    group = product(name)
    case = Case(group, which)
    assert isinstance(feeds(group)[1 - which], TmaLoadPlan)
    for depth in (16, 64):
        walk = joint_walk(group, depth)
        for extent in (64, 128, 192):
            case.check(made(case, extent, walk, depth))


CONVOLUTIONS = {
    "1d": ("C[n, p, f] +=! X[n, p + r, c] * W[f, r, c] where p in 30", (5, 32, 24), (40, 3, 24)),
    "1d padded": (
        "C[n, p, f] +=! X[n, p + r - 1, c].when([p + r - 1 >= 0, p + r - 1 < 30], 0.0) * W[f, r, c] where p in 30",
        (5, 30, 24), (40, 3, 24)),
    "1d strided, dilated": (
        "C[n, p, f] +=! X[n, 3 * p + 2 * r - 2, c].when([3 * p + 2 * r - 2 >= 0, 3 * p + 2 * r - 2 < 31], 0.0)"
        " * W[f, r, c] where p in 10", (5, 31, 24), (40, 3, 24)),
    "2d": ("C[n, p, q, f] +=! X[n, p + r, q + s, c] * W[f, r, s, c] where p in 7, q in 9",
           (3, 9, 11, 72), (40, 3, 3, 72)),
    "2d padded": (
        "C[n, p, q, f] +=! X[n, p + r - 1, q + s - 1, c].when([p + r - 1 >= 0, p + r - 1 < 7, q + s - 1 >= 0,"
        " q + s - 1 < 9], 0.0) * W[f, r, s, c] where p in 7, q in 9", (3, 7, 9, 32), (40, 3, 3, 32)),
    "2d padded, even": (
        "C[n, p, q, f] +=! X[n, p + r - 1, q + s - 1, c].when([p + r - 1 >= 0, p + r - 1 < 8, q + s - 1 >= 0,"
        " q + s - 1 < 16], 0.0) * W[f, r, s, c] where p in 8, q in 16", (3, 8, 16, 32), (40, 3, 3, 32)),
    "2d strided, dilated, padded": (
        "C[n, p, q, f] +=! X[n, 2 * p + 2 * r - 2, 2 * q + 3 * s - 3, c].when([2 * p + 2 * r - 2 >= 0,"
        " 2 * p + 2 * r - 2 < 14, 2 * q + 3 * s - 3 >= 0, 2 * q + 3 * s - 3 < 17], 0.0) * W[f, r, s, c]"
        " where p in 7, q in 9", (3, 14, 17, 32), (40, 3, 3, 32)),
    "2d strided, even": (
        "C[n, p, q, f] +=! X[n, 2 * p + r - 1, 2 * q + s - 1, c].when([2 * p + r - 1 >= 0, 2 * p + r - 1 < 16,"
        " 2 * q + s - 1 >= 0, 2 * q + s - 1 < 16], 0.0) * W[f, r, s, c] where p in 8, q in 8",
        (3, 16, 16, 32), (40, 3, 3, 32)),
    "2d, groups outside": (
        "C[n, g, p, q, f] +=! X[n, g, p + r - 1, q + s - 1, c].when([p + r - 1 >= 0, p + r - 1 < 7, q + s - 1 >= 0,"
        " q + s - 1 < 9], 0.0) * W[g, f, r, s, c] where p in 7, q in 9", (3, 2, 7, 9, 24), (2, 40, 3, 3, 24)),
    "2d, groups inside": (
        "C[n, p, q, g, f] +=! X[n, p + r - 1, q + s - 1, g, c].when([p + r - 1 >= 0, p + r - 1 < 7, q + s - 1 >= 0,"
        " q + s - 1 < 9], 0.0) * W[g, f, r, s, c] where p in 7, q in 9", (3, 7, 9, 2, 24), (2, 40, 3, 3, 24)),
    "2d, one image": ("C[p, q, f] +=! X[p + r, q + s, c] * W[f, r, s, c] where p in 7, q in 9",
                      (9, 11, 72), (40, 3, 3, 72)),
    "2d transposed": (
        "C[n, p, q, f] +=! X[n, p - r + 2, q - s + 2, c].when([p - r + 2 >= 0, p - r + 2 < 5, q - s + 2 >= 0,"
        " q - s + 2 < 7], 0.0) * W[c, r, s, f] where p in 3, q in 5", (3, 5, 7, 32), (32, 3, 3, 40)),
    "2d, filters' gradient": (
        "C[f, r, s, c] +=! Y[n, p, q, f] * X[n, p + r - 1, q + s - 1, c].when([p + r - 1 >= 0, p + r - 1 < 7,"
        " q + s - 1 >= 0, q + s - 1 < 9], 0.0) where r in 3, s in 3", (3, 7, 9, 40), (3, 7, 9, 64)),
    "3d": ("C[n, o, p, q, f] +=! X[n, o + t, p + r, q + s, c] * W[f, t, r, s, c] where o in 4, p in 3, q in 5",
           (3, 6, 5, 7, 24), (40, 3, 3, 3, 24)),
    "3d padded, strided": (
        "C[n, o, p, q, f] +=! X[n, 2 * o + t - 1, 2 * p + r - 1, 2 * q + s - 1, c].when([2 * o + t - 1 >= 0,"
        " 2 * o + t - 1 < 6, 2 * p + r - 1 >= 0, 2 * p + r - 1 < 8, 2 * q + s - 1 >= 0, 2 * q + s - 1 < 5], 0.0)"
        " * W[f, t, r, s, c] where o in 3, p in 4, q in 3", (3, 6, 8, 5, 32), (40, 3, 3, 3, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    text, x, w = CONVOLUTIONS[name]
    first, second = ("Y", "X") if "gradient" in name else ("X", "W")
    shapes = {first: x, second: w}
    group = contraction(text, HOPPER, **{t: f"float16 {' '.join(map(str, s))}" for t, s in shapes.items()})
    pixels = 1 if "gradient" in name else 0
    for which, depth, extent in itertools.product((0, 1), (16, 32, 64), (64, 128)):
        case = Case(group, which)
        walk = joint_walk(group, depth)
        tile = made(case, extent, walk, depth if case.feed.k_major else 32)
        uneven = which == pixels and "even" not in name
        assert tile.mode is (MapMode.IM2COL if uneven else MapMode.TILED)
        assert tile.copies == len(tile.boxes) == (1 if case.feed.k_major else extent // 32)
        case.check(tile)


REFUSED = {
    "computed": ("C[m, n] +=! (A[m, k] + A[m, k]) * B[k, n]", "float16 64 64", "it is computed"),
    "converted": ("C[m, n] +=! A[m, k].cast(`float16`) * B[k, n]", "float8_e4m3fn 64 64", "float8_e4m3fn in memory"),
    "narrow": ("C[m, n] +=! A[m, k] * B[k, n] where k in 64", "float16 64 68", "not multiples of 16"),
    "gaps": ("C[m, n] +=! A[m, 2 * k] * B[k, n]", "float16 64 128", "gaps"),
    "masked": ("C[m, n] +=! A[m, k].when([k <= m], 0.0) * B[k, n]", "float16 64 64", "does not bound a dimension"),
    "gathered": ("C[m, n] +=! A[m // 2, k] * B[k, n] where m in 64", "float16 32 64", "is not an affine index"),
    "backwards": ("C[m, n] +=! A[63 - m, k] * B[k, n] where m in 64", "float16 64 64", "backwards"),
    "neighbouring windows": ("C[m, n] +=! A[m + k] * B[k, n] where m in 64", "float16 127", "not multiples of 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tma_operands(name: str) -> None:
    text, a, reason = REFUSED[name]
    group = contraction(text, HOPPER, A=a, B="float16 64 64")
    (m,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.K))
    found = plan_tma_load(operands(group)[0], DType.FLOAT16, (m, k), group.space.role(AxisRole.BATCH), dict(group.inputs))
    if isinstance(found, TmaLoadPlan):
        assert not found.supports(KTileOrder.linear(64, 64))
        tile = found.tile(64, KTileOrder.linear(64, 64), 64)
        assert isinstance(tile, str)
        found = tile
    assert reason in found


@pytest.mark.parametrize(("dtype", "panel"), [("int8", 128), ("float8_e5m2", 64), ("bool", 32), ("float32", 32)])
def test_other_types(dtype: str, panel: int) -> None:
    text = (
        "C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)"
        if dtype in ("int8", "bool")
        else ("C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`)")
    )
    group = contraction(text, HOPPER, A=f"{dtype} 72 208", B=f"{dtype} 40 208")
    (m,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.K))
    staged = DType.UINT8 if dtype == "bool" else operands(group)[0].memory_dtype
    feed = plan_tma_load(operands(group)[0], staged, (m, k), (), dict(group.inputs))
    assert isinstance(feed, TmaLoadPlan)
    tile = feed.tile(64, KTileOrder.linear(208, 128), panel)
    assert isinstance(tile, TmaTile)
    view = tile.tensor_map("map", "a", Swizzle.NONE)
    assert (view.dtype, view.tf32, view.extents) == (staged, dtype == "float32", (208, 72))
    assert view.strides_bytes == (208 * staged.bytes,)
    Case(group, 0).check(tile)


def test_multicast_slice_starts_at_its_origin() -> None:
    group = product("nt")
    case = Case(group, 0)
    tile = made(case, 64, KTileOrder.linear(136, 64), 64)
    coordinates, offsets = tile.coordinates(num(128 + 64), num(1), tile.boxes[0])
    assert [value(c, {}) for c in coordinates] == [64, 192]
    assert offsets == ()


def test_k_tile_orders() -> None:
    group = contraction("C[m, n] +=! A[m, i, j, k] * B[i, n, j, k]", HOPPER, A="float16 64 2 3 40", B="float16 2 64 3 40")
    walk = joint_walk(group, 64)
    assert walk == KTileOrder((("i", 2),), 120, 64)
    assert (walk.num_rows, walk.row_steps, walk.steps, walk.has_tail) == (2, 2, 4, True)
    assert [int(value(walk.k_position(num(s), num(3)), {})) for s in range(4)] == [3, 67, 123, 187]
    inside = walk.in_bounds(num(3), num(56))
    assert inside is not None
    assert not value(inside, {})
    assert KTileOrder.linear(128, 64).in_bounds(num(1), num(63)) is None
