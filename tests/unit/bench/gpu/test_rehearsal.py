"""bench/gpu without a device: waits that are bounded, and the program rehearsed against a driver that is not there.

`make rehearse` runs all of it, and what may befall a device; here it is what that rests on.
"""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.errors import BuildServiceError, KernelTimeoutError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.semantics.inputs import draw_patterns, random_inputs

ROOT = Path(__file__).parents[4]


@pytest.fixture
def bench() -> Any:
    from roller_bench.gpu import device_inputs, main, rehearsal, report, samples, workers
    from roller_bench.gpu.rehearsal import driver, libraries, memory, subset

    return types.SimpleNamespace(
        device_inputs=device_inputs,
        driver=driver,
        subset=subset,
        workers=workers,
        libraries=libraries,
        main=main,
        memory=memory,
        rehearsal=rehearsal,
        report=report,
        samples=samples,
    )


# workers ------------------------------------------------------------------------------------------------------------
def test_every_task_comes_back_with_its_result(bench: Any) -> None:
    found = dict(bench.workers.map_unordered(operator.neg, range(6), 2, 60.0, time.monotonic() + 600))
    assert found == {n: -n for n in range(6)}


def test_a_bug_is_the_answer_to_its_task_and_the_next_goes_on(bench: Any) -> None:
    pool = bench.workers.BoundedPool(len, 1, 60.0)
    for task in (5, [1, 2]):
        pool.submit(task)
    (_, first), (_, second) = (pool.next(time.monotonic() + 600) for _ in range(2))
    pool.close()
    assert "TypeError" in str(first)
    assert second == 2


def test_what_is_at_work_when_the_time_is_up_is_killed(bench: Any) -> None:
    before = bench.workers.running_workers()
    until = time.monotonic() + 1.5
    assert list(bench.workers.map_unordered(time.sleep, [3600.0] * 2, 2, 3600.0, until)) == []
    assert bench.workers.end_processes(before)
    assert bench.workers.running_workers() <= before
    assert list(bench.workers.map_unordered(time.sleep, [3600.0], 1, 3600.0, until)) == []  # is not even begun
    assert bench.workers.running_workers() <= before


