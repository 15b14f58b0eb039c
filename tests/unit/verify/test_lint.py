"""Compiled CUDA kernels held against their plans and their texts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from roller_svc import hardware, toolchain
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.post_compile import predict_resources, reestimate_plan
from roller_svc.compiler.reports import report_json
from roller_svc.compiler.request import build_request
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import ComputeUnit, UnitKind
from roller_svc.ir.kernel import CompiledKernel, Resources
from roller_svc.ir.report import BuildReport, Plan
from roller_svc.verify.expected_instructions import find_expected_instructions
from roller_svc.verify.lint import Finding, FindingKind, LintResult, PlannedKernel, lint, matrix_opcodes

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
ADA = hardware.load("nvidia-l40s")


@functools.cache
def built(expression: str, dtype: str, *shapes: tuple[int, ...]) -> BuildReport:
    inputs = {name: (dtype, shape) for name, shape in zip("AB", shapes, strict=False)}
    return build_kernel(build_request(expression, inputs, target=ADA.id, top_k=1, select="model"))


def product() -> BuildReport:
    return built(MATMUL, "float32", (512, 512), (512, 512))


def compiled_of(report: BuildReport) -> CompiledKernel:
    assert report.winner.compiled is not None
    return report.winner.compiled


def linted(report: BuildReport, *, compiled: CompiledKernel | None = None, unit: ComputeUnit | None = None) -> LintResult:
    """The lint of a build, with another binary or another unit in its plan."""
    plan = report.winner.plan
    if unit is not None:
        (choice,) = plan.choices
        tiles = dataclasses.replace(choice.program, unit=unit).with_pipeline(stages=2)
        plan = Plan((dataclasses.replace(choice, program=tiles),))
    (found,) = lint([PlannedKernel(compiled or compiled_of(report), plan, report.groups)], report.hardware)
    return found


def kinds(found: LintResult) -> list[FindingKind]:
    return [finding.kind for finding in found.findings]


def handmade(body: str, *options: str) -> LintResult:
    """The lint of a kernel with that body, as if it were what a map was planned to be."""
    report = built("C[n] = A[n] * 2", "float32", (1024,))
    source = compiled_of(report).source
    text = f'extern "C" __global__ void {source.launches[0].name}(const float *A, float *C) {{ {body} }}'
    source = dataclasses.replace(source, text=text, options=options)
    return linted(report, compiled=toolchain.compile_source(source))


def test_every_launch_has_its_code_and_its_plan() -> None:
    report = product()
    found = linted(report)
    assert [one.launch for one in found.launches] == list(compiled_of(report).source.launches)
    main = found.launches[compiled_of(report).source.main_launch("kernel0")]
    assert main.planned is not None
    assert main.planned.unit == report.winner.plan.dominant_choice.program.unit
    assert main.planned.needs == predict_resources(report.groups[0], report.winner.plan.dominant_choice.program, ADA)
    assert main.code.count("FFMA") >= 16
    assert main.code.count("HMMA") == 0
    assert sum(one.planned is None for one in found.launches) == len(found.launches) - 1


FILL = "float x[64]; for (int i = 0; i < 64; i++) x[i] = A[i];"
DRAIN = "for (int i = 0; i < 64; i++) C[i] = x[63 - i];"


def test_spills_are_found() -> None:
    found = handmade(f"{FILL} __syncthreads(); {DRAIN}", "--maxrregcount=24")
    (one,) = found.launches
    message = f"{one.resources.spill_bytes} bytes of registers go through memory"
    assert found.findings == (Finding(FindingKind.SPILL, one.launch.name, message),)


def test_an_array_in_local_memory_is_found() -> None:
    scatter = "for (int i = 0; i < 999; i++) x[(int)A[i] & 63] += x[(int)A[i + 1] & 63];"
    assert kinds(handmade(f"{FILL} {scatter} {DRAIN}")) == [FindingKind.LOCAL_ARRAY]
    assert kinds(handmade(f"{FILL} x[3] = 1; {DRAIN}")) == []


def test_warnings_of_the_assembler_are_found() -> None:
    report = product()
    line = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    compiled = dataclasses.replace(compiled_of(report), log=f"{compiled_of(report).log}\n{line}\n")
    assert Finding(FindingKind.WARNING, "", line) in linted(report, compiled=compiled).findings
    assert linted(report, compiled=compiled).count(FindingKind.WARNING) == 1


def test_a_plan_for_tensor_cores_wants_their_instructions() -> None:
    report = built(MATMUL, "float16", (512, 512), (512, 512))
    unit = next(u for u in ADA.units if u.kind is UnitKind.MMA and u.in_dtype is DType.FLOAT16)
    found = linted(report, compiled=compiled_of(product()), unit=unit)
    main = next(one for one in found.launches if one.planned is not None)
    assert main.code.count("HMMA") == 0
    finding = Finding(FindingKind.MATRIX_UNIT, main.launch.name, f"planned for {unit.name}, but no HMMA")
    assert finding in found.findings


@pytest.mark.parametrize("unit", [u for u in hardware.load("nvidia-h200-sxm").units if u.kind is not UnitKind.FMA])
def test_every_matrix_unit_has_its_instructions(unit: ComputeUnit) -> None:
    families = matrix_opcodes(unit)
    assert families
    assert all(name.endswith("MMA") for name in families)
    assert all(("G" in name) is (unit.kind is UnitKind.WGMMA) for name in families)


def test_resources_beyond_the_plan_are_found_where_fewer_blocks_fit() -> None:
    report, compiled = product(), compiled_of(product())
    main = compiled.source.main_launch("kernel0")

    def with_main(used: Resources) -> list[FindingKind]:
        resources = (*compiled.resources[:main], used, *compiled.resources[main + 1 :])
        found = linted(report, compiled=dataclasses.replace(compiled, resources=resources))
        name = compiled.source.launches[main].name
        return [finding.kind for finding in found.findings if finding.launch == name]

    needs = predict_resources(report.groups[0], report.winner.plan.dominant_choice.program, ADA)
    assert needs is not None
    planned = Resources(needs.registers_per_thread, needs.shared_bytes)
    assert with_main(planned) == []
    assert with_main(dataclasses.replace(planned, registers_per_thread=1, shared_bytes=1)) == []
    assert with_main(dataclasses.replace(planned, registers_per_thread=planned.registers_per_thread + 80)) == [
        FindingKind.REGISTERS
    ]
    assert with_main(dataclasses.replace(planned, shared_bytes=96 << 10)) == [FindingKind.SHARED]


PROMISING = """
__device__ __forceinline__ void copy_async_16(void *s, const void *m, bool i) { copy_async_8(s, m, i); }
extern "C" __global__ void __launch_bounds__(32, 1)
kernel0(const float *__restrict__ A, float *__restrict__ C) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float *const room = (float *)(shared_memory + 0);
  __shared__ __align__(16) float still[128];
  float x[4];
  copy_async_16(&room[0], &A[0], true);
  load_matrix_4(words, &room[0]);
  mma_m16n8k16_bf16(d, a, b);
  *(uint4 *)&x[0] = *(const uint4 *)&still[8];
  *(uint4 *)&C[4] = *(const uint4 *)&x[0];
}
extern "C" __global__ void kernel1(const float *A, float *C) {
  if (*(uint2 *)&A[0] == 1) *(float4 *)&room[0] = *(float4 *)&A[0];
}
extern "C" __global__ void kernel2(const float *A, float *C) {
  mma_m16n8k32_s8u8(d, a, b);
  mma_m16n8k32_e4m3e5m2(d, a, b);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
kernel3(float *C, const __grid_constant__ TensorMap map) {
  cluster_sync();
  registers_decrease<40>();
  barrier_wait(&full[0], 0);
  tma_load_2d_multicast(&room[0], &map, &full[0], 0, 0, 3);
}
extern "C" __global__ void __launch_bounds__(384, 1)
kernel4(float *C, const __grid_constant__ TensorMap map) {
  named_barrier(1, 128);
  wgmma_m64n128k16_bf16_km(d, a, b, 1);
  wgmma_m64n8k32_s8u8_kk(d, a, b, 1);
  wgmma_m64n8k32_e4m3e5m2_rk(d, a, b, 1);
  store_matrix_4_transposed(&room[0], words);
  tma_store_2d(&map, &room[0], 0, 0);
}
"""


def test_promises_of_a_text() -> None:
    source = dataclasses.replace(compiled_of(built("C[n] = A[n] * 2", "float32", (1024,))).source, text=PROMISING)
    asked = {name: {p.opcodes for p in one} for name, one in find_expected_instructions(source).items()}
    assert asked == {
        "kernel0": {("LDGSTS.128",), ("LDSM",), ("HMMA",), ("LDS.128",), ("STG.128",)},
        "kernel1": {("LDG.128",)},
        "kernel2": {("IMMA",), ("QMMA", "HMMA")},
        "kernel3": {("UCGABAR_WAIT",), ("USETMAXREG",), ("SYNCS",), ("UTMALDG",)},
        "kernel4": {("HGMMA",), ("IGMMA",), ("QGMMA",), ("STSM",), ("UTMASTG",)},
    }


def test_a_promise_that_is_not_kept_is_found() -> None:
    whole = handmade("float x[4]; *(uint4 *)&x[0] = *(const uint4 *)&A[0]; C[0] = x[0] + x[1] + x[2] + x[3];")
    assert whole.findings == ()
    # the compiler reads no more than is used
    part = handmade("float x[4]; *(uint4 *)&x[0] = *(const uint4 *)&A[0]; C[0] = x[0];")
    message = "loads of 16 bytes from memory (A), but no LDG.128"
    assert part.findings == (Finding(FindingKind.INSTRUCTION, part.launches[0].launch.name, message),)


def test_the_estimate_is_made_again_with_what_the_kernel_takes() -> None:
    report, compiled = product(), compiled_of(product())
    plan = report.winner.plan
    needs = predict_resources(report.groups[0], plan.dominant_choice.program, ADA)
    assert needs is not None
    main = compiled.source.main_launch("kernel0")

    def again(used: Resources) -> Plan | None:
        resources = (*compiled.resources[:main], used, *compiled.resources[main + 1 :])
        return reestimate_plan(plan, report.groups, dataclasses.replace(compiled, resources=resources), ADA)

    assert again(Resources(needs.registers_per_thread, needs.shared_bytes)) == plan
    crowded = again(Resources(255, 96 << 10))
    assert crowded is not None
    assert crowded.estimate.occupancy < plan.estimate.occupancy
    assert crowded.estimate.seconds >= plan.estimate.seconds
    assert reestimate_plan(plan, report.groups, None, ADA) is None
    assert reestimate_plan(plan, report.groups, dataclasses.replace(compiled, binary=b""), ADA) is None


def first_attempt(report: BuildReport) -> Any:
    attempts = report_json(report)["attempts"]
    assert isinstance(attempts, list)
    return attempts[0]


def test_the_report_has_both_estimates() -> None:
    attempt = first_attempt(product())
    assert attempt["estimate"]["seconds"] == attempt["plan"]["seconds"]
    assert attempt["estimate_compiled"].keys() == attempt["estimate"].keys()
    on_cpu = build_kernel(build_request("C[n] = A[n] * 2", {"A": ("float32", (64,))}, top_k=1, select="model"))
    attempt = first_attempt(on_cpu)
    assert attempt["estimate_compiled"] is None
