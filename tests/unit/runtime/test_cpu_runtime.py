"""Compiled C on numpy arrays."""

from __future__ import annotations

import dataclasses
import os
import platform
import threading
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from reference_kernels import add, cuda_scale, gather, row_sums_doubled

import roller_svc
from roller_svc.codegen.c.threads import THREADS
from roller_svc.errors import ArgumentError, IndexRangeError, InvariantError, LaunchError
from roller_svc.ir.kernel import CompiledKernel, LaunchSpec
from roller_svc.runtime.binding import aligned_empty
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.measure import host_name, measure
from roller_svc.toolchain.gcc import compile_c


@pytest.fixture(scope="module")
def adder() -> CpuModule:
    return CpuModule(compile_c(add()))


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"A": rng.random((4, 6), np.float32), "B": rng.random((6, 4), np.float32).T}


def test_a_call_gives_new_arrays_and_leaves_its_inputs(adder: CpuModule) -> None:
    given = operands()
    before = {name: array.copy() for name, array in given.items()}
    first, second = adder.run(given)["C"], adder.run(given)["C"]
    assert np.array_equal(first, given["A"] + given["B"])
    assert not np.may_share_memory(first, second)
    assert all(np.array_equal(given[name], before[name]) for name in given)


def test_out_is_written_and_returned(adder: CpuModule) -> None:
    given = operands()
    expected = given["A"] + given["B"]
    for target in (aligned_empty((4, 6), np.dtype(np.float32)), np.empty((8, 6), np.float32)[::2], given["A"]):
        assert adder.run(given, {"C": target})["C"] is target
        assert np.array_equal(target, expected)


def test_arguments_are_checked(adder: CpuModule) -> None:
    with pytest.raises(ArgumentError, match="missing argument: B"):
        adder.run({"A": operands()["A"]})


def test_launches_run_in_order_on_a_zeroed_workspace() -> None:
    module = CpuModule(compile_c(row_sums_doubled()))
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    for _ in range(3):
        assert np.array_equal(module.run({"A": a})["C"], 2 * a.sum(1))


def test_a_bound_call_runs_again_and_again(adder: CpuModule) -> None:
    given = {name: np.ascontiguousarray(array) for name, array in operands().items()}
    call = adder.bind(given)
    call()
    call()
    assert np.array_equal(call.results()["C"], given["A"] + given["B"])


@pytest.mark.parametrize("value", [-1, 5, 2**31 - 1])
def test_an_index_out_of_range_is_reported(value: int) -> None:
    module = CpuModule(compile_c(gather()))
    a = np.arange(5, dtype=np.float32)
    with pytest.raises(IndexRangeError) as raised:
        module.run({"A": a, "P": np.array([0, value, 1], np.int32)})
    for part in (f"index {value} ", "dimension 0", "axis i", "of A", "extent 5", "P[i]"):
        assert part in raised.value.message
    # The record is cleared for the next call.
    assert np.array_equal(module.run({"A": a, "P": np.array([4, 0, 2], np.int32)})["C"], a[[4, 0, 2]])


def test_threads_have_workspaces_of_their_own() -> None:
    module = CpuModule(compile_c(row_sums_doubled()))
    wrong: list[int] = []

    def work(seed: int) -> None:
        a = np.full((4, 6), seed, np.float32)
        for _ in range(300):
            if not (module.run({"A": a})["C"] == 12 * seed).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_kernels_of_one_name_stay_apart() -> None:
    """A loader that identifies libraries by file name would return the first one."""
    given = operands()
    modules = []
    for factor in range(5):
        text = add().text.replace("a[i] + b[i]", f"{factor} * a[i]")
        modules.append(CpuModule(compile_c(dataclasses.replace(add(), text=text))))
    for factor, module in enumerate(modules):
        assert np.array_equal(module.run(given)["C"], factor * given["A"])


def test_a_library_goes_with_its_module() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("roller-")

    before = mapped()
    module = CpuModule(compile_c(add()))
    assert mapped() > before
    del module
    assert mapped() == before


def test_openmp_survives_the_library_that_brought_it() -> None:
    """Without "omp parallel" the kernel has no pool of ours."""
    text = add().text.replace("{ for", "{\n#pragma omp  parallel for num_threads(2)\nfor")
    compiled = compile_c(dataclasses.replace(add(("-fopenmp",)), text=text))
    given = operands()
    for _ in range(3):
        module = CpuModule(compiled)
        assert np.array_equal(module.run(given)["C"], given["A"] + given["B"])
        del module


