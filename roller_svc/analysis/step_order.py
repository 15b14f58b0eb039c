"""Which steps of a model have to run before others: what is written before it is read, and read before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.ir.kernel import Role
from roller_svc.ir.model_plan import PACKED, WEIGHTS, Address, CopyStep, KernelStep, ModelPlan


@dataclass(frozen=True, slots=True)
class _Access:
    """Bytes that a step reads or writes."""

    step: int
    first: int
    end: int
    is_write: bool


def find_predecessors(plan: ModelPlan, steps: Sequence[KernelStep | CopyStep]) -> tuple[tuple[int, ...], ...]:
    """Return for each step the steps that have to finish before it starts, without those that others imply.

    Args:
        plan: the plan of the steps.
        steps: unrolled steps in an order in which they may run one after the other. None writes weights.
    """
    latest: dict[int, list[_Access]] = {}  # by slot: accesses that no later write covers
    ancestors: list[int] = []  # of each step, as a set of bits
    predecessors: list[tuple[int, ...]] = []
    for number, step in enumerate(steps):
        accesses = [(address.slot, each) for address, each in _accesses(plan, step, number) if each.end > each.first]
        direct = {
            other.step
            for slot, each in accesses
            for other in latest.get(slot, ())
            if other.first < each.end and each.first < other.end and (other.is_write or each.is_write)
        }
        implied = 0
        for other in direct:
            implied |= ancestors[other]
        needed = tuple(sorted(other for other in direct if not implied >> other & 1))
        predecessors.append(needed)
        ancestors.append(implied | sum(1 << other for other in needed))
        for slot, each in accesses:
            others = latest.setdefault(slot, [])
            if each.is_write:
                others[:] = [o for o in others if o.step == number or not (each.first <= o.first and o.end <= each.end)]
            others.append(each)
    return tuple(predecessors)


def _accesses(plan: ModelPlan, step: KernelStep | CopyStep, number: int) -> list[tuple[Address, _Access]]:
    """Return what a step accesses, apart from weights. What is not an input may be read and written."""
    if isinstance(step, CopyStep):
        listed = [(step.target, step.bytes, True), (step.source, step.bytes, False)]
    else:
        source = plan.kernels[step.kernel].source
        buffers = {buffer.symbol: buffer for buffer in source.buffers}
        operands = source.launches[step.launch].operands
        listed = [
            (address, buffers[symbol].bytes, buffers[symbol].role is not Role.INPUT)
            for symbol, address in zip(operands, step.arguments, strict=True)
            if address is not None
        ]
        listed += [(address, size, True) for address, size in step.zeroed]
    return [
        (address, _Access(number, address.offset_bytes, address.offset_bytes + size, is_write))
        for address, size, is_write in listed
        if address.slot not in (WEIGHTS, PACKED)
    ]
