"""Compile random programs of several statements, run them, and compare with the reference interpreter.

    python tests/fuzz/fuzz_programs.py --seeds 0:3000
    python tests/fuzz/fuzz_programs.py --seeds 0:100 --target nvidia-h200-sxm --emulate
    python tests/fuzz/fuzz_programs.py --seeds 0:1000 --target nvidia-h200-sxm --emit --plans 8

Each program runs in a worker process: a crash or a hang is the failure of one program. Prints a line for each program
that fails, with its seed, and totals. Exits 1 if one failed. `--emit` prints the sources of larger programs and runs
none; `--show` prints programs alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from programs import EMULATED_POINTS, LARGE_POINTS, SMALL_POINTS, Program, draw

from roller_svc import hardware
from roller_svc.compiler.autotune import build_alone
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions
from roller_svc.compiler.request import build_request
from roller_svc.errors import InputError, InvariantError, RollerError
from roller_svc.farm.workers import map_unordered
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import GroupedPlan, Plan
from roller_svc.semantics.inputs import random_inputs
from roller_svc.verify.run_and_verify import accumulation_of, load_kernel, verify_results

TIMEOUT_S = 300.0
MAX_INT64 = (1 << 63) - 1
MAX_POINTS = 3_000_000  # of a program, beyond which the interpreter is slow
RANKED_PLANS = 12
DEVICE_COMPILES = 10  # one program in so many is also compiled for a device that is emulated


@dataclass(frozen=True)
class Task:
    seed: int
    target: str
    emulate: bool
    emit: bool  # sources of large programs, which are not run
    plans: int  # built of each program: the best, and others at random


@dataclass(frozen=True)
class Row:
    seed: int
    status: str  # ok, skipped, invalid, wrong, error
    detail: str = ""
    patterns: tuple[str, ...] = ()


def program_of(task: Task) -> Program:
    """Return the program of a task: those for GPUs have more narrow types, emulated ones fewer points."""
    is_gpu = hardware.load(task.target).family is not TargetKind.CPU
    limit = LARGE_POINTS if task.emit else EMULATED_POINTS if task.emulate else SMALL_POINTS
    return draw(task.seed, is_gpu=is_gpu, limit=limit)


def plans_of(program: TensorProgram, hw: HardwareSpec, task: Task) -> Iterator[GroupedPlan]:
    """Yield the best plan, then others: of any fusion alternative, with any candidate of each group."""
    partitions = rank_partitions(PartitionCache(program), hw, RANKED_PLANS)
    yield from merge_ranked_plans(partitions, 1)
    rng = random.Random(task.seed)
    for _ in range(task.plans - 1):
        chosen = rng.choice(partitions)
        yield GroupedPlan(Plan(tuple(rng.choice(candidates) for candidates in chosen.candidates)), chosen.groups)


def hints_of(drawn: Program) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the ranges of inputs with integers of any value, within those that an int64 draws."""
    ranges = {name: DType(str(drawn.inputs[name]["dtype"])).integer_range for name in drawn.wide}
    return {name: {"range": (low, min(high + 1, MAX_INT64))} for name, (low, high) in ranges.items()}


def compiled_plan(plan: GroupedPlan, program: TensorProgram, hw: HardwareSpec, task: Task) -> CompiledKernel:
    """Compile a plan; the compiler of a device that is emulated gets a part of the programs, as it is slow."""
    if task.emulate and task.seed % DEVICE_COMPILES:
        return CompiledKernel(emit_plan(plan.plan, program, plan.groups, hw), b"", "", ())
    built = build_alone(plan, program, hw)
    if built.compiled is None:
        raise built.error or InvariantError("a plan has neither a kernel nor an error")
    return built.compiled


def judge(task: Task) -> Row:
    """Return the verdict on one program; an exception that is no RollerError ends the worker process."""
    drawn = program_of(task)
    try:
        request = build_request(
            drawn.expression,
            drawn.inputs,
            outputs=drawn.outputs,
            target=task.target,
            top_k=1,
            select="model",
            runtime="emulator" if task.emulate else "auto",
        )
        program = parse(request.expression, dict(request.inputs), request.outputs)
    except InputError as error:
        return Row(task.seed, "invalid", f"{error.code}: {error.message}", drawn.patterns)
    if not task.emit and sum(statement.points for statement in program.statements) > MAX_POINTS:
        return Row(task.seed, "skipped", "too many points", drawn.patterns)
    hw = hardware.load(task.target)
    try:
        for number, plan in enumerate(plans_of(program, hw, task)):
            if task.emit:
                emit_plan(plan.plan, program, plan.groups, hw)
                continue
            arrays = random_inputs(program, seed=number, hints=hints_of(drawn))
            kernel = load_kernel(compiled_plan(plan, program, hw, task), arrays, request.runtime)
            results = kernel.results()
            verdict = verify_results(program, arrays, results, allow_tf32=False, accumulation=accumulation_of(plan.plan, hw))
            if not verdict.ok:
                return Row(task.seed, "wrong", f"plan {number}: {verdict.output}: {verdict.detail}", drawn.patterns)
    except RollerError as error:
        return Row(task.seed, "error", f"{type(error).__name__} {error.code}: {error.message}", drawn.patterns)
    return Row(task.seed, "ok", "", drawn.patterns)


def run(tasks: list[Task], jobs: int) -> Iterator[Row]:
    """Yield the rows of tasks in order of completion. A lost worker is an error of its task."""
    for task, result in map_unordered(judge, tasks, jobs, TIMEOUT_S):
        if isinstance(result, Row):
            yield result
        else:
            yield Row(task.seed, "error", f"{result.code}: {result.message}", program_of(task).patterns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", metavar="FIRST:END", help="numbers of the programs")
    parser.add_argument("--target", default="local")
    parser.add_argument("--emulate", action="store_true", help="run kernels of GPUs on the CPU")
    parser.add_argument("--emit", action="store_true", help="only emit sources, of larger programs")
    parser.add_argument("--plans", type=int, default=2, help="plans built of each program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="only print the programs")
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    tasks = [
        Task(seed, options.target, options.emulate, options.emit, options.plans)
        for seed in range(int(first), int(end or int(first) + 1))
    ]
    for task in tasks if options.show else ():
        sys.stdout.write(f"{program_of(task)}\n")
    if options.show:
        return 0
    start, counts = time.monotonic(), Counter[str]()
    for row in run(tasks, options.jobs):
        counts[row.status] += 1
        if row.status not in ("ok", "skipped"):
            sys.stdout.write(f"{row.seed:6} {row.status:8} {'+'.join(row.patterns)}: {row.detail[:300]}\n")
            sys.stdout.flush()
    totals = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    sys.stdout.write(f"{len(tasks)} programs on {options.target}: {totals}; {time.monotonic() - start:.0f} s\n")
    return 1 if counts["wrong"] + counts["error"] + counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