def test_a_lane_that_neither_answers_nor_ends_is_abandoned(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stuck in the driver cannot be killed: a lane that waits for its end does not come back."""
    stuck, made = threading.Event(), []

    class Stuck:
        def __init__(self, work: Any, timeout_s: float) -> None:
            made.append(self)

        def call(self, task: Any) -> Any:
            if len(made) == 1:
                stuck.wait()
                raise BuildServiceError("it ended after all")
            return task

        def close(self, *, kill: bool) -> None:
            pass

    monkeypatch.setattr(bench.workers, "WorkerProcess", Stuck)
    worker = bench.workers.BoundedWorker(operator.neg, 3600.0)
    with pytest.raises(KernelTimeoutError, match="abandoned"):
        worker.call(7, until=time.monotonic())
    assert worker.call(7) == 7
    assert len(made) == 2
    stuck.set()


# inputs --------------------------------------------------------------------------------------------------------------
def plan(bench: Any, tmp_path: Path, fault: str | None = None) -> Any:
    return bench.rehearsal.Plan(fault, tmp_path)


@pytest.mark.parametrize("shape", [(3, 5), (8,), (1000,), ()])
def test_values_that_repeat_on_the_device_are_those_of_the_judge(bench: Any, tmp_path: Path, shape: tuple[int, ...]) -> None:
    index = ",".join("ij"[: len(shape)])
    types_ = {"x": {"dtype": "float16", "shape": list(shape)}}
    program = parse(f"y[{index}] = x[{index}] * 2.0", dict(tensor_types(types_)), None)
    cupy = bench.memory.make_cupy(bench.driver.Device(plan(bench, tmp_path)))
    made = bench.device_inputs.on_device(cupy, program, draw_patterns(program, 0, None, 7))["x"]
    wanted = random_inputs(program, 0, None, 7)["x"]
    assert np.array_equal(made.numpy(), wanted)
    places = np.array([0, wanted.size - 1])
    found = bench.device_inputs.read_elements(cupy, made, places).view(np.float16)
    assert np.array_equal(found, wanted.reshape(-1)[places])


# the device that is not there ----------------------------------------------------------------------------------------
def test_a_device_gives_memory_back_and_runs_out_of_it(bench: Any, tmp_path: Path) -> None:
    device = bench.driver.Device(plan(bench, tmp_path, "memory"))
    cupy, half = bench.memory.make_cupy(device), bench.driver.SMALL_DEVICE_BYTES * 2 // 3
    first = cupy.empty((half,), np.dtype(np.uint8))
    part = first[:16]
    with pytest.raises(bench.driver.NoMemoryError):
        cupy.empty((half,), np.dtype(np.uint8))
    del first
    assert device.allocated_bytes == half  # a part holds all of it
    del part
    assert device.allocated_bytes == 0


def test_a_fault_stays_until_the_process_ends(bench: Any, tmp_path: Path) -> None:
    device = bench.driver.Device(plan(bench, tmp_path, "fault"))
    for _ in range(bench.driver.FAULT_INTERVAL):
        device.begin(None)
    device.count_launch()
    device.count_launch()
    for use in (device.count_launch, device.wait, lambda: device.allocate(1)):
        with pytest.raises(bench.driver.DriverError, match="illegal memory access"):
            use()


def test_the_clock_goes_by_what_the_model_expects_and_by_no_other(bench: Any, tmp_path: Path) -> None:
    device = bench.driver.Device(plan(bench, tmp_path))
    cupy = bench.memory.make_cupy(device)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    device.advance(1e-3)
    end.record()
    assert cupy.cuda.get_elapsed_time(start, end) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda t, f, x: t.matmul(x(4, 5), x(5, 6)), (4, 6)),
        (lambda t, f, x: t.einsum("abc,dc->adb", x(2, 3, 4), x(5, 4)), (2, 5, 3)),
        (lambda t, f, x: f.conv2d(x(2, 3, 9, 9), x(8, 3, 3, 3), None, (2, 2), (1, 1), (1, 1), 1), (2, 8, 5, 5)),
        (lambda t, f, x: f.max_pool2d(x(3, 9, 9), [3, 3], [2, 2], [0, 0]), (3, 4, 4)),
        (lambda t, f, x: t.tanh(x(3, 1) + x(4)), (3, 4)),
        (lambda t, f, x: x(2, 3, 4).permute(0, 2, 1)[:, None, 0], (2, 1, 3)),
        (lambda t, f, x: f.scaled_dot_product_attention(x(1, 2, 3, 8), x(1, 2, 9, 8), x(1, 2, 9, 8)), (1, 2, 3, 8)),
    ],
)
def test_tensors_without_values_have_torchs_shapes(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, shape: tuple[int, ...]
) -> None:
    device = bench.driver.Device(plan(bench, tmp_path))
    monkeypatch.setattr(bench.libraries, "_DEVICE", device)
    modules = bench.libraries.torch_modules()
    torch, functional = modules["torch"], modules["torch.nn.functional"]
    made = make(torch, functional, lambda *sizes: bench.libraries.Tensor(sizes, bench.libraries.DTYPES["float32"]))
    assert made.shape == shape


def test_a_graph_of_torchs_takes_its_time_when_it_is_replayed(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = bench.driver.Device(plan(bench, tmp_path))
    monkeypatch.setattr(bench.libraries, "_DEVICE", device)
    torch = bench.libraries.torch_modules()["torch"]
    a = bench.libraries.Tensor((4096, 4096), bench.libraries.DTYPES["bfloat16"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(a, a)
    assert device.now_s == 0
    graph.replay()
    rate = next(unit for unit in device.spec.units if unit.name == "wgmma_bf16").flops_per_s
    assert device.now_s == pytest.approx(2 * 4096**3 / rate, rel=0.1)


def test_what_is_rehearsed_is_a_few_of_everything(bench: Any) -> None:
    from roller_bench.gpu.cases import checks_for

    every = checks_for(hardware.load("nvidia-h200-sxm"))
    found = bench.subset.rehearsal_checks(every)
    small = {check.family for check in every if not check.family.endswith("-large")}
    assert {check.family for check in found} == small
    cases = bench.subset.rehearsal_cases([*bench.samples.references(), *bench.samples.sampled_cases(bench.main.CASES, 1)])
    assert len({case.id for case in cases}) == len(cases) < 30
    assert any(case.attention is not None for case in cases)
    assert bench.samples.data_bytes(cases[0].program()) <= bench.subset.EMULATED_BYTES


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("checks", [0, 1, 3])
def test_a_run_that_is_killed_is_a_result(bench: Any, tmp_path: Path, checks: int) -> None:
    """The whole process group is killed after so many checks, with others under way."""
    out, only = tmp_path / "r.jsonl", "^map/|^rows/|^llm-rmsnorm-008$"
    words = ["bench/gpu", "--rehearse", "--stages", "verify,measure", "--only", only, "--out", str(out)]
    words += ["--minutes", "60", "--timeout", "120"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    row = b'"section":"verification"'
    try:
        while process.poll() is None and (not out.exists() or out.read_bytes().count(row) < checks):
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = bench.report.report_of([out])
    assert not found["complete"]
    missing = {stage: one["missing"] for stage, one in found["missing"].items()}
    verified, measured = ({row["id"] for row in found[section]} for section in ("verification", "measurements"))
    assert len(verified) >= checks
    assert not verified & set(missing.get("verify", ()))
    assert ("llm-rmsnorm-008" in missing.get("measure", ())) != ("llm-rmsnorm-008" in measured)
    assert "was cut off" in bench.report.table(found)


@pytest.mark.slow
@pytest.mark.emulator
def test_a_rehearsal_is_a_whole_run_and_says_what_it_is(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, only = tmp_path / "r.jsonl", r"^map/add-4097$|^llm-rmsnorm-008$"
    words = ["--rehearse", "--stages", "verify,measure", "--only", only, "--out", str(out)]
    before = set(multiprocessing.active_children())
    assert bench.main.main(words) == 0
    assert set(multiprocessing.active_children()) <= before
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["rehearsal"]
    assert found["complete"]
    assert [row["ended"] for row in found["stages"]] == ["done"] * 2
    assert [(row["status"], row["sets"]) for row in found["verification"]] == [("ok", 2)]
    (one,) = found["measurements"]
    assert one["checked"] == "ok"  # by the emulator's results
    assert one["peers"]["library"]["samples"] == one["samples"]
    assert one["clocks"]["during"]["sm_mhz"] == [1980, 1980]
    assert "REHEARSAL: nothing here ran on a GPU" in capsys.readouterr().out
