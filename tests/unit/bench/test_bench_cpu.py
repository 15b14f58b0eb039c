"""The CPU benchmark: its arithmetic, which samples it takes, and what it prints."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

from roller_bench.cases import BenchCase
from roller_bench.cli.cpu import chosen_cases
from roller_bench.cpu import run as cpu
from roller_bench.cpu import worker as cpu_worker
from roller_bench.cpu.report import Samples, case_row, failed_row, metrics, p95, roofline_bound, summary
from roller_bench.cpu.worker import ROLLER, BuildRoller, Built, Start, TakeSample
from roller_bench.timing_worker import Sample, take_sample
from roller_svc import hardware
from roller_svc.calibration.cpu.limits import Bandwidth, LimitProbes, Limits, Stream
from roller_svc.calibration.cpu.probes import working_sets
from roller_svc.cli import main
from roller_svc.errors import ArgumentError, BuildError, InvariantError
from roller_svc.runtime.interference import runqueue_wait_s, steal_s
from roller_svc.semantics.interpreter import evaluate

LIMITS = Limits(
    100e9,
    (
        Bandwidth(Stream.COPY, "l2", 1 << 19, 50e9),
        Bandwidth(Stream.COPY, "dram", 1 << 28, 10e9),
        Bandwidth(Stream.READ, "l1", 1 << 14, 300e9),
    ),
)
MATRICES = {"A": {"dtype": "float32", "shape": [64, 32]}, "B": {"dtype": "float32", "shape": [32, 16]}}
PRODUCT = BenchCase("product", "gemm", "C[m, n] +=! A[m, k] * B[k, n]", MATRICES, None)


def test_a_row_compares_with_the_fastest_peer() -> None:
    taken = Samples({ROLLER: [2e-3, 1e-3, 3e-3], "numpy": [4e-3, 5e-3, 6e-3], "torch": [3e-3, 8e-3, 9e-3]}, 4)
    row = case_row(PRODUCT, taken, roofline_bound(PRODUCT.program(), LIMITS))
    assert (row["id"], row["cls"], row["error"]) == ("product", "gemm", None)
    assert (row["ours_s"], row["ours_median_s"]) == (1e-3, 2e-3)
    assert row["peers"] == {"numpy": 4e-3, "torch": 3e-3}
    assert row["peers_median"] == {"numpy": 5e-3, "torch": 8e-3}
    assert row["best_peer"] == "torch"
    assert row["ratio"] == pytest.approx(3.0)
    assert row["median_ratio"] == pytest.approx(2.5)
    assert row["gflops"] == pytest.approx(2 * 64 * 32 * 16 / 1e-3 / 1e9)
    assert row["gb_per_s"] == pytest.approx(4 * (64 * 32 + 32 * 16 + 64 * 16) / 1e-3 / 1e9)
    assert (row["samples"], row["repeated"]) == (3, 4)


def test_the_share_of_the_fma_peak_is_that_of_the_peak_beside_each_sample() -> None:
    flops = 2 * 64 * 32 * 16
    bound = roofline_bound(PRODUCT.program(), LIMITS)
    peaks = (flops / 1e-3, 4 * flops / 1e-3, 2 * flops / 1e-3)
    row = case_row(PRODUCT, Samples({ROLLER: [2e-3, 1e-3, 1e-3]}, 0, peaks), bound)
    assert row["share_of_peak"] == pytest.approx(0.5)
    assert case_row(PRODUCT, Samples({ROLLER: [2e-3]}, 0), bound)["share_of_peak"] == pytest.approx(flops / 2e-3 / 100e9)


def test_a_row_without_peers_has_no_ratio() -> None:
    row = case_row(PRODUCT, Samples({ROLLER: [1e-3]}, 0), roofline_bound(PRODUCT.program(), LIMITS))
    assert row["peers"] == {}
    assert row["ratio"] is None


def test_the_bound_is_what_takes_longer() -> None:
    product = roofline_bound(PRODUCT.program(), LIMITS)
    assert product.name == "fma"
    assert product.seconds == pytest.approx(2 * 64 * 32 * 16 / 100e9)
    shape = {"dtype": "float32", "shape": [1 << 20]}
    copy = roofline_bound(BenchCase("copy", "relu", "Y[i] = X[i].call(`max`, [0.0])", {"X": shape}, None).program(), LIMITS)
    assert copy.name == "copy bandwidth"
    assert copy.seconds == pytest.approx(8 * (1 << 20) / 10e9)


def test_a_gather_reads_no_more_than_it_takes() -> None:
    inputs = {"X": {"dtype": "float32", "shape": [1000, 8]}, "i": {"dtype": "int32", "shape": [10]}}
    found = roofline_bound(BenchCase("g", "gather", "Y[a, c] = X[i[a], c]", inputs, None).program(), LIMITS)
    assert found.bytes == 4 * (10 * 8 + 10 + 10 * 8)


def test_copy_bandwidth_is_that_of_the_size() -> None:
    assert LIMITS.copy_bytes_per_s(1000) == 50e9
    assert LIMITS.copy_bytes_per_s(1 << 20) == 10e9
    assert LIMITS.copy_bytes_per_s(1 << 40) == 10e9


def test_figures_of_classes() -> None:
    def row(cls: str, ratio: float | None, error: str | None = None) -> dict[str, object]:
        return {"cls": cls, "ratio": ratio, "median_ratio": ratio, "error": error, "build_s": 2.0, "model_build_s": 0.5}

    failed = failed_row(PRODUCT, BuildError("no kernel"))
    rows = [row("a", 1.0), row("a", 4.0), row("b", 0.5), row("b", None), failed]
    found = summary(rows)
    assert found["geomean_ratio"] == pytest.approx(2.0 ** (1 / 3))
    assert found["min_ratio"] == 0.5
    assert found["median_ratio"] == 1.0
    assert (found["cases"], found["compared"], found["errors"]) == (5, 3, 1)
    assert list(found["classes"]) == ["a", "b", "gemm"]
    assert found["classes"]["a"]["geomean_ratio"] == pytest.approx(2.0)
    assert found["classes"]["gemm"]["geomean_ratio"] is None
    assert failed["error"] == "build-failed: no kernel"
    assert metrics([])["geomean_ratio"] is None


def test_p95_is_an_element() -> None:
    assert p95([]) is None
    assert p95([1.0]) == 1.0
    assert p95([float(n) for n in range(1, 101)]) == 95.0


@pytest.mark.parametrize(
    ("waited_s", "stolen", "disturbed"),
    [(0.0, 0.0, False), (0.0003, 0.0, False), (0.001, 0.0, True), (0.0, 0.01, False), (0.0, 0.02, True)],
)
def test_samples_that_others_disturbed_are_known(waited_s: float, stolen: float, disturbed: bool) -> None:
    """Of 20 ms: up to 2 % of waiting, and one tick of stolen time, say nothing."""
    assert Sample(0.002, 10, waited_s, stolen).is_disturbed is disturbed


class Script:
    """Workers whose answers are written down; they know in which order they were asked."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.asked: list[str] = []

    def ask(self, name: str, task: object) -> Sample:
        assert isinstance(task, TakeSample)
        self.asked.append(name)
        return self.samples[min(len(self.asked), len(self.samples)) - 1]


