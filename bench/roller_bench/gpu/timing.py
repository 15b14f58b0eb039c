"""Time the best candidates of a case on the device, interleaved with baseline kernels."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roller_bench.gpu.baselines import baseline_work
from roller_bench.gpu.clocks import Nvml, open_nvml
from roller_bench.gpu.device_errors import fatal_device_errors
from roller_bench.gpu.device_inputs import allocate, on_device, read_elements
from roller_bench.gpu.interleaved import RollerWork, TimedWork, screening_median, time_interleaved
from roller_bench.gpu.samples import TimedCase, data_bytes, timing_inputs, timing_patterns
from roller_svc import hardware
from roller_svc.analysis.wide_values import storage_dtype
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions, select_for_measurement
from roller_svc.errors import BuildError, InvariantError
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cuda.arrays import DeviceBytes, import_cupy
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.interpreter import evaluate_sample, sample_indices
from roller_svc.toolchain import compile_source
from roller_svc.verify.kernel_stats import summarize_kernels
from roller_svc.verify.run_and_verify import MAX_INTERPRETED_POINTS, SAMPLED_ELEMENTS, accumulation_of

Json = dict[str, Any]
MAX_ARRAY_COPIES = 64  # copies of the arrays for cold-cache times
# Data of more than twice the cache evicts every line before its reuse, whatever the replacement policy.
CACHE_MULTIPLE = 2.5
COPIED_BYTES = 2 << 30
# A third of the float32 operations per DRAM byte (without tensor cores) of current devices, by their data sheets.
STREAMING_FLOPS_PER_BYTE = 4.0
# Programs of at most this many points are checked in full: the reference computes ten million points per second.
FULL_CHECK_POINTS = 3_000_000


@dataclass(frozen=True, slots=True)
class BuildTask:
    case: TimedCase
    target: str
    top_k: int


@dataclass(frozen=True, slots=True)
class BuiltCandidate:
    """A compiled candidate of a program."""

    rank: int  # by the model, 0 is best
    predicted_s: float
    bound: str
    kernels: tuple[Json, ...]
    compiled: CompiledKernel
    accumulation: AccumulatorPrecision | None


@dataclass(frozen=True, slots=True)
class TimingTask:
    """One case to time."""

    case: TimedCase
    candidates: tuple[BuiltCandidate, ...]
    baselines: tuple[str, ...]  # timed interleaved with our kernels
    bus_id: str | None = None  # of the device, for reading its clocks
    cold: bool = False  # also time our kernels with a cold cache


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Results of the fastest candidate: the bytes of the elements of each output that `evaluate_sample` chooses."""

    case: TimedCase
    accumulation: AccumulatorPrecision | None
    count: int
    values: Mapping[str, Array]


def build_candidates(task: BuildTask) -> tuple[BuiltCandidate, ...]:
    """Compile the best candidates; raise InputError for an invalid program and BuildError if none compiles."""
    program, hw = task.case.program(), hardware.load(task.target)
    groupings = rank_partitions(PartitionCache(program), hw, task.top_k)
    plans = select_for_measurement(merge_ranked_plans(groupings, task.top_k), groupings, task.top_k)
    found: list[BuiltCandidate] = []
    failures: list[BuildError] = []
    for rank, one in enumerate(plans):
        try:
            compiled = compile_source(emit_plan(one.plan, program, one.groups, hw))
        except BuildError as failure:
            failures.append(failure)
            continue
        estimate = one.plan.estimate
        described, accumulation = summarize_kernels(one.groups, one.plan, hw), accumulation_of(one.plan, hw)
        found.append(BuiltCandidate(rank, estimate.seconds, estimate.bound, described, compiled, accumulation))
    if not found:
        raise failures[0]
    return tuple(found)


def time_case(task: TimingTask) -> tuple[Json, CheckTask | None]:
    """Return the row, and the results to check in another process while the device continues."""
    cupy = import_cupy()
    with fatal_device_errors():
        try:
            return _time_case(cupy, task)
        finally:
            _free(cupy)


def _time_case(cupy: Any, task: TimingTask) -> tuple[Json, CheckTask | None]:
    case, program = task.case, task.case.program()
    patterns, device = timing_patterns(case, program), None if task.bus_id is None else open_nvml(task.bus_id)
    arrays = on_device(cupy, program, patterns)
    rows, works = [], {}
    for built in task.candidates:
        works[built.rank] = RollerWork(cupy, [CudaModule(built.compiled).bind(arrays)])
        rows.append(_candidate(built) | {"screened_s": screening_median(works[built.rank])})
    if not rows:
        raise InvariantError(f"{case.id} has no candidate to time")
    best = min(zip(rows, task.candidates, strict=True), key=lambda pair: float(pair[0]["screened_s"]))[1]
    first = task.candidates[0]
    contenders: dict[str, TimedWork] = {"ours": works[best.rank]}
    if first is not best:
        contenders["first"] = works[first.rank]
    baselines = {name: baseline_work(name, case, program, arrays) for name in task.baselines}
    contenders |= {name: baseline.work for name, baseline in baselines.items() if baseline.work is not None}
    times, clocks = time_interleaved(contenders, device)
    row = _measurement_row(program, task, rows, best, times) | {"clocks": clocks}
    row["peers"] = {
        name: baseline.row | times.get(name, {}) | _roller_times(times) for name, baseline in baselines.items() if baseline.row
    }
    if task.cold:
        both = {one.rank: one for one in (best, first)}
        cold = {rank: _cold(cupy, one, program, patterns, device) for rank, one in both.items()}
        row |= {"cold_s": cold[best.rank], "first_cold_s": cold[first.rank]}
    check_task = _check_task(cupy, case, program, best, arrays)
    if check_task is None:
        row["checked"] = "not checked: an element takes too many points"
    return row, check_task


