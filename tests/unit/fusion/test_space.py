"""Tile spaces: which loads of a tensor are one access, what each counts, and what data chooses."""

from __future__ import annotations

import pytest

import roller_svc
from roller_svc.compiler.partition_cache import partition
from roller_svc.frontend.parse import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import TileSpace
from roller_svc.ir.program import TensorType

H200 = load("nvidia-h200-sxm")


def space_of(text: str, **shapes: tuple[int, ...]) -> TileSpace:
    types = {n: TensorType(DType.INT32 if n in "ij" else DType.FLOAT32, shape) for n, shape in shapes.items()}
    (group,) = partition(parse(text, types), H200)
    return group.space


def offsets_of(space: TileSpace, tensor: str) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(dim.offsets for dim in a.dims) for a in space.accesses if a.tensor == tensor]


@pytest.mark.parametrize(
    ("text", "shape", "accesses", "elements"),
    [
        ("y[r, c] = x[r, c] * x[r, c + 64] where c in 64", (8, 128), 2, 8 * 128),  # halves
        ("y[r, c] = x[r, c] * x[r, c + 20] where c in 20", (8, 40), 1, 8 * 40),  # less than a line apart
        ("y[r, c] = x[r, c] + x[r, c + 1] + x[r, c + 2] where c in 62", (8, 64), 1, 8 * 64),  # taps of a stencil
        ("y[r, c] = x[r, c] + x[r + 1, c] where r in 7", (8, 64), 1, 8 * 64),
        ("y[r, c] = x[r, 2 * c] + x[r, 2 * c + 1] where c in 32", (8, 64), 1, 8 * 64),  # pairs
        ("y[r] = x[r, 0] + x[r, 3]", (8, 4), 1, 8 * 2),  # columns of one line
        ("y[r] = x[r, 0] + x[r, 64]", (8, 128), 2, 8 * 2),  # of two
        ("y[c] = x[c] + x[c + 1000] + x[c + 2000] where c in 2000", (4000,), 1, 4000),  # they overlap
        ("y[c] = x[c] + x[c + 1000] + x[c + 2000] where c in 1000", (3000,), 3, 3000),
        ("y[r, c] = x[r, c] + x[c, r] where r in 8, c in 8", (8, 8), 2, 64),  # at most the tensor
    ],
)
def test_loads_that_share_elements_or_lines_are_one_access(text: str, shape: tuple[int, ...], accesses: int, elements: int) -> None:
    space = space_of(text, x=shape)
    assert len(offsets_of(space, "x")) == accesses
    (written,) = [a for a in space.accesses if a.is_output]
    assert space.compulsory_bytes == 4 * elements + written.tensor_bytes


def test_a_tile_of_a_stencil_reads_its_halo() -> None:
    space = space_of("y[r, c] = x[r, c + 1] + x[r + 2, c + 1] + x[r + 1, c] + x[r + 1, c + 2] where r in 62, c in 62", x=(64, 64))
    (taps,) = [a for a in space.accesses if a.tensor == "x"]
    assert taps.tile_shape({"r": 4, "c": 16}) == (6, 18)
    assert taps.num_loads == 4


def test_a_tile_of_overlapping_slices_reads_each_of_them() -> None:
    (x,) = [a for a in space_of("y[c] = x[c] + x[c + 1000] where c in 2000", x=(3000,)).accesses if a.tensor == "x"]
    assert x.tile_shape({"c": 128}) == (256,)
    assert x.contiguous_elements({"c": 128}) == 128
    assert x.tile_shape({"c": 2000}) == (3000,)
    assert x.contiguous_elements({"c": 2000}) == 3000


def test_rows_that_different_data_choose_are_read_for_each() -> None:
    both = space_of("y[r, c] = x[i[r], c] + x[j[r], c]", x=(100, 64), i=(8,), j=(8,))
    one = space_of("y[r, c] = x[i[r], c] + x[i[r], c]", x=(100, 64), i=(8,))
    assert len(offsets_of(both, "x")) == 2
    assert len(offsets_of(one, "x")) == 1


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "cpu-x86-avx512"])
def test_two_halves_take_as_long_as_two_tensors(target: str) -> None:
    halves = "y[r, c] = x[r, c] * x[r, c + 4096] where c in 4096"
    tensors = "y[r, c] = x[r, c] * z[r, c]"
    shapes = {n: ("float32", (4096, size)) for n, size in (("x", 8192), ("half", 4096), ("z", 4096))}

    def seconds(text: str, **inputs: str) -> float:
        return roller_svc.estimate(text, {n: shapes[s] for n, s in inputs.items()}, targets=[target])[target][0].seconds

    assert seconds(halves, x="x") == pytest.approx(seconds(tensors, x="half", z="z"), rel=0.02)


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x"])
def test_the_cache_delivers_every_gathered_row_of_a_sum(target: str) -> None:
    inputs = {"x": ("float32", (65536, 128)), "i": ("int32", (65536, 32))}
    first = roller_svc.estimate("y[r, n] +=! x[i[r, z], n]", inputs, targets=[target])[target][0]
    cache = next(stage.seconds for stage in first.stages if stage.name == "l2")
    (level,) = [level for level in load(target).levels if level.name == "l2"]
    assert cache >= 65536 * 32 * 128 * 4 / level.bandwidth_bytes_per_s