def test_disturbed_samples_are_taken_again_but_not_for_ever() -> None:
    good, bad = Sample(1e-3, 20, 0.0, 0.0), Sample(9e-3, 20, 1.0, 0.0)
    taken = cpu.sample_interleaved((ROLLER,), Script([bad, bad, good]).ask)
    assert taken.seconds == {ROLLER: [1e-3] * cpu.ROUNDS}
    assert taken.peaks == ()
    assert taken.repeated == 2
    taken = cpu.sample_interleaved((ROLLER,), Script([bad]).ask)
    assert taken.repeated == cpu.MAX_REPEATED
    assert len(taken.seconds[ROLLER]) == cpu.ROUNDS


def test_a_sample_of_ours_keeps_the_peak_beside_it() -> None:
    taken = cpu.sample_interleaved((ROLLER,), Script([Sample(1e-3, 20, 0.0, 0.0, peak_flops_per_s=1e11)]).ask)
    assert taken.peaks == (1e11,) * cpu.ROUNDS


def test_turns_alternate() -> None:
    script = Script([Sample(1e-3, 20, 0.0, 0.0)])
    cpu.sample_interleaved(("ours", "numpy", "torch"), script.ask)
    assert script.asked == ["ours", "numpy", "torch"] * cpu.ROUNDS


def test_a_sample_warms_up_and_repeats_what_is_short() -> None:
    counts = [0]

    def call() -> None:
        counts[0] += 1

    found = take_sample(call, sample_s=1e-4)
    assert found.calls > 1
    assert counts[0] == found.calls + 2
    assert found.seconds > 0


