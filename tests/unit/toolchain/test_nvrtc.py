"""CUDA source → cubin through worker processes with NVRTC."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reference_kernels import SM_80, cuda_scale
from waiting import PATIENCE_S

from roller_svc import toolchain
from roller_svc.errors import CompileError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Language, LaunchSpec, Resources
from roller_svc.toolchain import nvrtc
from roller_svc.toolchain.limits import CompileLimits
from roller_svc.toolchain.nvrtc import pool as nvrtc_pool

# Preprocessing this takes longer than a machine lasts: 2^40 expansions.
ENDLESS = "#define A0 0,\n" + "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 41))
ENDLESS += "__device__ int x[] = {A40};\n"
HUGE = "__device__ int x[1 << 28] = {1};\n"
SPILLING = """
extern "C" __global__ void spill(float *c) {
    float x[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) x[i] = c[threadIdx.x + i * 32];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) c[threadIdx.x + i * 32] = x[63 - i];
}
"""


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"])
def test_a_kernel_becomes_a_cubin_with_its_resources(name: str) -> None:
    arch = Arch("sm_", int(name[3:].rstrip("a")), "a" if name.endswith("a") else "")
    compiled = toolchain.compile_source(cuda_scale(arch, shared_bytes=100))
    assert compiled.binary[:4] == b"\x7fELF"
    flip, scale = compiled.resources
    assert flip.shared_bytes == 2048 + 100
    assert scale.shared_bytes == 0
    assert all(4 <= used.registers_per_thread <= 64 and used.spill_bytes == 0 for used in (flip, scale))
    assert "Compiling entry function 'flip'" in compiled.log


def test_spills_are_counted() -> None:
    source = dataclasses.replace(cuda_scale(), text=SPILLING, options=("--maxrregcount=24",))
    source = dataclasses.replace(source, launches=(LaunchSpec("spill", ("c",)),))
    (used,) = nvrtc.compile_cuda(source).resources
    assert used.registers_per_thread == 24
    assert used.spill_bytes > 100


def test_spills_of_a_function_that_is_called_count_for_the_kernel() -> None:
    function = SPILLING.replace('extern "C" __global__ void spill', "__device__ __noinline__ void called")
    text = function + 'extern "C" __global__ void spill(float *c) { called(c + blockIdx.x); }\n'
    source = dataclasses.replace(cuda_scale(), text=text, launches=(LaunchSpec("spill", ("c",)),))
    (used,) = nvrtc.compile_cuda(dataclasses.replace(source, options=("--maxrregcount=24",))).resources
    assert used.spill_bytes > 100
    (used,) = nvrtc.compile_cuda(source).resources
    assert used.spill_bytes == 0


def test_ptx_is_text() -> None:
    text = toolchain.ptx(cuda_scale(Arch("sm_", 90, "a")))
    assert ".target sm_90a" in text
    assert ".visible .entry flip(" in text


def test_the_compilers_log_is_preserved() -> None:
    with pytest.raises(CompileError, match='"missing" is undefined') as raised:
        nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), text="__device__ int x = missing;\n"))
    assert "cuda_scale.cu(1)" in raised.value.log


def test_an_option_that_nvrtc_does_not_know() -> None:
    with pytest.raises(CompileError, match="--no-such-option"):
        nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), options=("--no-such-option",)))


def test_a_launch_without_its_function() -> None:
    with pytest.raises(CompileError, match=r"no extern .* function other"):
        nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), launches=(LaunchSpec("other", ("a",)),)))


def test_time_is_limited_and_the_next_compilation_works() -> None:
    with pytest.raises(KernelTimeoutError) as raised:
        nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), text=ENDLESS), CompileLimits(timeout_s=0.5))
    assert raised.value.code == "compile-timeout"
    assert nvrtc.compile_cuda(cuda_scale()).binary


def test_memory_is_limited_and_the_next_compilation_works() -> None:
    tight = CompileLimits(memory_bytes=768 << 20)
    assert nvrtc.compile_cuda(cuda_scale(), tight).binary
    with pytest.raises(CompileError, match=r"NVRTC crashed .*its memory limit is 768 MiB"):
        nvrtc.compile_cuda(dataclasses.replace(cuda_scale(), text=HUGE), tight)
    assert nvrtc.compile_cuda(cuda_scale(), tight).binary


def test_many_threads_share_the_workers() -> None:
    sources = [dataclasses.replace(cuda_scale(), text=cuda_scale().text + f"// {i}\n") for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        compiled = list(threads.map(nvrtc.compile_cuda, sources))
    assert [c.source for c in compiled] == sources
    assert len({c.binary for c in compiled}) == 1


def test_workers_end_with_their_parent() -> None:
    """A worker ends when its pipe closes, however its parent ended."""
    library = nvrtc.library_for(SM_80)
    worker = [sys.executable, "-I", "-S", str(Path(nvrtc_pool.__file__).with_name("worker.py"))]
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        arguments = [str(library.path), str(8 << 30), str(reader)]
        process = subprocess.run([*worker, *arguments], input=b"", capture_output=True, timeout=PATIENCE_S, pass_fds=(reader,))
    assert process.returncode == 0
    assert b'"archs"' in process.stdout


@pytest.mark.parametrize(
    ("arch", "need"),
    [
        (Arch("sm_", 37), "CUDA toolkit 11"),
        (Arch("sm_", 70), "nvidia-cuda-nvrtc-cu12"),
        (Arch("sm_", 80), r"roller-svc\[cuda\]"),
    ],
)
def test_without_nvrtc_the_error_says_what_to_install(arch: Arch, need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: ())
    with pytest.raises(ToolchainMissingError, match=need):
        nvrtc.compile_cuda(cuda_scale(arch))


@pytest.mark.parametrize(("number", "need"), [(37, "NVRTC 11"), (70, "NVRTC 12")])
def test_old_architectures_need_an_older_nvrtc(number: int, need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = tuple(library for library in nvrtc.find_libraries() if library.major == 13)
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: newest)
    with pytest.raises(ToolchainMissingError, match=need) as raised:
        nvrtc.compile_cuda(cuda_scale(Arch("sm_", number)))
    assert "estimates work without it" in raised.value.message


def test_an_architecture_that_the_library_itself_rejects() -> None:
    with pytest.raises(ToolchainMissingError, match="does not support sm_91"):
        nvrtc.compile_cuda(cuda_scale(Arch("sm_", 91)))


def test_libraries_are_found_by_name_one_a_major_version(tmp_path: Path) -> None:
    for name in ("a/libnvrtc.so.12", "b/libnvrtc.so.13", "c/libnvrtc.so.12.9", "c/libnvrtc.so.9", "c/libnvrtc-b.so.13"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = nvrtc.find_libraries_in(tuple(tmp_path / folder for folder in "abcd"))
    assert [(library.path.parent.name, library.major) for library in found] == [("b", 13), ("a", 12)]
    assert found[0].version == "libnvrtc.so.13, 1 bytes"


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(nvrtc, "find_libraries", lambda: nvrtc.find_libraries_in((tmp_path,)))
    with pytest.raises(ToolchainMissingError, match=r"cannot be loaded from .*libnvrtc\.so\.13"):
        nvrtc.compile_cuda(cuda_scale())


def test_a_log_is_read() -> None:
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    72 bytes stack frame, 60 bytes spill stores, 68 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem, 500 bytes cmem[0]
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'tail' for 'sm_90a'
ptxas info    : Function properties for tail
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'calls' for 'sm_90a'
ptxas info    : Function properties for calls
ptxas         .     160 bytes stack frame, 104 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 160 bytes cumulative stack size
ptxas info    : Function properties for _Z5takesff
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 104 bytes spill loads
ptxas info    : Function properties for _Z6hungryPKf
ptxas         .     0 bytes stack frame, 220 bytes spill stores, 252 bytes spill loads
"""
    assert nvrtc.parse_ptxas_log(log) == {
        "gemm": Resources(168, 1024, 128),
        "tail": Resources(8, 0, 0),
        "calls": Resources(40, 0, 220 + 252),  # those of the function that it calls; arguments on the stack are none
    }
    assert nvrtc.parse_ptxas_log(log + log) == nvrtc.parse_ptxas_log(log)
    (warning,) = nvrtc.ptxas_warnings(log)
    assert "wgmma.mma_async instructions are serialized" in warning


def test_the_version_is_part_of_a_cache_key() -> None:
    assert toolchain.tool_version(Language.CUDA, SM_80) == f"nvrtc {toolchain.versions()['nvrtc-13']}"
