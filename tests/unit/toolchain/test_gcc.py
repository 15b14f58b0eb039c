"""C source → shared object: compilation, rejected source, limits."""

from __future__ import annotations

import dataclasses
import platform
import threading
from pathlib import Path

import numpy as np
import pytest
from reference_kernels import HOST, add, row_sums_doubled

from roller_svc import toolchain
from roller_svc.errors import CompileError, InvariantError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource, Language, Resources
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import gcc
from roller_svc.toolchain.limits import LOG_CHARACTERS, CompileLimits, truncate_log

# Preprocessing this takes longer than a machine lasts: 2^40 expansions.
ENDLESS = "#define A0 0,\n" + "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 41)) + "int x[] = {A40};\n"
HUGE = "char x[1u << 30] = {1};\nvoid add(void) {}\n"
# The least text for which gcc 12 addresses `c` as 0 plus two sums: every loop, and each of these steps, is needed.
DEEP = """
static __attribute__((noinline, noclone))
void part(const float *restrict a, const float *restrict b, float *restrict c, long task) {
  for (long o = 0; o < 7; o++)
    for (long p = 0; p < 5; p++)
      for (long q = 0; q < 3; q++)
        for (long r = 0; r < 16; r++)
          for (long s = 0; s < 3; s++)
            for (long step = 0; step < (17 < 33 - task * 17 ? 17 : 33 - task * 17); step++) {
              const long t = task * 17 + step;
              float sum[3] __attribute__((aligned(64)));
              #pragma omp simd
              for (long lane = 0; lane < 3; lane++) sum[lane] = 0.0f;
              for (long k = 0; k < 2; k++) {
                #pragma omp simd
                for (long lane = 0; lane < 3; lane++)
                  sum[lane] += a[q * 630 + o * 90 + p * 18 + s * 6 + k * 3 + lane]
                             * b[k * 55440 + o * 7920 + r * 495 + t * 15 + lane * 5 + p];
              }
              #pragma omp simd
              for (long lane = 0; lane < 3; lane++)
                c[o * 71280 + p * 14256 + q * 4752 + r * 297 + s * 99 + t * 3 + lane] = sum[lane];
            }
}
void add(const float *a, const float *b, float *c) { for (long task = 0; task < 2; task++) part(a, b, c, task); }
"""
DEEP_SHAPES = {"a": (3, 7, 5, 3, 2, 3), "b": (2, 7, 16, 33, 3, 5), "c": (7, 5, 3, 16, 3, 33, 3)}


def test_a_kernel_becomes_a_shared_object() -> None:
    compiled = toolchain.compile_source(row_sums_doubled())
    assert compiled.binary[:4] == b"\x7fELF"
    assert compiled.resources == (Resources(), Resources())
    assert compiled.compile_seconds > 0


def test_the_same_text_gives_the_same_bytes() -> None:
    assert gcc.compile_c(add()).binary == gcc.compile_c(add()).binary


def test_calls_that_write_through_sums_of_addresses_are_kept() -> None:
    """Or gcc 12 deletes them, as accesses to the null pointer."""
    source = add(("-fopenmp-simd",))
    buffers = tuple(dataclasses.replace(buffer, shape=DEEP_SHAPES[buffer.symbol]) for buffer in source.buffers)
    kernel = CpuModule(gcc.compile_c(dataclasses.replace(source, text=DEEP, buffers=buffers)))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, DEEP_SHAPES[name]).astype(np.float32) for name in "ab")
    wanted = np.einsum("qopskl,kortlp->opqrstl", a, b)  # of small integers: exact
    np.testing.assert_array_equal(kernel.run({"A": a, "B": b})["C"], wanted)


def test_the_compilers_log_is_preserved() -> None:
    broken = dataclasses.replace(add(), text="void add(void) { return missing; }\n")
    with pytest.raises(CompileError, match="'missing' undeclared") as raised:
        gcc.compile_c(broken)
    assert "kernel.c:1" in raised.value.log


def test_time_is_limited() -> None:
    with pytest.raises(KernelTimeoutError) as raised:
        gcc.compile_c(dataclasses.replace(add(), text=ENDLESS), CompileLimits(timeout_s=0.5))
    assert raised.value.code == "compile-timeout"


