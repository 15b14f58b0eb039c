"""Contractions of float64 on matrix units of NVIDIA: layouts, values, machine code."""

from __future__ import annotations

import pytest
from cases_matrix import AMPERE, chosen, contraction, tiles, unit
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.codegen import dialect
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.families.common.gpu.matrix.tile import MMA_SYNC_F64, mma_tile, staged
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import ref
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.report import Plan
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source
from roller_svc.verify.lint import FindingKind, PlannedKernel, lint

HOPPER = hardware.load("nvidia-h200-sxm")
DEVICES = {"four instructions": AMPERE, "one instruction": HOPPER}
MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
NT, TN = "C[m, n] +=! A[m, k] * B[n, k]", "C[m, n] +=! A[k, m] * B[k, n]"
# Text, types of A and B, more of a tile; no extent is a multiple of a tile.
CASES = {
    "rows": (MATMUL, "float64 33 42", "float64 42 51", {}),
    "whole chunks": (MATMUL, "float64 33 40", "float64 40 54", {"stages": 4}),
    "both along k": (NT, "float64 33 42", "float64 51 42", {"stages": 3}),
    "neither along k": (TN, "float64 42 33", "float64 42 51", {}),
    "a batch": ("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", "float64 2 33 42", "float64 2 42 51", {}),
    "a guard": ("C[m, n] +=! where(k <= m, A[m, k] * B[k, n], 0.0)", "float64 33 42", "float64 42 51", {}),
    "an epilogue": (f"{MATMUL}; Y[m, n] = relu(C[m, n]) + A[m, 0]", "float64 33 42", "float64 42 51", {}),
    "converted": (f"{MATMUL.replace('A[m, k]', 'A[m, k].cast(`float64`)')}", "float32 33 44", "float64 44 52", {}),
    "computed": (f"{MATMUL.replace('B[k, n]', 'exp(B[k, n])')}", "float64 33 42", "float64 42 51", {}),
    "split": (MATMUL, "float64 33 90", "float64 90 51", {"split_k": 2}),
    "streamed": (MATMUL, "float64 33 90", "float64 90 51", {"stream_k_blocks": 3}),
}


def source_of(name: str, hw: HardwareSpec) -> KernelSource:
    text, a, b, more = CASES[name]
    found = program(text, A=a, B=b)
    (group,) = partition(found, hw)
    by_hand = tiles(group, unit(hw, "mma_f64"), (32, 64, 16), (16, 32), **more)
    return emit_plan(Plan((chosen(by_hand),)), found, (group,), hw)


@pytest.mark.emulator
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_interpreter(name: str, device: str) -> None:
    text, a, b, _ = CASES[name]
    found, hw = program(text, A=a, B=b), DEVICES[device]
    source = source_of(name, hw)
    assert ("mma_four_m8n8k4_f64" in source.text) == (hw is AMPERE)
    arrays = random_inputs(found, 3)
    module = load_emulated(CompiledKernel(source, b"", "", ()), 2, races=True)
    verdict = agrees(found, module.run(arrays), evaluate(found, arrays))
    assert verdict.ok, f"{verdict}\n{source.text}"


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("row", [8, 16, 24, 32, 48, 64, 128])
def test_half_a_warp_loads_from_different_banks(k_major: bool, row: int) -> None:
    """A load of 8 bytes is served for sixteen lanes at once: four rows of four neighbours."""
    text = NT if k_major else TN
    a, _ = operands(contraction(text, AMPERE, A=f"float64 64 {row}", B=f"float64 64 {row}"))
    extents = (16, row) if k_major else (row, 16)
    tile = staged(a, DType.FLOAT64, *extents, MMA_SYNC_F64)
    assert tile.k_major == k_major
    assert not tile.swizzled
    shared = BufferRef("a", DType.FLOAT64, (1, tile.rows, tile.row), pad=tile.pad)
    scalar = Scalar(dialect.CUDA, Names(), "int", guard_reads=True, ranges={"r": (0, 15)})
    address = eval(f"lambda s, r, c: {scalar.address(shared, (ref('s'), ref('r'), ref('c'))).replace('/', '//')}")
    assert len({address(0, r, c) % 16 for r in range(4) for c in range(4)}) == 16


def test_tiles_count_registers_and_rows_of_eight_bytes() -> None:
    group = contraction(MATMUL, AMPERE, A="float64 64 64", B="float64 64 64")
    tile = mma_tile(tiles(group, unit(AMPERE, "mma_f64"), (64, 64, 16), (32, 32)), *operands(group))
    assert (tile.fragments, tile.k_steps, tile.threads) == ((2, 4), 2, 128)
    assert tile.epilogue_row % 16 == 8  # pairs of two rows are in different banks
    assert tile.shared_bytes >= 2 * 16 * tile.epilogue_row * DType.FLOAT64.bytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", [MATMUL, NT])
def test_the_models_choice_has_the_instruction_and_spills_nothing(text: str, device: str) -> None:
    hw = DEVICES[device]
    found = program(text, A="float64 2048 2048", B="float64 2048 2048")
    (group,) = partition(found, hw)
    (best, *_), _ = rank_units(group, hw, 1, ScheduleConstraints(op_class=OpClass.MMA))
    assert best.program.unit.name == "mma_f64"
    plan = Plan((best,))
    compiled = compile_source(emit_plan(plan, found, (group,), hw))
    (result,) = lint([PlannedKernel(compiled, plan, (group,))], hw)
    assert not {finding.kind for finding in result.findings} & {FindingKind.SPILL, FindingKind.LOCAL_ARRAY, FindingKind.INSTRUCTION}
    assert result.launches[0].code.count("DMMA")
