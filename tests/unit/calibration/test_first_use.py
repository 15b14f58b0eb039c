"""Calibration at the first use of `local`: when it runs, what is stored, which process reads it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import PATIENCE_S

import roller_svc
from roller_svc import hardware, settings
from roller_svc.calibration import calibrate, first_use
from roller_svc.calibration.cpu.probes import CpuKernels, compile_kernels, probes, required_bytes
from roller_svc.calibration.cpu.spec import attach_fields, field_of
from roller_svc.cli import main
from roller_svc.compiler.action import action_digest
from roller_svc.compiler.request import build_request
from roller_svc.errors import LaunchError
from roller_svc.hardware import calibration_cache, catalog
from roller_svc.ir.hardware import HardwareSpec, Measured
from roller_svc.settings import Settings

DETECTED = hardware.detect_local()
SUM = ("b[] +=! a[i]", {"a": ("float32", [64])})
WORDS = ("estimate", SUM[0], "--input", "a=float32[64]")


class Calibrations:
    """Stands in for the measurement: counts calls and returns a spec with another clock, or fails."""

    def __init__(self) -> None:
        self.count = 0
        self.failure: LaunchError | None = None

    def __call__(self, detected: HardwareSpec, seconds: float) -> HardwareSpec:
        self.count += 1
        if self.failure is not None:
            raise self.failure
        return measured_with(detected, clock_hz=4e9 + self.count)


def measured_with(spec: HardwareSpec, clock_hz: float) -> HardwareSpec:
    return replace(spec, clock_hz=clock_hz, measured=(sample("clock", clock_hz, spec.num_cores),))


def sample(name: str, value: float, cores: int) -> Measured:
    field = field_of(name, {name: value}, DETECTED)
    return Measured(name, "Hz", cores, value, value, value, value, 3, "made up", field)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let this process calibrate at first use, with a cache folder of its own."""
    for name in ("ROLLER_CALIBRATE", "ROLLER_LOCAL_SPEC"):
        monkeypatch.setenv(name, "")  # restored at the end, whatever pin_local sets
    monkeypatch.setattr(settings, "_current", [Settings(cache=tmp_path / "cache", calibrate=True)])
    begin_process(monkeypatch)
    yield tmp_path / "cache"
    hardware.forget_local()


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> Calibrations:
    stand_in = Calibrations()
    monkeypatch.setattr(first_use, "calibrate_briefly", stand_in)
    return stand_in