def test_memory_is_limited() -> None:
    with pytest.raises(CompileError):
        gcc.compile_c(dataclasses.replace(add(), text=ENDLESS), CompileLimits(memory_bytes=128 << 20))


def test_the_size_of_files_is_limited() -> None:
    with pytest.raises(CompileError):
        gcc.compile_c(dataclasses.replace(add(), text=HUGE), CompileLimits(file_bytes=1 << 20))


def test_options_that_change_the_loading_process_are_rejected() -> None:
    with pytest.raises(InvariantError, match="-ffast-math"):
        gcc.compile_c(add(options=("-ffast-math",)))


def test_a_compiler_may_be_named() -> None:
    assert gcc.compile_c(add(), cc="gcc -fno-inline").binary
    with pytest.raises(ToolchainMissingError, match="no-such-cc"):
        gcc.compile_c(add(), cc="no-such-cc")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcc.shutil, "which", lambda _: None)
    with pytest.raises(ToolchainMissingError, match="apt install gcc"):
        gcc.compile_c(add())


def test_a_cross_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcc.shutil, "which", lambda _: None)
    foreign = Arch("armv", 8) if platform.machine() == "x86_64" else Arch("x86-64-v", 3)
    with pytest.raises(ToolchainMissingError, match="linux-gnu-gcc is not installed"):
        gcc.compile_c(dataclasses.replace(add(), arch=foreign))


def test_c_is_for_processors_only() -> None:
    with pytest.raises(ToolchainMissingError, match="not on sm_80"):
        gcc.compile_c(dataclasses.replace(add(), arch=Arch("sm_", 80)))


def test_hip_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcc.shutil, "which", lambda _: None)
    hip = dataclasses.replace(add(), language=Language.HIP, arch=Arch("gfx", 0x906))
    with pytest.raises(ToolchainMissingError, match="hipcc"):
        toolchain.compile_source(hip)


def test_versions_name_the_compiler() -> None:
    assert toolchain.versions()["cc"] in toolchain.tool_version(Language.C, HOST)
    assert "cc" not in toolchain.versions(cc="no-such-cc")


def test_versions_are_asked_for_once_and_beside_the_passes_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    run_for_line = gcc._run_for_line

    def record(command: tuple[str, ...], option: str) -> str:
        threads.append(threading.current_thread().name)
        return run_for_line(command, option)

    monkeypatch.setattr(gcc, "_first_lines", {})
    monkeypatch.setattr(gcc, "_run_for_line", record)
    for _ in range(2):  # the second time nothing is asked
        gcc.prepare_model(KernelSource("model", Language.C, HOST, "", (), ()))
        for thread in threading.enumerate():
            if thread.name == "roller-versions":
                thread.join()
        assert {"cc", "as", "ld"} <= set(toolchain.versions())
        assert threads == ["roller-versions"] * 5  # of the compiler, and paths and versions of the other two


def test_a_compiler_that_does_not_answer_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> tuple[int, str]:
        raise KernelTimeoutError("gcc ran longer than 10 s", code="compile-timeout")

    monkeypatch.setattr(gcc, "run_sandboxed", late)
    monkeypatch.setattr(gcc, "_first_lines", {})
    with pytest.raises(ToolchainMissingError, match="gcc --version does not end"):
        gcc.compiler_version(("/usr/bin/gcc",))
    assert not {"cc", "as", "ld"} & set(toolchain.versions())
    assert gcc.binutils_versions(("/usr/bin/gcc",)) == ()


def test_the_compiler_says_which_assembler_and_linker_it_runs(tmp_path: Path) -> None:
    compiler = tmp_path / "gcc"
    for name, script in {
        "gcc": f'echo "{tmp_path}/${{1#-print-prog-name=}}"',
        "as": "echo GNU assembler 2.99; echo more",
        "ld": "exit 1",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o700)
    assert gcc.binutils_versions((str(compiler),)) == (("as", "GNU assembler 2.99"),)


def test_long_logs_lose_their_middle() -> None:
    log = "a" * LOG_CHARACTERS + "b" * LOG_CHARACTERS
    assert len(truncate_log(log)) < LOG_CHARACTERS + 100
    assert truncate_log(log)[0] == "a"
    assert truncate_log(log)[-1] == "b"
    assert truncate_log("short") == "short"
