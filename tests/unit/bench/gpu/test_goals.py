"""bench/gpu: sets of inputs, samples in turns, goals, its record, its stages, and programs as torch has them."""

from __future__ import annotations

import importlib.util
import itertools
import random
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.errors import BuildError, KernelTimeoutError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def bench() -> Any:
    from roller_bench.gpu import (
        baselines,
        cases,
        clocks,
        interleaved,
        main,
        record,
        report,
        samples,
        session,
        targets,
        values,
    )
    from roller_bench.gpu.cases import check

    return types.SimpleNamespace(
        baselines=baselines,
        cases=cases,
        check=check,
        clocks=clocks,
        interleaved=interleaved,
        main=main,
        record=record,
        report=report,
        samples=samples,
        session=session,
        targets=targets,
        values=values,
    )


# checks --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "families", "without"),
    [
        ("nvidia-h200-sxm", {"wgmma", "wgmma-shared", "wgmma-images", "attention", "mma"}, set()),
        ("nvidia-a100-sxm-80gb", {"attention", "mma"}, {"wgmma", "wgmma-shared", "wgmma-images", "wgmma-large"}),
    ],
)
def test_a_device_is_given_the_checks_whose_units_it_has(bench: Any, target: str, families: set[str], without: set[str]) -> None:
    found = bench.cases.checks_for(hardware.load(target))
    assert families <= {check.family for check in found}
    assert not without & {check.family for check in found}
    float8 = [check.id for check in found if check.unit == "mma" and "float8" in check.inputs[0][1][0]]
    assert bool(float8) == (target == "nvidia-h200-sxm")


def test_demands_of_warpgroups_reach_every_way_to_share(bench: Any) -> None:
    demanded = [dict(check.tiles) for check in bench.cases.checks() if check.family == "wgmma-shared"]
    assert {name for tiles in demanded for name in tiles} >= {
        "blocks",
        "cluster_m",
        "cluster_n",
        "cluster_k",
        "split_k",
        "stream_k",
        "stages",
        "raster",
        "pingpong",
    }


# sets of inputs ------------------------------------------------------------------------------------------------------
def set_of(bench: Any, number: int, **more: Any) -> dict[str, np.ndarray]:
    types_ = (("A", ("float16", (4, 64))), ("B", ("float16", (4, 64))), ("n", ("int32", (4, 64))))
    check = bench.check.Check("c", "map", "y[i,j] = A[i,j] + B[i,j] * n[i,j]", types_, **more)
    found: dict[str, np.ndarray] = bench.values.inputs(
        parse(check.expression, dict(tensor_types(check.types)), None), number, check
    )
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


class Ticking:
    """Work that takes a little longer each time; `order` notes whose sample was taken."""

    def __init__(self, name: str, seconds: float, order: list[str]) -> None:
        self.name, self.seconds, self.order = name, seconds, order

    def sample(self) -> float:
        self.order.append(self.name)
        self.seconds *= 1.01
        return self.seconds


