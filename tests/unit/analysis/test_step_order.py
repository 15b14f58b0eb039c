"""Hazards between steps: by hand, and against all pairs of random steps."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from roller_svc.analysis.step_order import MAX_DISTANCE, check_operands, find_early_starts, find_predecessors
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role
from roller_svc.ir.model_plan import (
    ARENA,
    PACKED,
    WEIGHTS,
    Address,
    CopyStep,
    KernelStep,
    LoopStep,
    ModelKernel,
    ModelPlan,
    SlotUpdate,
    unroll_steps,
)

PLAN = ModelPlan("m", "nvidia-h200-sxm", (), (), (), (), (), (), 0, 0, 0, 0, 0, 3)


def copy(target: int, source: int, size: int = 4, slot: int = ARENA) -> CopyStep:
    return CopyStep("n", Address(slot, target), Address(slot, source), size)


def test_reads_wait_for_writes_and_writes_for_reads() -> None:
    steps = (copy(8, 0), copy(16, 8), copy(8, 24), copy(32, 0))
    assert find_predecessors(PLAN, steps) == ((), (0,), (1,), ())


def test_a_covered_write_still_orders_what_read_before() -> None:
    steps = (copy(8, 0), copy(8, 16), copy(24, 8), copy(0, 40))
    assert find_predecessors(PLAN, steps) == ((), (0,), (1,), (0,))


def test_a_copy_to_its_own_bytes_is_refused() -> None:
    check_operands(PLAN, (copy(8, 0, 8), copy(0, 8, 8)))
    for target in (0, 3):
        with pytest.raises(InvariantError, match="node 'n' of m writes bytes of another operand"):
            check_operands(PLAN, (copy(target, 0),))


def test_constants_need_no_order() -> None:
    weights = CopyStep("n", Address(ARENA, 0), Address(WEIGHTS, 0), 8)
    packed = CopyStep("n", Address(ARENA, 8), Address(PACKED, 0), 8)
    assert find_predecessors(PLAN, (weights, packed)) == ((), ())


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_that_of_all_pairs_and_no_edge_is_implied(seed: int) -> None:
    rng = random.Random(seed)
    steps = [
        CopyStep(
            "n",
            Address(rng.choice((2, 3)), rng.randrange(0, 40)),
            Address(rng.choice((2, 3)), rng.randrange(0, 40)),
            rng.randrange(0, 16),
        )
        for _ in range(30)
    ]

    def overlaps(a: Address, b: Address, i: int, j: int) -> bool:
        first, second = steps[i].bytes, steps[j].bytes
        is_any = min(first, second) > 0
        return is_any and a.slot == b.slot and a.offset_bytes < b.offset_bytes + second and b.offset_bytes < a.offset_bytes + first

    def conflicts(i: int, j: int) -> bool:
        a, b = steps[i], steps[j]
        pairs = ((a.target, b.target), (a.target, b.source), (a.source, b.target))
        return any(overlaps(first, second, i, j) for first, second in pairs)

    wanted: list[set[int]] = []
    for j in range(len(steps)):
        direct = {i for i in range(j) if conflicts(i, j)}
        wanted.append(direct.union(*(wanted[i] for i in direct)))
    found = find_predecessors(PLAN, steps)
    closure: list[set[int]] = []
    for before in found:
        closure.append(set(before).union(*(closure[i] for i in before)))
        assert not any(i in closure[other] for i in before for other in before if other != i)
    assert closure == wanted


def programmatic_plan(*, programmatic: bool = True) -> ModelPlan:
    """A plan with a kernel that reads a constant and a vector, and writes another vector."""
    roles = {"w": Role.INPUT, "x": Role.INPUT, "y": Role.OUTPUT}
    buffers = tuple(Buffer(name, name, role, DType.UINT8, (8,)) for name, role in roles.items())
    launch = LaunchSpec("k", tuple(roles), programmatic=programmatic)
    source = KernelSource("k", Language.CUDA, Arch("sm_", 90), "", buffers, (launch,), constants=("w",))
    return dataclasses.replace(PLAN, kernels=(ModelKernel(source, 0.0, 1),))


def launch(source: int, target: int, constant: Address, *, zeroed: bool = False) -> KernelStep:
    places = (constant, Address(ARENA, source), Address(ARENA, target))
    return KernelStep("n", 0, 0, places, ((places[2], 8),) if zeroed else ())


def test_a_launch_that_waits_starts_early_behind_launches_alone() -> None:
    weights, packed = Address(WEIGHTS, 0), Address(PACKED, 0)
    steps = (
        launch(0, 8, weights),  # comes after nothing
        launch(8, 16, packed),
        launch(16, 24, weights, zeroed=True),  # a fill comes before it
        copy(32, 24, 8),
        launch(32, 40, weights),  # after a copy
        launch(40, 48, Address(ARENA, 24)),  # its constant is what another step writes
        launch(48, 56, weights),
    )

    def found(plan: ModelPlan) -> tuple[bool, ...]:
        return find_early_starts(plan, steps, find_predecessors(plan, steps))

    assert found(programmatic_plan()) == (False, True, False, False, False, False, True)
    assert not any(found(programmatic_plan(programmatic=False)))


def test_edges_over_many_steps_are_kept_though_others_imply_them() -> None:
    between = [copy(1000 + 8 * i, 500) for i in range(MAX_DISTANCE)]
    chain = [copy(8, 0), copy(16, 8), *between, copy(8, 16)]
    assert find_predecessors(PLAN, chain)[-1] == (0, 1)
    assert find_predecessors(PLAN, [*chain[:2], *between[2:], chain[-1]])[-1] == (1,)


def test_work_grows_with_the_number_of_steps() -> None:
    """Eight times the steps execute eight times the lines; an exponent of two would be seen."""

    def lines(count: int) -> int:
        steps: list[CopyStep] = []
        for i in range(count):  # a step of a loop: from a slice to a state in turns, and to a slice
            steps.append(CopyStep("a", Address(ARENA, i % 2 * 64), Address(3, i * 64), 64))
            steps.append(CopyStep("b", Address(4, i * 64), Address(ARENA, i % 2 * 64), 64))
        executed = 0

        def trace(*_: object) -> Callable[..., Any]:
            nonlocal executed
            executed += 1
            return trace

        sys.settrace(trace)
        try:
            found = find_predecessors(PLAN, steps)
        finally:
            sys.settrace(None)
        assert found[-1] == (2 * count - 2,)
        return executed

    assert lines(4000) < 12 * lines(500)


def test_loops_are_unrolled_with_their_slots_resolved() -> None:
    inner = LoopStep("l", 2, (SlotUpdate(4, Address(3, 100), 8),), (CopyStep("n", Address(4, 1), Address(3, 2), 1),))
    outer = LoopStep("o", 3, (SlotUpdate(3, Address(ARENA, 10), 32, 1),), (inner,))
    targets = [step.target for step in unroll_steps((outer,)) if isinstance(step, CopyStep)]
    starts = [10 + 32 * i + (i & 1) for i in range(3)]
    assert targets == [Address(ARENA, start + 100 + 8 * j + 1) for start in starts for j in range(2)]
