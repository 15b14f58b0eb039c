"""Plan of construction → options and steps that make it: `roller explain --as-schedule`.

Tiles are options of `compile` that build the same text. Steps are a schedule by hand, where the language can say the
trees of construction: one statement a launch, loops, and the accumulator of a reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.compiler.explain import parse_request, rank_request
from roller_svc.compiler.lower_and_emit import lower, split_launches
from roller_svc.compiler.plans import merge_ranked_plans, select_for_measurement
from roller_svc.compiler.request import resolve_spec
from roller_svc.compiler.schedule_cost import price_schedule, price_trees
from roller_svc.compiler.serialize import Json, program_json
from roller_svc.errors import ArgumentError, ScheduleError
from roller_svc.families.matching import op_class_of
from roller_svc.ir.constraints import TILE_FIELDS, OpClass, tile_value
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.options import SelectionMode, chosen_options_json
from roller_svc.ir.program import StatementKind, TensorProgram
from roller_svc.ir.report import BuildRequest, Plan
from roller_svc.schedule.check_steps import apply_steps
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.device_launches import check_device
from roller_svc.schedule.nest_statements import ACCUMULATOR
from roller_svc.schedule.read_tree import read_tree
from roller_svc.schedule.schedule import Fixed, Schedule
from roller_svc.schedule.stage_plan import UnsaidError
from roller_svc.schedule.step_json import format_document
from roller_svc.schedule.step_text import format_steps
from roller_svc.schedule.steps import Step

MAX_PRICE_RATIO = 1.1  # between the trees of the steps and of construction


@dataclass(frozen=True, slots=True)
class AsSchedule:
    """A plan of construction in two languages."""

    program: TensorProgram
    options: Mapping[str, object] | None  # of compile: they build the same text; None of a plan that no options rank first
    kernels: tuple[Json, ...]  # family, unit and tiles of each
    steps: tuple[Step, ...] | None
    missing: str  # what no step says; '' where there are steps

    def to_json(self) -> Json:
        steps = None if self.steps is None else format_document(self.steps, self.program)
        return {
            "options": None if self.options is None else dict(self.options),
            "kernels": list(self.kernels),
            "schedule": steps,
            "missing": self.missing or None,
        }

    def text(self) -> str:
        """Return the steps as the text of a schedule, with tiles and what is missing as comments."""
        lines = [f"# {kernel['group']}: {kernel['family']} on {kernel['unit']}, {kernel['tile']}" for kernel in self.kernels]
        if self.steps is None:
            return "\n".join((*lines, f"# no steps: {self.missing}"))
        return "\n".join((*lines, format_steps(self.steps).rstrip()))


@dataclass(frozen=True, slots=True)
class ConstructedPlan:
    """A plan of a request, with all that its text follows from."""

    program: TensorProgram
    plan: Plan
    groups: tuple[KernelGroup, ...]
    hardware: HardwareSpec


def first_plan(request: BuildRequest) -> ConstructedPlan:
    """Return the plan that the model ranks first. Raises InputError, NoCandidateError."""
    forms, hw = parse_request(request), resolve_spec(request)
    partitions = rank_request(request, forms, hw)
    (first, *_) = select_for_measurement(merge_ranked_plans(partitions, request.top_k), partitions, request.top_k)
    return ConstructedPlan(forms[0], first.plan, first.groups, hw)


def explain_as_schedule(request: BuildRequest, chosen: ConstructedPlan) -> AsSchedule:
    """Return a plan of a request as options that build it again, and as steps where the language can say it."""
    program, plan, groups, hw = chosen.program, chosen.plan, chosen.groups, chosen.hardware
    choices = tuple(zip(groups, plan.choices, strict=True))
    kernels = tuple(
        {"group": group.name, "family": choice.program.family, "tile": choice.program.tile_text}
        | program_json(choice.program, hw.tile_levels)
        for group, choice in choices
    )
    options = _find_options(request, chosen)
    try:
        return AsSchedule(program, options, kernels, _read_steps(program, plan, groups, hw), "")
    except UnsaidError as unsaid:
        return AsSchedule(program, options, kernels, None, str(unsaid))


def _find_options(request: BuildRequest, chosen: ConstructedPlan) -> Mapping[str, object] | None:
    """Return options with which the model ranks the plan first: its tiles, or none, where tiles widen the search."""
    plain = replace(request, select=SelectionMode.MODEL, tiles=(), family=None)
    tiles, family = _tile_constraints(chosen)
    for each in (
        replace(plain, tiles=tiles, family=family),
        replace(plain, family=family),
        replace(request, select=SelectionMode.MODEL),
    ):
        again = first_plan(each)
        if [choice.program for choice in again.plan.choices] == [choice.program for choice in chosen.plan.choices]:
            return chosen_options_json(each) | {"select": SelectionMode.MODEL.value, "top_k": request.top_k}
    return None


def _tile_constraints(chosen: ConstructedPlan) -> tuple[tuple[tuple[str, int], ...], OpClass | None]:
    """Return the values of the tiles' fields on which all kernels agree that they constrain, and the class of unit."""
    matrix = [group.kind in (GroupKind.CONTRACTION, GroupKind.ATTENTION) for group in chosen.groups]
    choices = zip(chosen.plan.choices, matrix, strict=True)
    programs = [choice.program for choice, is_matrix in choices if is_matrix or not any(matrix)]
    values = {option: {tile_value(program, option) for program in programs} for option in TILE_FIELDS}
    classes = {op_class_of(program.unit) for program in programs}
    is_on_gpu = chosen.hardware.family is not TargetKind.CPU
    family = classes.pop() if is_on_gpu and any(matrix) and len(classes) == 1 else None
    return tuple(sorted((option, each.pop()) for option, each in values.items() if len(each) == 1)), family


