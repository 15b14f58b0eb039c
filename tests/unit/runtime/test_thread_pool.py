"""The thread pool of C kernels: regions, threads, affinity, forks, unloading."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reference_kernels import add
from waiting import PATIENCE_S

import roller_svc
from roller_svc import toolchain
from roller_svc.errors import ArgumentError
from roller_svc.runtime import thread_pool
from roller_svc.runtime.cpu import CpuCall, CpuModule
from roller_svc.toolchain import gcc
from roller_svc.toolchain.gcc import compile_c

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or "clang" in gcc.native_compiler()[0], reason="the pool is for gcc on Linux"
)

PROTOTYPES = "int omp_get_num_threads(void);\nint omp_get_thread_num(void);\nint omp_get_max_threads(void);\n"
HEAD = PROTOTYPES + "void add(const float *a, const float *b, float *c) {\n  (void)a, (void)b;\n"
# C[i] = 1 after a region of many loops that each add 1 to sums. A loop that begins early, or a task that runs twice or
# never, changes a sum.
MANY_LOOPS = """
  long sums[24] = {0}, last[24];
  #pragma omp parallel num_threads(64)
  for (int round = 1; round <= 40; round++) {
    #pragma omp for schedule(dynamic, 1) nowait
    for (long i = 0; i < 24; i++) { if (sums[i] == 2 * round - 2) sums[i]++; }
    #pragma omp barrier
    #pragma omp single
    { for (long i = 0; i < 24; i++) last[i] = sums[i]; }
    #pragma omp for schedule(dynamic, 5)
    for (long i = 23; i >= 0; i -= 1) { if (last[i] == 2 * round - 1) sums[i] = last[i] + 1; }
  }
  for (long i = 0; i < 24; i++) c[i] = sums[i] == 80;
}
"""
# C[i] = how often task i ran, in two loops without a barrier between them
TWO_LOOPS = """
  for (long i = 0; i < 24; i++) c[i] = 0;
  #pragma omp parallel num_threads(64)
  {
    #pragma omp for schedule(dynamic, 1) nowait
    for (long i = 0; i < 12; i++) c[i]++;
    #pragma omp for schedule(dynamic, 7) nowait
    for (long i = 12; i < 24; i++) c[i]++;
  }
}
"""
ONE_LOOP = """
  #pragma omp parallel for schedule(dynamic, 1) num_threads(64)
  for (long i = 0; i < 24; i++) c[i] = a[i] + b[i];
}
"""
# C[0] = number of threads, C[1 + i] = 1 for each thread that there is
STATIC = """
  for (long i = 0; i < 24; i++) c[i] = 0;
  #pragma omp parallel num_threads(8)
  { c[0] = omp_get_num_threads(); c[1 + omp_get_thread_num()] += 1; }
}
"""
NESTED = """
  for (long i = 0; i < 24; i++) c[i] = 0;
  #pragma omp parallel for schedule(dynamic, 1) num_threads(8)
  for (long i = 0; i < 6; i++) {
    #pragma omp parallel num_threads(8)
    {
      #pragma omp for schedule(dynamic, 1)
      for (long j = 0; j < 4; j++) c[4 * i + j] += omp_get_num_threads();
    }
  }
}
"""


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"A": rng.random((4, 6), np.float32), "B": rng.random((4, 6), np.float32)}


def module(body: str) -> CpuModule:
    return CpuModule(compile_c(dataclasses.replace(add(("-fopenmp",)), text=HEAD + body)))


def run(call: CpuCall) -> list[float]:
    call()
    return call.results()["C"].ravel().tolist()


@pytest.fixture
def limit() -> Iterator[None]:
    yield
    thread_pool.set_num_threads(0)


@pytest.mark.parametrize("body", [MANY_LOOPS, TWO_LOOPS, NESTED])
def test_each_task_runs_once_and_after_the_loop_before(body: str) -> None:
    call = module(body).bind(operands())
    for _ in range(500):
        assert run(call) == [1.0] * 24


@pytest.mark.parametrize("callers", [1, 3])
@pytest.mark.parametrize("flags", [("-DWORKERS=0",), ("-DWORKERS=6", "-DMAX_LOOPS=50")], ids=["cpus", "more_workers"])
def test_random_regions_run_each_iteration_once(tmp_path: Path, flags: tuple[str, ...], callers: int) -> None:
    binary = tmp_path / "stress"
    source = Path(__file__).with_name("thread_pool_stress.c")
    folder = Path(toolchain.__file__).parent
    command = ["gcc", "-std=gnu11", "-O2", "-pthread", "-DROLLER_POOL", *flags, "-I", folder, source, "-o", binary]
    subprocess.run(command, check=True)
    done = subprocess.run([binary, str(callers), "0.5"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_region_that_asks_for_its_threads_has_all_of_them() -> None:
    call = module(STATIC).bind(operands())
    threads = min(8, len(os.sched_getaffinity(0)))
    for _ in range(200):
        assert run(call) == [float(threads)] + [1.0] * threads + [0.0] * (23 - threads)


@pytest.mark.two_cores
def test_kernels_neither_need_nor_export_an_openmp_runtime(tmp_path: Path) -> None:
    shapes = dict.fromkeys("ab", ("float32", (192, 192)))
    kernel = roller_svc.compile("y[i, j] +=! a[i, k] * b[k, j]", shapes, select="model")
    assert "#pragma omp" in kernel.source
    path = tmp_path / "kernel.so"
    path.write_bytes(kernel.binary)
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed
    assert "gomp" not in needed
    assert "GOMP" not in symbols
    assert "omp_get" not in symbols
    assert {f"{kernel.name}_own_pool", f"{kernel.name}_use_pool"} <= set(symbols.split())


def test_set_num_threads_limits_kernels_that_are_loaded_and_later_ones(limit: None) -> None:
    first = module(STATIC).bind(operands())
    every = run(first)[0]
    roller_svc.set_num_threads(1)
    assert roller_svc.get_num_threads() == run(first)[0] == run(module(STATIC).bind(operands()))[0] == 1
    roller_svc.set_num_threads(1 << 20)
    assert roller_svc.get_num_threads() == run(first)[0] * len(os.sched_getaffinity(0)) / every


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2", 1 << 31])
def test_a_number_of_threads_is_a_positive_int(threads: object) -> None:
    with pytest.raises(ArgumentError, match="positive int") as raised:
        roller_svc.set_num_threads(threads)
    assert raised.value.code == "invalid-option"


@pytest.mark.parametrize(("setting", "expected"), [("1", 1), ("1,2", 1), ("", None), ("many", None), ("100000", None)])
def test_omp_num_threads_is_read(setting: str, expected: int | None) -> None:
    program = "import roller_svc; print(roller_svc.get_num_threads(), *run(module(STATIC).bind(operands()))[:1])"
    limited = in_a_process(program, OMP_NUM_THREADS=setting).split()
    every = len(os.sched_getaffinity(0))
    assert [float(value) for value in limited] == [expected or every, expected or min(8, every)]


def test_a_smaller_mask_is_respected_and_a_wider_one_used_again() -> None:
    static, call = module(STATIC).bind(operands()), module(MANY_LOOPS).bind(operands())
    every = os.sched_getaffinity(0)
    before = run(static)[0]
    for _ in range(3):
        os.sched_setaffinity(0, {max(every)})
        try:
            assert run(call) == [1.0] * 24
            assert roller_svc.get_num_threads() == max_threads() == run(static)[0] == 1
        finally:
            os.sched_setaffinity(0, every)
        assert roller_svc.get_num_threads() == max_threads() == len(every)
        assert run(static)[0] == before
        assert run(call) == [1.0] * 24


def max_threads() -> int:
    """Return what a region would have, which the pool reads from the mask at once."""
    return int(run(module("  c[0] = omp_get_max_threads();\n  if (c[0] < 0) {\n" + ONE_LOOP + "}").bind(operands()))[0])


def test_workers_that_were_moved_do_not_spoil_results() -> None:
    """As by `taskset -a -p`, which changes the mask of every thread."""
    call = module(MANY_LOOPS).bind(operands())
    every = os.sched_getaffinity(0)
    assert run(call) == [1.0] * 24
    tasks = [int(each.name) for each in Path("/proc/self/task").iterdir()]
    masks = {task: os.sched_getaffinity(task) for task in tasks}
    try:
        for mask in ({min(every)}, {max(every)}, every):
            for task in tasks:
                os.sched_setaffinity(task, mask)
            for _ in range(50):
                assert run(call) == [1.0] * 24
    finally:
        for task, mask in masks.items():
            os.sched_setaffinity(task, mask)


def test_calls_from_several_threads_are_right() -> None:
    wrong: list[list[float]] = []
    calls = [module(body).bind(operands()) for body in (MANY_LOOPS, TWO_LOOPS, NESTED, MANY_LOOPS)]

    def work(call: CpuCall) -> None:
        for _ in range(300):
            if (result := run(call)) != [1.0] * 24:
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_has_workers_of_its_own() -> None:
    program = """
