"""Axes that end just below 2^31: no condition, bound or index wraps, and nothing past the end is written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE_S

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.frontend.lang import parse
from roller_svc.ir import printer
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, iter_subexpressions
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorType
from roller_svc.ir.tensor_map import MAX_COORDINATE

TOP = 1 << 31
NVIDIA, AMD, X86 = "nvidia-h200-sxm", "amd-mi250x", "cpu-x86-avx512"

# What a kernel's text needs of CUDA, pages that may not be touched behind each tensor, and the last blocks of a launch.
HARNESS = """
#include <sys/mman.h>
#include <cstdio>
#include <cstdint>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) alignas(n)
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct { unsigned x; } blockIdx, threadIdx;
#include "kernel.cu"
static unsigned char *tensor(unsigned long bytes) {
  const unsigned long page = 4096, whole = (bytes + page - 1) / page * page;
  char *room = (char *)mmap(nullptr, whole + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED || mprotect(room, whole, PROT_READ | PROT_WRITE)) return nullptr;
  return (unsigned char *)room + whole - bytes / 16 * 16 - (bytes % 16 ? 16 : 0);
}
int main() {
  unsigned char *x = tensor(X_BYTES), *y = tensor(Y_BYTES);
  if (!x || !y) return 3;
  for (unsigned long i = X_BYTES - 4096; i < X_BYTES; i++) x[i] = i * 7;
  for (unsigned long i = Y_BYTES; i % 16; i++) y[i] = 255;
  for (long block = GRID > 2 ? GRID - 2 : 0; block < GRID; block++)
    for (unsigned thread = 0; thread < BLOCK; thread++) {
      blockIdx.x = block, threadIdx.x = thread;
      KERNEL;
    }
  for (unsigned long i = Y_BYTES; i % 16; i++) if (y[i] != 255) return 4;
  for (unsigned long i = Y_BYTES - 64; i < Y_BYTES; i++) printf("%d ", y[i]);
}
"""


def source(expression: str, target: str, **inputs: tuple[str, tuple[int, ...]]) -> KernelSource:
    hw = hardware.load(target)
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in inputs.items()})
    groups, ranked, _ = rank_best_partition(program, hw, 1)
    return emit_plan(best_plans(ranked, 1)[0], program, groups, hw)


def body(kernel: KernelSource) -> str:
    return kernel.text.split("*/", 1)[1]


def last_blocks(folder: Path, kernel: KernelSource, x_bytes: int, y_bytes: int) -> list[int]:
    """The last 64 bytes of y once the launch's last two blocks have run over x, which holds 7 times each place."""
    (launch,) = kernel.launches
    (folder / "kernel.cu").write_text(kernel.text)
    types = [re.sub(r"const|__restrict__|\w+$", "", part).strip() for part in parameters(kernel, launch.name)]
    call = f"{launch.name}({', '.join(f'({t}){name}' for t, name in zip(types, 'xy', strict=True))})"
    names = {"X_BYTES": f"{x_bytes}ul", "Y_BYTES": f"{y_bytes}ul", "GRID": f"{launch.grid[0]}l"}
    names |= {"BLOCK": str(launch.block[0]), "KERNEL": call}
    text = "".join(f"#define {name} {value}\n" for name, value in names.items()) + HARNESS
    (folder / "main.cpp").write_text(text)
    checks = ("-fsanitize=signed-integer-overflow,bounds", "-fno-sanitize-recover=all")
    command = ["g++", "-std=c++17", "-O1", "-w", "-fno-strict-aliasing", *checks, "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True, timeout=PATIENCE_S)
    ran = subprocess.run([folder / "main"], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    return [int(word) for word in ran.stdout.split()]


def parameters(kernel: KernelSource, name: str) -> list[str]:
    found = re.search(rf"\b{name}\(([^)]*)\)", kernel.text)
    assert found is not None
    return found[1].split(",")


@pytest.mark.parametrize("missing", [1, 3, 8, 15, 16, 17, 24, 4096 + 8])
@pytest.mark.parametrize("target", [NVIDIA, AMD])
def test_no_vector_is_stored_past_the_end(tmp_path: Path, target: str, missing: int) -> None:
    extent = TOP - missing
    kernel = source("y[i] = x[i] + 1", target, x=("int8", (extent,)))
    got = last_blocks(tmp_path, kernel, extent, extent)
    assert got == [(7 * i + 1) % 256 for i in range(extent - 64, extent)]


@pytest.mark.parametrize("missing", [3, 4, 9])
def test_no_vector_of_words_is_stored_past_the_end(tmp_path: Path, missing: int) -> None:
    extent = TOP - missing
    kernel = source("y[i] = x[i] + 0", NVIDIA, x=("int16", (extent,)))
    got = last_blocks(tmp_path, kernel, extent * 2, extent * 2)
    assert got == [7 * i % 256 for i in range(extent * 2 - 64, extent * 2)]


def test_no_window_is_read_past_the_end(tmp_path: Path) -> None:
    extent = TOP - 8
    outputs = (extent - 3) // 2 + 1
    kernel = source(f"y[i] >=! x[i * 2 + k] where k in 3, i in {outputs}", NVIDIA, x=("uint8", (extent,)))
    got = last_blocks(tmp_path, kernel, extent, outputs)
    assert got == [max(7 * (2 * i + k) % 256 for k in range(3)) for i in range(outputs - 64, outputs)]


@pytest.mark.parametrize("missing", [8, 24, 65])
@pytest.mark.parametrize("target", [NVIDIA, AMD, X86, "cpu-x86-avx2"])
def test_the_guard_of_a_vector_holds_only_inside(tmp_path: Path, target: str, missing: int) -> None:
    """As C has it, at every place where a vector may begin."""
    extent = TOP - missing
    text = body(source("y[i] = x[i] + 1", target, x=("int8", (extent,))))
    found = re.search(rf"if \((.*\b(i_first)\b.* (\d+)\)* <= {extent})\)", text)
    assert found is not None
    guard, name, width = found[1], found[2], int(found[3])
    declared = re.search(rf"const ([a-z ]+) {name} = ", text)
    assert declared is not None
    starts = range(TOP - 16 * width, extent, width)
    each = f"{{ {declared[1]} {name} = v; putchar({guard} ? 49 : 48); }}"
    main = f"for (long v = {starts.start}L; v < {extent}L; v += {width}) {each}"
    (tmp_path / "main.c").write_text(f"#include <stdio.h>\nint main(void) {{ {main} }}\n")
    subprocess.run(["gcc", "-fwrapv", "main.c", "-o", "main"], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    ran = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert ran.stdout == "".join(str(int(start + width <= extent)) for start in starts)


CASES = [
    ("y[i] = x[i] + 1", (1,)), ("y[i] >=! x[i, j]", (1, 3)), ("y[j] >=! x[i, j]", (1, 3)), ("y[] >=! x[i]", (1,)),
    ("y[j, i] = x[i, j]", (1, 2)), ("y[i] = x[i + 5].when([i + 5 < x.size(0)], 0) where i in x.size(0)", (1,)),
    ("y[i] >=! x[i + k] where k in 3, i in x.size(0) - 2", (1,)),
    ("y[i] >=! x[i * 2 + k] where k in 3, i in x.size(0) / 2 - 1", (1,)),
]  # fmt: skip


@pytest.mark.parametrize("target", [NVIDIA, "nvidia-t4", AMD])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("missing", [8, 24])
def test_compared_indices_do_not_wrap(target: str, case: tuple[str, tuple[int, ...]], missing: int) -> None:
    """Sums that may leave 32 bits are told by the cast around them."""
    expression, (rows, *others) = case
    text = body(source(expression, target, x=("int8", (rows * (TOP - missing), *others))))
    assert re.findall(r"\(unsigned int\)[^;{}?]*[<>]=? *\d{9,}", text) == []


def test_kernels_that_stay_below_keep_32_bits() -> None:
    text = body(source("y[i] = x[i] + 1", NVIDIA, x=("int8", (TOP - (1 << 15) - 8,))))
    assert "long long" not in text
    assert "(i_first + 16) <= " in text


# what a program itself asks for wraps --------------------------------------------------------------------------------
WRAPPING = [
    "y[i] = x[i].when([i * 1000003 < 0], 0.0)",
    "y[i] = x[i].when([i * 300000 < 5, i * 300000 > -999999], 0.0)",
    "y[i] = where(i * 300000 - 2147483647 < 5, x[i], 3.0)",
    "y[i] = x[i].when([i.cast(`uint32`) - const(5, `uint32`) > const(10, `uint32`)], 0.0)",
    "y[i] = x[i].when([(i * 1000003) // 7 % 2 == 0], 0.0)",
    "y[i] = (min(i * 1000003, 5)).cast(`float16`).cast(`float32`) + x[i]",
    "y[i] +=! x[k].when([(i + k) * 1000003 < 0], 0.0) where i in 9",
    "x[i] =. const(2.0).when([(i + 90).cast(`uint8`) * const(3, `uint8`) < 50])",
    "x[i] +=. x[i].when([i * 1000003 - 5 < 0])",
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"target": "nvidia-t4", "runtime": "emulator"}], ids=["local", "emulator"])
@pytest.mark.parametrize("expression", WRAPPING)
def test_conditions_of_a_program_wrap_as_its_types_do(expression: str, options: dict[str, str]) -> None:
    x = np.arange(1, 10001, dtype=np.float32)
    types = {"x": ("float32", x.shape)}
    (want,) = roller_svc.reference(expression, types, {"x": x}).values()
    kernel = roller_svc.compile(expression, types, select="model", top_k=1, **options)
    (got,) = kernel.run({"x": x}).values()
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert 0 < np.count_nonzero(want == want.flat[-1]) < want.size or want.size == 9


def test_what_is_read_wraps_whatever_bounds_it() -> None:
    q = np.array([2147483647, 3, -1, 2147483640], np.int32)
    expression = "z[i] =. const(1, `int32`).when([bitwise_and(q[i], 2147483647) + 16 < 5])"
    types = {"q": ("int32", (4,)), "z": ("int32", (4,))}
    arrays = {"q": q, "z": np.zeros(4, np.int32)}
    kernel = roller_svc.compile(expression, types, select="model", top_k=1)
    assert kernel.run(arrays)["z"].tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("target", [NVIDIA, AMD])
def test_values_computed_from_indices_beyond_int32_wrap(target: str) -> None:
    text = body(source("y[n] = where(n + 7 < 5, 1, x[n // 3]) where n in 3000000000", target, x=("int8", (1 << 30,))))
    assert re.search(r"\(int\)\(\([^;{}]* \+ 7\)\) < 5", text)


def test_a_program_with_cuts_is_printed_as_it_was_read() -> None:
    types = {"x": TensorType(DType.FLOAT32, (10000,))}
    program = parse("y[i] = x[i].when([i * 1000003 + i < i * 5], 0.0)", types)
    assert parse(printer.text(program), types) == program
    assert [part.dtype for part in iter_subexpressions(program.statements[0].body) if isinstance(part, Cast)] == [DType.INT32] * 2


def test_tma_coordinates_have_32_bits() -> None:
    """Of longer tensors elements are loaded by threads, whose places have 64."""
    for rows, is_bulk in ((1 << 20, True), (TOP - 8, False)):
        types = {"A": ("int8", (rows, 128)), "B": ("int8", (128, 128))}
        kernel = source("C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)", NVIDIA, **types)
        longest = max((e for launch in kernel.launches for view in launch.tensor_maps for e in view.extents), default=0)
        assert (longest == rows) is is_bulk
        assert longest <= MAX_COORDINATE
