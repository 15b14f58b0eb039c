"""Check a planned step of a virtual device before it is compiled: rTasks, waits, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roller_svc.analysis.happens_before import Access, HappensBefore, check_plan, unordered_accesses
from roller_svc.errors import InvariantError
from roller_svc.ir.kernel import KernelSource, Role
from roller_svc.ir.model_plan import PACKED, WEIGHTS, Address, CopyStep, KernelStep, ModelKernel, VDeviceStep


def check_step(step: VDeviceStep, kernels: Sequence[ModelKernel]) -> None:
    """Check that a plan computes what its steps compute in order. Raises InvariantError that says where it does not.

    Every rTask is executed once, no vEU waits for ever, and of two rOperators that use the same memory, one of them to
    write, the one of the earlier step happens before the other.
    """
    clocks = check_plan(step.plan)
    expected = [_num_tasks(step, number, kernels) for number in range(len(step.operators))]
    if expected != list(step.plan.num_tasks) or len(set(step.operators)) != len(step.operators):
        raise InvariantError(f"{step.node}: the plan's rTasks are not those of its steps")
    _check_complete(step, kernels)
    order = HappensBefore(step.plan, clocks)
    for first, second in unordered_accesses(accesses_of(step, kernels), order, lambda number: _position(step, number)):
        both = f"{_described(step, first)} and {_described(step, second)}"
        raise InvariantError(f"{both} use the same memory, and nothing orders them")


def accesses_of(step: VDeviceStep, kernels: Sequence[ModelKernel]) -> list[Access]:
    """Return the memory that the rOperators of a step use, without constants."""
    return [
        Access(number, address.slot, address.offset_bytes, address.offset_bytes + size, is_write)
        for number in range(len(step.operators))
        for address, size, is_write in _accesses(step, number, kernels)
        if address.slot not in (WEIGHTS, PACKED)
    ]


def _num_tasks(step: VDeviceStep, number: int, kernels: Sequence[ModelKernel]) -> int:
    operator = step.operators[number]
    inner = step.steps[operator.step]
    if operator.phase is None or not isinstance(inner, KernelStep):
        return 1
    return kernels[inner.kernel].source.num_tasks[inner.launch][operator.phase]


def _check_complete(step: VDeviceStep, kernels: Sequence[ModelKernel]) -> None:
    """Check that each step is executed whole, or by all of its phases."""
    for number, inner in enumerate(step.steps):
        phases = sorted(_position(step, i)[1] for i, each in enumerate(step.operators) if each.step == number)
        launch = kernels[inner.kernel].source.launches[inner.launch] if isinstance(inner, KernelStep) else None
        if phases != [-1] and (launch is None or phases != list(range(len(launch.phases)))):
            raise InvariantError(f"{inner.node}: the plan does not execute every phase once")


def _accesses(step: VDeviceStep, number: int, kernels: Sequence[ModelKernel]) -> Iterator[tuple[Address, int, bool]]:
    operator = step.operators[number]
    inner = step.steps[operator.step]
    if isinstance(inner, CopyStep):
        yield inner.source, inner.bytes, False
        yield inner.target, inner.bytes, True
        return
    source: KernelSource = kernels[inner.kernel].source
    launch = source.launches[inner.launch]
    used = launch.args if operator.phase is None else launch.phases[operator.phase].args
    packed = {buffer.symbol for buffer in source.prepacked_buffers}
    buffers = {buffer.symbol: buffer for buffer in source.buffers}
    for symbol, address in zip(launch.args, inner.arguments, strict=True):
        buffer = buffers[symbol]
        if symbol in used and address is not None and symbol not in packed:
            yield address, buffer.bytes, buffer.role is not Role.INPUT


def _position(step: VDeviceStep, number: int) -> tuple[int, int]:
    operator = step.operators[number]
    return operator.step, -1 if operator.phase is None else operator.phase


def _described(step: VDeviceStep, number: int) -> str:
    operator = step.operators[number]
    phase = "" if operator.phase is None else f", phase {operator.phase},"
    return f"{step.steps[operator.step].node}{phase}"