static, call = module(STATIC).bind(operands()), module(MANY_LOOPS).bind(operands())
threads = run(static)[0]
assert run(call) == [1.0] * 24
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(run(static)[0] != threads or run(call) != [1.0] * 24)
    assert os.waitpid(child, 0)[1] == 0
    assert run(call) == [1.0] * 24
"""
    assert in_a_process(program) == ""


def test_unloading_a_kernel_ends_its_workers(tmp_path: Path) -> None:
    """Without Python's pool each kernel makes its own."""
    path = tmp_path / "kernel.so"
    path.write_bytes(compile_c(dataclasses.replace(add(("-fopenmp",)), text=HEAD + STATIC)).binary)
    program = f"""
import ctypes, os
c = (ctypes.c_float * 24)()
workers = []
for _ in range(50):
    library = ctypes.CDLL({str(path)!r})
    library.add(None, None, c)
    workers.append(len(os.listdir("/proc/self/task")) - 1)
    assert c[0] == 1 + workers[-1] and sum(c[1:]) == c[0], list(c)
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
assert len(os.listdir("/proc/self/task")) == 1
assert {str(path)!r} not in open("/proc/self/maps").read()
assert min(workers) == max(workers) == min(8, len(os.sched_getaffinity(0))) - 1
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True)


@pytest.mark.two_cores
def test_kernels_share_one_pool() -> None:
    """A pool has at most one worker for each CPU, also where the system moves the caller from one CPU to another."""
    program = """
