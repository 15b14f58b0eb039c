"""Linking one program out of an object with several: exactly the functions that were measured."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest

from roller_bench.model.candidate_plans import trial_plans
from roller_svc.compiler.lower_and_emit import emit_plan, emit_plans
from roller_svc.errors import CompileError
from roller_svc.frontend.lang import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language
from roller_svc.ir.program import TensorType
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import compile_combined, link_single
from roller_svc.toolchain.link import compile_object, compile_unlinked, link_kernel, link_model

HW = load("cpu-x86-avx2")
# With panels that each thread has for itself.
PROGRAM = parse("y[i, j] +=! a[i, k] * b[k, j]", dict.fromkeys("ab", TensorType(DType.FLOAT32, (300, 300))))
FOUND = trial_plans(PROGRAM, HW, 4, 0, "")


@pytest.fixture(scope="module")
def together() -> tuple[CompiledKernel, tuple[KernelSource, ...]]:
    sources = emit_plans(FOUND.ranked, PROGRAM, FOUND.groups, HW)
    return compile_combined(sources[0]), sources


def alone(number: int, together: tuple[CompiledKernel, tuple[KernelSource, ...]]) -> CompiledKernel:
    """Return the linked plan of that number."""
    whole, sources = together
    source = emit_plan(FOUND.ranked[number], PROGRAM, FOUND.groups, HW)
    linked = link_single(dataclasses.replace(whole, source=sources[number]), source)
    assert linked is not None
    return linked


@pytest.mark.parametrize("number", range(4))
def test_each_linked_program_computes_its_plan(number: int, together: tuple[CompiledKernel, tuple[KernelSource, ...]]) -> None:
    rng = np.random.default_rng(number)
    a, b = (rng.standard_normal((300, 300)).astype(np.float32) for _ in range(2))
    found = CpuModule(alone(number, together)).run({"a": a, "b": b})
    np.testing.assert_allclose(found["y"], a @ b, rtol=1e-4, atol=1e-3)


def test_only_its_own_functions_are_there(together: tuple[CompiledKernel, tuple[KernelSource, ...]], tmp_path: Path) -> None:
    linked, (whole, _) = alone(1, together), together
    path = tmp_path / "kernel.so"
    path.write_bytes(linked.binary)
    names = [launch.name for launch in linked.source.launches]
    assert all(hasattr(ctypes.CDLL(str(path)), name) for name in names)
    listed = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
    assert "choice0_" not in listed
    assert len(linked.binary) < len(whole.binary)


def test_a_linked_program_exports_its_names_alone(
    together: tuple[CompiledKernel, tuple[KernelSource, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "kernel.so"
    linked = alone(2, together)
    path.write_bytes(linked.binary)
    name = linked.source.name
    assert name.startswith("roller_")
    assert exports(path) == {
        *(launch.name for launch in linked.source.launches),
        *(f"{name}_{function}" for function in ("run", "own_pool", "use_pool")),
    }


def exports(path: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", "-P", path], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def test_thread_local_memory_is_that_of_the_linked_program(
    together: tuple[CompiledKernel, tuple[KernelSource, ...]],
) -> None:
    """Otherwise every thread would clear the buffers of the largest plan."""
    whole, sources = together
    lost = dataclasses.replace(sources[0], scratch_definition="_Thread_local char thread_scratch[64];")
    linked = link_single(dataclasses.replace(whole, source=sources[0]), lost)
    assert linked is not None
    assert 64 <= thread_bytes(linked) < 300  # with those of the thread pool
    assert thread_bytes(whole) > 10_000


def thread_bytes(compiled: CompiledKernel) -> int:
    """Return the size of the segment of thread-local storage (ELF-64: type 7, memory size at offset 40)."""
    header = compiled.binary
    table, size, count = (int.from_bytes(header[at : at + n], "little") for at, n in ((32, 8), (54, 2), (56, 2)))
    entries = (header[table + i * size : table + (i + 1) * size] for i in range(count))
    return sum(int.from_bytes(e[40:48], "little") for e in entries if int.from_bytes(e[:4], "little") == 7)


def test_source_with_other_signatures_is_not_linked(
    together: tuple[CompiledKernel, tuple[KernelSource, ...]],
) -> None:
    whole, sources = together
    source = emit_plan(FOUND.ranked[0], PROGRAM, FOUND.groups, HW)
    turned = tuple(dataclasses.replace(launch, args=launch.args[::-1]) for launch in source.launches)
    there = dataclasses.replace(whole, source=sources[0])
    assert link_single(there, dataclasses.replace(source, launches=turned)) is None
    assert link_single(dataclasses.replace(there, object_code=b""), source) is None


def test_an_object_that_does_not_link_is_an_error(
    together: tuple[CompiledKernel, tuple[KernelSource, ...]],
) -> None:
    whole, sources = together
    broken = dataclasses.replace(whole, source=sources[0], object_code=b"no object")
    with pytest.raises(CompileError, match="failed"):
        link_single(broken, emit_plan(FOUND.ranked[0], PROGRAM, FOUND.groups, HW))


def test_one_compile_makes_a_kernel_and_the_object_of_models(tmp_path: Path) -> None:
    source = emit_plan(FOUND.ranked[0], PROGRAM, FOUND.groups, HW)
    hidden = '__attribute__((visibility("hidden"))) int hidden(void) { return 7; }'
    unlinked = compile_unlinked(source, f"{source.text}\n{hidden}")
    assert not unlinked.binary
    compiled = dataclasses.replace(unlinked, binary=link_kernel(source, unlinked.object_code))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((300, 300)).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(CpuModule(compiled).run({"a": a, "b": b})["y"], a @ b, rtol=1e-4, atol=1e-3)
    kernel, model = tmp_path / "kernel.so", tmp_path / "model.so"
    kernel.write_bytes(compiled.binary)
    assert not hasattr(ctypes.CDLL(str(kernel)), "hidden")
    unit = KernelSource("model", Language.C, HW.arch, "", (), (), options=("-fopenmp",))
    run = compile_object(unit, "int hidden(void); int run(void) { return hidden(); }")
    model.write_bytes(link_model(unit, {"model_run": "run"}, {"kernel": compiled.object_code, "run": run}))
    assert ctypes.CDLL(str(model)).model_run() == 7
    assert exports(model) == {f"model_{function}" for function in ("run", "own_pool", "use_pool")}


def test_a_linkers_error_names_its_cause() -> None:
    unit = KernelSource("pair", Language.C, HW.arch, "", (), ())
    objects = {name: compile_object(unit, "int same(void) { return 1; }") for name in ("one", "two")}
    with pytest.raises(CompileError, match="multiple definition of `same'"):
        link_model(unit, {"pair_run": "same"}, objects)


@pytest.mark.parametrize("name", ["pair", "inner"])
def test_a_model_exports_what_it_is_asked_to(tmp_path: Path, name: str) -> None:
    unit = KernelSource(name, Language.C, HW.arch, "", (), (), options=("-fopenmp",))
    text = '__attribute__((visibility("default"))) int inner(void) { return 7; } int other(void) { return 1; }'
    path = tmp_path / "model.so"
    path.write_bytes(link_model(unit, {f"{name}_run": "inner"}, {"one": compile_object(unit, text)}))
    assert ctypes.CDLL(str(path))[f"{name}_run"]() == 7
    assert exports(path) == {f"{name}_{function}" for function in ("run", "own_pool", "use_pool")}
