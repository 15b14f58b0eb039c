"""Calibration: sampling, spec fields and their sources, comparison of a spec with a machine, and both commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.calibration import samples
from roller_svc.calibration.check import Comparison, derived_comparisons, measured_comparisons, read_field
from roller_svc.calibration.cpu import kernels
from roller_svc.calibration.cpu.limits import LimitProbes
from roller_svc.calibration.cpu.probes import DRAM, CpuKernels, compile_kernels, pieces, probes, working_sets
from roller_svc.calibration.cpu.spec import field_of, merge_calibrations, recompute_derived, with_measured_values
from roller_svc.calibration.samples import Probe, run_probes
from roller_svc.cli import main
from roller_svc.errors import ArgumentError, LaunchError, SpecError
from roller_svc.hardware import catalog
from roller_svc.ir import canonical
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec, Measured, UnitKind
from roller_svc.perf.machine import prepare_machine
from roller_svc.settings import Settings

LOCAL = hardware.detect_local()


def measured_as(values: dict[str, float], cores: int, spec: HardwareSpec) -> tuple[Measured, ...]:
    figures = {name: field_of(name, values, spec) for name in values}
    units = {name: "s" if value < 1 else "1/s" for name, value in values.items()}
    return tuple(
        Measured(name, units[name], cores, 0.9 * value, value, 1.1 * value, value, 5, "made up", figures[name])
        for name, value in values.items()
    )


def every_figure() -> dict[str, float]:
    """Return results for all micro-benchmarks that determine fields."""
    rates = {kernels.multiply_name(dtype): 1e11 + i for i, dtype in enumerate(kernels.MULTIPLIED)}
    rates |= {kernels.divide_name(dtype): 1e10 + i for i, dtype in enumerate(kernels.DIVIDED)}
    reads = {"read_l1": 6e11, "read_l2": 2e11, "read_l3": 4e10, "read_ahead_l3": 5e10}
    reads |= {"read_dram": 2e10, "read_ahead_dram": 1.9e10, "copy_dram": 1.8e10, "copy_ahead_dram": 0.9e10}
    reads |= {"write_dram": 1.5e10, "write_ahead_dram": 1.2e10}
    reads |= {"write_streamed_dram": 1.6e10, "copy_streamed_dram": 3e10}
    latencies = {"latency_l1": 1e-9, "latency_l2": 5e-9, "latency_l3": 2e-8, "latency_dram": 1e-7}
    others = {"clock": 3e9, "launch": 3e-6, "multiply_float32_chain": 1.1e-9}
    return rates | reads | latencies | others


def calibrated_as(values: dict[str, float]) -> HardwareSpec:
    return with_measured_values(LOCAL, measured_as(values, LOCAL.num_cores, LOCAL), "Made up.")


def probe_of(values: list[float], unit: str = "1/s") -> Probe:
    numbers = iter(values)
    return Probe("made_up", unit, 1, "made up", lambda: next(numbers))


def stepped(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> None:
    """Install a clock that advances by a second per reading, and the wait times at each reading."""
    ticks, looks = iter(range(10_000)), iter(waited)
    monkeypatch.setattr(samples.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(samples, "runqueue_wait_s", lambda: next(looks))


@pytest.mark.parametrize(("unit", "quiet"), [("1/s", 4.5), ("s", 1.5)])
def test_samples_are_summed_up(monkeypatch: pytest.MonkeyPatch, unit: str, quiet: float) -> None:
    stepped(monkeypatch, [0.0] * 100)
    # the first one only finds out how often to repeat; a round takes three seconds of this clock
    (found,) = run_probes([probe_of([99, 2, 1, 4, 5], unit)], seconds=13.5)
    assert (found.min, found.median, found.max, found.samples) == (1, 3, 5, 4)
    assert found.quiet == quiet


def test_disturbed_samples_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(monkeypatch, [0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0.5])  # our threads waited during the second one
    (found,) = run_probes([probe_of([99, 3, 1000, 5, 4])], seconds=13.5)
    assert (found.min, found.max, found.samples) == (3, 5, 3)


def test_there_are_three_rounds_however_little_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(monkeypatch, [0.0] * 100)
    (found,) = run_probes([probe_of([99, 2, 1, 4, 5])], seconds=-1)
    assert (found.min, found.max, found.samples) == (1, 4, 3)


def test_a_busy_machine_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(monkeypatch, [float(i) for i in range(1000)])
    with pytest.raises(LaunchError, match="made_up") as refused:
        run_probes([probe_of([1.0] * 500)], seconds=10)
    assert refused.value.code == "machine-busy"


def test_fields_are_the_measured_values() -> None:
    spec = calibrated_as(every_figure())
    assert (spec.clock_hz, spec.limits.launch_overhead_s) == (3e9, 3e-6)
    assert [level.bandwidth_bytes_per_s for level in spec.levels[:4]] == [2e10, 5e10, 2e11, 6e11]
    assert [level.latency_s for level in spec.levels] == [1e-7, 2e-8, 5e-9, 1e-9, 1e-9]  # none beyond the next
    assert spec.unit_for(kernels.MULTIPLIED[0]).flops_per_s == 1e11
    assert all(unit.peak_flops_per_s is None for unit in spec.units)
    assert [spec.unit_for(d).quotients_per_s for d in kernels.DIVIDED] == [1e10, 1e10 + 1]
    assert spec.unit_for(DType.INT32).quotients_per_s is None
    assert (spec.dram.streamed_write_gain, spec.dram.streamed_copy_gain) == (0.8, 1.5)  # of what is read
    assert (spec.dram.write_gain, spec.dram.copy_gain) == (0.75, 0.9)  # as kernels do it: here without hints
    assert [level.peak_bandwidth_bytes_per_s for level in spec.levels] == [3e10, 5e10, 2e11, 6e11, None]
    # hints ahead of a walk pay in the last cache, and not in memory, where a map reads and writes
    assert (spec.dram.hinted_gain, spec.level("l3").hinted_gain) == (0.5, 1.25)


def test_dot_products_keep_their_ratio_to_multiply_adds() -> None:
    avx2 = hardware.load("cpu-x86-avx2")
    spec = with_measured_values(avx2, measured_as(every_figure(), avx2.num_cores, avx2), "Made up.")
    before, after = (
        dot.flops_per_s / one.unit_for(DType.FLOAT32).flops_per_s
        for one in (avx2, spec)
        for dot in one.units
        if dot.name == "dot_i16"
    )
    assert after == pytest.approx(before) != 2


def test_cached_stores_are_measured_as_in_kernels() -> None:
    """Cached stores use prefetch where it pays. Older calibrations lack stores with prefetch."""
    hinted = every_figure() | {"copy_ahead_dram": 1.9e10}
    spec = calibrated_as(hinted)
    assert (spec.dram.hinted_gain > 1, spec.dram.write_gain, spec.dram.copy_gain) == (True, 0.6, 0.95)
    del hinted["write_ahead_dram"]
    assert calibrated_as(hinted).dram.write_gain == 1


def test_measured_fields_are_not_assumed() -> None:
    specs = (LOCAL, calibrated_as(every_figure()))
    before, after = (prepare_machine(spec, spec.units[0]).assumed_stages for spec in specs)
    assert before.arithmetic
    assert before.launch
    assert (after.arithmetic, after.launch, after.latency) == (False, False, False)
    assert [name for name, assumed in after.levels if assumed] == []
    once = calibrated_as(every_figure())
    again = with_measured_values(once, once.measured, "Again.")
    assert [s.text for s in again.sources].count("Made up.") == 0


def test_a_calibrated_spec_is_a_file() -> None:
    spec = calibrated_as(every_figure())
    back = hardware.load_yaml(hardware.to_yaml(spec))
    assert back == spec
    assert back.measured == spec.measured
    assert hardware.from_mapping(json.loads(json.dumps(hardware.to_mapping(spec)))).measured == spec.measured


def test_fields_of_an_earlier_calibration_are_recomputed() -> None:
    spec = calibrated_as(every_figure())
    before = replace(spec, levels=(replace(spec.dram, bandwidth_bytes_per_s=1e9), *spec.levels[1:]))
    assert recompute_derived(before) == spec
    assert recompute_derived(LOCAL) == LOCAL
    few = replace(before, measured=tuple(one for one in before.measured if one.name != "write_streamed_dram"))
    assert recompute_derived(few) == few


def test_merged_calibrations_have_the_best_result_of_each_benchmark() -> None:
    busy = {"read_dram": 1e10, "read_ahead_dram": 1.2e10, "latency_dram": 2e-7, "read_l2": 3e11}
    found = merge_calibrations([calibrated_as(every_figure() | busy), calibrated_as(every_figure())])
    assert (found.dram.bandwidth_bytes_per_s, found.dram.latency_s) == (2e10, 1e-7)
    assert found.level("l2").bandwidth_bytes_per_s == 3e11
    figures = {one.name: one.figure for one in found.measured}
    assert figures["read_dram"] == "levels.dram.bandwidth_bytes_per_s"
    assert figures["read_ahead_dram"] is None  # of the busy calibration it was the faster one
    assert merge_calibrations([LOCAL]) == LOCAL


def test_a_calibration_of_before_has_no_quotients() -> None:
    before = calibrated_as({name: value for name, value in every_figure().items() if not name.startswith("divide")})
    assert all(unit.quotients_per_s is None for unit in recompute_derived(before).units)


def test_measurements_do_not_make_another_device() -> None:
    spec = calibrated_as(every_figure())
    bare = replace(spec, measured=())
    assert (bare, hash(bare), canonical.digest(bare)) == (spec, hash(spec), canonical.digest(spec))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"figure": "levels.l9.latency_s"}, "is not a field"),
        ({"quiet": 9e99}, "measured.0.quiet"),
        ({"min": 2e11}, "in this order"),
        ({"unit": "furlongs"}, "measured.0.unit"),
        ({"cores": 0}, "measured.0.cores"),
    ],
)
def test_inconsistent_measurements_are_rejected(changes: dict[str, object], complaint: str) -> None:
    data = hardware.to_mapping(calibrated_as(every_figure()))
    data["measured"][0] |= changes
    with pytest.raises(SpecError, match=complaint):
        hardware.from_mapping(data)


@pytest.mark.parametrize(
    ("spec", "quiet", "unit", "agrees"),
    [
        (100, 110, "1/s", True),
        (100, 120, "1/s", False),
        (100, 80, "s", False),
        (8, 8, "count", True),
        (8, 9, "count", False),
    ],
)
def test_values_agree_within_15_percent(spec: float, quiet: float, unit: str, agrees: bool) -> None:
    assert Comparison("x", unit, spec, quiet, quiet, quiet, quiet / spec).agrees is agrees


def test_a_value_within_the_samples_agrees() -> None:
    assert Comparison("x", "1/s", 100, 60, 120, 140, 1.3).agrees


def test_a_spec_is_compared_field_by_field() -> None:
    found = {one.field: one for one in measured_comparisons(LOCAL, measured_as(every_figure(), LOCAL.num_cores, LOCAL))}
    assert found["clock_hz"].spec == LOCAL.clock_hz
    assert found["levels.l2.latency_s"].ratio == pytest.approx(5e-9 / LOCAL.level("l2").latency_s)
    assert read_field(LOCAL, "limits.launch_overhead_s") == LOCAL.limits.launch_overhead_s


def test_derived_fields_are_compared() -> None:
    measured = measured_as(every_figure(), LOCAL.num_cores, LOCAL)
    found = {one.field: one for one in derived_comparisons(LOCAL, measured)}
    here = with_measured_values(LOCAL, measured, "").dram
    assert found["levels.dram.streamed_write_gain"].median == here.streamed_write_gain
    assert found["levels.dram.hinted_gain"].ratio == pytest.approx(here.hinted_gain / LOCAL.dram.hinted_gain)
    assert all(one.agrees for one in derived_comparisons(with_measured_values(LOCAL, measured, ""), measured))


def with_caches(**capacities: int) -> HardwareSpec:
    levels = (replace(v, capacity_bytes=capacities.get(v.name, v.capacity_bytes)) for v in LOCAL.levels)
    return replace(LOCAL, levels=tuple(levels))


@pytest.mark.parametrize("cores", [1, 2, 28, 64])
def test_working_sets_fit_where_they_belong(cores: int) -> None:
    hw = with_caches(l1=32 << 10, l2=1 << 20, l3=38_500 << 10)  # Skylake-SP of 28 cores
    sets, levels = dict(working_sets(hw, cores)), {level.name: level.capacity_bytes for level in hw.levels}
    assert (sets["l1"], sets["l2"]) == (levels["l1"] // 2, levels["l2"] // 2)
    # more than L2 holds, and no more than L3 does beside it
    assert levels["l2"] < sets["l3"] <= max(levels["l3"] // (2 * cores), levels["l2"] + levels["l3"] // (2 * cores))
    assert sets["l3"] == levels["l3"] // (4 * cores) // 4096 * 4096 or cores > 4
    assert sets[DRAM] * cores > levels["l3"]
    assert all(size >= 4096 for _, size in pieces(hw, cores))


@pytest.mark.slow
def test_every_micro_benchmark_gives_a_number() -> None:
    cpu = CpuKernels(LOCAL, LOCAL.num_cores, compile_kernels(LOCAL))
    found = probes(cpu)
    assert len({(probe.name, probe.cores) for probe in found}) == len(found)
    values = {(probe.name, probe.cores): probe.sample() for probe in found}
    assert all(0 < value < 1e15 for value in values.values())
    # what is followed for a latency are all lines of the set, each once
    start, lines = cpu._chase_starts["l1"], cpu.hw.level("l1").capacity_bytes // 2 // kernels.LINE_BYTES
    words = cpu.memory[start : start + lines * kernels.LINE_BYTES].view(np.uint64).reshape(lines, -1)
    at = next(column for column in words.T if len(set(column.tolist())) == lines)
    assert sorted((at - at.min()) // kernels.LINE_BYTES) == list(range(lines))
    of_all = {name: value for (name, cores), value in values.items() if cores == LOCAL.num_cores}
    assert {field_of(name, of_all, LOCAL) for name in of_all} >= {"clock_hz"}


@pytest.mark.parametrize("hardware_id", ["cpu-x86-avx2", "cpu-x86-avx512", "cpu-arm-neon"])
def test_the_text_has_every_function(hardware_id: str) -> None:
    text = kernels.kernels_source(hardware.load(hardware_id))
    assert [name for name in kernels.function_names() if f"void {name}(uint8_t" not in text] == []
    assert "{j}" not in text


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("calibrate", "--target", "cuda:0"), 3, "NVIDIA device 0"),
        (("calibrate", "--target", "nvidia-h200-sxm"), 3, "NVIDIA device 0"),
        (("calibrate", "--target", "amd-mi50"), 3, "none for amd"),
        (("calibrate", "--target", "nothing"), 2, "unknown-hardware"),
        (("calibrate", "--seconds", "0"), 2, "positive"),
        (("calibrate", "--seconds", "nan"), 2, "finite"),
        (("calibrate", "--seconds", "inf"), 2, "finite"),
        (("targets", "check", "--seconds", "1e9"), 2, "at most"),
        (("targets", "check", "nvidia-h200-sxm"), 3, "NVIDIA device 0"),
        (("targets", "check", "local", "--hardware", "x"), 2, "exclude"),
        (("targets", "check", "--server", "http://127.0.0.1:9"), 2, "is not available with"),
        (("targets", "--hardware", "x"), 2, "targets check"),
    ],
)
def test_unmeasurable_targets_are_rejected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, says: str
) -> None:
    monkeypatch.setattr("roller_svc.calibration.presence.device_count", lambda: 0)
    assert main(words) == code
    assert says in capsys.readouterr().err


def test_a_cpu_that_is_not_here_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from roller_svc.calibration import check_present

    check_present(LOCAL)
    for other in (replace(LOCAL, isa=(*LOCAL.isa, "amx-fp64")), replace(LOCAL, num_cores=LOCAL.num_cores + 1)):
        with pytest.raises(LaunchError) as refused:
            check_present(other)
        assert refused.value.code == "wrong-device"


def fake_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_spec(hw: HardwareSpec, seconds: float) -> tuple[Measured, ...]:
        return measured_as(every_figure(), hw.num_cores, hw)

    monkeypatch.setattr("roller_svc.calibration.calibrate.measure_spec", measure_spec)
    monkeypatch.setattr("roller_svc.calibration.check.measure_spec", measure_spec)


def test_calibrate_writes_what_check_agrees_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_measuring(monkeypatch)
    file = str(tmp_path / "local.yaml")
    assert main(("calibrate", "--output", file)) == 0
    assert "levels.dram.bandwidth_bytes_per_s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["local.yaml"]
    assert main(("targets", "check", "--hardware", file, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"]
    assert {"figure", "unit", "spec", "min", "median", "max", "ratio", "agrees"} == set(found["figures"][0])
    changed = hardware.to_yaml(replace(hardware.load_yaml(Path(file).read_text()), clock_hz=9e9))
    Path(file).write_text(changed)
    assert main(("targets", "check", "--hardware", file)) == 1
    assert "1 of" in capsys.readouterr().out


def test_calibrate_prints_a_spec(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measuring(monkeypatch)
    assert main(("calibrate",)) == 0
    assert hardware.load_yaml(capsys.readouterr().out).clock_hz == 3e9
    assert main(("calibrate", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["clock_hz"] == 3e9


def test_an_unwritable_file_is_rejected_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("roller_svc.calibration.calibrate_spec", lambda *_, **__: pytest.fail("measured"))
    for file in ("/proc/nowhere/x.yaml", str(tmp_path)):
        assert main(("calibrate", "--output", file)) == 2
        assert "unwritable-file" in capsys.readouterr().err


def test_a_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    fake_measuring(monkeypatch)
    monkeypatch.setattr(Path, "replace", refuse)
    assert main(("calibrate", "--output", str(tmp_path / "x.yaml"))) == 2
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_not_there_has_a_code() -> None:
    endless = replace(with_caches(l2=1 << 59), num_cores=1)
    with pytest.raises(LaunchError) as refused:
        CpuKernels(endless, 1, compile_kernels(LOCAL))
    assert refused.value.code == "out-of-memory"


def test_the_probe_of_the_peak_takes_no_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.calibration.cpu.limits.CpuKernels", lambda *_: pytest.fail("took all the memory"))
    assert LimitProbes(LOCAL, 1).flops_per_s() > 1e8


def test_local_can_be_a_calibrated_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = calibrated_as(every_figure())
    file = tmp_path / "local.yaml"
    monkeypatch.setattr(catalog, "settings", lambda: Settings(local_spec=file))
    monkeypatch.setattr(catalog, "_local", catalog._local.__wrapped__)
    file.write_text(hardware.to_yaml(spec))
    assert hardware.load("local") == spec
    plain = tuple(unit for unit in spec.units if unit.kind is not UnitKind.DOT)  # which have whole vectors
    others = [replace(spec, name="another CPU"), replace(spec, vector_bytes=spec.vector_bytes // 2, units=plain)]
    for other in (*others, *([replace(spec, num_cores=spec.num_cores - 1)] if spec.num_cores > 1 else [])):
        file.write_text(hardware.to_yaml(other))
        with pytest.raises(ArgumentError, match="ROLLER_LOCAL_SPEC") as refused:
            hardware.load("local")
        assert refused.value.code == "invalid-setting"
    file.unlink()
    with pytest.raises(ArgumentError, match="cannot be read"):
        hardware.load("local")


def test_calibrated_spec_scales_to_fewer_cores() -> None:
    alone = tuple(replace(one, cores=1, figure=None) for one in measured_as({"read_l1": 4e11}, 1, LOCAL))
    four = replace(LOCAL, num_cores=4)
    spec = with_measured_values(four, (*measured_as(every_figure(), 4, four), *alone), "Made up.")
    for cores, l1 in ((1, 4e11), (2, 6e11), (4, 6e11)):  # what one core reads alone, at most what all do
        fewer = catalog.restrict_cores(spec, cores)
        assert (fewer.num_cores, fewer.level("l1").bandwidth_bytes_per_s) == (cores, pytest.approx(l1))
        assert fewer.level("l2").bandwidth_bytes_per_s == pytest.approx(2e11 * cores / 4)
        assert fewer.level("l1").peak_bandwidth_bytes_per_s == pytest.approx(l1)
        assert fewer.units[0].flops_per_s == pytest.approx(spec.units[0].flops_per_s * cores / 4)
        assert fewer.units[0].quotients_per_s == pytest.approx(1e10 * cores / 4)


def test_an_invalid_local_spec_does_not_affect_other_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = Settings(local_spec=tmp_path / "none.yaml")
    monkeypatch.setattr(catalog, "settings", lambda: broken)
    monkeypatch.setattr(catalog, "_local", catalog._local.__wrapped__)
    assert [spec.id for spec in hardware.all_specs()] == [one for one in hardware.ids() if one != hardware.LOCAL]
    assert main(("targets",)) == 0
    assert "invalid-setting" in capsys.readouterr().err
    monkeypatch.setattr("roller_svc.cli.serve.settings.use", lambda _: None)
    monkeypatch.setattr("roller_svc.service.server.run_server", lambda _: pytest.fail("served"))
    assert main(("serve", "--port", "0")) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLER_LOCAL_SPEC", "")
    assert Settings().local_spec is None
