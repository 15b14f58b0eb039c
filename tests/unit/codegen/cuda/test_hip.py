"""Kernels in HIP: their text, what they compute with waves of 64 threads, what hipcc makes of them."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from cases_hip import FAMILIES, MATMUL, MI50, MI250X, MI300X, Types, built, needs_hipcc, text_of
from reference_kernels import tensor

from roller_svc import toolchain
from roller_svc.compiler.backends import load_emulated
from roller_svc.errors import CompileError, KernelTimeoutError, LaunchError, RollerError, ToolchainMissingError
from roller_svc.ir.hardware import Arch, TargetKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.emulator import EmulatorModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import hip
from roller_svc.toolchain.binaries.code_object import read_code_object
from roller_svc.verify.run_and_verify import load_kernel

MAP = """\
__device__ __forceinline__ float f16_to_f32(unsigned short h) {
  return (float)__builtin_bit_cast(_Float16, h);
}
__device__ __forceinline__ unsigned short f32_to_f16(float a) {
  return __builtin_bit_cast(unsigned short, (_Float16)a);
}

extern "C" __global__ void __launch_bounds__(64, 1)
kernel0(const unsigned short *__restrict__ X, unsigned short *__restrict__ Y) {
  const int i_block = (int)blockIdx.x;
  const int i_thread = (int)threadIdx.x;
  const int thread = i_thread;
  const int i_first = (i_block * 64) + i_thread;
  if (i_first < 1000) {
    Y[i_first] = f32_to_f16((f16_to_f32(X[i_first]) + 1.0f));
  }
}
"""


def without_comment(source: KernelSource) -> str:
    return source.text.partition(" */\n")[2]


def test_a_map_as_text() -> None:
    source = text_of("Y[i] = X[i] + 1.0", {"X": ("float16", (1000,))}, "amd-mi50")
    assert source.language is Language.HIP
    assert without_comment(source).replace(source.launches[0].name, "kernel0") == MAP


def test_a_reduction_as_text() -> None:
    """A row of several waves: shuffles within each, shared memory between them."""
    text = without_comment(text_of("Y[r] +=! X[r, c]", {"X": ("float32", (6, 8192))}, "amd-mi50"))
    assert "__shfl_xor(a, across)" in text
    assert "_sync" not in text.replace("__syncthreads", "")
    assert re.search(r"Y_acc = lane_sum_f32\(Y_acc, 64\);", text)
    assert re.search(r"const int in_warp = lane % 64;", text)
    assert text.count("__syncthreads();") == 1


def test_waves_of_a_simd_are_what_launch_bounds_count() -> None:
    types: Types = {"A": ("float32", (2048, 2048)), "B": ("float32", (2048, 2048))}
    (bounds,) = re.findall(r"__launch_bounds__\((\d+), (\d+)\)", text_of(MATMUL, types, "amd-mi50").text)
    threads, waves = map(int, bounds)
    report = built(MATMUL, types, "amd-mi50", runtime="emulator")
    resident = report.winner.plan.estimate.occupancy * MI50.limits.max_threads_per_core / threads
    assert waves == -(-round(resident) * threads // (64 * 4))


def test_all_of_lds_is_static() -> None:
    types: Types = {"A": ("float64", (1024, 1024)), "B": ("float64", (1024, 1024))}
    source = text_of(MATMUL, types, "amd-mi250x")
    assert "extern __shared__" not in source.text
    assert all(launch.shared_bytes == 0 for launch in source.launches)


# run --------------------------------------------------------------------------------------------------------------


def lanes_of(body: str, threads: int = 64) -> EmulatorModule:
    buffers = (tensor("A", "a", Role.INPUT, shape=(threads,)), tensor("C", "c", Role.OUTPUT, shape=(threads,)))
    text = f'extern "C" __global__ void one(const float *a, float *c) {{\n{body}\n}}\n'
    launch = LaunchSpec("one", ("a", "c"), (1, 1, 1), (threads, 1, 1))
    source = KernelSource("one", Language.HIP, MI50.arch, text, buffers, (launch,))
    return load_emulated(CompiledKernel(source, b"", "", ()), 1)


@pytest.mark.emulator
def test_a_wave_has_64_lanes() -> None:
    a = np.arange(64, dtype=np.float32)
    found = lanes_of("  c[threadIdx.x] = __shfl_xor(a[threadIdx.x], 32);").run({"A": a})
    assert np.array_equal(found["C"], np.roll(a, 32))


@pytest.mark.emulator
def test_lanes_of_a_wave_that_part_are_found() -> None:
    module = lanes_of("  if (threadIdx.x < 32) c[threadIdx.x] = __shfl_xor(a[threadIdx.x], 1);")
    with pytest.raises(RollerError, match="warp divergence"):
        module.run({"A": np.zeros(64, np.float32)})


@pytest.mark.emulator
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_right(name: str) -> None:
    expression, types = FAMILIES[name]
    report = built(expression, types, "amd-mi50", runtime="emulator")
    arrays = random_inputs(report.program, 3)
    module = load_emulated(CompiledKernel(report.winner.source, b"", "", ()), 3, races=True)
    verdict = agrees(report.program, module.run(arrays), evaluate(report.program, arrays))
    assert verdict.ok, f"{verdict}\n{report.winner.source.text}"


# compiled ---------------------------------------------------------------------------------------------------------


@needs_hipcc
@pytest.mark.slow
@pytest.mark.parametrize("target", ["amd-mi50", "amd-mi250x"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_compiles(name: str, target: str) -> None:
    compiled = built(*FAMILIES[name], target).winner.compiled
    assert compiled is not None
    assert compiled.binary.startswith(b"\x7fELF")
    assert all(0 < used.registers_per_thread <= 512 and not used.spill_bytes for used in compiled.resources)


SCALE = """
extern "C" __global__ void __launch_bounds__(256) flip(const float *a, float *c) {
    __shared__ float tile[512];
    tile[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    c[threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void scale(float *c) { c[blockIdx.x * 64 + threadIdx.x] *= 2.0f; }
"""
# more values than a thread with so many waves beside its own has registers for
CROWDED = """
extern "C" __global__ void __launch_bounds__(256, 8) flip(const float *a, float *c) {
    float kept[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) kept[i] = a[256 * i + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; i++) c[256 * (95 - i) + threadIdx.x] = kept[i] + kept[(i + 1) % 96];
}
"""


def source_of(text: str, *launches: LaunchSpec, arch: Arch = MI50.arch) -> KernelSource:
    buffers = (tensor("A", "a", Role.INPUT, shape=(256,)), tensor("C", "c", Role.OUTPUT, shape=(256,)))
    return KernelSource("kernel", Language.HIP, arch, text, buffers, launches)


FLIP = LaunchSpec("flip", ("a", "c"), (1, 1, 1), (256, 1, 1))


@needs_hipcc
def test_registers_shared_memory_and_spills_are_reported() -> None:
    compiled = toolchain.compile_source(source_of(SCALE, FLIP, LaunchSpec("scale", ("c",), (4, 1, 1), (64, 1, 1))))
    flip, scale = compiled.resources
    assert (flip.shared_bytes, scale.shared_bytes) == (2048, 0)
    assert 0 < scale.registers_per_thread < 32
    assert flip.spill_bytes == scale.spill_bytes == 0
    (crowded,) = toolchain.compile_source(source_of(CROWDED, FLIP)).resources
    assert crowded.spill_bytes > 0


@needs_hipcc
def test_errors_have_the_compilers_log() -> None:
    with pytest.raises(CompileError) as raised:
        toolchain.compile_source(source_of("nonsense"))
    assert "error" in raised.value.log
    with pytest.raises(CompileError, match="no extern"):
        toolchain.compile_source(source_of(SCALE, dataclasses.replace(FLIP, name="flap")))


@needs_hipcc
def test_other_bytes_are_no_code_object() -> None:
    binary = toolchain.compile_source(source_of(SCALE, FLIP)).binary
    assert set(read_code_object(binary)) == {"flip", "scale"}
    for damaged in (b"", b"\x7fELF\x02\x01", binary[:100], binary[:600], b"\x7fELF\x01" + binary[5:]):
        with pytest.raises(CompileError, match="code object") as raised:
            read_code_object(damaged)
        assert raised.value.code == "bad-code-object"


@needs_hipcc
def test_what_compiled_needs_a_device_to_run() -> None:
    report = built("Y[i] = X[i] + 1.0", {"X": ("float16", (1000,))}, "amd-mi50")
    assert report.winner.compiled is not None
    with pytest.raises(LaunchError, match='runtime="emulator"') as raised:
        load_kernel(report.winner.compiled, random_inputs(report.program, 1))
    assert raised.value.code == "no-device"


# what is missing --------------------------------------------------------------------------------------------------


def installed(root: Path, *files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hipcc with those files beside it."""
    for file in ("bin/hipcc", *files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    monkeypatch.setattr(shutil, "which", lambda _: str(root / "bin/hipcc"))


LIBRARY = "lib/x86_64-linux-gnu/amdgcn/bitcode/oclc_isa_version_{}.bc"


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ToolchainMissingError, match="apt install hipcc libamdhip64-dev rocm-device-libs"):
        hip.compiler_for(MI50.arch)
    installed(tmp_path, monkeypatch=monkeypatch)
    with pytest.raises(ToolchainMissingError, match="without HIP's device libraries: apt install"):
        hip.compiler_for(MI50.arch)
    installed(tmp_path, LIBRARY.format("906"), monkeypatch=monkeypatch)
    with pytest.raises(ToolchainMissingError, match="without HIP's headers: apt install"):
        hip.compiler_for(MI50.arch)
    installed(tmp_path, "include/hip/hip_runtime.h", monkeypatch=monkeypatch)
    assert hip.compiler_for(MI50.arch) == str(tmp_path / "bin/hipcc")


def test_architecture_too_new_for_the_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "include/hip/hip_runtime.h", LIBRARY.format("90a"), monkeypatch=monkeypatch)
    assert hip.compiler_for(MI250X.arch)
    with pytest.raises(ToolchainMissingError, match=r"gfx942 is too new .* ROCm 6"):
        hip.compiler_for(MI300X.arch)
    found = toolchain.availability(MI300X)
    assert not found.ok
    assert "ROCm 6" in found.install


def test_a_compiler_that_does_not_answer_stops_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> tuple[int, str]:
        raise KernelTimeoutError("hipcc ran longer than 10 s", code="compile-timeout")

    path = str(tmp_path / "hipcc")
    monkeypatch.setattr(hip, "run_sandboxed", late)
    assert hip.compiler_version(path) == f"{path} --version does not end"


def test_only_what_is_built_for_amd_depends_on_hipcc(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str | None:
        return "/opt/bin/hipcc" if name == hip.COMMAND else None

    monkeypatch.setattr(toolchain.shutil, "which", found)
    monkeypatch.setattr(hip, "compiler_version", lambda _: "HIP version: 5.2")
    assert toolchain.versions()["hipcc"] == toolchain.versions(TargetKind.AMD)["hipcc"] == "HIP version: 5.2"
    assert "hipcc" not in toolchain.versions(TargetKind.CPU) | toolchain.versions(TargetKind.CUDA)
