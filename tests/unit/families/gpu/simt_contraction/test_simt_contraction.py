"""SIMT contractions: tile layouts and copies, and what source and estimate show of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from roller_svc import hardware
from roller_svc.analysis.index_ranges import fold
from roller_svc.analysis.operand import operands
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.post_compile import predict_resources
from roller_svc.compiler.rank import rank
from roller_svc.errors import WrongAnswerError
from roller_svc.families import prepare_model
from roller_svc.families.gpu.simt_contraction.workload import (
    SimtOperandLoads,
    chunk,
    fused_stride,
    prepare_operand_loads,
    staged_row,
)
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.expr import Const
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile
from roller_svc.ir.schedule import Let, iter_nodes
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.semantics.inputs import random_inputs
from roller_svc.toolchain import compile_source
from roller_svc.toolchain.binaries import sass

A100, T4 = hardware.load("nvidia-a100-sxm-80gb"), hardware.load("nvidia-t4")
BANKS, BANK_BYTES, WARP = 32, 4, 32


@dataclass(frozen=True)
class Contraction:
    program: TensorProgram
    hw: HardwareSpec

    @property
    def group(self) -> KernelGroup:
        (only,) = partition(self.program, self.hw)
        return only

    @property
    def feeds(self) -> SimtOperandLoads:
        return prepare_operand_loads(self.group.space, operands(self.group), self.hw.arch)

    def best(self) -> Candidate:
        return rank(self.group, self.hw, self.hw.unit_for(self.group.space.compute_dtype), 1)[0][0]

    def tiled(self, block: tuple[int, int, int] = (128, 128, 8), thread: int = 8, stages: int = 2) -> RProgram:
        """Tiles along m, n, k and of a thread."""
        sizes = dict(zip("mnk", zip(block, (thread, thread, 1), strict=True), strict=True))
        axes = self.group.space.axes
        outer, inner = (RTile(tuple((a.name, sizes.get(a.role.value, (1, 1))[i]) for a in axes)) for i in (0, 1))
        found = self.best().program
        return replace(found, block=outer, thread=inner, split_k=1, pipeline=PipelineOptions(stages))

    def source(self, tiles: RProgram) -> KernelSource:
        plan = Plan((Candidate(tiles, self.best().estimate),))
        return emit_plan(plan, self.program, (self.group,), self.hw)


def contraction(expression: str, hw: HardwareSpec, **inputs: tuple[int, ...]) -> Contraction:
    types = {name: TensorType(DType.FLOAT32, shape) for name, shape in inputs.items()}
    return Contraction(parse(expression, types), hw)


def matmul(hw: HardwareSpec = A100, size: int = 512, right: str = "k,n") -> Contraction:
    return contraction(f"C[m,n] +=! A[m,k] * B[{right}]", hw, A=(size, size), B=(size, size))


def conv(hw: HardwareSpec = A100, channels: int = 16, *, last: bool = False) -> Contraction:
    """3 x 3, channels before or behind the pixels."""
    if last:
        text = "Y[n,h,w,f] +=! X[n,h+r,w+s,c] * W[r,s,c,f] where h in 12, w in 12"
        return contraction(text, hw, X=(2, 14, 14, channels), W=(3, 3, channels, 32))
    text = "Y[n,f,h,w] +=! X[n,c,h+r,w+s] * W[f,c,r,s] where h in 12, w in 12"
    return contraction(text, hw, X=(2, channels, 14, 14), W=(32, channels, 3, 3))


# shared memory --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [16, 20, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_transposing_stores_have_no_bank_conflicts(columns: int, width: int) -> None:
    """Lanes hold `width` neighbours along k of 8, and as many columns as are left; they store one k after another."""
    row, near = staged_row(columns, 4), 8 // width
    for k in range(width):
        places = [(lane % near * width + k) * row + lane // near for lane in range(min(WARP, near * columns))]
        assert len({place % BANKS for place in places}) == len(places)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [4, 8, 36, 128])
def test_staged_rows_are_padded_to_chunks(size: int, columns: int) -> None:
    row = staged_row(columns, size)
    assert columns <= row <= columns + 2 * chunk(size)
    assert row * size % 16 == 0


@pytest.mark.parametrize("block", [(128, 128, 8), (32, 64, 8), (8, 256, 8), (64, 16, 8)])
def test_warp_is_a_rectangle_of_threads_that_share_loads(block: tuple[int, int, int]) -> None:
    found = matmul()
    tiles = found.tiled(block, 4)
    (tree,) = lower(found.group, tiles, A100)
    lets = {node.var: node.value for node in iter_nodes(tree.body) if isinstance(node, Let)}
    places = []
    for thread in range(tiles.threads):
        row, column = (fold(lets[f"{axis}.thread"], {".thread": thread}) for axis in "mn")
        assert isinstance(row, Const)
        assert isinstance(column, Const)
        places.append((int(row.value), int(column.value)))
    rows, columns = block[0] // 4, block[1] // 4
    assert sorted(places) == [(i, j) for i in range(rows) for j in range(columns)]
    for first in range(0, len(places), WARP):
        warp = places[first : first + WARP]
        height, width = (len({place[axis] for place in warp}) for axis in (0, 1))
        assert height * width == len(warp)
        if min(height, width) > 1:  # of a pair of lanes, whichever factor they read, both read the same
            assert all(warp[i][0] == warp[i ^ 1][0] and warp[i][1] == warp[i ^ 2][1] for i in range(len(warp)))


# how factors move -----------------------------------------------------------------------------------------------------
def test_copy_width_follows_contiguous_columns() -> None:
    a, b = matmul().feeds.a, matmul().feeds.b
    assert a.is_async(128)
    assert a.width(128, 8, None) == 1  # along k: each element goes to a row of its own
    assert b.width(128, 8, None) == 4
    assert b.width(126, 8, None) == 2
    assert matmul(right="n,k").feeds.b.width(128, 8, None) == 1


def test_unit_dimensions_do_not_hide_the_contiguous_axis() -> None:
    found = contraction("Y[n,f,p] +=! X[n,c,p] * W[f,c,0,0]", A100, X=(2, 32, 49), W=(16, 32, 1, 1))
    assert found.feeds.a.operand.k_major
    assert found.feeds.a.operand.vector_width == 16


def test_vector_loads_in_both_directions_without_cp_async() -> None:
    feeds = matmul(T4).feeds
    assert not feeds.a.is_async(128)
    assert feeds.a.width(128, 8, None) == feeds.b.width(128, 8, None) == 4
    assert feeds.a.width(128, 2, None) == 2


def test_computed_operand_goes_through_registers() -> None:
    found = contraction("C[m,n] +=! exp(A[m,k]) * B[k,n]", A100, A=(64, 64), B=(64, 64))
    assert not found.feeds.a.is_async(64)
    assert found.feeds.b.is_async(64)


def test_k_tiles_follow_the_contiguous_reduced_axis() -> None:
    last, first = conv(last=True), conv()
    (c,) = (a for a in last.feeds.a.reduced_axis.members if a.name == "c")
    assert last.feeds.inner_member(8) == c
    assert last.feeds.inner_member(32) is None
    assert first.feeds.inner_member(8) is None  # weights are contiguous along all of (c, r, s)


def test_contiguous_fused_axes_count_as_one() -> None:
    feeds = conv().feeds
    weights, pixels = feeds.a, feeds.b
    assert (weights.needs_division, pixels.needs_division) == (False, True)
    assert weights.operand.source is not None
    assert pixels.operand.source is not None
    assert fused_stride(weights.operand.source, weights.reduced_axis, (32, 16, 3, 3)) == 1
    assert fused_stride(pixels.operand.source, pixels.reduced_axis, (2, 16, 14, 14)) is None


# text -----------------------------------------------------------------------------------------------------------------
def test_ampere_copies_and_turing_loads() -> None:
    ampere, turing = (found.source(found.tiled()).text for found in (matmul(), matmul(T4)))
    assert "copy_async_16((" in ampere
    assert "copy_async_4((" in ampere
    assert "copy_async" not in turing


def test_one_barrier_per_k_tile() -> None:
    found = matmul()
    assert found.source(found.tiled(stages=3)).text.count("__syncthreads();") == 1
    assert found.source(found.tiled(stages=1)).text.count("__syncthreads();") == 2


def test_launch_bounds_name_the_resident_blocks() -> None:
    found = matmul()
    tiles = found.tiled()
    needs = predict_resources(found.group, tiles, A100)
    assert needs is not None
    assert blocks_per_core(needs, A100) == 2
    assert "__launch_bounds__(256, 2)" in found.source(tiles).text


@pytest.mark.emulator
@pytest.mark.parametrize("hw", [A100, T4], ids=lambda hw: hw.id)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_barrier_and_wait_is_needed(hw: HardwareSpec, stages: int) -> None:
    """Without any one of them the kernel races or reads data that has not arrived."""
    found = matmul(hw, size=64)
    source = found.source(found.tiled((32, 64, 8), 4, stages))
    arrays = random_inputs(found.program, seed=0)

    def run(text: str) -> None:
        load_emulated(CompiledKernel(replace(source, text=text), b"", "", ()), 0, races=True).run(dict(arrays))

    run(source.text)
    kernel = source.text.index("__global__")
    for found_at in re.finditer(r"__syncthreads\(\);|await_copies<\d>\(\);", source.text[kernel:]):
        start, end = (kernel + at for at in found_at.span())
        with pytest.raises(WrongAnswerError):
            run(source.text[:start] + source.text[end:])


# estimates ------------------------------------------------------------------------------------------------------------
def test_a_large_product_is_estimated_near_the_peak() -> None:
    found = matmul(size=4096)
    peak = A100.unit_for(DType.FLOAT32).peak_flops_per_s
    assert peak is not None
    share = 2 * 4096**3 / found.best().estimate.seconds / peak
    assert 0.85 <= share <= 0.95


@pytest.mark.parametrize("hw", [A100, T4], ids=lambda hw: hw.id)
def test_buffers_hide_latency(hw: HardwareSpec) -> None:
    """Use one block per core, since other blocks would hide the latency too."""
    found = contraction("C[m,n] +=! A[m,k] * B[k,n]", hw, A=(128, 4096), B=(4096, 128))
    prepared = prepare_model(found.group, hw, hw.unit_for(DType.FLOAT32))
    single, double = (prepared.estimate(found.tiled(stages=stages)).seconds for stages in (1, 2))
    assert double < 0.98 * single


def test_blocks_are_rasterised_beyond_the_l2_capacity() -> None:
    assert matmul(size=512).best().program.pipeline.raster == 1
    assert matmul(size=8192).best().program.pipeline.raster > 1


# compiled -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hw", [A100, T4], ids=lambda hw: hw.id)
@pytest.mark.parametrize("found", [matmul, conv], ids=["matmul", "conv"])
def test_compiled_kernels_keep_to_the_plan(hw: HardwareSpec, found: Callable[[HardwareSpec], Contraction]) -> None:
    case = found(hw)
    tiles = case.tiled((64, 64, 8), 4)
    source = case.source(tiles)
    compiled = compile_source(source)
    resources = compiled.resources[0]
    needs = predict_resources(case.group, tiles, hw)
    assert needs is not None
    assert resources.spill_bytes == 0
    assert resources.shared_bytes == pytest.approx(needs.shared_bytes, abs=128)
    used = needs._replace(registers_per_thread=resources.registers_per_thread)
    assert blocks_per_core(used, hw) >= blocks_per_core(needs, hw)


def test_the_machine_code_has_wide_reads_and_copies() -> None:
    found = matmul()
    kernel = compile_source(found.source(found.tiled()))
    (functions,) = sass.sass_functions([kernel.binary], A100.arch)
    counts = dict(functions[kernel.source.launches[0].name].counts)
    assert counts["FFMA"] >= 512
    assert counts["LDS.128"] == 32  # four a row, of which a step has eight
    assert counts["LDGSTS.128"] > 0
    assert counts["STG.128"] == 16
