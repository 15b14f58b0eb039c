"""Plans as JSON: all kinds of steps come back, and no damaged plan is read or ends in another error."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reference_kernels import add

from roller_svc.errors import ArgumentError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Phase
from roller_svc.ir.model_plan import (
    Address,
    CopyStep,
    KernelStep,
    LoopStep,
    ModelKernel,
    ModelPlan,
    Parameter,
    ROperator,
    SlotUpdate,
    VDeviceStep,
)
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import Barrier, Execute, VDevicePlan
from roller_svc.runtime.saved.plan_json import plan_from_json, plan_to_json

VECTOR = TensorType(DType.FLOAT32, (24,))
SOURCE = add()
LAUNCH = dataclasses.replace(SOURCE.launches[0], phases=(Phase("add_phase", ("a",), 2),))
KERNELS = (ModelKernel(dataclasses.replace(SOURCE, launches=(LAUNCH,)), 1e-6, 1),)
STEP = KernelStep("sum", 0, 0, (Address(3), Address(0, 64), *[Address(4)] * (len(LAUNCH.args) - 2)))
PLAN = ModelPlan(
    "net",
    "local",
    (("x", VECTOR),),
    (("y", VECTOR),),
    KERNELS,
    (CopyStep("pack", Address(1), Address(0), 64),),
    (
        dataclasses.replace(STEP, zeroed=((Address(2, 64), 64),), rkernel=1),
        LoopStep("loop", 3, (SlotUpdate(5, Address(2), 64, -64),), (STEP, CopyStep("move", Address(5), Address(4), 8))),
        VDeviceStep(
            "both",
            (STEP, CopyStep("move", Address(2), Address(4), 8)),
            (ROperator(0, 0), ROperator(1)),
            VDevicePlan((2, 1), ((Execute(0, 0, 2), Barrier(((1, 0),))), (Execute(1, 0, 1),))),
        ),
    ),
    (Parameter(VECTOR, "0" * 64, 64),),
    160,
    160,
    64,
    256,
    64,
    6,
)


def test_a_plan_comes_back() -> None:
    document = plan_to_json(PLAN)
    assert plan_from_json(document, KERNELS) == PLAN
    assert document["inputs"] == [["x", "float32", [24]]]
    assert document["weights"] == [["float32", [24], "0" * 64, 64]]
    first, loop, device = document["steps"]
    assert (first["zeroed"], first["rkernel"]) == ([[2, 64, 64]], 1)
    assert loop["updates"] == [[5, 2, 0, 64, -64]]
    assert loop["body"][1] == {"node": "move", "copy": [[5, 0], [4, 0]], "bytes": 8}
    assert "rkernel" not in loop["body"][0]
    assert device["operators"] == [[0, 0], [1, None]]
    assert device["vdevice"]["programs"] == [[{"execute": [0, 0, 2]}, {"wait": [[1, 0]]}], [{"execute": [1, 0, 1]}]]


def _set(*path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        *way, last, value = path
        for step in way:
            document = document[step]
        document[last] = value

    return change


NESTED: dict[str, Any] = {"node": "loop", "steps": 1, "updates": [], "body": []}
for _ in range(40):
    NESTED = NESTED | {"body": [NESTED]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("inputs", [["x", "float32", [1]]] * 2), "one name"),
        (_set("inputs", 0, 2, [1 << 50]), "no tensor has the shape"),
        (_set("inputs", 0, 2, [1] * 17), "no tensor has the shape"),
        (_set("num_slots", 4), "fewer slots"),
        (_set("read_weights_bytes", 161), "more weights are read"),
        (_set("weights", 0, 3, 65), "is not in the weights"),
        (_set("weights", 0, 1, [0]), "no tensor has the shape"),
        (_set("prepack", 0, "copy", 0, 0, 6), "a slot that does not exist"),
        (_set("steps", 0, "kernel", 1), "a kernel that does not exist"),
        (_set("steps", 0, "launch", 1), "a launch that does not exist"),
        (_set("steps", 0, "arguments", []), "has 0 arguments"),
        (_set("steps", 0, "rkernel", 2), r"ModelPlan\.steps\[0\]\.rkernel: expected a number from 0 to 1, got 2"),
        (_set("steps", 1, "updates", 0, 0, 6), "a slot that is not a loop's"),
        (_set("steps", 1, "updates", 0, 0, 4), "a slot that is not a loop's"),
        (_set("steps", 1, "updates", 0, 1, 6), "a slot that does not exist"),
        (_set("steps", 1, "updates", []), "slot 5 is read outside of its loop"),
        (_set("prepack", 0, "copy", 0, 1, 1), r"pack has bytes 1\.\.65 of slot 1, of 64 bytes"),
        (_set("prepack", 0, "copy", 1, 1, 97), r"97\.\.161 of slot 0, of 160 bytes"),
        (_set("read_weights_bytes", 159), r"sum has bytes 64\.\.160 of slot 0, of 159 bytes"),
        (_set("arena_bytes", 0), "of slot 2, of 0 bytes"),
        (_set("steps", 0, "arguments", 0, 1, 8), r"8\.\.104 of slot 3, of 96 bytes"),
        (_set("steps", 0, "zeroed", 0, 2, 193), r"64\.\.257 of slot 2, of 256 bytes"),
        (_set("steps", 1, "updates", 0, 3, 125), r"move has bytes 0\.\.258 of slot 2, of 256 bytes"),
        (_set("steps", 1, "updates", 0, 4, -65), r"move has bytes -1\.\.136 of slot 2"),
        (_set("steps", 1, "steps", 1 << 31), "of slot 2, of 256 bytes"),
        (_set("steps", 1, "steps", 0), r"steps\[1\]\.steps: expected a number from 1"),
        (_set("steps", 2, "steps", [NESTED]), r"ModelPlan\.steps\[2\]\.steps\[0\]: expected an object"),
        (_set("steps", 2, "operators", [[0, 0]]), "has 1 rOperators, expected 2"),
        (_set("steps", 2, "operators", 0, [0, 1]), "has no phase 1"),
        (_set("steps", 2, "operators", 1, [1, 0]), "has no phase 0"),
        (_set("steps", 2, "operators", 1, [2, None]), "a rOperator without a step"),
        (_set("steps", 2, "vdevice", "programs", 0, 0, "execute", [0, 0, 3]), "rTasks that do not exist"),
        (_set("steps", 2, "vdevice", "programs", 1, [{"wait": [[0, 1]]}, {"execute": [1, 0, 1]}]), "deadlock"),
        (_set("steps", 2, "vdevice", "programs", []), "expected a length from 1 to 1024"),
        (_set("steps", [NESTED]), "nested more than 16 deep"),
    ],
)
def test_what_does_not_exist_is_refused(change: Callable[[Any], None], message: str) -> None:
    document = plan_to_json(PLAN)
    change(document)
    with pytest.raises(ArgumentError, match=message):
        plan_from_json(document, KERNELS)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _places(item, (*path, key))


@pytest.mark.parametrize("value", [None, True, -1, 1 << 80, 1.5, "", "\0", [], [[]], {}, {"node": "x"}], ids=repr)
def test_any_damage_is_refused_or_harmless(value: Any) -> None:
    whole = plan_to_json(PLAN)
    refused = 0
    for place in _places(whole):
        document = copy.deepcopy(whole)
        _set(*place, value)(document)
        try:
            plan_from_json(document, KERNELS)
        except ArgumentError:
            refused += 1
    assert refused > len(list(_places(whole))) // 2
