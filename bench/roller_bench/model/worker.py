"""The worker process that times the candidates of a case, on the cores that they use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from roller_bench.cases import BenchCase
from roller_bench.cpu.worker import approximate_values, make_inputs
from roller_bench.timing_worker import Sample, take_sample, time_calls, wait_until_idle
from roller_svc import hardware
from roller_svc.calibration import calibrate_spec
from roller_svc.compiler.backends import Call, backend_for
from roller_svc.errors import BuildError, InvariantError, RollerError, WrongAnswerError
from roller_svc.hardware.detect import adapt_to_machine, probe
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.interpreter import Value

SAMPLE_S = 0.01
CLOCK_S = 50e-6  # shorter calls are timed in batches: reading the clock takes 0.1 us


@dataclass(frozen=True, slots=True)
class Describe:
    """Return the spec of this process's cores: `local`, or a target with a subset of its ISA.

    `measure`: calibrate it here.
    """

    target: str
    measure: bool


@dataclass(frozen=True, slots=True)
class LoadKernels:
    """Load the kernels of a case and run each once; respond with the error of each, or None.

    Results are compared unless they are known to be right.
    """

    case: BenchCase
    kernels: tuple[CompiledKernel, ...]
    results_known: bool = False


@dataclass(frozen=True, slots=True)
class TimeKernel:
    """Take one sample of one kernel."""

    number: int


Task = Describe | LoadKernels | TimeKernel
Answer = HardwareSpec | tuple[RollerError | None, ...] | Sample


@dataclass(slots=True)
class _State:
    """The state of this process between tasks."""

    hardware: HardwareSpec | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    repeats: dict[int, tuple[int, int]] = field(default_factory=dict)  # per kernel: calls of a sample, of a batch


_state = _State()


def work(task: Task) -> Answer:
    """Run one task."""
    match task:
        case Describe(target=target, measure=measure):
            shipped = local_spec(target)
            _state.hardware = calibrate_spec(shipped) if measure else shipped
            return _state.hardware
        case LoadKernels():
            return _load_kernels(task)
        case TimeKernel(number=number):
            return _time_kernel(number)


def local_spec(target: str) -> HardwareSpec:
    """Return the target's spec with this machine's caches and clock, and the cores of this process."""
    if target == hardware.LOCAL:
        return hardware.detect_local()
    return replace(adapt_to_machine(hardware.load(target), probe()), id=target)


def _load_kernels(task: LoadKernels) -> tuple[RollerError | None, ...]:
    if _state.hardware is None:
        raise InvariantError("expected the task Describe first")
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
                array.fill(0)  # so that elements that a kernel does not write are not an earlier kernel's
            call()
            results = call.results()
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
    """Take a sample. The first one determines the calls of a sample and of a batch.

    A call that fills a sample by itself needs no warm-up.
    """
    call = _state.calls[number]
    if number not in _state.repeats:
        sample = take_sample(call, SAMPLE_S)
        _state.repeats[number] = (sample.calls, max(1, round(CLOCK_S / sample.seconds)))
    elif _state.repeats[number] != (1, 1):
        call()
    return time_calls(call, *_state.repeats[number])
