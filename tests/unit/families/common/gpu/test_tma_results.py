"""TMA stores of a contraction's outputs: each element once, at its position, and nothing else."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from cases_matrix import contraction
from tma_copies import reached, value

from roller_svc import hardware
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaLoadPlan, TmaTile, plan_tma_store
from roller_svc.ir.expr import Load
from roller_svc.ir.group import AxisRole
from roller_svc.ir.index import mul, num, ref
from roller_svc.ir.tensor_map import MapMode, Swizzle

HOPPER = hardware.load("nvidia-h200-sxm")
STORED = {
    "rows": "C[m, n] +=! A[m, k] * B[k, n]",
    "batches": "C[b, m, n] +=! A[b, m, k] * B[b, k, n]",
    "heads": "C[b, m, h, n] +=! A[b, h, m, k] * B[b, h, k, n]",
    "rows of two axes": "C[y, x, n] +=! A[x, y, k] * B[k, n]",
    "images": "C[i, p, q, n] +=! A[i, p + r, q, k] * B[r, k, n] where p in 8, q in 8",
}
SHAPES = {
    "rows": ((200, 64), (64, 136)),
    "batches": ((3, 72, 64), (3, 64, 136)),
    "heads": ((2, 3, 72, 64), (2, 3, 64, 40)),
    "rows of two axes": ((16, 5, 64), (64, 72)),
    "images": ((3, 10, 8, 32), (3, 32, 72)),
}


def results(name: str, overhangs: bool) -> tuple[TmaLoadPlan | str, tuple[int, ...], tuple[int, int, dict[str, int]]]:
    """The feed, the shape stored to, and extents of m, n and batches."""
    a, b = (f"float16 {' '.join(map(str, shape))}" for shape in SHAPES[name])
    group = contraction(STORED[name], HOPPER, A=a, B=b)
    last, types = group.statements[-1], dict(group.stored)
    type_ = types[last.output]
    (m,), (n,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N))
    batch = group.space.role(AxisRole.BATCH)
    found = plan_tma_store(Load(last.output, last.index, type_.dtype), type_.dtype, (m, n), batch, types, (overhangs, overhangs))
    return found, type_.shape, (m.extent, n.extent, {x.name: x.extent for axis in batch for x in axis.members})


@pytest.mark.parametrize("overhangs", [False, True], ids=["all tiles begin inside", "tiles begin beyond the ends"])
@pytest.mark.parametrize("name", STORED)
def test_every_element_is_stored_once(name: str, overhangs: bool) -> None:
    feed, shape, (m, n, batch) = results(name, overhangs)
    assert isinstance(feed, TmaLoadPlan), feed
    for extent, columns in ((8, 8), (16, 32), (16, 64)):
        walk = KTileOrder.linear(n, columns)
        tile = feed.tile(extent, walk, columns)
        assert isinstance(tile, TmaTile), tile
        assert tile.mode is MapMode.TILED
        view = tile.tensor_map("results", "c", Swizzle.NONE)
        assert not view.tf32
        assert view.end_bytes <= math.prod(shape) * view.dtype.bytes
        written = np.zeros(math.prod(shape), int)
        starts = [(box, tile.coordinates(mul(ref("tile"), num(extent)), ref("step"), box)[0]) for box in tile.boxes]
        for number, step, *at in itertools.product(
            range(-(-m // extent) + 2 * overhangs),
            range(walk.steps + 2 * overhangs),
            *(range(size) for size in batch.values()),
        ):
            names = {"tile": number, "step": step, **dict(zip(batch, at, strict=True))}
            for box, start in starts:
                inside, address = reached(view, tuple(int(value(c, names)) for c in start), ())
                rows = number * extent + box.row + np.arange(tile.rows)[:, None]
                cols = step * columns + box.panel * columns + np.arange(columns)[None, :]
                exists = (rows < m) & (cols < n)
                assert np.array_equal(inside.reshape(exists.shape), exists)
                np.add.at(written, address[inside], 1)
        assert (written == 1).all()
