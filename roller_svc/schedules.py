"""Schedules by hand in Python: `roller_svc.Schedule`.

    schedule = roller_svc.Schedule("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (512, 256)), "B": ("float32", (256, 384))})
    schedule = schedule["C.update"].split("m", 64).reorder("m.outer", "k", "m.inner", "n").vectorise("n").schedule
    kernel = schedule.compile()

The operations and their rules are in docs/schedule.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roller_svc.api import Inputs, Kernel
from roller_svc.api import compile as compile_kernel
from roller_svc.codegen.symbols import name_symbols
from roller_svc.compiler.as_schedule import explain_as_schedule, first_plan
from roller_svc.compiler.autotune import DISTINCT_VALUES
from roller_svc.compiler.backends import backend_for
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.request import build_request, resolve_spec
from roller_svc.compiler.schedule_cost import price_schedule
from roller_svc.compiler.schedule_tuner import Trial, search_schedules
from roller_svc.errors import ArgumentError, ScheduleError
from roller_svc.frontend.lang.input_types import short_repr, whole_number
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.schedule_cost import ScheduleCost
from roller_svc.ir.schedule_text import render
from roller_svc.runtime.measure import measure
from roller_svc.schedule.build_tree import build_tree
from roller_svc.schedule.by_hand import read_steps
from roller_svc.schedule.check_steps import Problem, apply_steps
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.device_launches import build_device_launches, check_device
from roller_svc.schedule.random_steps import StepSpace
from roller_svc.schedule.schedule import Schedule as AppliedSchedule
from roller_svc.schedule.step_json import format_document
from roller_svc.schedule.step_text import format_steps
from roller_svc.schedule.steps import Step, Value
from roller_svc.semantics.inputs import random_inputs
from roller_svc.toolchain import compile_source

TRIAL_S = 0.1  # of measuring, for each trial


class Schedule:
    """A program, a device and the steps of a schedule. Operations return a new schedule."""

    def __init__(
        self,
        expression: str,
        inputs: Inputs | None = None,
        target: str = "local",
        steps: object = None,
        *,
        outputs: Sequence[str] | None = None,
        hardware: HardwareSpec | str | None = None,
    ) -> None:
        """Take a program and steps, which are parsed and not checked yet.

        Args:
            expression: the program.
            inputs: dtype and shape of each input, or arrays.
            target: id of the device.
            steps: text, a JSON document, a list of steps, or a schedule; default: none, the default schedule.
            outputs: names of the outputs; default: tensors that are never read.
            hardware: a spec, or its YAML text, instead of `target`.

        Raises InputError for an invalid program or device, ScheduleError (schedule-syntax, schedule-program) for steps
        that cannot be read.
        """
        self._request = build_request(expression, inputs or {}, target=target, outputs=outputs, hardware=hardware)
        self._written = read_steps([] if steps is None else steps, self.program)

    @classmethod
    def from_construction(
        cls,
        expression: str,
        inputs: Inputs | None = None,
        target: str = "local",
        *,
        outputs: Sequence[str] | None = None,
        hardware: HardwareSpec | str | None = None,
        **options: Any,
    ) -> Schedule:
        """Return the model's first plan as a schedule: `roller explain --as-schedule`. `options` are those of `compile`.

        Raises ScheduleError (schedule-construction) with what no step says.
        """
        request = build_request(expression, inputs or {}, target=target, outputs=outputs, hardware=hardware, **options)
        found = explain_as_schedule(request, first_plan(request))
        if found.steps is None:
            raise ScheduleError(
                f"construction's plan has no steps: {found.missing}",
                code="schedule-construction",
                hint=f"its tiles are the options {found.options}",
            )
        return cls(expression, inputs, target, found.steps, outputs=outputs, hardware=hardware)

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._written.steps

    @cached_property
    def program(self) -> TensorProgram:
        return parse_once(self._request.expression, self._request.inputs, self._request.outputs)[0]

    def __getitem__(self, name: str) -> Stage:
        """Return a stage, or a function, whose operations add steps."""
        return Stage(self, name)

    def with_step(self, step: Step) -> Schedule:
        """Return the schedule with one more step. Raises ScheduleError if a step is illegal."""
        longer = object.__new__(Schedule)
        longer._request = self._request
        longer._written = read_steps(format_document([*self.steps, step])["steps"])  # which checks all values
        longer._apply()
        return longer

    def check(self) -> tuple[Problem, ...]:
        """Return the first step that breaks a rule, or a rule of the device, as a problem; () for a legal schedule."""
        try:
            build_device_launches(self._apply(), resolve_spec(self._request))
        except ScheduleError as error:
            return (Problem.from_error(error),)
        return ()

    def tree(self) -> str:
        """Return the schedule tree, a line for each loop, buffer and computation. Raises ScheduleError."""
        return render(build_tree(self._apply()))

    def text(self) -> str:
        """Return the steps as text, a line each."""
        return format_steps(self.steps)

    def to_json(self) -> dict[str, object]:
        """Return the steps as JSON: `roller-schedule/1`."""
        return format_document(self.steps, self.program)

    def cost(self) -> ScheduleCost:
        """Return the performance model's price on the device. Raises ScheduleError if the device cannot run it."""
        return price_schedule(self._apply(), resolve_spec(self._request))

    def compile(self, **options: Any) -> Kernel:
        """Compile the program by this schedule. `options` are those of `roller_svc.compile`. Raises ScheduleError."""
        request = self._request
        return compile_kernel(
            request.expression,
            {name: (kind.dtype.value, kind.shape) for name, kind in request.inputs},
            target=request.target,
            outputs=request.outputs,
            hardware=request.hardware,
            schedule=self,
            **options,
        )

    def __repr__(self) -> str:
        return f"<roller_svc.Schedule of {len(self.steps)} steps for {self._request.target}: {self._request.expression[:60]}>"

    def _apply(self) -> AppliedSchedule:
        """Return the default schedule after the steps. Raises ScheduleError."""
        return apply_steps(default_schedule(self.program), self.steps, self._written.lines, self._written.text)


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The schedules that a search has built."""

    best: Schedule
    trials: tuple[Trial, ...]
    unbuilt: Mapping[str, int]  # proposals that were not built: codes of rules, `known`, `expensive`, `same text`

    @property
    def history(self) -> list[dict[str, object]]:
        """Return the trials as JSON-compatible values.

        They have the steps as text, the price, the seconds if it was measured, and the error if it failed.
        """
        return [
            {
                "steps": format_steps(trial.steps),
                "priced_s": trial.priced_s,
                "seconds": trial.seconds,
                "error": trial.error or None,
            }
            for trial in self.trials
        ]


def tune(
    expression: str,
    inputs: Inputs | None = None,
    target: str = "local",
    *,
    outputs: Sequence[str] | None = None,
    hardware: HardwareSpec | str | None = None,
    trials: int = 100,
    seed: int = 0,
    start: object = None,
    budget_s: float = 60.0,
    on_trial: Callable[[TuneResult], None] | None = None,
) -> TuneResult:
    """Search the schedules of a program for the fastest one: by measuring, or by price where the device is absent.

    Args:
        expression: the program.
        inputs: dtype and shape of each input, or arrays.
        target: id of the device.
        outputs: names of the outputs; default: tensors that are never read.
        hardware: a spec, or its YAML text, instead of `target`.
        trials: schedules that are built, at most.
        seed: of the search. It gives the same schedules in the same order, whatever their times are.
        start: steps that are mutated besides those of construction and of the default schedule.
        budget_s: seconds after which no trial begins.
        on_trial: is called with what was found so far, after each trial from the first that did not fail.

    Raises ScheduleError for an illegal `start`, or if no schedule is legal on the device or none was built in time.
    Raises ArgumentError for invalid numbers, ToolchainMissingError without a compiler for the device.
    """
    if (trial_count := whole_number(trials)) is None or trial_count < 1:
        raise ArgumentError(f"trials must be a positive whole number, got {short_repr(trials)}", code="invalid-option")
    if (first_seed := whole_number(seed)) is None:
        raise ArgumentError(f"seed must be a whole number, got {short_repr(seed)}", code="invalid-option")
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not budget_s > 0:
        raise ArgumentError(f"budget_s must be a positive number of seconds, got {short_repr(budget_s)}", code="invalid-option")
    first = Schedule(expression, inputs, target, start, outputs=outputs, hardware=hardware)
    request, spec = first._request, resolve_spec(first._request)
    check_device(spec)
    on_gpu = spec.family is not TargetKind.CPU
    space = StepSpace(default_schedule(first.program), lanes=max(1, spec.vector_bytes // 4), on_gpu=on_gpu)
    first._apply()
    constructed = explain_as_schedule(request, first_plan(request)).steps
    starts = [*([first.steps] if start is not None else []), *([constructed] if constructed is not None else [])]
    starts.append(space.start())
    device = backend_for(spec)
    is_present = device.is_present(spec)
    arrays = device.to_device(random_inputs(first.program, seed=0, distinct=DISTINCT_VALUES)) if is_present else {}
    unbuilt: Counter[str] = Counter()
    end_s = time.monotonic() + budget_s

    def build_and_time(_: AppliedSchedule, source: KernelSource) -> float | None:
        compiled = compile_source(name_symbols(source, first.program.name))
        return measure(device.load(compiled).bind(arrays), TRIAL_S).min_s if is_present else None

    def result_of(found: tuple[Trial, ...]) -> TuneResult | None:
        built = [trial for trial in found if not trial.error]
        if not built:
            return None
        best = min(built, key=lambda trial: trial.priced_s if trial.seconds is None else trial.seconds)
        fastest = Schedule(expression, inputs, target, best.steps, outputs=outputs, hardware=hardware)
        return TuneResult(fastest, found, dict(sorted(unbuilt.items())))

    def report(found: tuple[Trial, ...]) -> None:
        if on_trial is not None and (result := result_of(found)) is not None:
            on_trial(result)

    found = search_schedules(
        space,
        starts,
        spec,
        build_and_time,
        trials=trial_count,
        seed=first_seed,
        has_time=lambda: time.monotonic() < end_s,
        report=report,
        unbuilt=unbuilt,
    )
    if (result := result_of(found)) is None:
        failed = f"none of {len(found)} schedules could be built; of the first: {found[0].error}" if found else ""
        raise ScheduleError(
            failed or f"no trial has begun within {budget_s:g} s",
            code="schedule-tune",
            hint="give `start`, a schedule that compiles" if failed else "give it more seconds",
        )
    return result


class Stage:
    """A stage or function of a schedule. Each operation returns it with one more step, and raises ScheduleError."""

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.schedule = schedule
        self.name = name

    def split(self, loop: str, factor: int, names: tuple[str, str] | None = None, tail: str | None = None) -> Stage:
        """Split a loop into `loop.outer` and `loop.inner`, or `names`. `tail` is guard, the default, or exact."""
        return self._then("split", loop=loop, factor=factor, names=names, tail=tail)

    def reorder(self, *loops: str) -> Stage:
        """Permute the loops, the first outermost."""
        return self._then("reorder", loops=loops)

    def fuse(self, outer: str, inner: str) -> Stage:
        """Fuse two nested loops into `outer.inner.fused`."""
        return self._then("fuse", outer=outer, inner=inner)

    def tile(self, outer: tuple[str, int], inner: tuple[str, int]) -> Stage:
        """Split two loops, and move both outer ones outside."""
        return self._then("tile", outer=outer, inner=inner)

    def rename(self, loop: str, name: str) -> Stage:
        """Rename a loop."""
        return self._then("rename", loop=loop, name=name)

    def serial(self, loop: str) -> Stage:
        """Undo the mark of a loop."""
        return self._then("serial", loop=loop)

    def parallel(self, loop: str) -> Stage:
        """Run the iterations of a loop on any threads."""
        return self._then("parallel", loop=loop)

    def vectorise(self, loop: str) -> Stage:
        """Vectorise an innermost loop."""
        return self._then("vectorise", loop=loop)

    def block(self, loop: str) -> Stage:
        """Run the iterations of a loop on blocks of a GPU."""
        return self._then("block", loop=loop)

    def thread(self, loop: str) -> Stage:
        """Run the iterations of a loop on threads of a block."""
        return self._then("thread", loop=loop)

    def add_threads(self, name: str, extent: int) -> Stage:
        """Add a loop over threads of a block, the first of which does the work of the stage."""
        return self._then("add_threads", name=name, extent=extent)

    def unroll(self, loop: str) -> Stage:
        """Unroll a loop completely."""
        return self._then("unroll", loop=loop)

    def accumulate_at(self, loop: str) -> Stage:
        """Accumulate the reduction in a tile in each iteration of a loop, which then writes it."""
        return self._then("accumulate_at", loop=loop)

    def rfactor(self, loop: str) -> Stage:
        """Give each iteration of a loop of a split reduced axis an accumulator of its own, `C.part`."""
        return self._then("rfactor", loop=loop)

    def inline(self) -> Stage:
        """Replace each load of the function by its value."""
        return self._then("inline")

    def compute_root(self) -> Stage:
        """Compute the function whole, before all loops."""
        return self._then("compute_root")

    def compute_at(self, stage: str, loop: str) -> Stage:
        """Compute the function in a loop of a stage that reads it."""
        return self._then("compute_at", stage=stage, loop=loop)

    def store_root(self) -> Stage:
        """Store the function outside of all loops."""
        return self._then("store_root")

    def store_at(self, stage: str, loop: str) -> Stage:
        """Store the function in a loop outside of the one where it is computed."""
        return self._then("store_at", stage=stage, loop=loop)

    def store_in(self, scope: str) -> Stage:
        """Store the function's tile in registers, on the stack, or in shared memory."""
        return self._then("store_in", scope=scope)

    def cache(self, stage: str, loop: str, scope: str) -> Stage:
        """Copy the part of the input that an iteration of the stage's loop reads to a tile."""
        return self._then("cache", stage=stage, loop=loop, scope=scope)

    def _then(self, op: str, **values: Value | None) -> Stage:
        given = tuple((name, value) for name, value in values.items() if value is not None)
        return Stage(self.schedule.with_step(Step(op, self.name, given)), self.name)