def test_waiting_and_stolen_time_are_read(tmp_path: Path) -> None:
    for task, text in (("1", "5 2000000000 7"), ("2", "5 500000000 7")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(text, encoding="ascii")
    assert runqueue_wait_s(tmp_path) == 2.5
    assert runqueue_wait_s(tmp_path / "nowhere") == 0
    stat = tmp_path / "stat"
    core = min(os.sched_getaffinity(0))
    stat.write_text(f"cpu 1 1 1 1 1 1 1 900\ncpu{core} 1 1 1 1 1 1 1 50 0\ncpu999999 1 1 1 1 1 1 1 70\n", encoding="ascii")
    assert steal_s(stat) == pytest.approx(50 / os.sysconf("SC_CLK_TCK"))
    assert steal_s(tmp_path / "nothing") == 0


def test_workers_start_on_their_cores_only() -> None:
    before, variables = os.sched_getaffinity(0), dict(os.environ)
    with cpu.pinned(sorted(before)[:1]):
        assert len(os.sched_getaffinity(0)) == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.sched_getaffinity(0) == before
    assert dict(os.environ) == variables


def test_the_turnstile_locks_and_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    turnstile = cpu.MachineLock(path)
    turnstile.enter()
    turnstile.enter()
    with path.open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        turnstile.leave()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    turnstile.close()
    free = cpu.MachineLock(None)
    free.enter()
    free.close()


@pytest.mark.slow
def test_every_limit_of_this_cpu_is_measured() -> None:
    hw = hardware.load("local")
    found = LimitProbes(hw, 1).limits()
    assert found.flops_per_s > 1e8
    levels = [name for name, _ in working_sets(hw, 1)]
    assert levels[0] == "l1"
    assert levels[-1] == "dram"
    assert [(b.stream, b.level) for b in found.bandwidths] == [(s, name) for s in Stream for name in levels]
    assert all(np.isfinite(b.bytes_per_s) and b.bytes_per_s > 1e6 for b in found.bandwidths)


def _case_file(folder: Path) -> Path:
    cases = [
        {"id": "good", "cls": "gemm", "expr": PRODUCT.expression, "inputs": MATRICES},
        {"id": "bad", "cls": "gemm", "expr": "C[m] = A[q", "inputs": MATRICES},
        {"id": "other", "cls": "erf", "expr": "Y[i, j] = A[i, j].call(`erf`)", "inputs": MATRICES},
        {"id": "left out", "cls": "map", "expr": "Y[i, j] = A[i, j] * 2.0", "inputs": MATRICES},
    ]
    path = folder / "cases.json"
    path.write_text(json.dumps({"cases": cases}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_document_has_what_the_interface_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--only", "gemm", "--only", "oth", "--select", "model", "--peers", "numpy"]
    assert main(["bench", "cpu", "--cases", str(_case_file(tmp_path)), *chosen, "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    found = document["threads"]["1"]
    good, bad, other = found["cases"]
    assert good["ours_s"] > 0
    assert good["ratio"] == pytest.approx(good["peers"]["numpy"] / good["ours_s"])
    assert good["peer_calls"] == {"numpy": ["mm"]}
    assert bad["error"].startswith(("unbalanced-bracket", "syntax-error"))
    assert (bad["ours_s"], bad["ratio"]) == (None, None)
    assert other["peers"] == {}
    assert "numpy has no erf" in other["peer_errors"]["numpy"]
    assert found["geomean_ratio"] == pytest.approx(good["ratio"])
    assert found["classes"]["gemm"]["min_ratio"] == pytest.approx(good["ratio"])
    assert document["machine"]["cpu"]
    assert found["versions"]["numpy"] == np.__version__
    assert "good gemm" in printed.err


@pytest.mark.slow
def test_a_worker_that_died_starts_again_on_its_cores() -> None:
    workers = cpu.Workers(1, cpu.Settings(baselines=()))
    workers.start()
    try:
        with pytest.raises(InvariantError, match="expected a built kernel or a baseline"):
            workers.call(ROLLER, TakeSample())
        workers.processes[ROLLER].close(kill=True)
        assert workers.call(ROLLER, Start(ROLLER, 1)) == {"cores": "1"}
    finally:
        workers.close()


def test_a_program_too_large_for_the_interpreter_is_judged_by_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_worker, "_CHECKED_POINTS", 1)
    task = BuildRoller(PRODUCT, "local", "model", 1)
    built = cpu_worker.work(task)
    assert isinstance(built, Built)
    assert not built.checked_by_reference
    program = PRODUCT.program()
    expected = evaluate(program, cpu_worker.make_inputs(program, PRODUCT))["C"].wide.reshape(-1)
    approximate_values = built.expected["C"]
    assert approximate_values.indices is not None
    assert approximate_values.error is not None
    assert (np.abs(approximate_values.wide - expected[approximate_values.indices]) <= approximate_values.error).all()


def test_cases_are_chosen_by_class_and_by_the_beginning_of_their_ids(tmp_path: Path) -> None:
    def chosen(*only: str) -> list[str]:
        options = argparse.Namespace(cases=_case_file(tmp_path), every=1, only=list(only))
        return [case.id for case in chosen_cases(options)]

    assert chosen() == ["good", "bad", "other", "left out"]
    assert chosen("oth") == chosen("erf") == ["other"]
    assert chosen("gemm", "left") == ["good", "bad", "left out"]
    with pytest.raises(ArgumentError, match="--only er: expected a prefix of an id or one of the classes "):
        chosen("oth", "er")


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    path = str(_case_file(tmp_path))
    assert main(["bench", "cpu", "--cases", path, "--target", "nvidia-v100-sxm2"]) == 2
    assert main(["bench", "cpu", "--cases", path, "--threads", "0"]) == 2
    assert main(["bench", "cpu", "--cases", path, "--threads", "100000"]) == 2
    assert main(["bench", "cpu", "--cases", path, "--peers", "nothing"]) == 2
    assert main(["bench", "cpu", "--cases", str(tmp_path / "nothing.json")]) == 2
    workers = cpu.Workers(100_000, cpu.Settings())
    with pytest.raises(ArgumentError, match="cores"):
        workers.start()