def test_samples_are_taken_in_turns_as_many_of_each_with_clocks_beside_them(bench: Any) -> None:
    order: list[str] = []
    device = bench.clocks.Nvml(FakeNvmlLibrary(), "0000:01:00.0")
    works = {name: Ticking(name, seconds, order) for name, seconds in (("ours", 1e-3), ("library", 2e-3))}
    times, clocks = bench.interleaved.time_interleaved(works, device)
    assert order == ["ours", "library"] * (len(order) // 2)
    counts = {one["samples"] for one in times.values()}
    assert counts == {bench.interleaved.MAX_ROUNDS}
    for one in times.values():
        assert one["min_s"] < one["median_s"] < one["max_s"]
    assert clocks["before"] == {"sm_mhz": 1000, "memory_mhz": 2619, "temperature_c": 41, "slowed_by": ["power cap"]}
    assert clocks["after"]["sm_mhz"] > clocks["before"]["sm_mhz"]
    assert clocks["during"]["sm_mhz"] == [clocks["before"]["sm_mhz"], clocks["after"]["sm_mhz"]]
    assert clocks["during"]["samples"] == bench.interleaved.MAX_ROUNDS + 1
    assert "power_w" not in clocks["during"]


def test_long_works_get_fewer_samples_all_alike(bench: Any) -> None:
    order: list[str] = []
    works = {name: Ticking(name, seconds, order) for name, seconds in (("ours", 0.3), ("library", 1e-4))}
    times, clocks = bench.interleaved.time_interleaved(works, None)
    assert {one["samples"] for one in times.values()} == {bench.interleaved.MIN_ROUNDS}
    assert clocks == {}


def test_without_nvml_there_are_no_clocks(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.clocks, "LIBRARY", "libnvidia-ml-that-is-not-there.so")
    assert bench.clocks.open_nvml("0000:01:00.0") is None
    with pytest.raises(OSError, match="expected 0, got 6"):
        bench.clocks.Nvml(FakeNvmlLibrary(), "another")


# goals ---------------------------------------------------------------------------------------------------------------
def row(name: str, cls: str, best_s: float, **more: Any) -> dict[str, Any]:
    usual = {"fused": False, "memory_bound": False, "first_s": 2 * best_s, "cold_s": None, "bytes": 1, "peers": {}}
    return {"id": name, "cls": cls, "best_s": best_s, **usual, **more}


def peer(median_s: float, ours_s: float = 1.0) -> dict[str, Any]:
    """One that was timed in turns with ours."""
    return {"name": "x", "median_s": median_s, "ours_s": ours_s, "first_s": 2 * ours_s}


def test_goals_are_shares_of_the_peers_speed(bench: Any) -> None:
    copied = bench.targets.MIN_STREAM_BYTES
    found = bench.targets.targets(
        [
            row(bench.targets.SQUARE, "reference", 9.0, peers={"library": peer(1.8, ours_s=2.0)}),
            row("a", "gemm", 1.0, peers={"library": peer(2.0), "triton": {"error": "no"}}),
            row("b", "gemv", 1.0, peers={"library": peer(0.5)}),
            row("c", "attention_prefill", 1.0, fused=True, peers={"library": peer(0.9), "torch.compile": peer(1.4, ours_s=2.0)}),
            row("d", "kb_norm", 1.0, fused=True, peers={"torch.compile": {"skipped": "no triton"}}),
            row("e", "relu", 0.5, memory_bound=True, bytes=copied, cold_s=1.0),
            row("f", "relu", 0.5, memory_bound=True, bytes=copied - 1),
        ],
        2.0 * copied,
    )
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
    cases = {case.id: case for case in bench.samples.sampled_cases(bench.main.CASES, 20)}
    square = bench.samples.references()[0]
    attention = next(case for case in cases.values() if case.attention is not None)
    rope = next(case for case in cases.values() if case.cls == "rope")
    map_, product = (types.SimpleNamespace(kernels=({"kind": kind},)) for kind in ("map", "contraction"))
    assert bench.session._should_compare("triton", square, [product])
    assert bench.session._should_compare("triton", attention, [product])
    assert not bench.session._should_compare("triton", rope, [map_])
    assert bench.session._should_compare("torch.compile", rope, [map_])
    assert not bench.session._should_compare("torch.compile", square, [product])


def test_a_peer_that_is_not_there_is_skipped_with_the_reason(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    square = bench.samples.references()[0]
    for name in bench.baselines.BASELINES:
        found = bench.baselines.baseline_work(name, square, square.program(), {})
        assert (found.row, found.work) == ({"name": name, "skipped": "torch is not installed"}, None)


# the record ----------------------------------------------------------------------------------------------------------
def recorded(bench: Any, path: Path) -> Any:
    record = bench.record.Record(path, {"rehearsal": False})
    record.add("verification", {"id": "a", "family": "map", "status": "ok", "emulator": {"status": "ok"}})
    record.add(
        "verification",
        {
            "id": "b",
            "family": "map",
            "status": "wrong",
            "emulator": {"status": "ok"},
            "max_abs_error": float("inf"),
            "repeatable": False,
        },
    )
    measured = row("c", "gemm", 1.0, first_cold_s=None, predicted_s=4.0, peers={"library": peer(0.5)})
    record.add("measurements", measured)
    record.add("measurements", {"id": "d", "cls": "gemm", "error": "timeout"})
    record.add("judged", {"id": "c", "judged": "wrong: y[0]"})
    record.add("comparisons", {"id": "c", "peer": "triton", "ours": measured, "found": peer(3.0)})
    record.add("sanitizer", {"tool": "racecheck", "status": "unconfirmed"})
    record.add("stages", {"stage": "verify", "seconds": 1.0, "done": 2, "left": 0, "ended": "done"})
    return record


def test_the_summary_counts_and_compares(bench: Any, tmp_path: Path) -> None:
    recorded(bench, tmp_path / "sub" / "gpu.jsonl").finish()
    found = bench.report.report_of([tmp_path / "sub" / "gpu.jsonl"])
    total = found["summary"]
    assert found["complete"]
    assert total["verification"] == {"map": {"ok": 1, "wrong": 1}}
    assert total["not_repeatable"] == total["device_differs_from_emulator"] == ["b"]
    gemm = total["classes"]["gemm"]
    assert (gemm["cases"], gemm["predicted_to_measured"], gemm["first_to_best"]) == (1, 2.0, 2.0)
    assert gemm["peer_to_ours"] == 0.5
    assert total["wrong"] == ["b", "c", "d"]  # not what racecheck alone says
    assert found["measurements"][0]["peers"]["triton"]["median_s"] == 3.0
    assert "not right: b, c, d" in bench.report.table(found)


def test_a_file_that_was_cut_off_is_a_result(bench: Any, tmp_path: Path) -> None:
    """Wherever it was cut: what is whole counts."""
    path, cut = tmp_path / "gpu.jsonl", tmp_path / "cut.jsonl"
    record = recorded(bench, path)  # and the process is gone: no last line
    text = path.read_bytes()
    found = bench.report.report_of([path])
    assert not found["complete"]
    assert "was cut off" in bench.report.table(found)
    lines = text.splitlines(keepends=True)
    for count in range(1, len(lines)):
        cut.write_bytes(b"".join(lines[:count]) + lines[count][:7])
        left = bench.report.report_of([cut])
        assert len(left["verification"]) == min(2, count - 1)
        assert bench.report.table(left)
    record.finish()


def test_runs_of_several_stages_make_one_report(bench: Any, tmp_path: Path) -> None:
    """Of what two of them have the later counts; comparisons alone bring their own times of ours."""
    first, second = (bench.record.Record(tmp_path / name, {}) for name in ("1.jsonl", "2.jsonl"))
    for record, status in ((first, "error"), (second, "ok")):
        record.add("verification", {"id": "a", "family": "map", "status": status})
    second.add("comparisons", {"id": "c", "peer": "triton", "ours": row("c", "gemm", 1.0, predicted_s=1.0), "found": peer(3.0)})
    for record in (first, second):
        record.finish()
    found = bench.report.report_of([first.path, second.path])
    assert [one["status"] for one in found["verification"]] == ["ok"]
    assert found["summary"]["targets"]["written for Triton"]["share"] == pytest.approx(3.0)
    assert bench.main.main(["--report", str(first.path)]) == 1
    assert bench.main.main(["--report", str(first.path), str(second.path)]) == 0


def test_what_is_no_file_of_results_is_refused(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"section": "end"}\n')
    (tmp_path / "y").write_text('{"section": "about"}\n{"sec\n{}\n')
    for name in ("x", "y", "z"):
        assert bench.main.main(["--report", str(tmp_path / name)]) == 2


# stages --------------------------------------------------------------------------------------------------------------
class DirectWorker:
    """A lane without a process."""

    def __init__(self, work: Any, timeout_s: float) -> None:
        self._work = work

    def call(self, task: Any, until: float = 0.0) -> Any:
        return self._work(task)

    def close(self) -> None:
        pass


class DirectPool:
    """The same for many tasks."""

    def __init__(self, work: Any, jobs: int, timeout_s: float) -> None:
        self._work, self._done, self.pending = work, [], 0

    def submit(self, task: Any) -> None:
        self._done.append((task, self._work(task)))
        self.pending += 1

    def next(self, until: float) -> Any:
        self.pending -= 1
        return self._done.pop(0)

    def close(self) -> None:
        pass


def failing(_: Any) -> Any:
    raise KernelTimeoutError("no answer in 25 s")


def timed(task: Any) -> Any:
    found = {name: peer(9e-4, ours_s=1e-3) for name in task.baselines}
    if "torch.compile" in task.baselines:
        failing(task)
    return row(
        task.case.id, task.case.cls, 1e-3, fused=True, predicted_s=1e-3, first_cold_s=None, best_rank=0, peers=found
    ), task.case.id


def session_of(bench: Any, monkeypatch: pytest.MonkeyPatch, out: Path, cases: list[Any], *stages: str, **fakes: Any) -> Any:
    """One whose device, libraries and compilers are functions here."""
    built = types.SimpleNamespace(rank=0, kernels=({"kind": "map"},))
    usual = {
        "BoundedWorker": DirectWorker, "BoundedPool": DirectPool, "copy_bandwidth": lambda _: {"bytes_per_s": 1e12},
        "time_case": timed, "build_candidates": lambda task: (built,), "check_result": lambda name: f"ok {name}",
        "map_unordered": lambda work, tasks, jobs, timeout_s, until: ((task, work(task)) for task in tasks),
        "_should_compare": lambda name, case, built: True,
    }  # fmt: skip
    for name, fake in {**usual, **fakes}.items():
        monkeypatch.setattr(bench.session, name, fake)
    found = bench.main.parse_options(
        ["--out", str(out), "--minutes", "9", "--target", "nvidia-h200-sxm", "--stages", ",".join(stages)]
    )
    record = bench.record.Record(out, {})
    work = bench.session.Tasks((), cases, {})
    return bench.session.Session(bench.main.make_options(found, out), record, work, lambda work: work, None)


def checked_by_case(task: Any) -> str:
    return "ok"


def test_a_case_is_measured_judged_and_compared(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = [c for c in bench.samples.sampled_cases(bench.main.CASES, 1) if c.attention is not None][:1]
    out = tmp_path / "gpu.jsonl"
    fakes = {
        "time_case": lambda task: (timed(task)[0], types.SimpleNamespace(case=task.case)),
        "check_result": checked_by_case,
    }
    session = session_of(bench, monkeypatch, out, cases, "measure", "compare", **fakes)
    monkeypatch.setattr(bench.session.Session, "_check_device", lambda _: None)
    session.run()
    session.record.finish()
    found = bench.report.report_of([out])
    (one,) = found["measurements"]
    assert {name: found.get("median_s") for name, found in one["peers"].items()} == {
        "library": 9e-4,
        "torch.compile": None,
        "triton": 9e-4,
    }
    assert "no answer in 25 s" in one["peers"]["torch.compile"]["error"]
    assert one["checked"] == "ok"
    assert found["summary"]["targets"]["attention, to the best of torch"]["share"] == pytest.approx(0.9)
    assert [(row["stage"], row["ended"], row["left"]) for row in found["stages"]] == [
        ("measure", "done", 0),
        ("compare", "done", 0),
    ]
    assert not found["summary"]["wrong"]


def test_a_library_that_breaks_the_process_leaves_our_times(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(task: Any) -> Any:
        return failing(task) if task.baselines else (timed(task)[0] | {"peers": {}}, None)

    out, cases = tmp_path / "gpu.jsonl", bench.samples.references()[:1]
    session = session_of(bench, monkeypatch, out, cases, "measure", time_case=broken)
    monkeypatch.setattr(bench.session.Session, "_check_device", lambda _: None)
    session.run()
    session.record.finish()
    (one,) = bench.report.report_of([out])["measurements"]
    assert one["best_s"] == 1e-3
    assert "no answer in 25 s" in one["peers"]["library"]["error"]


def test_compare_runs_alone(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, cases = tmp_path / "gpu.jsonl", bench.samples.references()[:2]
    session = session_of(bench, monkeypatch, out, cases, "compare")
    monkeypatch.setattr(bench.session.Session, "_check_device", lambda _: None)
    session.run()
    session.record.finish()
    found = bench.report.report_of([out])
    assert [set(one["peers"]) for one in found["measurements"]] == [{"triton"}] * 2
    assert found["summary"]["targets"]["written for Triton"]["cases"] == 2


def test_when_the_device_is_gone_the_rest_is_skipped(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, cases = tmp_path / "gpu.jsonl", bench.samples.references()
    session = session_of(bench, monkeypatch, out, cases, "measure", "compare", time_case=failing)
    monkeypatch.setattr(bench.session.machine, "device", failing)
    session.run()
    session.record.finish()
    found = bench.report.report_of([out])
    assert [row["ended"].partition(":")[0] for row in found["stages"]] == ["device lost"]
    assert [row["stage"] for row in found["skipped"]] == ["measure", "compare"]
    assert found["summary"]["wrong"] == ["stage measure"]


def test_what_was_under_way_when_the_time_was_up_is_no_error(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, cases = tmp_path / "gpu.jsonl", bench.samples.references()
    session = session_of(bench, monkeypatch, out, cases, "measure", time_case=failing)
    over = iter([False, True])
    monkeypatch.setattr(session, "_is_over", lambda: next(over, True))
    monkeypatch.setattr(session, "_measure_copy", lambda: session._is_over())
    session.run()
    session.record.finish()
    found = bench.report.report_of([out])
    assert found["measurements"] == []
    assert (found["stages"][0]["ended"], found["stages"][0]["left"]) == ("time", 5)


@pytest.mark.parametrize(
    ("stages", "minutes", "expected"),
    [(("smoke",), 3, {"smoke": 180}), (("smoke", "compare"), 10, {"smoke": 300, "compare": 300})],
)
def test_minutes_are_shared_out(bench: Any, stages: Any, minutes: float, expected: dict[str, float]) -> None:
    assert bench.session.stage_seconds(stages, minutes) == expected


def test_all_stages_take_ten_of_the_fifteen_minutes(bench: Any) -> None:
    """The start of the machine takes the others. Checks are done after three minutes, times after six."""
    minutes = bench.session.STAGE_MINUTES
    ends = dict(zip(minutes, itertools.accumulate(minutes.values()), strict=True))
    assert bench.main.MINUTES == ends["sanitize"] == 10
    assert (ends["verify"], ends["measure"]) == (3, 6)


def test_a_run_that_is_cut_anywhere_says_what_it_has_and_what_is_missing(bench: Any, tmp_path: Path) -> None:
    path, cut = tmp_path / "gpu.jsonl", tmp_path / "cut.jsonl"
    planned = {
        "smoke": {"smoke": ["tools"], "verification": ["a"]}, "verify": {"verification": ["a", "b", "c"]},
        "measure": {"measurements": ["square", "few-tiles"]}, "probe": {"probes": ["tma"]},
        "compare": {"comparisons": ["square triton", "square torch.compile"]}, "sanitize": {"sanitizer": ["memcheck"]},
    }  # fmt: skip
    record = bench.record.Record(path, {"date": "today"}, planned)
    first = path.stat().st_size
    assert not path.with_name("gpu.jsonl.part").exists()
    record.add("smoke", {"name": "tools", "status": "ok"})
    for name in ("a", "b", "c"):
        record.add("verification", {"id": name, "family": "map", "status": "ok"})
    record.add("stages", {"stage": "verify", "seconds": 1.0, "done": 3, "left": 0, "ended": "done"})
    for name in ("square", "few-tiles"):
        record.add("measurements", row(name, "gemm", 1.0, predicted_s=1.0))
    record.add("probes", {"name": "rows of 128 bytes", "probe": "tma", "status": "ok", "value": 1.0, "unit": "B/s"})
    record.add("comparisons", {"id": "square", "peer": "triton", "ours": {}, "found": peer(3.0)})
    record.add("stages", {"stage": "compare", "seconds": 1.0, "done": 2, "left": 0, "ended": "done"})
    record.add("sanitizer", {"tool": "memcheck", "status": "ok"})
    record.finish()
    text, rng = path.read_bytes(), random.Random(25)
    counts = []
    for length in sorted({first, len(text), *(rng.randrange(first, len(text)) for _ in range(60))}):
        cut.write_bytes(text[:length])
        found = bench.report.report_of([cut])
        counts.append(sum(len(one["missing"]) for one in found["missing"].values()))
        shown = bench.report.table(found)
        assert all(f"\n{stage:<18}" in shown for stage in found["missing"])
        assert found["complete"] == (length >= len(text) - 1)
        assert ("was cut off" in shown) != found["complete"]
        for stage, one in found["missing"].items():
            planned_ids = [name for names in planned[stage].values() for name in names]
            assert one["planned"] == len(planned_ids)
            assert set(one["missing"]) <= set(planned_ids)
    assert counts[0] == 11  # all that was planned
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0  # torch.compile has no row, and its stage is done


def test_a_report_appears_whole(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text("the one before")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.report.write({"rows": [1]}, path)
    assert path.read_text() == "the one before"


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

    from roller_bench.gpu.baselines.torch_program import torch_function

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

    from roller_bench.gpu.baselines.torch_program import torch_function

    shapes = {"g": ("float32", [9]), "at": ("int32", [4]), "x": ("float32", [64]), "w": ("float32", [25]),
              "v": ("float32", [25, 40])}  # fmt: skip
    used = {
        n: {"dtype": d, "shape": [4] if "g[" in text and n == "x" else s}
        for n, (d, s) in shapes.items()
        if re.search(rf"\b{n}\[", text)
    }
    program = parse(text, dict(tensor_types(used)), None)
    with pytest.raises(BuildError):
        torch_function(program)(*(torch.from_numpy(a) for a in random_inputs(program, 0).values()))


CONVOLUTIONS = {
    "channels last": ("Y[n,y,x,f] +=! X[n,y*2+r,x*2+s,c] * W[r,s,c,f] where y in 4, x in 3",
                      {"X": (2, 9, 7, 5), "W": (3, 3, 5, 6)}),
    "": ("Y[n,f,y,x] +=! X[n,c,y+r,x+s] * W[f,c,r,s] where y in 7, x in 5", {"X": (2, 5, 9, 7), "W": (6, 5, 3, 3)}),
}  # fmt: skip


@with_torch
@pytest.mark.parametrize("layout", CONVOLUTIONS)
def test_a_convolution_of_the_library_has_the_programs_layout(bench: Any, layout: str) -> None:
    """Images whose channels come last stay where they are, and are its channels_last."""
    import torch

    from roller_bench.gpu.baselines.torch_program import library_convolution

    text, shapes = CONVOLUTIONS[layout]
    program = parse(text, dict(tensor_types({n: {"dtype": "float32", "shape": s} for n, s in shapes.items()})), None)
    arrays = random_inputs(program, 0)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    name, call = library_convolution(program, tensors)
    assert name.endswith("channels last") == bool(layout)
    results = {program.outputs[0].name: call().contiguous().numpy()}
    assert agrees(program, results, evaluate(program, arrays)).ok
    assert (
        library_convolution(
            parse("y[i] = x[i] + 1.0", dict(tensor_types({"x": {"dtype": "float32", "shape": [4]}})), None), tensors
        )
        is None
    )


@with_torch
def test_a_product_is_asked_of_both_libraries_and_the_setting_is_put_back(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from roller_bench.gpu.baselines.torch_library import library_variants

    setting = ["default"]

    def preferred(library: str | None = None) -> str:
        setting[0] = library or setting[0]
        return setting[0]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    case, tensors = bench.samples.references()[0], {name: torch.ones(4, 4) for name in "AB"}
    seen = []
    for one in library_variants(case, case.program(), tensors):
        with one.context():
            seen.append(setting[0])
            assert torch.equal(one.call(), torch.full((4, 4), 4.0))
    assert seen == ["cublas", "cublaslt"]
    assert setting == ["default"]


@with_torch
@pytest.mark.parametrize(("key_heads", "queries", "keys", "causal"), [(4, 5, 5, True), (2, 3, 7, True), (2, 3, 7, False)])
def test_attention_is_asked_of_every_backend_in_every_way(
    bench: Any, key_heads: int, queries: int, keys: int, causal: bool
) -> None:
    import torch

    from roller_bench.gpu.baselines.attention import BACKENDS, attention_variants

    shape = bench.samples.Attention(4, key_heads, queries, keys, causal)
    seen = (1, key_heads, keys, 16)
    torch.manual_seed(0)
    tensors = {"q": torch.randn(1, 4, queries, 16), "k": torch.randn(seen), "v": torch.randn(seen)}
    variants = attention_variants(shape, tensors)
    assert len(variants) == len(BACKENDS) * (1 if key_heads == 4 else 2)
    k, v = (tensors[name].repeat_interleave(4 // key_heads, dim=1) for name in "kv")
    scores = tensors["q"] @ k.transpose(-1, -2) / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), -torch.inf)
    wanted = scores.softmax(-1) @ v
    for one in (one for one in variants if "math" in one.name):
        with one.context():
            assert torch.allclose(one.call(), wanted, atol=1e-5)


@with_torch
def test_what_torch_is_asked_for_has_the_shapes_of_the_corpus(bench: Any) -> None:
    """Tensors without memory: of attention the backend that takes them is asked."""
    import torch

    from roller_bench.gpu.baselines.torch_library import library_variants

    asked = set()
    for case in [*bench.samples.references(), *bench.samples.sampled_cases(bench.main.CASES, 1)]:
        program = case.program()
        tensors = {
            name: torch.empty(kind.shape, dtype=getattr(torch, kind.dtype.value), device="meta") for name, kind in program.inputs
        }
        wanted = [program.types[out.tensor].shape for out in program.outputs]
        for one in library_variants(case, program, tensors):
            if case.attention is None or "math" in one.name:
                assert [tuple(one.call().shape)] == wanted, case.id
                asked.add(case.cls)
    assert {"gemm", "gemv", "conv2d", "depthwise", "maxpool", "softmax", "layernorm", "transpose"} <= asked


@with_torch
@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("y[c,a,b] = x[a,b,c]", [2, 0, 1]),
        ("y[a,b,c] = x[a,b,c]", None),
        ("y[c,a,b] = x[a,b,c] * 2.0", None),
        ("y[b,a,c] = x[a,b,c] where c in 3", None),
        ("y[a,c,d] = x[a,c,c] where d in 4", None),
    ],
)
def test_what_only_changes_the_order_of_dimensions_is_a_permutation(bench: Any, text: str, order: list[int] | None) -> None:
    from roller_bench.gpu.baselines.torch_library import permutation

    types_ = dict(tensor_types({"x": {"dtype": "float32", "shape": [4, 4, 4]}}))
    assert permutation(parse(text, types_, None)) == order


@with_torch
def test_a_program_is_traced_for_torchs_compiler(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from roller_bench.gpu.baselines.torch_compile import compiled_variants

    text, shapes = PROGRAMS["product"]
    program = parse(text, dict(tensor_types({n: {"dtype": "float32", "shape": s} for n, s in shapes.items()})), None)
    arrays = random_inputs(program, 0)
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)  # it needs a compiler, and is torch's own
    (one,) = compiled_variants(program, {name: torch.from_numpy(array) for name, array in arrays.items()})
    results = {out.name: made.numpy() for out, made in zip(program.outputs, one.call(), strict=True)}
    assert agrees(program, results, evaluate(program, arrays)).ok