def test_a_kernel_takes_no_more_threads_than_its_caller_may_use() -> None:
    """C[i] is the number of threads of a region for at most i, for a compiler with its own OpenMP runtime."""
    text = THREADS + "\nvoid add(const float *a, const float *b, float *c) "
    text += "{ (void)a; (void)b; for (int i = 0; i < 24; i++) c[i] = threads_i32(i); }\n"
    call = CpuModule(compile_c(dataclasses.replace(add(("-fopenmp",)), text=text))).bind(operands())
    every = os.sched_getaffinity(0)
    call()
    most = int(call.results()["C"].max())
    assert 1 <= most <= len(every)
    assert call.results()["C"].ravel().tolist() == [min(i, most) for i in range(24)]
    os.sched_setaffinity(0, {min(every)})
    try:
        call()
    finally:
        os.sched_setaffinity(0, every)
    assert call.results()["C"].max() == 1


def test_denormals_stay() -> None:
    """Loading a kernel must not enable flush-to-zero for the process."""
    CpuModule(compile_c(add(("-fopenmp",)))).run(operands())
    assert np.float32(1e-40) * np.float32(0.5) != 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the control register of x86")
def test_kernels_leave_the_control_register_of_their_thread_alone() -> None:
    """Every family's kernel preserves rounding, flush-to-zero, denormals-are-zero and trap masks."""
    text = 'void add(float *a, float *b, float *c) { (void)a; (void)b; __asm__("stmxcsr %0" : "=m"(*c)); }\n'
    reader = CpuModule(compile_c(dataclasses.replace(add(), text=text)))

    def control() -> int:
        register = reader.run(operands())["C"].view(np.uint32).ravel()[0]
        return int(register) & ~0x3F  # but for the flags of what has happened

    before = control()
    for expression in ("y[m, n] +=! x[m, k] * x[n, k]", "y[m, n] = x[m, n].call(`tanh`)", "y[m] >=! x[m, k]"):
        kernel = roller_svc.compile(expression, {"x": ("float32", (40, 40))}, select="model")
        kernel(x=np.full((40, 40), 1e-30, np.float32))
        assert control() == before


def test_bytes_that_are_not_a_library_are_rejected() -> None:
    compiled = compile_c(add())
    with pytest.raises(LaunchError, match="cannot load shared object"):
        CpuModule(CompiledKernel(compiled.source, b"\x7fELF nonsense", "", compiled.resources))
    renamed = dataclasses.replace(compiled.source, launches=(LaunchSpec("other", ("a", "b", "c")),))
    with pytest.raises(LaunchError, match="no function other"):
        CpuModule(dataclasses.replace(compiled, source=renamed))
    with pytest.raises(InvariantError, match="not C"):
        CpuModule(CompiledKernel(cuda_scale(), b"", "", ()))


def test_measuring_takes_as_many_calls_as_the_clock_needs() -> None:
    calls: list[int] = []
    measured = measure(lambda: calls.append(1), repeats=5)
    assert measured.samples <= 5
    assert len(calls) > 50  # of a microsecond or less each
    assert 0 < measured.min_s <= measured.median_s
    assert measured.device_name == host_name() != ""


def test_measuring_stops_at_the_budget_and_when_hopeless_or_steady() -> None:
    def clock(seconds: float, taken: list[int]):
        def stopwatch(_: object, times: int) -> float:
            taken.append(times)
            return seconds * times

        return stopwatch

    taken: list[int] = []
    assert measure(lambda: None, 0.1, 100, stopwatch=clock(0.3, taken)).samples == len(taken) == 1  # all of the budget
    assert measure(lambda: None, 1.0, 100, stopwatch=clock(0.3, taken)).samples <= 4
    assert measure(lambda: None, 100.0, 50, stopwatch=clock(0.01, taken)).samples == 7  # all equal: steady
    assert measure(lambda: None, 100.0, 50, best_s=0.001, stopwatch=clock(0.1, taken)).samples == 1
    assert measure(lambda: None, 100.0, 50, best_s=0.005, stopwatch=clock(0.01, taken)).samples == 1
    assert measure(lambda: None, 100.0, 50, best_s=5e-4, stopwatch=clock(1e-3, taken)).samples == 3  # cold ones


def test_arrays_that_are_used_as_they_are_and_others_give_one_result(adder: CpuModule) -> None:
    a, b = (np.arange(24, dtype=np.float32).reshape(4, 6) + i for i in range(2))
    read_only = a.copy()
    read_only.flags.writeable = False
    strided = np.repeat(a, 2, axis=1)[:, ::2]
    for first in (a, read_only, strided):
        result = adder.run({"A": first, "B": b})["C"]
        np.testing.assert_array_equal(result, a + b)
        assert result.base is None or result.base is not first
    with pytest.raises(ArgumentError, match="missing argument: B"):
        adder.run({"A": a})


