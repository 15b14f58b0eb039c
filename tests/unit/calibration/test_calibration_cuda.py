"""Micro-benchmarks of NVIDIA devices: their texts compile and compute what they say, and their times become a spec.

There is no device here: numbers are the emulator's, times those of a CuPy that is not there.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulator_support import module
from fake_cupy import FakeCupy

from roller_svc import hardware
from roller_svc.calibration import samples
from roller_svc.calibration.cuda import launches
from roller_svc.calibration.cuda import spec as cuda
from roller_svc.calibration.cuda.kernels import SECONDS, Kernel, Sizes, kernels, sizes_of
from roller_svc.errors import LaunchError
from roller_svc.ir.event_state import ABORT, EPOCH, EVENT_WORDS, find_reached_deadline
from roller_svc.ir.kernel import CompiledKernel, KernelSource, LaunchSpec, Resources, Role
from roller_svc.runtime.cuda import arrays as cuda_arrays
from roller_svc.runtime.cuda import module as runtime_cuda
from roller_svc.toolchain import compile_source, sass_text

A100, H200 = hardware.load("nvidia-a100-sxm-80gb"), hardware.load("nvidia-h200-sxm")
SMALL = Sizes(cores=2, last_cache_bytes=1 << 16, dram_bytes=1 << 18, rounds=4, steps=32)
LONG = replace(SMALL, rounds=1 << 20, steps=1 << 17)  # where nothing runs
BY_NAME = {kernel.name: kernel for kernel in kernels(A100, SMALL)}


def emulated(kernel: Kernel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a kernel in the emulator with zeroed outputs. Return its inputs and outputs."""
    source = kernel.source
    outputs = tuple(b.symbol for b in source.buffers_of(Role.OUTPUT))
    zeroed = replace(source, launches=tuple(replace(launch, zeroed=outputs) for launch in source.launches))
    inputs = {b.name: cuda.initial_contents(b) for b in source.buffers_of(Role.INPUT)}
    return inputs, module(zeroed).run(inputs)


@pytest.mark.emulator
def test_a_copy_copies_and_a_read_reads_everything_once() -> None:
    given, left = emulated(BY_NAME["copy_dram_2"])
    assert (given["source"] == left["target"]).all()
    assert BY_NAME["copy_dram_2"].amount == 2 * given["source"].nbytes
    given, left = emulated(BY_NAME["read_dram_1"])
    threads = 256 * SMALL.cores
    sums = given["source"].reshape(-1, threads, 4).sum(axis=0, dtype=np.uint32)
    assert (np.bitwise_xor.reduce(sums, axis=1) == left["results"]).all()
    assert BY_NAME["read_dram_1"].amount == given["source"].nbytes


@pytest.mark.emulator
def test_a_chase_goes_from_line_to_line() -> None:
    for name in ("latency_dram", "latency_shared"):
        kernel = BY_NAME[name]
        given, left = emulated(kernel)
        at = 0
        for _ in range(int(kernel.amount)):
            at = int(given["next"][at])
        assert left["place"][0] == at


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["signal", "wait"])
def test_every_block_arrives_once_a_round_and_the_counts_go_on(name: str) -> None:
    source = BY_NAME[name].source
    (sync,) = source.buffers
    before = replace(sync, symbol="before", role=Role.INPUT, donated=True)
    given = np.zeros(sync.shape, np.uint32)
    for run in (1, 2):
        given = module(replace(source, buffers=(before, sync))).run({"sync": given})["sync"]
        arrived, finished = given[EVENT_WORDS], given[2 * EVENT_WORDS]
        assert (given[EPOCH], arrived, finished) == (run, run * SMALL.rounds * SMALL.cores, run * SMALL.cores)
        assert find_reached_deadline(given) is None


@pytest.mark.emulator
def test_chains_multiply_and_add_as_often_as_is_counted() -> None:
    kernel = BY_NAME["multiply_fma_f64"]
    given, left = emulated(kernel)
    (a, b), threads = given["values"][:2], left["results"].size
    expected = np.zeros(threads)
    for chain in range(8):
        x = given["values"][(np.arange(threads) % 256 + chain) % 8]
        for _ in range(SMALL.rounds):
            x = x * a + b
        expected += x
    assert np.allclose(left["results"], expected, rtol=1e-12)
    assert kernel.amount == 2 * 8 * SMALL.rounds * threads


def test_a_chase_meets_every_line_before_the_first_again() -> None:
    following = cuda.random_cycle(32 * 100, np.random.default_rng(0))
    at, met = 0, set()
    while at not in met:
        met.add(at)
        at = int(following[at])
    assert met == set(range(0, 3200, 32))


