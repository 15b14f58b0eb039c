"""Many programs on many devices → the answer of POST /v1/estimates, also what `roller estimate --json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roller_svc import hardware
from roller_svc.ask import checked_expression, checked_flag, checked_outputs, checked_target, checked_top_k
from roller_svc.construct.partition import partition
from roller_svc.construct.what_if import sensitivities
from roller_svc.describe import Json, error_json, plan_json, sensitivity_json
from roller_svc.errors import RollerError
from roller_svc.front import parse
from roller_svc.ir.demands import Demands
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Plan
from roller_svc.lang.input_types import tensor_types
from roller_svc.pipeline import estimate_program


@dataclass(frozen=True, slots=True)
class Item:
    """One program to estimate, in plain values, not yet checked."""

    expression: object
    inputs: Mapping[str, object] | None
    outputs: Sequence[str] | None = None
    allow_tf32: object = False


def estimates_json(items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object) -> list[Json]:
    """In order of items, then targets. What is refused stands in its place as `error`."""
    count = checked_top_k(top_k)
    return [_answer(index, item, target, count) for index, item in enumerate(items) for target in targets]


def plans_of(item: Item, target: str | HardwareSpec, top_k: int) -> tuple[HardwareSpec, tuple[Plan, ...]]:
    """The device and the best plans for it, best first."""
    spec = target if isinstance(target, HardwareSpec) else hardware.load(checked_target(target))
    expression = checked_expression(item.expression)
    outputs = checked_outputs(item.outputs)
    demands = Demands(checked_flag("allow_tf32", item.allow_tf32))
    return spec, estimate_program(expression, tensor_types(item.inputs), spec, outputs, top_k, demands)


def what_if_json(item: Item, spec: HardwareSpec, plan: Plan) -> list[Json]:
    """What a tenth more of each resource of the device would save of that plan of the item."""
    outputs = checked_outputs(item.outputs)
    program = parse(checked_expression(item.expression), dict(tensor_types(item.inputs)), outputs)
    return sensitivity_json(sensitivities(plan, partition(program, spec), spec))


def candidates_json(index: int, spec: HardwareSpec, plans: Iterable[Plan]) -> Json:
    """The answer for one item on one device."""
    return {"item": index, "target": spec.id, "candidates": [plan_json(plan, spec) for plan in plans]}


def _answer(index: int, item: Item, target: str | HardwareSpec, top_k: int) -> Json:
    try:
        spec, plans = plans_of(item, target, top_k)
    except RollerError as error:
        name = target.id if isinstance(target, HardwareSpec) else target
        return {"item": index, "target": name, "error": error_json(error)}
    return candidates_json(index, spec, plans)