every = os.sched_getaffinity(0)
for cpu in sorted(every)[:2] * 2:
    call = module(STATIC).bind(operands())
    os.sched_setaffinity(0, {cpu})  # moves the caller, which then may use all CPUs again
    os.sched_setaffinity(0, every)
    assert run(call)[0] == min(8, len(every))
tasks = [pathlib.Path("/proc/self/task", name) for name in os.listdir("/proc/self/task")]
workers = [int(task.name) for task in tasks if (task / "comm").read_text() == "roller-worker\\n"]
masks = [tuple(os.sched_getaffinity(worker)) for worker in workers]
assert all(len(mask) == 1 for mask in masks), masks
print(len(masks), len(set(masks)))
"""
    workers, cpus = in_a_process(program).split()
    assert 1 <= int(workers) == int(cpus)


def test_a_pool_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    path.write_bytes(compile_c(dataclasses.replace(add(("-fopenmp",)), text=HEAD + ONE_LOOP)).binary)
    library = ctypes.CDLL(str(path))
    other = (ctypes.c_int * 64)(1 << 20)
    assert library.add_use_pool(other) == 0
    a = (ctypes.c_float * 24)(*range(24))
    c = (ctypes.c_float * 24)()
    library.add(a, a, c)
    assert list(c) == [2 * i for i in range(24)]


def in_a_process(program: str, **variables: str) -> str:
    """Run a program with this module's names, and return what it prints."""
    text = f"import os, pathlib, sys\nsys.path[:0] = {sys.path!r}\nfrom {Path(__file__).stem} import *\n{program}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONWARNINGS": "ignore"} | variables
    return subprocess.run([sys.executable, "-c", text], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_a_fork_has_neither_locks_nor_limits_of_other_threads() -> None:
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with thread_pool.limit_threads(1), thread_pool._shared.lock:
            held.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    with thread_pool.limit_threads(2):
        thread.start()
        assert held.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if thread_pool.get_num_threads(0) == min(2, len(os.sched_getaffinity(0))) else 1)
        leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_limits_of_overlapping_blocks_end_with_the_last_one() -> None:
    before = thread_pool.get_num_threads(0)
    first, second = thread_pool.limit_threads(1), thread_pool.limit_threads(2)
    first.__enter__()
    second.__enter__()
    assert thread_pool.get_num_threads(0) == 1
    first.__exit__(None, None, None)
    assert thread_pool.get_num_threads(0) == min(2, before)
    second.__exit__(None, None, None)
    assert thread_pool.get_num_threads(0) == before
