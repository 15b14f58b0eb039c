"""Threads that do not divide the items of a copy: each item once, constant steps, registers by ptxas."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.post_compile import predict_resources
from roller_svc.compiler.rank import rank
from roller_svc.families.gpu.simt_contraction.copy_rounds import DividedThreads, divide_threads, own_addresses
from roller_svc.families.gpu.simt_contraction.staging import THREAD
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.expr import AxisRef, Const, Expr, Op, OpKind
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import ref
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RTile
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import availability, compile_source

A100, T4 = hardware.load("nvidia-a100-sxm-80gb"), hardware.load("nvidia-t4")
ROUND = ".round"


def value_of(expr: Expr, at: dict[str, int]) -> int:
    """Return the value of an index or a condition."""
    match expr:
        case Const(value=value):
            return int(value)
        case AxisRef(name=name):
            return at[name]
        case Op(kind=kind, args=(x, y)):
            a, b = value_of(x, at), value_of(y, at)
            return {
                OpKind.ADD: a + b,
                OpKind.MUL: a * b,
                OpKind.LT: int(a < b),
                OpKind.LOR: int(a or b),
                OpKind.FLOORDIV: a // b if b else 0,
                OpKind.MOD: a % b if b else 0,
            }[kind]
    raise AssertionError(expr)


def divided(extents: tuple[int, ...], threads: int) -> DividedThreads:
    found = divide_threads(extents, threads, 1)
    assert found is not None
    return found


CASES = [
    ((8, 64, 1), 96), ((8, 64, 2), 96), ((8, 80, 4), 96), ((96, 8, 1), 160), ((128, 16, 1), 160), ((32, 8, 4), 96),
    ((32, 16, 3), 224), ((2, 112, 2), 288), ((16, 32, 5), 192), ((128, 8, 1), 224),
]  # fmt: skip


@pytest.mark.parametrize(("extents", "threads"), CASES)
def test_each_item_has_one_thread_and_round(extents: tuple[int, ...], threads: int) -> None:
    found = divided(extents, threads)
    positions, has_item = found.positions(ref(THREAD), ref(ROUND)), None
    if found.is_partial:
        has_item = found.has_item(found.partial_digit(ref(THREAD)), ref(ROUND))
    places = [{THREAD: thread, ROUND: i} for thread in range(threads) for i in range(found.rounds)]
    items = [tuple(value_of(position, at) for position in positions) for at in places if has_item is None or value_of(has_item, at)]
    assert sorted(items) == sorted(itertools.product(*map(range, extents)))


@pytest.mark.parametrize(("extents", "threads"), CASES)
def test_steps_of_rounds_are_equal_for_all_threads(extents: tuple[int, ...], threads: int) -> None:
    found = divided(extents, threads)
    for position in found.positions(ref(THREAD), ref(ROUND)):
        for i in range(found.rounds):
            steps = {value_of(position, {THREAD: t, ROUND: i}) - value_of(position, {THREAD: t, ROUND: 0}) for t in range(threads)}
            assert len(steps) == 1


@pytest.mark.parametrize("threads", [32, 64, 128, 256, 512])
def test_powers_of_two_are_numbered_through(threads: int) -> None:
    for extents in itertools.product((8, 32, 64, 128), (8, 16, 32), (1, 2)):
        assert own_addresses(extents, threads) == 0
        assert divide_threads(extents, threads, 1) is None


def test_rounds_grow_only_by_fewer_registers_than_addresses_take() -> None:
    extents, threads = (128, 8, 1), 224  # five rounds numbered through, eight divided
    assert own_addresses(extents, threads) == 3
    assert divided(extents, threads).rounds == 8
    assert divide_threads(extents, threads, 4) is None


# kernels --------------------------------------------------------------------------------------------------------------
GEMM = {"A": (200, 72), "B": (72, 200)}
PROGRAMS = {
    "rows along k": ("C[m,n] +=! exp(A[m,k]) * B[k,n]", GEMM),
    "rows along m": ("C[m,n] +=! exp(A[k,m]) * B[k,n]", {"A": (72, 200), "B": (72, 200)}),
    "scales": (
        "C[m,n] +=! A[m,k] * (B[k,n] * S[n] + T[k])", {"A": (200, 72), "B": (72, 200), "S": (200,), "T": (72,)}),
    "convolution": (
        "Y[n,f,h,w] +=! X[n,c,h+r,w+s].call(`max`, [0.0]) * W[f,c,r,s] where h in 8, w in 8",
        {"X": (3, 8, 10, 10), "W": (112, 8, 3, 3)}),
}  # fmt: skip
TILES = [((64, 96, 8), 8), ((128, 80, 16), 8), ((48, 32, 8), 4), ((64, 48, 16), 4), ((112, 128, 8), 8)]


class Forced:
    """A program with a tile."""

    def __init__(self, name: str, hw: HardwareSpec, block: tuple[int, int, int], thread: int, stages: int = 2) -> None:
        text, shapes = PROGRAMS[name]
        self.hw = hw
        self.compute: TensorProgram = parse(text, {x: TensorType(DType.FLOAT32, shape) for x, shape in shapes.items()})
        (self.group,) = partition(self.compute, hw)
        best = rank(self.group, hw, hw.unit_for(DType.FLOAT32), 1)[0][0]
        sizes = dict(zip("mnk", zip(block, (thread, thread, 1), strict=True), strict=True))
        outer, inner = (
            RTile(tuple((axis.name, sizes.get(axis.role.value, (1, 1))[i]) for axis in self.group.space.axes)) for i in (0, 1)
        )
        pipeline = PipelineOptions(stages)
        self.tiles = replace(best.program, block=outer, thread=inner, split_k=1, pipeline=pipeline)
        self.estimate = best.estimate

    @property
    def source(self) -> KernelSource:
        return emit_plan(Plan((Candidate(self.tiles, self.estimate),)), self.compute, (self.group,), self.hw)


@pytest.mark.emulator
@pytest.mark.parametrize("hw", [A100, T4], ids=lambda hw: hw.id)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("block", "thread"), TILES, ids=str)
def test_results_are_those_of_the_reference(name: str, hw: HardwareSpec, block: tuple[int, int, int], thread: int) -> None:
    forced = Forced(name, hw, block, thread)
    arrays = random_inputs(forced.compute, 1)
    got = load_emulated(CompiledKernel(forced.source, b"", "", ()), 1, races=True).run(arrays)
    agreement = agrees(forced.compute, got, evaluate(forced.compute, arrays))
    assert agreement.ok, agreement.detail


@pytest.mark.parametrize("hw", [A100, T4], ids=lambda hw: hw.id)
@pytest.mark.parametrize(
    ("name", "block"),
    [("rows along k", (64, 96, 8)), ("rows along m", (128, 80, 16)), ("scales", (96, 128, 32)), ("convolution", (96, 128, 16))],
)
def test_ptxas_does_not_spill_where_the_estimate_fits(name: str, block: tuple[int, int, int], hw: HardwareSpec) -> None:
    if not (toolchain := availability(hw)).ok:
        pytest.skip(toolchain.reason)
    forced = Forced(name, hw, block, 8)
    assert predict_resources(forced.group, forced.tiles, hw) is not None
    assert compile_source(forced.source).resources[0].spill_bytes == 0