def test_given_outputs_are_written_whatever_memory_they_share() -> None:
    text = "s[i] = x[i] + w[i]; d[i] = x[i] - w[i]"
    kernel = roller_svc.compile(text, {"x": ("float32", (8,)), "w": ("float32", (8,))}, constants=["w"], select="model")
    values, weights = np.arange(8, dtype=np.float32), np.full(8, 3, np.float32)
    memory = np.empty(64, np.float32)

    def check(*places: tuple[str, int]) -> None:
        """Give outputs that begin at these elements of memory, where x begins at 0 and w at 16."""
        for prepares in (False, True):
            memory[:8], memory[16:24] = values, weights
            x, w, out = memory[:8], memory[16:24], {name: memory[start : start + 8] for name, start in places}
            call = kernel.prepare(w=w) if prepares else partial(kernel, w=w)
            results = call(x=x, out=out)
            assert all(results[name] is array for name, array in out.items())
            separate = len({start // 8 for _, start in places}) == len(places)
            for name, expected in (("s", values + weights), ("d", values - weights)):
                if separate or name not in out:
                    np.testing.assert_array_equal(results[name], expected)

    check(("s", 32), ("d", 40))
    check(("d", 40))
    check(("s", 0))  # the input's memory
    check(("s", 4), ("d", 40))  # half of it
    check(("d", 16))  # the constant's
    check(("s", 32), ("d", 36))  # each other's: the last copy wins
    check(("s", 24), ("d", 8))  # beside x and w


@pytest.mark.parametrize("kind", ["strided", "overlaps an input", "is an input"])
def test_each_bound_call_writes_given_outputs_that_the_kernel_cannot_write_in_place(adder: CpuModule, kind: str) -> None:
    base = np.zeros((5, 6), np.float32)
    a = base[:4]
    target = {"strided": np.zeros((4, 12), np.float32)[:, ::2], "overlaps an input": base[1:], "is an input": a}[kind]
    call = adder.bind({"A": a, "B": np.ones((4, 6), np.float32)}, {"C": target})
    for _ in range(2):
        expected = a + 1
        call()
        np.testing.assert_array_equal(target, expected)
    assert call.results()["C"] is target
    np.testing.assert_array_equal(target, expected)


def test_a_bound_call_that_raises_leaves_outputs_that_would_be_copied() -> None:
    kernel = roller_svc.compile("y[i] = x[j[i]]", {"x": ("float32", (4,)), "j": ("int32", (3,))}, select="model")
    j, y = np.array([0, 9, 1], np.int32), np.full((3, 2), 7, np.float32)[:, 0]
    call = kernel.bind({"x": np.arange(4, dtype=np.float32), "j": j}, {"y": y})
    with pytest.raises(IndexRangeError):
        call()
    assert y.tolist() == [7, 7, 7]
    j[1] = 3
    call()
    assert y.tolist() == [0, 3, 1]


def test_outputs_that_do_not_fit_are_refused(adder: CpuModule) -> None:
    given = {"A": np.ones((4, 6), np.float32), "B": np.ones((4, 6), np.float32)}
    read_only = np.ones((4, 6), np.float32)
    read_only.flags.writeable = False
    for out, message in (
        ({"C": read_only}, "read-only"),
        ({"C": np.ones((6, 4), np.float32)}, "shape"),
        ({"C": np.ones((4, 6))}, "dtype"),
        ({"C": None}, "must be a numpy array"),
        ({"D": np.ones((4, 6), np.float32)}, "unknown output"),
    ):
        with pytest.raises(ArgumentError, match=message):
            adder.run(given, out)


def test_a_range_error_of_a_direct_call_leaves_the_next_call_alone() -> None:
    kernel = roller_svc.compile("y[i] = x[j[i]]", {"x": ("float32", (4,)), "j": ("int32", (3,))}, select="model")
    x = np.arange(4, dtype=np.float32)
    with pytest.raises(IndexRangeError):
        kernel(x=x, j=np.array([0, 9, 1], np.int32))
    np.testing.assert_array_equal(kernel(x=x, j=np.array([3, 0, 1], np.int32))["y"], x[[3, 0, 1]])


def test_prepared_kernels_and_narrow_types_are_called_directly() -> None:
    types = {"x": ("bfloat16", (4, 8)), "w": ("bfloat16", (8, 5))}
    text = "y[m, n]: float32 +=! x[m, k] * w[k, n]"
    kernel = roller_svc.compile(text, types, select="model", constants=["w"])
    x, w = np.ones((4, 8), ml_dtypes.bfloat16), np.full((8, 5), 2, ml_dtypes.bfloat16)
    prepared = kernel.prepare(w=w)
    for _ in range(2):
        np.testing.assert_array_equal(prepared(x=x)["y"], np.full((4, 5), 16, np.float32))
        np.testing.assert_array_equal(kernel(x=x, w=w)["y"], np.full((4, 5), 16, np.float32))