def _read_steps(program: TensorProgram, plan: Plan, groups: Sequence[KernelGroup], hw: HardwareSpec) -> tuple[Step, ...]:
    """Return the steps of a plan. Raises UnsaidError."""
    try:
        check_device(hw)
        schedule = default_schedule(program)
    except (ArgumentError, ScheduleError) as error:
        raise UnsaidError(error.message) from error
    steps = _placements(schedule, groups)
    price = 0.0
    for group, choice in zip(groups, plan.choices, strict=True):
        launches = [(piece, tiles) for piece, tiles, _ in split_launches(group, choice.program, hw)]
        if len(launches) > 1:
            raise UnsaidError("a reduction is split over launches")
        trees = lower(*launches[0], hw)
        if len(trees) > 1:
            raise UnsaidError("statements are split over launches")
        steps += read_tree(trees[0], group.statements, schedule, on_gpu=hw.family is not TargetKind.CPU)
        price += price_trees(trees, dict((*group.inputs, *group.stored)), hw).seconds
    try:
        own = price_schedule(apply_steps(schedule, steps), hw).seconds
    except ScheduleError as error:
        raise UnsaidError(f"a step is refused: {error.message}") from error
    if not price / MAX_PRICE_RATIO <= own <= price * MAX_PRICE_RATIO:
        raise UnsaidError(f"the trees of construction cost {price / own:.2g} times those of the steps, by the model")
    return tuple(steps)


def _placements(schedule: Schedule, groups: Sequence[KernelGroup]) -> list[Step]:
    """Return the steps after which the functions at root are those of the groups."""
    stored = {group.statements[-1].output for group in groups}
    steps = []
    for function in schedule.functions:
        if function.name.endswith(ACCUMULATOR):
            continue
        if function.name in stored and function.computed is Fixed.INLINE:
            steps.append(Step("compute_root", function.name))
        is_map = function.statement.kind is StatementKind.MAP
        if is_map and function.name not in stored and function.computed is not Fixed.INLINE:
            steps.append(Step("inline", function.name))
    return steps
