"""A case → the times of its best candidates on the device, beside what the model expects of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_bench.fault import ending_the_process
from gpu_bench.samples import TimedCase, data_bytes, timing_inputs
from roller_svc import hardware
from roller_svc.calibration import calibrated_cuda
from roller_svc.construct.shared import Shared
from roller_svc.errors import BuildError, InvariantError
from roller_svc.features import kernels
from roller_svc.generate import generate
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.matrix_sums import MatrixSums
from roller_svc.ir.program import TensorProgram
from roller_svc.lang.compare import agrees
from roller_svc.lang.interpreter import evaluate, sampled
from roller_svc.ranking import plans_of_all, ranked_groupings, shortlisted
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cuda import CudaModule, Replay
from roller_svc.runtime.cuda_arrays import import_cupy, placed
from roller_svc.runtime.measure import measure
from roller_svc.toolchain import compile_source
from roller_svc.trial import SAMPLED_ELEMENTS, WHOLE_POINTS, sums_of

Json = dict[str, Any]
BUDGET_S = 0.1  # of measuring one candidate
MOST_SETS = 64  # of copies of the arrays, to find them out of the cache
# Twice the cache, and a little: then what is read again has been replaced by then, whatever the cache prefers to keep.
_CACHES = 2.5
_COLD_SAMPLES = 5
COPIED_BYTES = 2 << 30
# A third of what devices with spec sheets of today do with float32 outside matrix units for a byte of their memory.
STREAMING_FLOPS_PER_BYTE = 4.0
JUDGED_POINTS = 3_000_000  # of the reference, which makes ten million a second while the device has nothing to do


@dataclass(frozen=True, slots=True)
class BuildTask:
    case: TimedCase
    target: str
    top_k: int


@dataclass(frozen=True, slots=True)
class Built:
    """A candidate of a program, compiled. `rank`: its place by the model, 0 the best."""

    rank: int
    predicted_s: float
    bound: str
    kernels: tuple[Json, ...]
    compiled: CompiledKernel
    sums: MatrixSums | None


@dataclass(frozen=True, slots=True)
class TimingTask:
    case: TimedCase
    candidates: tuple[Built, ...]


def build(task: BuildTask) -> tuple[Built, ...]:
    """The best candidates that compile; raises InputError for a program that is refused, BuildError where none does."""
    program, hw = task.case.program(), hardware.load(task.target)
    groupings = ranked_groupings(Shared(program), hw, task.top_k)
    plans = shortlisted(plans_of_all(groupings, task.top_k), groupings, task.top_k)
    found: list[Built] = []
    failures: list[BuildError] = []
    for rank, one in enumerate(plans):
        try:
            compiled = compile_source(generate(one.plan, program, one.groups, hw))
        except BuildError as failure:
            failures.append(failure)
            continue
        estimate = one.plan.estimate
        described, sums = kernels(one.groups, one.plan, hw), sums_of(one.plan, hw)
        found.append(Built(rank, estimate.seconds, estimate.bound, described, compiled, sums))
    if not found:
        raise failures[0]
    return tuple(found)


def timed(task: TimingTask) -> Json:
    """Seconds of every candidate with all arrays where they were (`warm_s`: small ones are in the cache), and of the
    fastest and the model's first on arrays that are not in the cache (None where they cannot be kept out of it)."""
    with ending_the_process():
        row = _timed(task)
    import_cupy().get_default_memory_pool().free_all_blocks()
    return row


def _timed(task: TimingTask) -> Json:
    program = task.case.program()
    arrays = timing_inputs(task.case, program)
    on_device = placed(arrays)
    rows: list[Json] = []
    best: tuple[float, Built] | None = None
    for built in task.candidates:
        call = CudaModule(built.compiled).bound(on_device)
        found = measure(call, BUDGET_S, best_s=best[0] if best else None)
        rows.append(_candidate(built) | {"warm_s": found.min_s, "median_s": found.median_s, "samples": found.samples})
        if best is None or found.min_s < best[0]:
            best = (found.min_s, built)
    if best is None:
        raise InvariantError(f"{task.case.id} has no candidate to time")
    warm_s, winner = best
    cold_s = _cold(winner, arrays, data_bytes(program), warm_s)
    first = task.candidates[0]
    first_s: float = rows[0]["warm_s"]
    return {
        "bytes": data_bytes(program),
        "fused": len(program.statements) > 1,
        "memory_bound": memory_bound(winner.kernels, program, task.case.flops),
        "candidates": rows,
        "best_s": warm_s,
        "best_rank": winner.rank,
        "cold_s": cold_s,
        "predicted_s": first.predicted_s,
        "first_s": first_s,
        "first_cold_s": cold_s if winner is first else _cold(first, arrays, data_bytes(program), first_s),
        "judged": _verdict(program, arrays, winner),
    }


def memory_bound(found: Sequence[Json], program: TensorProgram, flops: float | None) -> bool:
    """Whether its arrays should stream as a copy does: no products, little work for each byte, and every array read
    whole, which those that integers index are not."""
    products = any(kernel["kind"] in ("contraction", "attention") for kernel in found)
    floats = all(kind.dtype.is_float for _, kind in program.inputs)
    return not products and floats and (flops or 0.0) <= STREAMING_FLOPS_PER_BYTE * data_bytes(program)


def copy_bandwidth(_: object) -> Json:
    """Bytes a second of a copy within the device, what is read and what is written both counted."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    source, target = (cupy.empty((COPIED_BYTES,), cupy.uint8) for _ in range(2))
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


def calibrated(seconds: float) -> Json:
    """The spec of the device with what `roller calibrate` measures of it."""
    return hardware.to_mapping(calibrated_cuda(0, seconds))


def _candidate(built: Built) -> Json:
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


def _cold(built: Built, arrays: Mapping[str, Array], size: int, warm_s: float) -> float | None:
    """Seconds of a call that finds nothing of its arrays in the last cache: calls on several copies take turns."""
    cupy = import_cupy()
    cache = cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"]
    sets: int = math.ceil(_CACHES * cache / size)
    if sets == 1:
        return warm_s
    if sets > MOST_SETS:
        return None
    module = CudaModule(built.compiled)
    calls = [module.bound(placed(arrays)) for _ in range(sets)]
    times = sets * max(1, math.ceil(calls[0].min_sample_s / (sets * warm_s)))
    cupy.cuda.runtime.deviceSynchronize()
    replay = Replay(cupy, calls, times)
    return min(replay.seconds() for _ in range(_COLD_SAMPLES)) / times


def _verdict(program: TensorProgram, arrays: Mapping[str, Array], winner: Built) -> str:
    """Whether the fastest is right too, at this size: a sample of its elements, if those take not too many points."""
    outputs = sum(math.prod(program.types[out.tensor].shape) for out in program.outputs)
    points = sum(statement.points for statement in program.statements)
    if points > WHOLE_POINTS and points / outputs * SAMPLED_ELEMENTS > WHOLE_POINTS:
        return "not judged: an element takes too many points"
    call = CudaModule(winner.compiled).bound(placed(arrays))
    call()
    results = {name: array.numpy() for name, array in call.finish().items()}
    whole = points <= JUDGED_POINTS
    want = (
        evaluate(program, arrays, sums=winner.sums) if whole
        else sampled(program, arrays, SAMPLED_ELEMENTS, sums=winner.sums)
    )  # fmt: skip
    agreement = agrees(program, results, want)
    return "ok" if agreement.ok else f"wrong: {agreement.detail}"
