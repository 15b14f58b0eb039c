"""A worker process of the CPU benchmark: roller or one baseline library, on given cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_bench.baselines import BaselineLibrary, library_of
from roller_bench.cases import BenchCase
from roller_bench.timing_worker import Sample, take_sample, wait_until_idle
from roller_svc import hardware
from roller_svc.calibration.cpu.limits import LimitProbes, Limits
from roller_svc.compiler.backends import backend_for
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError, InvariantError, WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.binding import aligned_empty
from roller_svc.semantics import interpreter
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import Value

CHECKED_ELEMENTS = 1024
# Limit for the interpreter: a few seconds.
_CHECKED_POINTS = 50_000_000
# Tolerances between roller and a baseline for programs too large for the interpreter: of the value, of the maximum.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
ROLLER = "ours"
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker; it responds with the versions of its library."""

    library: str  # a baseline or "ours"
    threads: int


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    target: str


@dataclass(frozen=True, slots=True)
class BuildRoller:
    """Build the kernel to time, and the kernel that the model alone chooses."""

    case: BenchCase
    target: str
    select: str
    top_k: int


@dataclass(frozen=True, slots=True)
class Built:
    """Build times and the expected results."""

    build_s: float  # from the expression to the chosen kernel
    model_build_s: float
    candidates: int
    checked_by_reference: bool  # the results agree with the interpreter
    expected: Mapping[str, Value]  # by the interpreter; if that takes too long, roller's results with a margin


@dataclass(frozen=True, slots=True)
class FindBaseline:
    case: BenchCase
    expected: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class BaselineCalls:
    """The names of the calls of a baseline."""

    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeSample:
    """Take one sample."""


Task = Start | MeasureLimits | BuildRoller | FindBaseline | TakeSample
Answer = dict[str, str] | Limits | Built | BaselineCalls | Sample


@dataclass(slots=True)
class _State:
    """The state of this process between tasks."""

    threads: int = 1
    library: BaselineLibrary | None = None
    run: Callable[[], object] | None = None
    baseline: object = None
    probes: LimitProbes | None = None


_state = _State()


def work(task: Task) -> Answer:
    """Run one task. Raises BuildError without a kernel or baseline, WrongAnswerError if roller's results are wrong."""
    match task:
        case Start(library=library, threads=threads):
            _state.threads = threads
            if library == ROLLER:
                return {"cores": str(len(os.sched_getaffinity(0)))}
            _state.library = library_of(library, threads)
            return dict(_state.library.versions)
        case MeasureLimits(target=target):
            _state.probes = LimitProbes(hardware.load(target), _state.threads)
            return _state.probes.limits()
        case BuildRoller():
            return _build(task)
        case FindBaseline():
            return _find_baseline(task)
        case TakeSample():
            if _state.run is None:
                raise InvariantError("expected a built kernel or a baseline before a sample")
            if _state.library is None:
                return _sample_with_peak(_state.run, _state.probes)
            with _state.library.context(), np.errstate(all="ignore"):
                return take_sample(_state.run)


def _sample_with_peak(run: Callable[[], object], probes: LimitProbes | None) -> Sample:
    """Take a sample and the larger FMA peak of before and after it; without probes only the sample."""
    if probes is None:
        return take_sample(run)
    before = probes.flops_per_s()
    sample = take_sample(run)
    return replace(sample, peak_flops_per_s=max(before, probes.flops_per_s()))


def _build(task: BuildRoller) -> Built:
    _state.run = _state.baseline = None
    case, spec = task.case, hardware.load(task.target)
    program = case.program()
    arrays = make_inputs(program, case)

    def build(select: str) -> tuple[float, Any]:
        request = build_request(
            case.expression, case.inputs, outputs=case.outputs, target=task.target, top_k=task.top_k, select=select
        )
        start = time.perf_counter()
        report = build_kernel(request)
        return time.perf_counter() - start, report

    model_s, report = build("model")
    build_s = model_s
    if task.select != "model":
        build_s, report = build(task.select)
    compiled = report.winner.compiled
    if compiled is None:
        raise InvariantError(f"{case.id}: the winner has no binary")
    module = backend_for(spec).load(compiled)
    call: Any = module.bind(arrays)
    call()
    results = call.results()
    try:
        expected = interpreter.evaluate_sample(program, arrays, CHECKED_ELEMENTS, limit_points=_CHECKED_POINTS)
    except ArgumentError:
        expected = {out.name: approximate_values(results[out.name], program.types[out.tensor].dtype) for out in program.outputs}
        checked_by_reference = False
    else:
        checked_by_reference = True
        if not (verdict := agrees(program, results, expected)).ok:
            raise WrongAnswerError(verdict.detail)
    _state.run = call
    wait_until_idle()
    return Built(build_s, model_s, len(report.results), checked_by_reference, expected)


def approximate_values(array: NDArray[Any], dtype: DType) -> Value:
    """Return elements of a result with a margin for rounding."""
    positions = np.unique(np.linspace(0, array.size - 1, CHECKED_ELEMENTS, dtype=np.int64))
    wide = array.reshape(-1)[positions].astype(np.float64)
    return Value(wide, dtype, _RELATIVE * np.abs(wide) + _ABSOLUTE * np.abs(wide).max(initial=0.0), positions)


def _find_baseline(task: FindBaseline) -> BaselineCalls:
    _state.run = _state.baseline = None
    if _state.library is None:
        raise InvariantError("this worker has no baseline library")
    program = task.case.program()
    with _state.library.context(), np.errstate(all="ignore"):
        baseline = _state.library.find(program, make_inputs(program, task.case), task.expected)
    _state.run, _state.baseline = baseline.run, baseline
    wait_until_idle()
    return BaselineCalls(baseline.calls)


def make_inputs(program: TensorProgram, case: BenchCase) -> Arrays:
    """Return the same arrays in every worker, aligned to cache lines."""
    arrays: Arrays = {}
    for name, array in random_inputs(program, 0, case.hints).items():
        arrays[name] = aligned_empty(array.shape, array.dtype)
        arrays[name][...] = array
    return arrays
