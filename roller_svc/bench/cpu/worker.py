"""One worker of the CPU benchmark: ours or a peer on given cores. Its process starts on these cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc import hardware
from roller_svc.bench.baselines import BaselineLibrary, library_of
from roller_svc.bench.cases import BenchCase
from roller_svc.bench.timing_worker import Sample, take_sample, wait_until_idle
from roller_svc.calibration.cpu.limits import LimitProbes, Limits
from roller_svc.compiler.backends import backend_for
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError, InvariantError, WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.reference import interpreter
from roller_svc.reference.compare import agrees
from roller_svc.reference.inputs import random_inputs
from roller_svc.reference.interpreter import Value
from roller_svc.runtime.binding import aligned_empty

CHECKED_ELEMENTS = 1024
# What the interpreter may evaluate for them: some seconds.
_CHECKED_POINTS = 50_000_000
# Of a program that is too much for the interpreter: how far from ours a peer may be, of the value and of the greatest.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
ROLLER = "ours"
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker is: `library` a peer's name or ours. Its answer is the versions of what it calls."""

    library: str
    threads: int


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    target: str


@dataclass(frozen=True, slots=True)
class BuildRoller:
    """Build the case as it will be timed, and once more as the model alone chooses."""

    case: BenchCase
    target: str
    select: str
    top_k: int


@dataclass(frozen=True, slots=True)
class Built:
    """Seconds from the expression to the chosen kernel, and what peers must give.

    `proven`: ours agrees with the interpreter. Where that would take too long, `want` is ours, about: then ours is
    right where a peer is.
    """

    build_s: float
    model_build_s: float
    candidates: int
    proven: bool
    expected: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class FindBaseline:
    case: BenchCase
    expected: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class BaselineCalls:
    """What a peer calls."""

    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeSample:
    """One turn."""


Task = Start | MeasureLimits | BuildRoller | FindBaseline | TakeSample
Answer = dict[str, str] | Limits | Built | BaselineCalls | Sample


@dataclass(slots=True)
class _State:
    """What this process holds between its tasks."""

    threads: int = 1
    library: BaselineLibrary | None = None
    run: Callable[[], object] | None = None
    baseline: object = None
    probes: LimitProbes | None = None


_state = _State()


def work(task: Task) -> Answer:
    """One task's answer. BuildError: there is no kernel or no peer; WrongAnswerError: ours is wrong."""
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
                raise InvariantError("nothing to sample")
            if _state.library is None:
                return _sample_with_peak(_state.run, _state.probes)
            with _state.library.context(), np.errstate(all="ignore"):
                return take_sample(_state.run)


def _sample_with_peak(run: Callable[[], object], probes: LimitProbes | None) -> Sample:
    """A sample between two of the FMA peak, the greater of which counts; without probes the sample alone."""
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
        request = build_request(case.expression, case.inputs, outputs=case.outputs, target=task.target,
                                top_k=task.top_k, select=select)  # fmt: skip
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
    results = call.finish()
    try:
        expected = interpreter.evaluate_sample(program, arrays, CHECKED_ELEMENTS, limit_points=_CHECKED_POINTS)
    except ArgumentError:
        expected = {
            out.name: approximate_values(results[out.name], program.types[out.tensor].dtype) for out in program.outputs
        }
        proven = False
    else:
        proven = True
        if not (verdict := agrees(program, results, expected)).ok:
            raise WrongAnswerError(verdict.detail)
    _state.run = call
    wait_until_idle()
    return Built(build_s, model_s, len(report.results), proven, expected)


def approximate_values(array: NDArray[Any], dtype: DType) -> Value:
    """Elements of a result, with a margin that rounding stays within."""
    positions = np.unique(np.linspace(0, array.size - 1, CHECKED_ELEMENTS, dtype=np.int64))
    wide = array.reshape(-1)[positions].astype(np.float64)
    return Value(wide, dtype, _RELATIVE * np.abs(wide) + _ABSOLUTE * np.abs(wide).max(initial=0.0), positions)


def _find_baseline(task: FindBaseline) -> BaselineCalls:
    _state.run = _state.baseline = None
    if _state.library is None:
        raise InvariantError("this worker has no library")
    program = task.case.program()
    with _state.library.context(), np.errstate(all="ignore"):
        baseline = _state.library.find(program, make_inputs(program, task.case), task.expected)
    _state.run, _state.baseline = baseline.run, baseline
    wait_until_idle()
    return BaselineCalls(baseline.calls)


def make_inputs(program: TensorProgram, case: BenchCase) -> Arrays:
    """The same arrays in every worker, each on a cache line's start."""
    arrays: Arrays = {}
    for name, array in random_inputs(program, 0, case.hints).items():
        arrays[name] = aligned_empty(array.shape, array.dtype)
        arrays[name][...] = array
    return arrays