def begin_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a new process would not know."""
    monkeypatch.setattr(first_use, "_has_attempted", [])
    hardware.forget_local()


def use_local(*targets: object) -> list[str]:
    """Return the lines that a use of targets reports; by default of `local`."""
    lines: list[str] = []
    first_use.calibrate_at_first_use(targets or ("local",), lines.append)
    return lines


def test_first_use_measures_once_and_stores_the_spec(
    calibrations: Calibrations, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hardware.load("local") == DETECTED  # a listing measures nothing
    (line,) = use_local()
    assert "--no-calibrate" in line
    assert str(cache) in line
    stored = hardware.load("local")
    assert stored.clock_hz == 4e9 + 1
    begin_process(monkeypatch)
    assert use_local() == []
    assert hardware.load("local") == stored
    assert calibrations.count == 1
    assert [path.suffix for path in sorted((cache / "calibrations").iterdir())] == [".lock", ".yaml"]


def test_other_targets_measure_nothing(calibrations: Calibrations) -> None:
    assert use_local("nvidia-h200-sxm", "cpu-x86-avx2", DETECTED) == []
    assert calibrations.count == 0


@pytest.mark.parametrize("current", [{"calibrate": False}, {"local_spec": Path("mine.yaml")}])
def test_settings_win_over_calibration(
    calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch, current: dict[str, object]
) -> None:
    use_local()  # an earlier process has stored one
    monkeypatch.setattr(settings, "_current", [settings.settings().model_copy(update=current)])
    begin_process(monkeypatch)
    assert use_local() == []
    assert calibrations.count == 1
    if "calibrate" in current:
        assert hardware.load("local") == DETECTED


def test_busy_machine_keeps_assumed_rates_and_is_tried_again_in_an_hour(
    calibrations: Calibrations, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrations.failure = LaunchError("made up", code="machine-busy")
    assert "machine-busy" in use_local()[-1]
    assert hardware.load("local") == DETECTED
    assert use_local() == []  # once a process
    assert list((cache / "calibrations").glob("*.yaml")) == []
    calibrations.failure = None
    begin_process(monkeypatch)
    assert use_local() == []
    (stamp,) = (cache / "calibrations").glob("*.failed")
    before = stamp.stat().st_mtime - calibration_cache.RETRY_AFTER_S
    os.utime(stamp, (before, before))
    begin_process(monkeypatch)
    assert len(use_local()) == 1
    assert hardware.load("local").clock_hz == 4e9 + 2


def test_unwritable_cache_measures_nothing(calibrations: Calibrations, cache: Path) -> None:
    cache.write_text("not a folder")
    (line,) = use_local()
    assert "assumed rates" in line
    assert (calibrations.count, hardware.load("local")) == (0, DETECTED)


def test_unreadable_spec_is_measured_again(calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local()
    calibration_cache.calibrated_path(DETECTED).write_text("id: [")
    begin_process(monkeypatch)
    assert hardware.load("local") == DETECTED
    assert len(use_local()) == 1
    assert hardware.load("local").clock_hz == 4e9 + 2


def test_process_with_fewer_cores_uses_the_larger_spec(
    calibrations: Calibrations, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restrict(cores: int) -> HardwareSpec:
        monkeypatch.setattr(catalog, "detect_local", lambda: replace(DETECTED, num_cores=cores))
        monkeypatch.setattr(hardware, "detect_local", catalog.detect_local)
        begin_process(monkeypatch)
        use_local()
        return hardware.load("local")

    whole = restrict(4)
    part = restrict(2)
    assert (calibrations.count, part.num_cores) == (1, 2)
    assert part == replace(catalog.restrict_cores(whole, 2), id="local")
    restrict(8)
    assert calibrations.count == 2  # more cores than any stored spec
    assert restrict(2) == part  # the nearest larger one is still that of 4


@pytest.mark.parametrize(
    "other",
    [replace(DETECTED, name="another CPU"), replace(DETECTED, isa=DETECTED.isa[:-1])],
)
def test_another_cpu_has_another_spec(calibrations: Calibrations, other: HardwareSpec) -> None:
    use_local()
    assert calibration_cache.load_calibrated(other) is None
    assert calibration_cache.load_calibrated(replace(DETECTED, clock_hz=1e9)) is not None  # clocks vary


def test_another_version_measures_again(calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local()
    monkeypatch.setattr(calibration_cache, "_code_digest", lambda: "another")
    assert calibration_cache.load_calibrated(DETECTED) is None


def test_second_process_waits_for_the_first_and_reads_its_spec(calibrations: Calibrations) -> None:
    has_locked = threading.Event()
    with calibration_cache.lock_calibration(DETECTED):
        other = threading.Thread(target=lambda: (has_locked.set(), use_local()))
        other.start()
        assert has_locked.wait(PATIENCE_S)
        calibration_cache.save_calibrated(measured_with(DETECTED, 5e9))
    other.join(PATIENCE_S)
    assert calibrations.count == 0
    assert hardware.load("local").clock_hz == 5e9


def test_lock_that_is_never_released_keeps_assumed_rates(calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_cache, "LOCK_TIMEOUT_S", 0.0)
    with calibration_cache.lock_calibration(DETECTED):
        (line,) = use_local()
    assert "another process" in line
    assert (calibrations.count, hardware.load("local")) == (0, DETECTED)


def test_stored_spec_is_one_device_to_the_kernel_cache(calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch) -> None:
    request = build_request(*SUM)
    assumed = action_digest(request)
    use_local()
    digests = {action_digest(request)}
    for _ in range(2):
        begin_process(monkeypatch)
        use_local()
        digests.add(action_digest(request))
    assert len(digests) == 1
    assert assumed not in digests


def test_command_line_measures_at_first_use_unless_told_not_to(
    calibrations: Calibrations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main((*WORDS, "--no-calibrate", "--target", "local")) == 0
    assert main((*WORDS, "--target", "nvidia-h200-sxm")) == 0
    assert (calibrations.count, capsys.readouterr().err) == (0, "")
    monkeypatch.setattr(settings, "_current", [settings.settings().model_copy(update={"calibrate": True})])
    begin_process(monkeypatch)
    assert main((*WORDS, "--json")) == 0
    assert "roller: measuring this CPU" in capsys.readouterr().err
    assert calibrations.count == 1


@pytest.mark.parametrize("call", [roller_svc.compile, lambda *program: roller_svc.estimate(*program, ["local"])])
def test_python_api_measures_at_first_use(calibrations: Calibrations, caplog: pytest.LogCaptureFixture, call: object) -> None:
    assert callable(call)
    with caplog.at_level(logging.WARNING):
        call(*SUM)
    assert "measuring this CPU" in caplog.text
    assert calibrations.count == 1


def test_service_and_its_children_use_one_spec(calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch) -> None:
    first_use.pin_calibration(lambda _: None)
    path = calibration_cache.calibrated_path(DETECTED)
    assert (os.environ["ROLLER_LOCAL_SPEC"], os.environ["ROLLER_CALIBRATE"]) == (str(path), "0")
    assert settings.settings().local_spec == path
    monkeypatch.setattr(settings, "_current", [])  # as in a child process
    begin_process(monkeypatch)
    assert use_local() == []
    assert hardware.load("local").clock_hz == 4e9 + 1


def test_service_without_calibration_keeps_its_children_from_one(
    calibrations: Calibrations, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrations.failure = LaunchError("made up", code="machine-busy")
    first_use.pin_calibration(lambda _: None)
    assert (os.environ["ROLLER_LOCAL_SPEC"], os.environ["ROLLER_CALIBRATE"]) == ("", "0")
    calibration_cache.save_calibrated(measured_with(DETECTED, 5e9))  # by another process
    monkeypatch.setattr(settings, "_current", [])
    monkeypatch.setenv("ROLLER_CACHE", str(cache))
    begin_process(monkeypatch)
    assert hardware.load("local") == DETECTED


def test_brief_calibration_determines_the_same_fields() -> None:
    small = replace(
        DETECTED, levels=tuple(replace(level, capacity_bytes=min(level.capacity_bytes, 1 << 20)) for level in DETECTED.levels)
    )
    binary = compile_kernels(small)

    def fields(*, for_spec: bool) -> tuple[set[str | None], set[str]]:
        """Return the fields that are determined on all cores, and the benchmarks of these on one."""
        kernels = CpuKernels(small, small.num_cores, binary, for_spec=for_spec)
        samples = [
            Measured(each.name, each.unit, each.cores, 1.0, 1.0, 1.0, 1.0, 3, each.how)
            for each in probes(kernels, for_spec=for_spec)
        ]
        by_name = {one.name: one.figure for one in attach_fields(samples, small) if one.figure is not None}
        return set(by_name.values()), {one.name for one in samples if one.cores == 1 and one.name in by_name}

    assert fields(for_spec=True) == fields(for_spec=False)


def test_brief_calibration_takes_at_most_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = required_bytes(DETECTED, DETECTED.num_cores, for_spec=True)
    assert needed <= required_bytes(DETECTED, DETECTED.num_cores)
    monkeypatch.setattr(calibrate, "usable_memory_bytes", lambda: 2 * needed - 2)
    monkeypatch.setattr(calibrate, "compile_kernels", lambda _: pytest.fail("compiled"))
    with pytest.raises(LaunchError) as refused:
        calibrate.calibrate_briefly(DETECTED, 1.0)
    assert refused.value.code == "out-of-memory"


def test_what_can_be_refused_is_refused_before_a_measurement(calibrations: Calibrations) -> None:
    with pytest.raises(roller_svc.errors.InputError):
        roller_svc.compile("b[] +=! q[i]", {"a": ("float32", [64])})
    assert main(["estimate", "b[] +=! q[i]", "--input", "a=float32[64]"]) == 2
    with pytest.raises(roller_svc.errors.InputError):
        roller_svc.compile_model("no-such-file.onnx")
    assert calibrations.count == 0