@pytest.mark.slow
def test_every_kernel_compiles_without_spills_to_its_instructions() -> None:
    expected = {
        "multiply_fma_f32": "FFMA", "multiply_fma_f16": "HFMA2", "matrix_mma_bf16": "HMMA", "matrix_mma_s8": "IMMA",
        "read_shared_1": "LDS.128", "read_dram_1": "LDG.E.128", "copy_dram_1": "STG.E.128", "latency_l2": "LDG.E",
        "latency_shared": "LDS", "barrier": "BAR.SYNC", "atomic_same": "RED.E.ADD.F32", "signal": "MEMBAR",
        "wait": "LDG.E.STRONG.GPU", "pdl_node": "PREEXIT",
    }  # fmt: skip
    programmatic = [kernel for kernel in kernels(H200, sizes_of(H200)) if kernel.name == "pdl_node"]
    assert "pdl_node" not in BY_NAME
    for kernel in (*kernels(A100, sizes_of(A100)), *programmatic):
        compiled = compile_source(kernel.source)
        assert [used.spill_bytes for used in compiled.resources] == [0], kernel.name
        if kernel.name in expected:
            assert expected[kernel.name] in sass_text(compiled.binary), kernel.name


class FakeLaunches:
    """The driver's launches: each is a call of the fake CuPy, which takes a millisecond."""

    def __init__(self, fake: FakeCupy) -> None:
        self.fake = fake

    def parameters(self, launch: LaunchSpec, memory: dict[str, int]) -> list[int]:
        return [memory[symbol] for symbol in launch.args]

    def launch(self, function: str, launch: LaunchSpec, parameters: list[int], stream: int) -> None:
        kind = "cooperative" if launch.cooperative else "launch"
        self.fake._run(stream, lambda: self.fake.calls.append((kind, function, parameters)))

    def launch_programmatic(self, function: str, launch: LaunchSpec, parameters: list[int], stream: int) -> None:
        self.fake._run(stream, lambda: self.fake.calls.append(("programmatic", function, parameters)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> cuda.Device:
    """A fake device whose kernels only count cycles, a millisecond each."""
    names = {kernel.source.launches[0].name for kernel in kernels(H200, SMALL)}

    def count(_: int, results: int) -> None:
        ctypes.c_uint64.from_address(results).value = 1_410_000

    fake = FakeCupy(dict.fromkeys(names, lambda *_: None) | {"clock_cycles": count})
    monkeypatch.setattr(launches, "driver", lambda: FakeLaunches(fake))
    for module_ in (runtime_cuda, cuda_arrays, cuda):
        monkeypatch.setattr(module_, "import_cupy", lambda: fake)
    monkeypatch.setattr(runtime_cuda, "device_present", lambda: True)
    monkeypatch.setattr(cuda, "sizes_of", lambda _: LONG)
    monkeypatch.setattr(samples, "runqueue_wait_s", lambda: 0.0)  # the times are fake, however busy the machine
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(launches, "time", SimpleNamespace(perf_counter_ns=lambda: next(ticks)))

    def compiled(source: KernelSource) -> CompiledKernel:
        return CompiledKernel(source, b"cubin", "", (Resources(8, 0, 0),))

    monkeypatch.setattr(cuda, "compile_source", compiled)
    found = cuda.Device(0, "NVIDIA A100-SXM4-80GB", (8, 0), 96)
    monkeypatch.setattr(cuda, "open_device", lambda _: found)
    return found


def test_times_become_fields_of_the_devices_spec(device: cuda.Device) -> None:
    spec = cuda.calibrate_cuda(0, 0.1)
    assert (spec.id, spec.num_cores) == (A100.id, 96)
    named = {one.name: one for one in spec.measured}
    assert len(named) == len(BY_NAME)
    for kernel in kernels(replace(A100, num_cores=96), LONG):
        expected = 1e-3 / kernel.amount if kernel.unit == SECONDS else kernel.amount / 1e-3
        if kernel.name == "clock":
            expected = 1.41e9
        if kernel.part is not None:
            expected = cuda.MIN_S  # the fake kernels take equally long
        assert named[kernel.name].median == pytest.approx(expected, rel=1e-3), kernel.name
    assert spec.clock_hz == pytest.approx(1.41e9)
    limits = spec.limits
    assert (limits.launch_overhead_s, limits.graph_node_s, limits.cooperative_launch_s) == pytest.approx((1e-3, 1e-3, 1e-3))
    assert limits.signal_s == pytest.approx(1e-3 / LONG.rounds, rel=1e-3)
    assert not any(spec.is_assumed(f"limits.{name}") for name in ("graph_node_s", "cooperative_launch_s", "signal_s", "wait_s"))
    assert spec.level("l2").latency_s == pytest.approx(1e-3 / LONG.steps, rel=1e-3)
    # of several occupancies the best
    copies = [one for one in spec.measured if one.name.startswith("copy_dram")]
    assert spec.dram.bandwidth_bytes_per_s == max(one.quiet for one in copies)
    assert [one.figure for one in copies].count("levels.dram.bandwidth_bytes_per_s") == 1
    assert spec.is_assumed("limits.max_blocks_per_core") == A100.is_assumed("limits.max_blocks_per_core")
    assert not spec.is_assumed("units.fma_f32.flops_per_s")
    # nothing here measures latency under load
    assert spec.dram.latency_s == A100.dram.latency_s
    assert hardware.load_yaml(hardware.to_yaml(spec)) == spec


def test_launches_of_all_kinds_are_timed(device: cuda.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = cuda.import_cupy()
    monkeypatch.setattr(fake, "_capability", "90")
    names = ("launch", "graph_node", "pdl_node", "cooperative_launch", "signal", "wait")
    benchmarks = tuple(kernel for kernel in kernels(H200, LONG) if kernel.name in names)
    measured = cuda.measure_kernels(benchmarks, H200, 0, 0.01)
    assert [one.name for one in measured] == sorted(names, key=[kernel.name for kernel in benchmarks].index)
    assert [one.figure for one in measured] == [kernel.field for kernel in benchmarks]
    assert {call[:2] for call in fake.calls} >= {
        *(("launch", name) for name in ("empty", "delay")),
        *(("cooperative", name) for name in ("together", "signals", "waits")),
        ("programmatic", "programmatic"),
    }


def test_launches_are_queued_while_the_device_is_busy(device: cuda.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, bench = BY_NAME["cooperative_launch"], cuda._Bench(cuda.import_cupy(), A100, 0)
    sample = bench.probe(kernel).sample
    monkeypatch.setattr(launches, "FIRST_DELAY_NS", 1)  # too short for the first time
    assert sample() == pytest.approx(1e-3)
    assert int(bench._delay[1].get()[0]) > 1
    monkeypatch.setattr(launches, "MAX_DELAY_NS", 0)
    with pytest.raises(LaunchError, match="to queue 200 launches") as busy:
        sample()
    assert busy.value.code == "machine-busy"


def test_a_wait_that_reached_its_deadline_is_no_measurement(device: cuda.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = cuda._Bench(cuda.import_cupy(), A100, 0)
    sample = bench.probe(BY_NAME["wait"]).sample
    bench._array(BY_NAME["wait"].source.buffers[0]).numpy[ABORT] = 1
    with pytest.raises(LaunchError, match="wait: a block waited for others"):
        sample()


def test_a_device_other_than_the_specs_is_rejected(device: cuda.Device) -> None:
    cuda.check_spec(A100, device)
    with pytest.raises(LaunchError, match="nvidia-h200-sxm") as refused:
        cuda.check_spec(hardware.load("nvidia-h200-sxm"), device)
    assert refused.value.code == "wrong-device"


def test_a_device_is_known_by_its_name_and_capability() -> None:
    def of(name: str, *capability: int) -> str | None:
        spec = cuda.find_shipped_spec(name, (capability[0], capability[1]))
        return None if spec is None else spec.id

    assert of("NVIDIA H200", 9, 0) == "nvidia-h200-sxm"
    assert of("NVIDIA H100 80GB HBM3", 9, 0) == "nvidia-h100-sxm"
    assert of("NVIDIA A100-SXM4-80GB", 8, 0) == "nvidia-a100-sxm-80gb"
    assert of("Tesla T4", 7, 5) == "nvidia-t4"
    assert of("NVIDIA of tomorrow", 19, 0) is None
    with pytest.raises(LaunchError, match="sm_190"):
        cuda.find_spec(cuda.Device(0, "NVIDIA of tomorrow", (19, 0), 1))


def test_arithmetic_is_counted_in_operations() -> None:
    units = {f"units.{unit.name}.flops_per_s" for unit in A100.units if unit.name != "mma_f64"}
    assert {kernel.field for kernel in BY_NAME.values() if kernel.field.startswith("units.")} == units
