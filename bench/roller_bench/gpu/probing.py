"""Run probes: micro-benchmarks of values that the model assumes, with the spec field that each would replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_bench.gpu.cases.check import Check
from roller_bench.gpu.device_errors import fatal_device_errors
from roller_bench.gpu.device_inputs import on_device
from roller_bench.gpu.interleaved import RollerWork, time_interleaved
from roller_bench.gpu.probe_kernels import (
    ProbeSizes,
    atomic_probes,
    barrier_probes,
    box_copy,
    rounded_box,
    small_box,
    tma_probes,
)
from roller_bench.gpu.verify import build_check
from roller_svc import hardware
from roller_svc.calibration.cuda.kernels import Kernel, kernels, sizes_of
from roller_svc.calibration.cuda.spec import measure_kernels
from roller_svc.errors import require
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.hardware import HardwareSpec, Measured, UnitKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cuda import driver as cuda_driver
from roller_svc.runtime.cuda.arrays import import_cupy
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.semantics.inputs import draw_patterns
from roller_svc.toolchain import compile_source

Json = dict[str, Any]
SECONDS = 1.5  # for measuring one group of compiled kernels
# Calibration kernels to which the model is most sensitive, each at one sufficient occupancy.
CONSTANTS = (
    "launch", "graph_node", "pdl_node", "cooperative_launch", "signal", "wait",
    "clock", "copy_dram_4", "copy_dram_8", "read_l2_4", "read_l2_8", "latency_l2", "latency_dram",
)  # fmt: skip
SMALL_ROWS = (17, 64, 500, 1023)  # rows of 128 bytes: tensors below 128 KiB
SMALL_RUNS = 50
MANTISSA_CUT = 13  # bits that float32 has more than tf32
DISTINCT = 1 << 20


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """One probe to run."""

    name: str
    target: str
    run: bool  # on the device; else compile only


@dataclass(frozen=True, slots=True)
class ProbeDevice:
    """The device of a probe."""

    hw: HardwareSpec
    run: bool  # False: compile only


def probe_names(target: str) -> list[str]:
    """Return the probes that the target supports, most informative first."""
    hopper = any(unit.kind is UnitKind.WGMMA for unit in hardware.load(target).units)
    return [name for name in PROBES if hopper or name not in _HOPPER_PROBES]


def run_probe(task: ProbeTask) -> list[Json]:
    """Run a probe; return its rows."""
    with fatal_device_errors():
        return PROBES[task.name](ProbeDevice(hardware.load(task.target), task.run))


def row(
    name: str,
    value: float | str,
    unit: str,
    how: str,
    hw: HardwareSpec,
    *,
    samples: int,
    field: str | None = None,
    **more: Any,
) -> Json:
    """Return a row; `field` names the spec field that the value would replace."""
    return {
        "name": name,
        "status": "ok",
        "value": value,
        "unit": unit,
        "samples": samples,
        "how": how,
        "field": field,
        "spec_value": None if field is None else spec_value(hw, field),
        **more,
    }


def spec_value(hw: HardwareSpec, field: str) -> float:
    """Return the value of a spec field, such as 'levels.l2.latency_s'."""
    outputs: Any = hardware.to_mapping(hw)
    for part in field.split("."):
        outputs = outputs[part] if isinstance(outputs, dict) else next(one for one in outputs if one["name"] == part)
    return float(outputs)


def source_rows(sources: Iterable[KernelSource]) -> list[Json]:
    """Compile kernels and return a row for each."""
    return [
        {"name": one.name, "status": "compiled", "registers": compile_source(one).resources[0].registers_per_thread}
        for one in sources
    ]


def _measure_kernels(kernels_to_run: tuple[Kernel, ...], device: ProbeDevice) -> list[Json]:
    if not device.run:
        return source_rows(kernel.source for kernel in kernels_to_run)
    return [_measured_row(one, device.hw) for one in measure_kernels(kernels_to_run, device.hw, 0, SECONDS)]


def _measured_row(one: Measured, hw: HardwareSpec) -> Json:
    """Return a row with the entry for the list `measured` of a spec."""
    entry = {key: value for key, value in dataclasses.asdict(one).items() if value is not None}
    return row(
        one.name, one.quiet, one.unit, one.how, hw, samples=one.samples, field=one.figure, least=one.min, most=one.max, entry=entry
    )


def constants(device: ProbeDevice) -> list[Json]:
    kernels_to_run = kernels(device.hw, sizes_of(device.hw))
    return _measure_kernels(tuple(kernel for kernel in kernels_to_run if kernel.name in CONSTANTS), device)


def barriers(device: ProbeDevice) -> list[Json]:
    return _measure_kernels(tuple(barrier_probes(device.hw, ProbeSizes(device.hw.num_cores))), device)


def tma_copies(device: ProbeDevice) -> list[Json]:
    return _measure_kernels(tuple(tma_probes(device.hw, ProbeSizes(device.hw.num_cores))), device)


def atomics(device: ProbeDevice) -> list[Json]:
    return _measure_kernels(tuple(atomic_probes(device.hw, ProbeSizes(device.hw.num_cores))), device)


def tf32_rounding(device: ProbeDevice) -> list[Json]:
    """Determine whether TMA rounds float32 to nearest tf32 or truncates: a factor of 2 in the error of products."""
    source = box_copy(device.hw.arch, rounded_box(), 256)
    if not device.run:
        return source_rows([source])
    inputs = rounding_inputs()
    outputs = CudaModule(compile_source(source)).run({"X": import_cupy().asarray(inputs)})["Y"].get()
    how, share = rounding_mode(inputs, outputs)
    text = "float32 loaded through a TFLOAT32 tensor map"
    return [row("tma_tf32_rounding", how, "", text, device.hw, samples=inputs.size, nearest_share=share)]


def rounding_inputs() -> Array:
    """Return the bits of 256 float32 numbers: near tf32 numbers, between two of them, and even and odd ties."""
    residues = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x800, 0x1800], np.uint32)
    mantissas = np.arange(32, dtype=np.uint32) + 0x1FC00  # from 1 on, mantissas even and odd
    return (mantissas[:, None] << MANTISSA_CUT | residues).astype(np.uint32).reshape(-1)


def rounding_mode(inputs: NDArray[Any], outputs: NDArray[Any]) -> tuple[str, float]:
    """Return the rounding mode, and the fraction of numbers that were rounded to the nearer tf32 number."""
    low, residue = inputs >> MANTISSA_CUT, inputs & 0x1FFF
    mantissas, tie = outputs >> MANTISSA_CUT, residue == 0x1000
    up = mantissas == low + 1
    if np.array_equal(outputs, inputs):
        return "none: all bits kept", 0.0
    between = (residue != 0) & ~tie
    share = float(np.mean(up[between] == (residue[between] > 0x1000)))
    if not up.any():
        return "cut off", share
    if share < 1:
        return "neither nearest nor cut off", share
    even = np.array_equal(up[tie], (low[tie] & 1) == 1)
    return f"nearest, ties {'to even' if even else 'away' if up[tie].all() else 'otherwise'}", share


def small_maps(device: ProbeDevice) -> list[Json]:
    """Determine whether tensor maps of small tensors need bit 85 cleared: load out-of-bounds boxes both ways."""
    sources = [box_copy(device.hw.arch, small_box(rows), rows * 32) for rows in SMALL_ROWS]
    if not device.run:
        return source_rows(sources[:1])
    cupy = import_cupy()
    wrong = dict.fromkeys((False, True), 0)
    for rows, source in zip(SMALL_ROWS, sources, strict=True):
        compiled = compile_source(source)
        inputs = np.arange(1, rows * 32 + 1, dtype=np.uint32)
        expected = expected_small_box(inputs, rows)
        for mend in wrong:
            wrong[mend] += sum(
                int((outputs != expected).sum()) for outputs in _load_boxes(cupy, compiled, cupy.asarray(inputs), mend=mend)
            )
    how = "wrong words in out-of-bounds boxes of tensors below 128 KiB, tensor maps "
    descriptions = {False: f"{how}as the driver encodes them", True: f"{how}with bit 85 cleared"}
    return [
        row(
            f"small_maps_{'mended' if mend else 'as_encoded'}",
            count,
            "words",
            descriptions[mend],
            device.hw,
            samples=SMALL_RUNS * len(SMALL_ROWS),
        )
        for mend, count in wrong.items()
    ]


def expected_small_box(inputs: Array, rows: int) -> Array:
    """Return the expected words of a box of 64 rows of 128 bytes: the rows of the tensor, then zeros."""
    expected = np.zeros(64 * 32, np.uint32)
    expected[: min(rows, 64) * 32] = inputs[: 64 * 32]
    return expected


def _load_boxes(cupy: Any, compiled: CompiledKernel, x: Any, *, mend: bool) -> list[Array]:
    """Load the box repeatedly, with a driver that clears the bit or not."""
    driver = cuda_driver.Driver(cuda_driver.driver().library, fix_small_maps=mend)
    launch = compiled.source.launches[0]
    (function,) = CudaModule(compiled).functions(cupy, 0)
    y = cupy.zeros((64 * 32,), np.dtype(np.uint32))
    parameters = driver.parameters(launch, {"x": int(x.data.ptr), "y": int(y.data.ptr)})
    outputs = []
    for _ in range(SMALL_RUNS):
        y.fill(0)
        driver.launch(function.ptr, launch, parameters, cupy.cuda.get_current_stream().ptr)
        outputs.append(y.get())
    return outputs


def gelu_epilogue(device: ProbeDevice) -> list[Json]:
    """Time a function in the epilogue, which the model counts as one instruction."""
    types = (("A", ("float16", (8192, 512))), ("B", ("float16", (8192, 512))))
    text = "S[m,n] +=! A[m,k].cast(`float32`) * B[n,k].cast(`float32`); C[m,n] = {}.cast(`float16`)"
    checks = {
        name: Check(name, "probe", text.format(body), types)
        for name, body in (("epilogue_plain", "S[m,n]"), ("epilogue_gelu", "gelu(S[m,n])"))
    }
    return _time_programs(device, checks, "8192 x 8192 x 512, float16")


def decode_attention(device: ProbeDevice) -> list[Json]:
    """Time decoding with 64 blocks, half of the SMs, and with the keys split for 128 and 256 blocks."""
    halves = {"Q": (8, 32, 1, 128), "K": (8, 8, 8192, 128), "V": (8, 8, 8192, 128)}
    types = tuple((name, ("bfloat16", shape)) for name, shape in halves.items())
    checks = {
        f"decode_split_{split}": Check(
            f"decode_split_{split}", "probe", "O = attention(Q, K, V)", types, tiles=(("split_k", split),) if split > 1 else ()
        )
        for split in (1, 2, 4)
    }
    return _time_programs(device, checks, "one query of 32 heads over 8192 keys of 8, batch 8, bfloat16")


def _time_programs(device: ProbeDevice, checks: dict[str, Check], how: str) -> list[Json]:
    """Time the kernels that the model chooses for several programs, interleaved."""
    reports = {name: build_check(check, device.hw.id) for name, check in checks.items()}
    compiled = {name: require(report.winner.compiled, f"{name}, compiled") for name, report in reports.items()}
    predicted = {name: report.winner.plan.estimate.seconds for name, report in reports.items()}
    if not device.run:
        return [{"name": name, "status": "compiled", "predicted_s": predicted[name]} for name in checks]
    cupy = import_cupy()
    works = {}
    for name, check in checks.items():
        program = parse(check.expression, dict(tensor_types(check.types)), None)
        arrays = on_device(cupy, program, draw_patterns(program, 0, None, DISTINCT))
        works[name] = RollerWork(cupy, [CudaModule(compiled[name]).bind(arrays)])
    times, _ = time_interleaved(works, None)
    return [
        row(
            name,
            one["median_s"],
            "s",
            how,
            device.hw,
            samples=one["samples"],
            least=one["min_s"],
            most=one["max_s"],
            predicted_s=predicted[name],
        )
        for name, one in times.items()
    ]


PROBES: dict[str, Callable[[ProbeDevice], list[Json]]] = {
    "constants": constants,
    "tf32-rounding": tf32_rounding,
    "small-maps": small_maps,
    "barriers": barriers,
    "tma": tma_copies,
    "atomics": atomics,
    "gelu-epilogue": gelu_epilogue,
    "decode-attention": decode_attention,
}
_HOPPER_PROBES = ("tf32-rounding", "small-maps", "barriers", "tma")
