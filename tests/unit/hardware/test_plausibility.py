"""Specs that no device can have are refused with everything that is wrong; rates follow cores and clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from roller_svc import hardware
from roller_svc.compiler.estimates.batch import Item, estimate_item
from roller_svc.errors import SpecError
from roller_svc.hardware.detect import adapt_to_machine, probe
from roller_svc.hardware.mapping import validate
from roller_svc.hardware.shipped_files import shipped_files

H200, A100, MI300X, AVX512 = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x", "cpu-x86-avx512"
GEMM = Item("c[m, n] +=! a[m, k] * b[k, n]", {"a": ("float16", (4096, 4096)), "b": ("float16", (4096, 4096))})


def mapping(hardware_id: str, **changes: Any) -> dict[str, Any]:
    return hardware.to_mapping(hardware.load(hardware_id)) | changes


def faults(data: dict[str, Any]) -> dict[str, str]:
    return dict(validate(data)[1])


def with_level(data: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    levels = [level | (changes if level["name"] == name else {}) for level in data["levels"]]
    return data | {"levels": levels}


@pytest.mark.parametrize("hardware_id", [H200, A100, MI300X, AVX512, "graphcore-mk2"])
def test_half_the_cores_have_half_the_rates_inside_them(hardware_id: str) -> None:
    whole = hardware.load(hardware_id)
    half = hardware.from_mapping(mapping(hardware_id, num_cores=whole.num_cores // 2))
    for one, other in zip(half.units, whole.units, strict=True):
        assert one.flops_per_s == pytest.approx(other.flops_per_s / 2)
        assert (one.peak_flops_per_s or 0) == pytest.approx((other.peak_flops_per_s or 0) / 2)
    for level, before in zip(half.levels, whole.levels, strict=True):
        factor = 1 if before.scope.value == "device" else 2
        assert level.bandwidth_bytes_per_s == pytest.approx(before.bandwidth_bytes_per_s / factor)
        assert level.latency_s == before.latency_s


def test_half_the_cores_take_twice_the_time_of_arithmetic() -> None:
    half = hardware.from_mapping(mapping(H200, id="half", num_cores=66))
    (before, after) = estimate_item(GEMM, [H200, half], 1)
    assert after.floor.arithmetic_s == pytest.approx(2 * before.floor.arithmetic_s)
    assert after.floor.traffic_s == before.floor.traffic_s


def test_a_slower_clock_has_longer_cycles_inside_the_cores() -> None:
    whole = hardware.load(A100)
    slow = hardware.from_mapping(mapping(A100, clock_hz=whole.clock_hz / 2))
    assert slow.units[0].flops_per_s == whole.units[0].flops_per_s / 2
    assert slow.level("shared").latency_s == 2 * whole.level("shared").latency_s
    assert slow.level("l2") == whole.level("l2")


def test_rates_given_for_the_device_stay() -> None:
    spec = hardware.from_mapping(mapping(H200, num_cores=130, rates_for=None))
    assert spec.units == hardware.load(H200).units
    assert hardware.from_mapping(hardware.to_mapping(spec)) == spec


@pytest.mark.parametrize("hardware_id", sorted(shipped_files()))
def test_shipped_files_state_their_own_cores_and_clock(hardware_id: str) -> None:
    data = yaml.safe_load(shipped_files()[hardware_id].read_text(encoding="utf-8"))
    assert data["rates_for"] == {"num_cores": data["num_cores"], "clock_hz": data["clock_hz"]}


@pytest.mark.parametrize("hardware_id", [H200, A100, MI300X, AVX512])
@pytest.mark.parametrize("rates_for", [None, True])
def test_thousands_of_cores_are_refused(hardware_id: str, rates_for: bool | None) -> None:
    data = mapping(hardware_id, num_cores=66_000)
    found = faults(data if rates_for else data | {"rates_for": None})
    assert "of 66000 cores (num_cores), less than 0.125" in found["levels.1.bandwidth_bytes_per_s"]


def test_everything_that_is_wrong_is_listed() -> None:
    data = mapping(AVX512, clock_hz=2e10, rates_for=None)
    data = with_level(data, "l1", bandwidth_bytes_per_s=4e12, peak_bandwidth_bytes_per_s=None, latency_s=1e-11)
    data = with_level(data, "l2", capacity_bytes=1 << 14)
    with pytest.raises(SpecError) as refused:
        hardware.from_mapping(data, "mine.yaml")
    lines = refused.value.message.splitlines()
    assert {line.split(": ")[1] for line in lines} == {
        "clock_hz", "levels.3.latency_s", "levels.4.latency_s", "levels.3.capacity_bytes", "levels.4.bandwidth_bytes_per_s",
        "limits.shared_bytes_per_core",
    }  # fmt: skip
    assert any("less than the 4e+12 of l1 around it" in line for line in lines)


@pytest.mark.parametrize(
    ("data", "path", "what"),
    [
        (with_level(mapping(H200), "shared", bandwidth_bytes_per_s=4e13, peak_bandwidth_bytes_per_s=None),
         "levels.2.bandwidth_bytes_per_s", "32 banks of 4 bytes"),
        (with_level(mapping(H200), "register", bandwidth_bytes_per_s=3e13), "units.0.peak_flops_per_s", "fma_f32 reads"),
        (mapping(H200, num_cores=66_000), "units.13.peak_flops_per_s", "wgmma_f16: 4.95e+17 operations a second take 30.9 kW"),
        (mapping(A100, num_cores=900_000), "num_cores", "more than fits on a wafer"),
        (mapping(AVX512, num_cores=66_000, rates_for=None), "num_cores", "each of 66000 cores has 0.0019 operations a clock"),
        (with_level(mapping(H200), "l2", bandwidth_bytes_per_s=4e12),
         "levels.1.bandwidth_bytes_per_s", "less than the 4.3e+12 of dram"),
    ],
)  # fmt: skip
def test_a_value_that_no_device_has_is_refused(data: dict[str, Any], path: str, what: str) -> None:
    assert what in faults(data)[path]


@pytest.mark.parametrize(
    ("hardware_id", "changes"),
    [
        ("cpu-arm-neon", {"num_cores": 2}), ("cpu-x86-avx2", {"num_cores": 1}), ("cpu-x86-avx2", {"num_cores": 64}),
        (AVX512, {"clock_hz": 1.5e9}), (AVX512, {"num_cores": 64}), (H200, {"num_cores": 40}), (A100, {"num_cores": 28}),
        ("nvidia-t4", {"num_cores": 8}), ("nvidia-b200", {"clock_hz": 0.5e9}),
    ],
)  # fmt: skip
def test_other_numbers_of_cores_and_clocks_are_plausible(hardware_id: str, changes: dict[str, Any]) -> None:
    assert faults(mapping(hardware_id, **changes)) == {}


@pytest.mark.parametrize("base", ["cpu-arm-neon", "cpu-x86-avx2", AVX512])
@pytest.mark.parametrize("cores", [1, 2, 192])
@pytest.mark.parametrize("clock_hz", [1.5e9, 4e9])
def test_specs_of_detected_machines_can_be_read_again(base: str, cores: int, clock_hz: float) -> None:
    spec = hardware.load(base)
    machine = replace(probe(), cores=cores, clock_hz=clock_hz, vendor=spec.vendor)
    assert faults(hardware.to_mapping(adapt_to_machine(spec, machine))) == {}


def test_measured_bandwidths_may_contradict_each_other() -> None:
    data = with_level(mapping(AVX512), "l1", bandwidth_bytes_per_s=3.5e12, peak_bandwidth_bytes_per_s=None)
    sample = {"name": "l1_reads", "unit": "bytes/s", "cores": 2, "min": 1.0, "median": 1.0, "max": 1.0, "quiet": 1.0}
    sample |= {"samples": 3, "how": "reads", "figure": "levels.l1.bandwidth_bytes_per_s"}
    assert "levels.4.bandwidth_bytes_per_s" in faults(data)
    assert faults(data | {"measured": [sample]}) == {}
    assert "num_cores" in faults(data | {"measured": [sample], "num_cores": 66_000, "rates_for": None})
