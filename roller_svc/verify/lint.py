"""Lint compiled CUDA kernels: compare their machine code with their source and their plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from roller_svc.compiler.post_compile import predict_resources
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, UnitKind
from roller_svc.ir.kernel import CompiledKernel, LaunchSpec, Resources
from roller_svc.ir.report import Plan
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.toolchain.binaries.sass import SassFunction, sass_functions
from roller_svc.toolchain.nvrtc import ptxas_warnings
from roller_svc.verify.expected_instructions import ExpectedInstruction, find_expected_instructions


class FindingKind(Enum):
    SPILL = "spill"  # registers spilled to local memory
    WARNING = "ptxas-warning"  # C75xx: ptxas could not use an instruction as requested
    LOCAL_ARRAY = "local-array"  # a thread's array in local memory, without a spill
    INSTRUCTION = "missing-instruction"  # requested by the source but missing in the machine code
    MATRIX_UNIT = "no-matrix-instruction"  # planned for a matrix unit but computed elsewhere
    REGISTERS = "registers"  # more than planned, which lowers the occupancy
    SHARED = "shared-memory"  # more than planned, which lowers the occupancy


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the lint."""

    kind: FindingKind
    launch: str  # '' if the compiler does not name the launch
    message: str


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """A binary with its plan and the plan's kernel groups."""

    compiled: CompiledKernel
    plan: Plan
    groups: tuple[KernelGroup, ...]


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """The planned compute unit and block resources of a launch."""

    unit: ComputeUnit
    needs: BlockResources | None


@dataclass(frozen=True, slots=True)
class LintedLaunch:
    """A launch with its machine code. Launches that prepack or combine partial results have no plan."""

    launch: LaunchSpec
    resources: Resources
    code: SassFunction
    planned: PlannedLaunch | None


@dataclass(frozen=True, slots=True)
class LintResult:
    launches: tuple[LintedLaunch, ...]
    findings: tuple[Finding, ...]

    def count(self, kind: FindingKind) -> int:
        return sum(finding.kind is kind for finding in self.findings)


def lint(kernels: Sequence[PlannedKernel], hw: HardwareSpec) -> list[LintResult]:
    """Disassemble every launch and compare it with its plan and source. The kernels must be for one device.

    Raises ToolchainMissingError without a disassembler, and CompileError if it cannot read a binary.
    """
    codes = sass_functions([kernel.compiled.binary for kernel in kernels], hw.arch)
    return [_lint_kernel(kernel, code, hw) for kernel, code in zip(kernels, codes, strict=True)]


def _lint_kernel(kernel: PlannedKernel, code: Mapping[str, SassFunction], hw: HardwareSpec) -> LintResult:
    compiled = kernel.compiled
    planned = {
        compiled.source.main_launch(group.name): PlannedLaunch(choice.program.unit, predict_resources(group, choice.program, hw))
        for group, choice in zip(kernel.groups, kernel.plan.choices, strict=True)
    }
    launches = tuple(
        LintedLaunch(launch, used, code[launch.name], planned.get(position))
        for position, (launch, used) in enumerate(zip(compiled.source.launches, compiled.resources, strict=True))
    )
    expected = find_expected_instructions(compiled.source)
    findings = [Finding(FindingKind.WARNING, "", line) for line in ptxas_warnings(compiled.log)]
    for linted in launches:
        findings += _findings(linted, expected.get(linted.launch.name, ()), hw)
    return LintResult(launches, tuple(findings))


def matrix_opcodes(unit: ComputeUnit) -> tuple[str, ...]:
    """Return the SASS opcodes of an NVIDIA matrix unit; empty for other units."""
    if unit.kind not in (UnitKind.MMA, UnitKind.WGMMA):
        return ()
    prefix = {UnitKind.MMA: "", UnitKind.WGMMA: "G"}[unit.kind]
    if unit.in_dtype is DType.FLOAT64:
        return ("DMMA",)
    if not unit.in_dtype.is_float:
        return (f"I{prefix}MMA",)
    # float8 without its own instruction is converted to float16 (verify/expected_instructions.py)
    return (f"Q{prefix}MMA", f"H{prefix}MMA") if unit.in_dtype.bits == 8 else (f"H{prefix}MMA",)


def _findings(linted: LintedLaunch, expected: Sequence[ExpectedInstruction], hw: HardwareSpec) -> Iterator[Finding]:
    name, used, code = linted.launch.name, linted.resources, linted.code
    local = code.count("LDL", "STL")
    if used.spill_bytes:
        yield Finding(FindingKind.SPILL, name, f"{used.spill_bytes} bytes of registers go through memory")
    elif local:
        yield Finding(FindingKind.LOCAL_ARRAY, name, f"{local} accesses of an array that is not in registers")
    for instruction in expected:
        if not code.count(*instruction.opcodes):
            yield Finding(FindingKind.INSTRUCTION, name, f"{instruction.description}, but no {' or '.join(instruction.opcodes)}")
    if linted.planned is not None:
        yield from _compare_with_plan(linted, linted.planned, hw)


def _compare_with_plan(linted: LintedLaunch, planned: PlannedLaunch, hw: HardwareSpec) -> Iterator[Finding]:
    name, used = linted.launch.name, linted.resources
    opcodes = matrix_opcodes(planned.unit)
    if opcodes and not linted.code.count(*opcodes):
        yield Finding(FindingKind.MATRIX_UNIT, name, f"planned for {planned.unit.name}, but no {' or '.join(opcodes)}")
    if (needs := planned.needs) is None:
        return
    assumed = blocks_per_core(needs, hw)
    registers, shared = used.registers_per_thread, used.shared_bytes
    for kind, change, real in (
        (
            FindingKind.REGISTERS,
            f"{registers} registers per thread, planned {needs.registers_per_thread}",
            needs._replace(registers_per_thread=registers),
        ),
        (FindingKind.SHARED, f"{shared} bytes of shared memory, planned {needs.shared_bytes}", needs._replace(shared_bytes=shared)),
    ):
        if (fit := blocks_per_core(real, hw)) < assumed:
            yield Finding(kind, name, f"{change}: {fit} blocks per core, planned {assumed}")
