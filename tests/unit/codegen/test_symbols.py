"""A kernel's name before its launches, and the function that makes all launches, by ctypes as a C program would."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE_S

import roller_svc
from roller_svc.api import Kernel
from roller_svc.ir.kernel import Role, align_blocks
from roller_svc.runtime.binding import aligned_empty

RNG = np.random.default_rng(0)
W = RNG.standard_normal((96, 64), np.float32)
X = RNG.standard_normal((48, 96), np.float32)
AT = np.array([3, 0, 3, 5, 5, 5], np.int32)
V = RNG.standard_normal(6, np.float32)


def compiled(text: str, arrays: dict[str, np.ndarray], **options: object) -> Kernel:
    return roller_svc.compile(text, arrays, select="model", **options)


def run(kernel: Kernel, folder: Path, *arrays: np.ndarray) -> int:
    """Call the saved kernel's function for all launches, with workspace of the size in the header and a guard."""
    saved = kernel.save(folder / "saved")
    match = re.search(rf"#define {kernel.name}_WORKSPACE_BYTES (\d+)L", (saved / "kernel.h").read_text())
    assert match is not None
    size = int(match[1])
    workspace = aligned_empty((size + 64,), np.dtype(np.uint8))
    workspace[...] = 0xFF  # not a number, and neither zero nor in range
    library = ctypes.CDLL(str(saved / "kernel.so"))
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (*arrays, workspace))
    result: int = library[f"{kernel.name}_run"](*pointers)
    assert workspace[size:].tolist() == [0xFF] * 64
    return result


def test_all_launches_have_the_name_and_are_made(tmp_path: Path) -> None:
    """Prepacking, and workspaces in one allocation."""
    kernel = compiled("y[m, n] +=! x[m, k] * w[k, n]", {"x": X, "w": W}, constants=["w"], name="product")
    assert len(kernel.launches) > 1
    assert all(launch.name.startswith("product_kernel0") for launch in kernel.launches)
    source = kernel.parts.compiled.source
    assert source.workspace_bytes == align_blocks(source.buffers_of(Role.WORKSPACE))[1] > 0
    y = np.zeros((48, 64), np.float32)
    assert run(kernel, tmp_path, X, W, y) == 0
    np.testing.assert_allclose(y, X @ W, rtol=1e-4, atol=1e-4)


def test_a_scatter_reports_an_index_out_of_range(tmp_path: Path) -> None:
    kernel = compiled("grid[at[i]] +=. v[i]", {"grid": np.zeros(8, np.float32), "at": AT, "v": V})
    grid, y = RNG.standard_normal(8, np.float32), np.zeros(8, np.float32)
    wanted = grid.copy()
    np.add.at(wanted, AT, V)
    assert run(kernel, tmp_path, grid, AT, V, y) == 0
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    assert run(kernel, tmp_path, grid, AT + 3, V, y) == 1


def test_a_donated_input_has_no_parameter(tmp_path: Path) -> None:
    kernel = compiled("grid[at[i]] +=. v[i]", {"grid": np.zeros(8, np.float32), "at": AT, "v": V}, donate=["grid"])
    grid = np.ones(8, np.float32)
    wanted = grid.copy()
    np.add.at(wanted, AT, V)
    assert run(kernel, tmp_path, AT, V, grid) == 0
    np.testing.assert_allclose(grid, wanted, rtol=1e-6)
    assert re.search(r"Updated in place: grid\w*\.", (tmp_path / "saved" / "kernel.h").read_text())


@pytest.mark.parametrize("tensor", ["kernel0", "rows_kernel0", "rows_run", "workspace", "status", "rows", "kernel"])
def test_a_tensor_may_have_a_functions_name(tensor: str, tmp_path: Path) -> None:
    kernel = compiled(f"y[i] = {tensor}[i] * 2.0", {tensor: V}, name="rows")
    y = np.zeros(6, np.float32)
    assert run(kernel, tmp_path, V, y) == 0
    np.testing.assert_array_equal(y, V * 2)
    np.testing.assert_array_equal(kernel.run({tensor: V})["y"], V * 2)
    for compiler, language in (("gcc", "c"), ("g++", "c++")):
        command = [compiler, "-Wall", "-Werror", "-pedantic", "-x", language, "-fsyntax-only", "-"]
        header = f'#include "{tmp_path}/saved/kernel.h"\n'
        subprocess.run(command, input=header, text=True, check=True, timeout=PATIENCE_S)


def test_a_default_name_and_the_digest_have_the_same_digits() -> None:
    text, types = "y[i] = v[i] * 3.0", {"v": V}
    first, again, other = compiled(text, types), compiled(text, types), compiled("y[i] = v[i] * 5.0", types)
    assert first.name == f"roller_{first.digest.removeprefix('sha256:')[:12]}"
    assert (first.name, first.digest) == (again.name, again.digest)
    assert first.name != other.name
    named = compiled(text, types, name="triple")
    assert named.name == "triple"
    assert named.digest != first.digest


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "amd-mi250x"])
def test_entries_of_gpus_have_the_name(target: str) -> None:
    types = {"x": X.astype(np.float16), "w": W.astype(np.float16)}
    kernel = compiled("y[m, n]: float32 +=! x[m, k] * w[k, n]", types, target=target, name="product")
    assert all(launch.name.startswith("product_kernel0") for launch in kernel.launches)
    assert all(launch.name.encode() in kernel.binary for launch in kernel.launches)
    assert not re.search(r"\bkernel0\(", kernel.source)
    assert "product_run" not in kernel.source


@pytest.mark.emulator
def test_a_named_kernel_runs_in_the_emulator() -> None:
    kernel = compiled("y[i] = v[i] * 2.0", {"v": V}, target="nvidia-a100-sxm-80gb", runtime="emulator", name="twice")
    assert [launch.name for launch in kernel.launches] == ["twice_kernel0"]
    np.testing.assert_array_equal(kernel(v=V)["y"], V * 2)
