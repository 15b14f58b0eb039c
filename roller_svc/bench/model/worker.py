"""The worker that times a case's candidates in turns. Its process starts on the cores that they are to have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from roller_svc import hardware
from roller_svc.bench.cases import BenchCase
from roller_svc.bench.cpu.worker import approximate_values, make_inputs
from roller_svc.bench.timing_worker import Sample, take_sample, time_calls, wait_until_idle
from roller_svc.calibration import calibrated
from roller_svc.compiler.backends import Call, backend_for
from roller_svc.errors import BuildError, InvariantError, RollerError, WrongAnswerError
from roller_svc.hardware.detect import localised, probe
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram
from roller_svc.reference.compare import agrees
from roller_svc.reference.interpreter import Value

SAMPLE_S = 0.01
CLOCK_S = 50e-6  # calls that take less are timed together: a look at the clock takes a tenth of a microsecond


@dataclass(frozen=True, slots=True)
class Describe:
    """The spec of the cores that this process may use: `local`, or what a smaller target has of them. `measure`: with
    figures measured here in place of shipped ones."""

    target: str
    measure: bool


@dataclass(frozen=True, slots=True)
class LoadKernels:
    """Take these kernels of a case, and run each once. The answer says of each what was wrong with it, if anything;
    results are compared unless they are `known` to be right."""

    case: BenchCase
    kernels: tuple[CompiledKernel, ...]
    results_known: bool = False


@dataclass(frozen=True, slots=True)
class TimeKernel:
    """One turn of one kernel."""

    number: int


Task = Describe | LoadKernels | TimeKernel
Answer = HardwareSpec | tuple[RollerError | None, ...] | Sample


@dataclass(slots=True)
class _State:
    """What this process holds between its tasks. `repeats`: how many calls a sample of each kernel has, and
    how many of them are timed together."""

    hardware: HardwareSpec | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    repeats: dict[int, tuple[int, int]] = field(default_factory=dict)


_state = _State()


def work(task: Task) -> Answer:
    """One task's answer."""
    match task:
        case Describe(target=target, measure=measure):
            shipped = local_spec(target)
            _state.hardware = calibrated(shipped) if measure else shipped
            return _state.hardware
        case LoadKernels():
            return _load_kernels(task)
        case TimeKernel(number=number):
            return _time_kernel(number)


def local_spec(target: str) -> HardwareSpec:
    """The target's spec, with this machine's caches, clock and the cores that this process may use."""
    if target == hardware.LOCAL:
        return hardware.detect_local()
    return replace(localised(hardware.load(target), probe()), id=target)


def _load_kernels(task: LoadKernels) -> tuple[RollerError | None, ...]:
    if _state.hardware is None:
        raise InvariantError("no spec was asked for")
    _state.calls, _state.repeats = {}, {}
    program, load = task.case.program(), backend_for(_state.hardware).load
    arrays = make_inputs(program, task.case)
    results: dict[str, NDArray[Any]] | None = None
    expected: dict[str, Value] = {}
    errors: list[RollerError | None] = []
    for number, kernel in enumerate(task.kernels):
        try:
            call = load(kernel).bind(arrays, results)
            for array in (results or {}).values() if not task.results_known else ():
                array.fill(0)  # what a kernel does not write shall not be an earlier one's
            call()
            results = call.finish()
            if not task.results_known:
                expected = expected or _values(program, results)
                _check(program, results, expected)
        except BuildError as failure:
            errors.append(failure)
        else:
            _state.calls[number] = call
            errors.append(None)
    wait_until_idle()
    return tuple(errors)


def _check(program: TensorProgram, results: dict[str, NDArray[Any]], expected: dict[str, Value]) -> None:
    if not (verdict := agrees(program, results, expected)).ok:
        raise WrongAnswerError(f"differs from the model's first: {verdict.detail}")


def _values(program: TensorProgram, results: dict[str, NDArray[Any]]) -> dict[str, Value]:
    return {out.name: approximate_values(results[out.name], program.types[out.tensor].dtype) for out in program.outputs}


def _time_kernel(number: int) -> Sample:
    """The first turn finds out how many calls fill a sample, and how many are timed together; a call that fills one by
    itself needs no warming up."""
    call = _state.calls[number]
    if number not in _state.repeats:
        sample = take_sample(call, SAMPLE_S)
        _state.repeats[number] = (sample.calls, max(1, round(CLOCK_S / sample.seconds)))
    elif _state.repeats[number] != (1, 1):
        call()
    return time_calls(call, *_state.repeats[number])
