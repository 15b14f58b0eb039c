"""roller run: compile a kernel, run it on random inputs, check it against the reference and time it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.compile import build, kernel_facts
from roller_svc.errors import ArgumentError, WrongAnswerError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.options import KernelOptions, RuntimeChoice
from roller_svc.ir.program import TensorProgram
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.api import Kernel
    from roller_svc.compiler.request import validate_outputs
    from roller_svc.ir.accumulation import AccumulatorPrecision, accumulator_precision
    from roller_svc.ir.rprogram import RProgram
    from roller_svc.semantics.compare import Agreement
    from roller_svc.semantics.inputs import random_inputs
    from roller_svc.verify.run_and_verify import Arrays, load_kernel, numpy_einsum, verify_results
else:
    validate_outputs = OnUse("roller_svc.compiler.request:validate_outputs")
    accumulator_precision = OnUse("roller_svc.ir.accumulation:accumulator_precision")
    random_inputs = OnUse("roller_svc.semantics.inputs:random_inputs")
    load_kernel = OnUse("roller_svc.verify.run_and_verify:load_kernel")
    numpy_einsum = OnUse("roller_svc.verify.run_and_verify:numpy_einsum")
    verify_results = OnUse("roller_svc.verify.run_and_verify:verify_results")


UNCHECKED = "not checked: the reference would take too long at this size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    common.add_device(parser)
    common.add_options(parser, KernelOptions)
    common.add_server(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: %(default)s)")


def execute(options: argparse.Namespace) -> int:
    if options.seed < 0:
        raise ArgumentError(f"--seed must not be negative, got {options.seed}", code="invalid-option")
    common.check_program(options)
    kernel = build(options)
    types = dict(tensor_types(common.parse_inputs(options)))
    program = parse(options.context.expression, types, validate_outputs(options.output or None))
    arrays = random_inputs(program, options.seed)
    runtime = RuntimeChoice(options.runtime)
    loaded = load_kernel(kernel.parts.compiled, arrays, runtime)
    agreement = _check(
        program,
        arrays,
        loaded.results(),
        allow_tf32=options.allow_tf32,
        allow_expanded_squares=options.allow_expanded_squares,
        accumulation=_accumulation(kernel),
        main=kernel.program,
    )
    # the emulator's time says nothing about the device
    measurement = None if runtime is RuntimeChoice.EMULATOR else loaded.measure()
    facts = kernel_facts(kernel) | {
        "median_s": None if measurement is None else measurement.median_s,
        "min_s": None if measurement is None else measurement.min_s,
        "device": "the emulator" if measurement is None else measurement.device_name,
        "gflops": None if measurement is None else gflops(program, measurement.median_s),
        "checked": agreement is not None,
        "max_abs_error": None if agreement is None else agreement.max_abs_error,
        "max_rel_error": None if agreement is None else agreement.max_rel_error,
        "numpy_s": None if measurement is None else measure_numpy_s(program, arrays),
    }
    common.print_notes(facts["notes"])
    show.print_result(options, facts, format_summary(facts))
    return 0


def _accumulation(kernel: Kernel) -> AccumulatorPrecision | None:
    """Return the accumulator precision of the main kernel; None if unknown, as for a service's kernel."""
    return None if kernel.program is None else accumulator_precision(kernel.program.unit, kernel.parts.compiled.source.arch)


def _check(
    program: TensorProgram,
    arrays: Arrays,
    results: Arrays,
    *,
    allow_tf32: bool,
    allow_expanded_squares: bool,
    accumulation: AccumulatorPrecision | None,
    main: RProgram | None,
) -> Agreement | None:
    """Compare the results with the reference; return None if the program is too large. Raises WrongAnswerError."""
    try:
        agreement = verify_results(
            program,
            arrays,
            results,
            allow_tf32=allow_tf32,
            allow_expanded_squares=allow_expanded_squares,
            accumulation=accumulation,
            main=main,
        )
    except ArgumentError as failure:
        if failure.code != "reference-too-large":
            raise
        return None
    if not agreement.ok:
        raise WrongAnswerError(f"the kernel disagrees with the reference: {agreement.detail}")
    return agreement


def gflops(program: TensorProgram, seconds: float) -> float:
    return program.flops / seconds / 1e9


def measure_numpy_s(program: TensorProgram, arrays: Any) -> float | None:
    """Return the time of the same program in numpy, if one call of numpy computes it."""
    einsum = numpy_einsum(program)
    return None if einsum is None else einsum.measure_numpy(arrays).median_s


def format_summary(facts: dict[str, Any]) -> str:
    check_line = f"PASS: max abs error {facts['max_abs_error']:.3g}" if facts["checked"] else UNCHECKED
    lines = [
        facts["expression"],
        f"for {facts['target']}, {facts['language']}, on {facts['device']}:",
        show.format_launches(facts),
        check_line,
    ]
    if facts["median_s"] is not None:
        estimate = facts["estimate"]  # a schedule by hand has none
        lines.append(
            f"time: min {show.format_seconds(facts['min_s'])}, median {show.format_seconds(facts['median_s'])}; "
            f"{facts['gflops']:.3g} GFLOP/s" + (f"; estimated {show.format_seconds(estimate['seconds'])}" if estimate else "")
        )
    if facts["numpy_s"] is not None:
        ratio = facts["numpy_s"] / facts["median_s"]
        comparison = f"{ratio:.2f}x slower" if ratio >= 1 else f"{1 / ratio:.2f}x faster"
        lines.append(f"numpy: {show.format_seconds(facts['numpy_s'])} ({comparison})")
    return "\n".join(lines)
