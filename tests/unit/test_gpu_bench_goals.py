"""bench/gpu: sets of inputs, clocks beside measurements, goals, and programs as torch has them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.errors import BuildError, KernelTimeoutError
from roller_svc.front import parse
from roller_svc.lang.compare import agrees
from roller_svc.lang.input_types import tensor_types
from roller_svc.lang.inputs import random_inputs
from roller_svc.lang.interpreter import evaluate

BENCH = Path(__file__).resolve().parents[2] / "bench"
with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    from gpu_bench import (
        cases,
        check,
        clocks,
        compiled_peer,
        main,
        record,
        samples,
        session,
        targets,
        triton_peer,
        values,
    )

    return types.SimpleNamespace(
        cases=cases, check=check, clocks=clocks, compiled_peer=compiled_peer, main=main, record=record,
        samples=samples, session=session, targets=targets, triton_peer=triton_peer, values=values,
    )  # fmt: skip


# checks --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "families", "without"),
    [
        ("nvidia-h200-sxm", {"wgmma", "wgmma-shared", "wgmma-images", "attention", "mma"}, set()),
        ("nvidia-a100-sxm-80gb", {"attention", "mma"}, {"wgmma", "wgmma-shared", "wgmma-images", "wgmma-large"}),
    ],
)
def test_a_device_is_given_the_checks_whose_units_it_has(
    bench: Any, target: str, families: set[str], without: set[str]
) -> None:
    found = bench.cases.checks_for(hardware.load(target))
    assert families <= {check.family for check in found}
    assert not without & {check.family for check in found}
    float8 = [check.id for check in found if check.unit == "mma" and "float8" in check.inputs[0][1][0]]
    assert bool(float8) == (target == "nvidia-h200-sxm")


def test_demands_of_warpgroups_reach_every_way_to_share(bench: Any) -> None:
    demanded = [dict(check.tiles) for check in bench.cases.checks() if check.family == "wgmma-shared"]
    assert {name for tiles in demanded for name in tiles} >= {
        "blocks", "cluster_m", "cluster_n", "split_k", "stream_k", "stages", "raster",
    }  # fmt: skip


# sets of inputs ------------------------------------------------------------------------------------------------------
def set_of(bench: Any, number: int, **more: Any) -> dict[str, np.ndarray]:
    types_ = (("A", ("float16", (4, 64))), ("B", ("float16", (4, 64))), ("n", ("int32", (4, 64))))
    check = bench.check.Check("c", "map", "y[i,j] = A[i,j] + B[i,j] * n[i,j]", types_, **more)
    found: dict[str, np.ndarray] = bench.values.inputs(parse(check.expression, dict(tensor_types(check.types)), None),
                                                       number, check)  # fmt: skip
    return found


def test_every_kind_of_values_is_among_the_first_sets_and_the_first_is_plain(bench: Any) -> None:
    kinds = [bench.values.values_of(number) for number in range(5)]
    assert kinds[0] is bench.values.Values.PLAIN
    assert set(kinds) == set(bench.values.Values)


def test_what_the_sets_hold(bench: Any) -> None:
    kinds = {bench.values.values_of(number): number for number in range(4)}
    special = set_of(bench, kinds[bench.values.Values.SPECIAL])["A"].astype(np.float64)
    assert (np.isnan(special).sum(), np.isposinf(special).sum(), np.isneginf(special).sum()) == (1, 1, 1)
    tiny = set_of(bench, kinds[bench.values.Values.TINY])["A"].astype(np.float64)
    assert np.abs(tiny).max() <= 2.0**-14
    assert np.signbit(tiny[tiny == 0]).any()
    assert (tiny != 0).any()
    cancelling = set_of(bench, kinds[bench.values.Values.CANCELLING])["A"].astype(np.float64)
    pairs = cancelling.reshape(4, 32, 2)
    assert (np.abs(pairs.sum(-1)) < 0.02 * np.abs(pairs).sum(-1)).all()


def test_sets_are_the_same_each_time_and_leave_integers_and_finite_inputs_alone(bench: Any) -> None:
    number = [bench.values.values_of(n) for n in range(4)].index(bench.values.Values.SPECIAL)
    first, second = set_of(bench, number), set_of(bench, number)
    assert all(np.array_equal(first[name], second[name], equal_nan=name != "n") for name in first)
    check_finite = set_of(bench, number, finite=("B",))
    assert np.isfinite(check_finite["B"].astype(np.float64)).all()
    assert not np.isfinite(check_finite["A"].astype(np.float64)).all()
    assert np.array_equal(check_finite["n"], first["n"])


# clocks --------------------------------------------------------------------------------------------------------------
class FakeNvmlLibrary:
    """Clocks that rise with every question; no power figure."""

    def __init__(self) -> None:
        self.mhz = itertools.count(1000, 10)

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, device: Any) -> int:
        return 0 if bus_id == b"0000:01:00.0" else 6

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, value: Any) -> int:
        value._obj.value = next(self.mhz) if kind == 1 else 2619
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> int:
        return 3

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int, value: Any) -> int:
        value._obj.value = 41
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, value: Any) -> int:
        value._obj.value = 0x1 | 0x4
        return 0


def test_clocks_stand_beside_a_measurement(bench: Any) -> None:
    device = bench.clocks.Nvml(FakeNvmlLibrary(), "0000:01:00.0")
    with bench.clocks.watched(device) as watch:
        pass
    found = watch.told()
    assert found["before"] == {"sm_mhz": 1000, "memory_mhz": 2619, "temperature_c": 41, "slowed_by": ["power cap"]}
    assert found["after"]["sm_mhz"] > found["before"]["sm_mhz"]
    assert found["during"]["sm_mhz"] == [found["before"]["sm_mhz"], found["after"]["sm_mhz"]]
    assert "power_w" not in found["during"]
    assert found["during"]["slowed_by"] == ["power cap"]


def test_without_nvml_there_are_no_clocks(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.clocks, "LIBRARY", "libnvidia-ml-that-is-not-there.so")
    device = bench.clocks.opened("0000:01:00.0")
    assert device is None
    with bench.clocks.watched(device) as watch:
        pass
    assert watch.told() == {}
    with pytest.raises(OSError, match="answers 6"):
        bench.clocks.Nvml(FakeNvmlLibrary(), "another")


# goals ---------------------------------------------------------------------------------------------------------------
def row(name: str, cls: str, best_s: float, **more: Any) -> dict[str, Any]:
    usual = {"fused": False, "memory_bound": False, "first_s": 2 * best_s, "cold_s": None, "bytes": 1, "peers": {}}
    return {"id": name, "cls": cls, "best_s": best_s, **usual, **more}


def test_goals_are_shares_of_the_peers_speed(bench: Any) -> None:
    copied = bench.targets.LEAST_STREAM_BYTES
    found = bench.targets.targets(
        [
            row(bench.targets.SQUARE, "reference", 2.0, peers={"library": {"seconds": 1.8}}),
            row("a", "gemm", 1.0, peers={"library": {"seconds": 2.0}, "triton": {"error": "no"}}),
            row("b", "gemv", 1.0, peers={"library": {"seconds": 0.5}}),
            row("c", "attention_prefill", 1.0, fused=True,
                peers={"library": {"seconds": 0.9}, "torch.compile": {"seconds": 0.7}}),
            row("d", "kb_norm", 1.0, fused=True, peers={"torch.compile": {"skipped": "no triton"}}),
            row("e", "relu", 0.5, memory_bound=True, bytes=copied, cold_s=1.0),
            row("f", "relu", 0.5, memory_bound=True, bytes=copied - 1),
        ],
        2.0 * copied,
    )  # fmt: skip
    assert found[bench.targets.SQUARE] == {"share": 0.9, "least": 0.9, "cases": 1, "goal": 0.9}
    assert (found["contractions"]["share"], found["contractions"]["least"]) == (1.0, 0.5)
    assert found["contractions, the model's first"]["share"] == 0.5
    assert found["attention, to the best of torch"]["share"] == 0.7
    assert found["fused, to torch.compile"] == {"share": None, "least": None, "cases": 0, "goal": 1.0}
    assert found["memory_bound"] == {"relu": {"share": 0.5, "least": 0.5, "cases": 1, "goal": 0.9}}
    lines = bench.targets.target_lines(found)
    assert any(line.startswith("copy bandwidth: relu") for line in lines)
    assert bench.targets.targets([], None)["contractions"]["share"] is None


def test_what_is_compared_with_which_compiler(bench: Any) -> None:
    cases = {case.id: case for case in bench.samples.sampled_cases(BENCH / "data" / "public.json", 20)}
    square = bench.samples.references()[0]
    attention = next(case for case in cases.values() if case.attention is not None)
    rope = next(case for case in cases.values() if case.cls == "rope")
    timed = {"best_s": 1.0, "fused": False, "memory_bound": False}
    assert bench.session._compared("triton", square, timed)
    assert bench.session._compared("triton", attention, timed)
    assert not bench.session._compared("triton", rope, timed)
    assert not bench.session._compared("triton", square, {"error": "x"})
    assert bench.session._compared("torch.compile", rope, timed | {"memory_bound": True})
    assert not bench.session._compared("torch.compile", square, timed)


def test_another_compiler_that_is_not_there_is_skipped_with_the_reason(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    square = bench.samples.references()[0]
    assert bench.compiled_peer.compiled_timed(square) == {"name": "torch.compile", "skipped": "torch is not installed"}
    assert bench.triton_peer.triton_timed(square) == {"name": "triton", "skipped": "torch is not installed"}


class DirectLane:
    """A lane without a process."""

    def __init__(self, work: Any, timeout_s: float) -> None:
        self.call = work

    def close(self, *, at_once: bool = False) -> None:
        pass


def session_of(bench: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *, minutes: float = 9.0) -> Any:
    """One whose device, libraries and compilers are functions here."""

    def failing(case: Any) -> Any:
        raise KernelTimeoutError("no answer in 30 s")

    fakes = {
        "Lane": DirectLane, "copy_bandwidth": lambda _: {"bytes_per_s": 1e12}, "calibrated": lambda _: {"id": "x"},
        "timed": lambda task: row(task.case.id, task.case.cls, 1e-3, fused=True, judged="ok", predicted_s=1e-3,
                                  first_cold_s=None),
        "build": lambda task: (task.case.id,), "compiled_timed": failing,
        "library_timed": lambda case: {"name": "torch matmul", "seconds": 9e-4},
        "triton_timed": lambda case: {"name": "triton matmul", "seconds": 2e-3},
        "spread": lambda work, tasks, jobs, timeout_s: ((task, work(task)) for task in tasks),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(bench.session, name, fake)
    options = bench.main.parsed(["--out", str(out), "--minutes", str(minutes), "--target", "nvidia-h200-sxm"])
    device = bench.clocks.Nvml(FakeNvmlLibrary(), "0000:01:00.0")
    return bench.session.Session(options, bench.record.Record(out, {}), device)


def test_a_case_is_measured_and_compared_with_clocks_beside_each(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = session_of(bench, monkeypatch, tmp_path / "gpu.json")
    session.measure(bench.samples.references()[:1])
    session.compare()
    found = session.record.finish()
    document = json.loads((tmp_path / "gpu.json").read_text())
    (one,) = document["measurements"]
    assert {name: peer.get("seconds") for name, peer in one["peers"].items()} == {
        "library": 9e-4, "torch.compile": None, "triton": 2e-3,
    }  # fmt: skip
    assert "no answer in 30 s" in one["peers"]["torch.compile"]["error"]
    assert all("sm_mhz" in each["clocks"]["before"] for each in (one, *one["peers"].values()))
    assert document["bandwidth"]["clocks"]["during"]["samples"] >= 2
    assert found["targets"][bench.targets.SQUARE]["share"] == pytest.approx(0.9)
    assert not document["skipped"]
    assert not bench.main.wrong(document)


def test_what_there_is_no_time_to_compare_is_listed(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = session_of(bench, monkeypatch, tmp_path / "gpu.json")
    session.measure(bench.samples.references()[:2])
    session._began -= 0.95 * 9 * 60
    session.compare()
    assert session.record.document["skipped"] == [{"stage": "compare", "tasks": 4}]
    assert all(set(one["peers"]) == {"library"} for one in session.record.document["measurements"])


# programs as torch has them ------------------------------------------------------------------------------------------
PROGRAMS = {
    "product": ("C[m,n] +=! A[m,k] * B[n,k]; D[m,n] = relu(C[m,n] + v[n])", {"A": (5, 7), "B": (3, 7), "v": (3,)}),
    "convolution": (
        "Y[n,f,y,x] +=! X[n,c,y*2+r-1,x+s].when([y*2+r-1 >= 0, y*2+r-1 < 9], 0.0) * W[f,c,r,s] where y in 5, x in 6",
        {"X": (2, 3, 9, 8), "W": (4, 3, 3, 3)}),
    "norm": (
        "s[i] +=! x[i,j]; q[i] +=! (x[i,j] - s[i] / 9.0) * (x[i,j] - s[i] / 9.0); y[i,j] = x[i,j] * rsqrt(q[i] + 1.0)",
        {"x": (4, 9)}),
    "slices": ("y[i,j] = x[i,j+3] * 2.0 - x[i,2*j] where j in 4", {"x": (3, 8)}),
    "guards": ("y[i,j] = (-x[i,j+3]).when([j < 3], x[i,j-3]) where j in 6", {"x": (3, 6)}),
    "divided": ("y[i,j] +=! q[i,k] * w[i/2,j,k]", {"q": (6, 5), "w": (3, 4, 5)}),
    "greatest": ("y[i] >=! x[i,j]; z[i,j] = exp(x[i,j] - y[i])", {"x": (3, 6)}),
}  # fmt: skip


@with_torch
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_as_torch_has_it_gives_the_references_values(bench: Any, name: str) -> None:
    import torch
    from gpu_bench.torch_program import torch_function

    text, shapes = PROGRAMS[name]
    program = parse(text, dict(tensor_types({n: {"dtype": "float32", "shape": s} for n, s in shapes.items()})), None)
    arrays = random_inputs(program, 0)
    made = torch_function(program)(*(torch.from_numpy(arrays[n]) for n, _ in program.inputs))
    results = {out.name: one.contiguous().numpy() for out, one in zip(program.outputs, made, strict=True)}
    assert agrees(program, results, evaluate(program, arrays)).ok


@with_torch
@pytest.mark.parametrize("text", ["g[at[n]] +=. x[n]", "y[i] +=! x[i + r] * w[r] * v[r, i] where i in 40, r in 25"])
def test_what_torch_has_no_way_to_write_is_refused(bench: Any, text: str) -> None:
    import torch
    from gpu_bench.torch_program import torch_function

    shapes = {"g": ("float32", [9]), "at": ("int32", [4]), "x": ("float32", [64]), "w": ("float32", [25]),
              "v": ("float32", [25, 40])}  # fmt: skip
    used = {n: {"dtype": d, "shape": [4] if "g[" in text and n == "x" else s} for n, (d, s) in shapes.items()
            if re.search(rf"\b{n}\[", text)}  # fmt: skip
    program = parse(text, dict(tensor_types(used)), None)
    with pytest.raises(BuildError):
        torch_function(program)(*(torch.from_numpy(a) for a in random_inputs(program, 0).values()))
