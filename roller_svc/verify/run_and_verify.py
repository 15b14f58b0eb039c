"""Run a kernel on host arrays, verify it against the reference, and time it and the same program in numpy."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.api import load_runner
from roller_svc.compiler.backends import load_emulated
from roller_svc.errors import LaunchError
from roller_svc.frontend.torch.arguments import Call
from roller_svc.ir.accumulation import AccumulatorPrecision, least_precise
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, Load, Op, OpKind
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, Language, Measurement, Role
from roller_svc.ir.options import RuntimeChoice
from roller_svc.ir.program import Combine, StatementKind, TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.runtime.cuda.arrays import copy_to_device, copy_to_host
from roller_svc.runtime.cuda.module import device_present
from roller_svc.runtime.measure import host_name, measure
from roller_svc.semantics.compare import Agreement, agrees
from roller_svc.semantics.interpreter import Value, evaluate, evaluate_sample
from roller_svc.verify.expanded_squares import expand_squares, widen_bounds
from roller_svc.verify.winograd_reference import transformed_program

Arrays = Mapping[str, NDArray[Any]]

# The interpreter computes about ten million points per second: larger programs are verified on a sample of the outputs.
MAX_INTERPRETED_POINTS = 30_000_000
SAMPLED_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel bound to its inputs."""

    call: Call
    on_gpu: bool

    def results(self) -> dict[str, NDArray[Any]]:
        """Run the kernel once and return the outputs in host memory."""
        self.call()
        outputs = self.call.results()
        if self.on_gpu:
            return copy_to_host(outputs)
        return outputs

    def measure(self, budget_s: float = 0.5) -> Measurement:
        return measure(self.call, budget_s)


def load_kernel(
    compiled: CompiledKernel, arrays: Arrays, runtime: RuntimeChoice = RuntimeChoice.AUTO, *, races: bool = False
) -> LoadedKernel:
    """Load a kernel and bind it to arrays. `races` selects the emulator with its race detector.

    Donated inputs are copied first, for a later comparison with the reference. Raises LaunchError if the device is
    missing.
    """
    donated = [b.name for b in compiled.source.buffers_of(Role.INPUT) if b.donated]
    arrays = {**arrays, **{name: arrays[name].copy() for name in donated}}
    if races:
        return LoadedKernel(load_emulated(compiled, races=True).bind(arrays), on_gpu=False)
    runner = load_runner(compiled, runtime)
    if compiled.source.language is not Language.CUDA or runtime is RuntimeChoice.EMULATOR:
        return LoadedKernel(runner.bind(arrays), on_gpu=False)
    if not device_present():
        raise LaunchError(
            'cannot run the kernel: this machine has no NVIDIA device; runtime="emulator" runs it on the CPU', code="no-device"
        )
    return LoadedKernel(runner.bind(copy_to_device(arrays)), on_gpu=True)


def verify_results(
    program: TensorProgram,
    arrays: Arrays,
    results: Arrays,
    *,
    allow_tf32: bool,
    allow_expanded_squares: bool = False,
    accumulation: AccumulatorPrecision | None = None,
    main: RProgram | None = None,
) -> Agreement:
    """Compare the results with the reference; for large programs, a sample of them.

    Args:
        allow_expanded_squares: The kernel may compute squares of differences as products.
        accumulation: Accumulator precision of the kernel's matrix units (`accumulation_of`).
        main: Tiles of the longest kernel. If they are of Winograd's algorithm, so are the reference's bounds.
    """
    if main is not None and main.space.winograd_tile:
        program, transforms = transformed_program(program, main.space)
        arrays = {**arrays, **transforms}
    is_whole = sum(statement.points for statement in program.statements) <= MAX_INTERPRETED_POINTS

    def values(form: TensorProgram) -> dict[str, Value]:
        if is_whole:
            return evaluate(form, arrays, allow_tf32=allow_tf32, accumulation=accumulation)
        return evaluate_sample(form, arrays, SAMPLED_ELEMENTS, allow_tf32=allow_tf32, accumulation=accumulation)

    expected = values(program)
    if allow_expanded_squares:
        expected = widen_bounds(expected, values(expand_squares(program)))
    return agrees(program, results, expected)


def accumulation_of(plan: Plan, hw: HardwareSpec) -> AccumulatorPrecision | None:
    """Return the lowest accumulator precision of the plan's matrix units; None if it uses none."""
    return least_precise((choice.program.unit for choice in plan.choices), hw.arch)


@dataclass(frozen=True, slots=True)
class Einsum:
    """A program that numpy computes in one call."""

    equation: str
    operands: tuple[str, ...]

    def measure_numpy(self, arrays: Arrays, budget_s: float = 0.5) -> Measurement:
        """Time the program in numpy, by matmul if possible, which is faster than einsum."""
        values = [arrays[name] for name in self.operands]
        if self.equation == "ab,bc->ac":
            out = np.empty((values[0].shape[0], values[1].shape[1]), values[0].dtype)
            return measure(lambda: np.matmul(values[0], values[1], out=out), budget_s, device_name=host_name())
        return measure(lambda: np.einsum(self.equation, *values, optimize=True), budget_s, device_name=host_name())


def numpy_einsum(program: TensorProgram) -> Einsum | None:
    """Return the einsum of a program if numpy supports its types, else None."""
    einsum = einsum_equation(program)
    types = dict(program.inputs)
    if einsum is None or any(not _computed_by_numpy(types[name].dtype) for name in einsum.operands):
        return None
    return einsum


def einsum_equation(program: TensorProgram) -> Einsum | None:
    """Return the einsum of a program that sums a product of inputs indexed by plain axes, else None."""
    if len(program.statements) != 1:
        return None
    statement = program.statements[0]
    if statement.kind is not StatementKind.REDUCE or statement.combine is not Combine.SUM:
        return None
    loads = _multiplied_loads(statement.body)
    if loads is None or len(statement.axes) > len(string.ascii_letters):
        return None
    indices = [_axis_names(index) for index in (*(factor.index for factor in loads), statement.index)]
    named = [names for names in indices if names is not None]
    letters = dict(zip(dict.fromkeys(chain(*named[:-1])), string.ascii_letters, strict=False))
    if len(named) != len(indices) or not letters.keys() >= set(named[-1]):
        return None
    shapes = {name: type_.shape for name, type_ in program.inputs}
    for factor, names in zip(loads, named[:-1], strict=True):
        if shapes.get(factor.tensor) != tuple(statement.extents[name] for name in names):
            return None
    *terms, result = ("".join(letters[name] for name in names) for names in named)
    return Einsum(f"{','.join(terms)}->{result}", tuple(factor.tensor for factor in loads))


def _computed_by_numpy(dtype: DType) -> bool:
    return dtype.is_float and not dtype.is_narrow_float


def _multiplied_loads(body: Expr) -> list[Load] | None:
    match body:
        case Load():
            return [body]
        case Cast(implicit=True):
            return _multiplied_loads(body.arg)
        case Op(kind=OpKind.MUL):
            parts = [_multiplied_loads(arg) for arg in body.args]
            return None if any(part is None for part in parts) else [load for part in parts for load in part or ()]
    return None


def _axis_names(index: tuple[Expr, ...]) -> tuple[str, ...] | None:
    names = tuple(part.name for part in index if isinstance(part, AxisRef))
    return names if len(names) == len(index) else None
