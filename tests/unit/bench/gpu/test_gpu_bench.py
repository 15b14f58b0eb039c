"""bench/gpu: its checks, its guards, its record; and a dry run, which is all of it that goes without a device."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeCupy, floats_at
from reference_kernels import tensor

from roller_svc.errors import LaunchError, RollerError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language, LaunchSpec, Resources, Role
from roller_svc.runtime.cuda import arrays as cuda_arrays
from roller_svc.runtime.cuda import module as cuda

COMPILED = CompiledKernel(
    KernelSource(
        "k",
        Language.CUDA,
        Arch("sm_", 80),
        "",
        (
            tensor("A", "a", Role.INPUT, shape=(8,)),
            tensor("w", "w", Role.WORKSPACE, shape=(4,)),
            tensor("C", "c", Role.OUTPUT, shape=(8,)),
        ),
        (LaunchSpec("work", ("a", "w", "c"), (1, 1, 1), (8, 1, 1)),),
    ),
    b"cubin",
    "",
    (Resources(8, 0, 0),),
)


@pytest.fixture
def bench() -> Any:
    from roller_bench.gpu import (
        cases,
        device_errors,
        guarded,
        machine,
        main,
        rehearsal,
        samples,
        sanitized,
        timing,
        verify,
    )
    from roller_bench.gpu.baselines import window_text
    from roller_bench.gpu.cases import check, findings

    return types.SimpleNamespace(
        cases=cases,
        check=check,
        device_errors=device_errors,
        findings=findings,
        guarded=guarded,
        machine=machine,
        main=main,
        rehearsal=rehearsal,
        samples=samples,
        sanitized=sanitized,
        timing=timing,
        verify=verify,
        window_text=window_text,
    )


def test_every_check_is_a_program_with_an_id_of_its_own(bench: Any) -> None:
    found = bench.cases.checks()
    assert len({check.id for check in found}) == len(found)
    for check in found:
        program = parse(check.expression, dict(tensor_types(check.types)), None)
        assert program.outputs, check.id
        assert set(check.hints) <= {name for name, _ in program.inputs}, check.id


def test_findings_come_first(bench: Any) -> None:
    """Smoke runs the first check of each family, and measurement begins with their cases."""
    findings = list(bench.findings.finding_checks())
    assert [check.expression for check in findings] == [c.expression for c in bench.cases.checks()[: len(findings)]]
    assert not {check.family for check in findings} & {c.family for c in bench.cases.checks()[len(findings) :]}
    cases = bench.samples.finding_cases(bench.main.FINDINGS)
    assert {"gelu-map", "histogram", "decode-int4"} <= {case.id for case in cases}
    assert [case.id for case in cases[:3]] == ["gelu-epilogue", "few-tiles", "packed-rows-64"]
    ordered = bench.cases.in_order_of_value(bench.cases.checks()[::-1])
    assert {check.family for check in ordered[: len(findings)]} == {check.family for check in findings}
    assert ordered[len(findings)].family.endswith("-large")
    assert all(case.program().outputs for case in cases)


def test_the_sample_of_cases_takes_every_class_first_and_repeats_none(bench: Any) -> None:
    found = bench.samples.sampled_cases(bench.main.CASES, 3)
    assert len({case.id for case in found}) == len(found)
    attention = [case for case in found if case.attention is not None]
    assert attention == found[: len(attention)] != []
    groups = [(case.cls, case.dtype) for case in found[len(attention) :]]
    first = groups[: len(set(groups))]
    assert len(set(first)) == len(first)
    assert all(groups.count(group) <= 3 for group in set(groups))


def test_inputs_to_time_repeat_values_of_their_types(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.samples, "DISTINCT", 7)  # else only large inputs repeat
    case = small_case(bench, "C[m,n] +=! A[m,k] * B[k,n]", A=(5, 5), B=(5, 5))
    arrays = bench.samples.timing_inputs(case, case.program())
    assert {a.shape for a in arrays.values()} == {(5, 5)}
    assert {a.dtype.name for a in arrays.values()} == {"bfloat16"}
    flat = arrays["A"].reshape(-1)
    assert np.array_equal(flat[:7], flat[7:14])
    assert not np.array_equal(arrays["A"], arrays["B"])


def small_case(bench: Any, text: str, **shapes: tuple[int, ...]) -> Any:
    inputs = {name: {"dtype": "bfloat16", "shape": list(shape)} for name, shape in shapes.items()}
    return bench.samples.TimedCase("small", "", text, inputs, None, {}, 8.0)


def guarded_call(bench: Any, monkeypatch: pytest.MonkeyPatch, work: Any) -> Any:
    fake = FakeCupy({"work": work})
    monkeypatch.setattr(cuda_arrays, "import_cupy", lambda: fake)
    return bench.guarded.GuardedCall(COMPILED, {"A": np.arange(8, dtype=np.float32)}, fake)


def test_guards_are_whole_where_a_kernel_stays_inside(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(a: int, w: int, c: int) -> None:
        floats_at(w, 4)[...] = 1.0
        floats_at(c, 8)[...] = floats_at(a, 8) + 1

    call = guarded_call(bench, monkeypatch, work)
    assert np.array_equal(call.results()["C"], np.arange(8, dtype=np.float32) + 1)
    assert call.guard_violations() == []


@pytest.mark.parametrize(
    ("buffer", "at", "message"),
    [
        ("c", 8, "4 bytes outside c, the first at 32 of 32"),
        ("c", -1, "4 bytes outside c, the first at -4 of 32"),
        ("w", 4, "4 bytes outside w, the first at 16 of 16"),
        ("a", 8, "4 bytes outside a, the first at 32 of 32"),
    ],
)
def test_what_is_written_beside_a_buffer_shows(
    bench: Any, monkeypatch: pytest.MonkeyPatch, buffer: str, at: int, message: str
) -> None:
    def work(a: int, w: int, c: int) -> None:
        floats_at({"a": a, "w": w, "c": c}[buffer] + 4 * at, 1)[...] = 1.0

    call = guarded_call(bench, monkeypatch, work)
    call.results()
    assert call.guard_violations() == [message]


def test_what_is_not_written_or_read_beside_an_input_is_nan(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(a: int, w: int, c: int) -> None:
        floats_at(c, 7)[...] = floats_at(a + 8, 7)

    first, second = (guarded_call(bench, monkeypatch, work).results()["C"] for _ in range(2))
    assert np.array_equal(np.isnan(first), [False] * 6 + [True] * 2)
    assert np.array_equal(first, second, equal_nan=True)


def test_a_device_that_refuses_ends_the_process(bench: Any) -> None:
    """What a lane takes for an error of ours would leave its process, and a broken context in it, to the next task."""
    with pytest.raises(bench.device_errors.DeviceFault) as raised, bench.device_errors.fatal_device_errors():
        raise LaunchError("CUDA_ERROR_ILLEGAL_ADDRESS")
    assert not isinstance(raised.value, RollerError)


def test_a_device_without_room_leaves_the_process(bench: Any) -> None:
    with pytest.raises(LaunchError), bench.device_errors.fatal_device_errors():
        raise LaunchError("no room", code="out-of-memory")


@pytest.mark.parametrize(
    ("name", "capability", "target"),
    [
        ("NVIDIA H200", (9, 0), "nvidia-h200-sxm"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "nvidia-h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "nvidia-a100-sxm-80gb"),
        ("NVIDIA Unheard", (6, 0), None),
    ],
)
def test_the_spec_of_a_device(bench: Any, name: str, capability: tuple[int, int], target: str | None) -> None:
    spec = bench.machine.target_of({"name": name, "capability": list(capability)})
    assert (spec and spec.id) == target


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "ok"),
        ("========= ERROR SUMMARY: 2 errors", 86, "wrong"),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 86, "wrong"),
        ("========= ERROR SUMMARY: 0 errors", 1, "not run"),
        ("Device not supported", 1, "not run"),
    ],
)
def test_reports_of_the_sanitizer(bench: Any, text: str, code: int, status: str) -> None:
    assert bench.sanitized.parse_report("memcheck", text, code)["status"] == status


def test_racecheck_alone_finds_nothing_wrong(bench: Any) -> None:
    """It does not know all of mbarriers and TMA; beside a finding of memcheck or synccheck it counts."""
    rows = [{"tool": tool, "status": "ok"} for tool in bench.sanitized.TOOLS]
    hazards = [{**row, "status": "wrong"} if row["tool"] == "racecheck" else row for row in rows]
    assert [row["status"] for row in bench.sanitized.confirm_racecheck(hazards)] == ["ok", "unconfirmed", "ok", "ok"]
    confirmed = [{**row, "status": "wrong"} if row["tool"] == "synccheck" else row for row in hazards]
    assert [row["status"] for row in bench.sanitized.confirm_racecheck(confirmed)] == ["ok", "wrong", "wrong", "ok"]


@pytest.mark.parametrize(
    ("text", "dimensions", "found"),
    [
        ("y[n,f,ho,wo] +=! x[N, C, HO * 2 + KH - 1, WO + KW] * w[F, C, KH, KW]", 4, ([2, 1], [1, 0])),
        ("y[n,f,ho,wo] +=! x[N, C, HO * 2, WO * 2] * w[F, C, 0, 0]", 4, ([2, 2], [0, 0])),
        ("y[n,f,ho,wo] +=! x[N, C, HO, WO] * w[F, C, 0, 0]", 4, ([1, 1], [0, 0])),
        ("y[i] = x[i // 3, i % 3]", 2, None),
        ("y[n] = x[N, C]", 3, None),
    ],
)
def test_windows_of_the_corpus_are_read(bench: Any, text: str, dimensions: int, found: object) -> None:
    assert bench.window_text.windows(text, dimensions) == found


def dry(bench: Any, out: Path, pattern: str, *more: str) -> int:
    words = ["--dry", "--jobs", "1", "--sets", "1", "--only", pattern, "--out", str(out), *more]
    found: int = bench.main.main(words)
    return found


@pytest.mark.slow
@pytest.mark.emulator
def test_a_dry_run_compiles_and_emulates(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = r"^mma/odd-nn-float16$|^scatter/histogram$|^layout-large/transpose$|^square-4096-float16$|^probe/atomics$"
    assert dry(bench, tmp_path / "gpu.jsonl", pattern) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["complete"]
    assert found["about"][0]["plan"]["checks"] == 3
    rows = {row["id"]: row for row in found["verification"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "mma/odd-nn-float16": "ok",
        "scatter/histogram": "ok",
        "layout-large/transpose": "compiled",
    }
    assert rows["mma/odd-nn-float16"]["kernels"][0]["family"] == "mma"
    assert rows["mma/odd-nn-float16"]["emulator"]["status"] == "ok"
    assert [row["built"] for row in found["measurements"]] == [1]
    assert [(row["status"], row["measured"]) for row in found["probes"]] == [("compiled", False)] * 2
    assert {row["stage"]: row["ended"] for row in found["stages"]} == dict.fromkeys(bench.main.DRY_STAGES, "done")
    assert "1 ok" in capsys.readouterr().out


def test_when_the_time_is_up_the_rest_is_listed_as_skipped(bench: Any, tmp_path: Path) -> None:
    assert dry(bench, tmp_path / "gpu.jsonl", "^map/", "--minutes", "0", "--stages", "verify") == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["verification"] == []
    checks = sum(bool(re.search("^map/", check.id)) for check in bench.cases.checks())
    assert found["skipped"][0]["tasks"] == found["stages"][0]["left"] == checks
    assert found["stages"][0]["ended"] == "time"


def test_without_a_device_it_says_so(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.machine, "device_present", lambda: False)
    assert bench.main.main(["--out", str(tmp_path / "gpu.jsonl")]) == 3
    assert "no NVIDIA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def double(x: int, y: int) -> None:
    floats_at(y, 8)[...] = 2 * floats_at(x, 8)


def working(work: Callable[[int, int], None] = double) -> FakeCupy:
    """A device each of whose kernels, by any name, is given the addresses of x and y."""
    fake = FakeCupy(collections.defaultdict(lambda: work), "90")
    fake.cuda.runtime.getDeviceProperties = lambda _: {"l2CacheSize": 256}
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    fake.get_default_memory_pool = lambda: pool
    return fake


def doubled(bench: Any) -> Any:
    return bench.check.Check("doubled", "map", "y[i] = x[i] * 2.0", (("x", ("float32", (8,))),))


def verified(bench: Any, fake: FakeCupy, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    monkeypatch.setattr(bench.verify, "import_cupy", lambda: fake)
    task = bench.verify.Verification(doubled(bench), "nvidia-h200-sxm", 2, on_device=True, **more)
    return bench.verify.verify(task)


def test_a_check_that_is_right_is_not_emulated_beside_the_device(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = verified(bench, working(), monkeypatch)
    assert (row["status"], row["detail"], row["sets"], row["repeatable"]) == ("ok", "", 2, True)
    assert "emulator" not in row
    assert row["launches"][0]["registers_per_thread"] > 0


def test_a_verdict_from_before_counts_where_the_text_is_the_same(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = verified(bench, working(), monkeypatch)["key"]
    before = {"key": key, "emulator": {"status": "ok", "detail": ""}}
    assert verified(bench, working(), monkeypatch, verdict=before)["emulator"] == before["emulator"]
    assert "emulator" not in verified(bench, working(), monkeypatch, verdict={**before, "key": "another"})


@pytest.mark.emulator
def test_a_device_that_is_wrong_is_found_and_the_emulator_asked(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = verified(bench, working(lambda _, y: floats_at(y, 8).fill(0.5)), monkeypatch)
    assert row["status"] == "wrong"
    assert "8 of 8 elements are wrong" in row["detail"]
    assert row["emulator"]["status"] == "ok"
    assert row["emulator"]["difference"] > 0


def test_times_stand_beside_what_the_model_expects(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = working()
    monkeypatch.setitem(sys.modules, "torch", None)  # of which the stand-in has no tensors
    for module in (cuda, cuda_arrays, bench.timing):
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(cuda, "device_present", lambda: True)
    check = doubled(bench)
    case = bench.samples.TimedCase("doubled", "relu", check.expression, check.types, None, {}, 8.0)
    built = bench.timing.build_candidates(bench.timing.BuildTask(case, "nvidia-h200-sxm", 2))
    assert built[0].rank == 0
    row, task = bench.timing.time_case(bench.timing.TimingTask(case, built, ("library",), cold=True))
    assert row["best_s"] == row["best_min_s"] == pytest.approx(1e-3)  # of one launch, by the stand-in's clock
    assert row["cold_s"] == pytest.approx(1e-3)
    assert row["samples"] >= 5
    assert row["predicted_s"] == built[0].predicted_s
    assert len(row["candidates"]) == len(built)
    assert bench.timing.check_result(task) == "ok"
    (wrong,) = (values + 1 for values in task.values.values())
    assert bench.timing.check_result(dataclasses.replace(task, values={"y": wrong})).startswith("wrong: ")