def _measurement_row(
    program: TensorProgram, task: TimingTask, rows: list[Json], best: BuiltCandidate, times: Mapping[str, Json]
) -> Json:
    roller, first = times["ours"], times.get("first", times["ours"])
    return {
        "bytes": data_bytes(program),
        "fused": len(program.statements) > 1,
        "memory_bound": memory_bound(best.kernels, program, task.case.flops),
        "candidates": rows,
        "best_s": roller["median_s"],
        "best_min_s": roller["min_s"],
        "samples": roller["samples"],
        "best_rank": best.rank,
        "predicted_s": task.candidates[0].predicted_s,
        "first_s": first["median_s"],
        "first_min_s": first["min_s"],
    }


def _roller_times(times: Mapping[str, Json]) -> Json:
    """Return our times from the interleaved block in which a baseline was timed."""
    roller, first = times["ours"], times.get("first", times["ours"])
    return {"ours_s": roller["median_s"], "ours_min_s": roller["min_s"], "first_s": first["median_s"]}


def memory_bound(found: Sequence[Json], program: TensorProgram, flops: float | None) -> bool:
    """Return whether a program should reach the bandwidth of a copy.

    It has no contraction, few operations per byte, and no integer inputs, which may index other arrays.
    """
    products = any(kernel["kind"] in ("contraction", "attention") for kernel in found)
    floats = all(kind.dtype.is_float for _, kind in program.inputs)
    return not products and floats and (flops or 0.0) <= STREAMING_FLOPS_PER_BYTE * data_bytes(program)


def copy_bandwidth(_: object) -> Json:
    """Measure a device-to-device copy; bytes read and bytes written both count."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    source, target = (allocate(cupy, COPIED_BYTES) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    best_s: float = math.inf
    for _ in range(10):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, COPIED_BYTES, runtime.memcpyDeviceToDevice, stream.ptr)
        end.record(stream)
        end.synchronize()
        best_s = min(best_s, cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return {"bytes": 2 * COPIED_BYTES, "seconds": best_s, "bytes_per_s": 2 * COPIED_BYTES / best_s}


def check_result(task: CheckTask) -> str:
    """Check results against the reference, on inputs regenerated from the seed of the case."""
    program = task.case.program()
    want = evaluate_sample(program, timing_inputs(task.case, program), task.count, accumulation=task.accumulation)
    results: dict[str, Array] = {}
    for out in program.outputs:
        kind = program.types[out.tensor]
        whole = np.zeros(math.prod(kind.shape), storage_dtype(kind.dtype))
        whole[want[out.name].indices] = task.values[out.name].view(whole.dtype)
        results[out.name] = whole.reshape(kind.shape)
    agreement = agrees(program, results, want)
    return "ok" if agreement.ok else f"wrong: {agreement.detail}"


def checked_elements(program: TensorProgram) -> int | None:
    """Return how many elements of each output are checked; None if one element takes too many points."""
    outputs = sum(math.prod(program.types[out.tensor].shape) for out in program.outputs)
    points = sum(statement.points for statement in program.statements)
    if points > MAX_INTERPRETED_POINTS and points / outputs * SAMPLED_ELEMENTS > MAX_INTERPRETED_POINTS:
        return None
    return SAMPLED_ELEMENTS if points > FULL_CHECK_POINTS else outputs


def _check_task(
    cupy: Any, case: TimedCase, program: TensorProgram, best: BuiltCandidate, arrays: Mapping[str, DeviceBytes]
) -> CheckTask | None:
    """Run the kernel and copy the elements that `evaluate_sample` will choose to the host."""
    count = checked_elements(program)
    if count is None:
        return None
    call = CudaModule(best.compiled).bind(arrays)
    call()
    results = call.results()
    values = {
        out.name: read_elements(
            cupy, results[out.name], sample_indices(program.types[out.tensor].shape, count, np.random.default_rng(0))
        )
        for out in program.outputs
    }
    return CheckTask(case, best.accumulation, count, values)


def _candidate(built: BuiltCandidate) -> Json:
    resources = built.compiled.resources
    return {
        "rank": built.rank,
        "predicted_s": built.predicted_s,
        "bound": built.bound,
        "kernels": list(built.kernels),
        "registers": max(r.registers_per_thread for r in resources),
        "shared_bytes": max(r.shared_bytes for r in resources),
        "spill_bytes": sum(r.spill_bytes for r in resources),
    }


def _cold(
    cupy: Any, built: BuiltCandidate, program: TensorProgram, patterns: Mapping[str, Array], device: Nvml | None
) -> float | None:
    """Return the seconds of a call with a cold L2 cache, by cycling through several copies of the arrays.

    Returns None if too many copies would be needed. One copy is enough for large arrays.
    """
    cache = cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"]
    sets: int = math.ceil(CACHE_MULTIPLE * cache / data_bytes(program))
    if sets > MAX_ARRAY_COPIES:
        return None
    module = CudaModule(built.compiled)
    calls = [module.bind(on_device(cupy, program, patterns)) for _ in range(sets)]
    times, _ = time_interleaved({"cold": RollerWork(cupy, calls)}, device)
    return float(times["cold"]["median_s"])


def _free(cupy: Any) -> None:
    """Free the memory pools of CuPy and torch: the next case has other sizes."""
    cupy.get_default_memory_pool().free_all_blocks()
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.cuda.empty_cache()
