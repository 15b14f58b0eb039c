"""The tensors that a caller of a model gives and gets, as buffers of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from roller_svc.errors import ArgumentError
from roller_svc.ir.kernel import Buffer, Role
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.runtime.binding import ArrayLibrary, Binding, bind, check_names

A = TypeVar("A")
_STATE = "state"  # begins the symbols of states


def call_buffers(plan: ModelPlan) -> tuple[Buffer, ...]:
    """Return the inputs, the outputs and the states, in the order of their slots.

    A state is an output in an array that the caller gives, with the old value in it.
    """
    return (
        *(Buffer(name, f"input{i}", Role.INPUT, t.dtype, t.shape) for i, (name, t) in enumerate(plan.inputs)),
        *(Buffer(name, f"output{i}", Role.OUTPUT, t.dtype, t.shape) for i, (name, t) in enumerate(plan.outputs)),
        *(Buffer(name, f"{_STATE}{i}", Role.OUTPUT, t.dtype, t.shape) for i, (name, t) in enumerate(plan.states)),
    )


def bind_call(
    buffers: Sequence[Buffer],
    arrays: Mapping[str, object],
    out: Mapping[str, object] | None,
    library: ArrayLibrary[A],
) -> Binding[A]:
    """Return the memory of a call, as `bind` does. The states are in `out`.

    A state is updated in place if it is dense and aligned. Another one is copied before the call, and back after it.
    Raises ArgumentError also for a state that is missing, or shares memory with itself or another array of the call.
    """
    states = [buffer for buffer in buffers if buffer.symbol.startswith(_STATE)]
    if states:
        _check_states(states, buffers, arrays, out or {}, library)
    binding = bind(buffers, arrays, out, library)
    updated = [binding.memory[state.symbol] for state in states]
    for target, memory in binding.copies:
        if any(memory is each for each in updated):
            library.copy_into(memory, target)
    return binding


def _check_states(
    states: Sequence[Buffer],
    buffers: Sequence[Buffer],
    arrays: Mapping[str, object],
    out: Mapping[str, object],
    library: ArrayLibrary[A],
) -> None:
    names = [state.name for state in states]
    check_names("state", names, {name: out[name] for name in names if name in out}, complete=True)
    views: list[tuple[str, A]] = []
    for buffer in buffers:
        what, given = ("argument", arrays) if buffer.role is Role.INPUT else ("output", out)
        if buffer.name not in given:
            continue
        view = library.view("state" if buffer in states else what, buffer, given[buffer.name])
        if buffer in states and not library.is_writeable(given[buffer.name]):
            raise ArgumentError(f"state {buffer.name!r} is read-only, and a call updates it", code="out-not-writeable")
        if buffer in states and library.overlaps_itself(view):
            raise ArgumentError(
                f"elements of state {buffer.name!r} share memory, and a call updates each",
                code="state-aliased",
                hint=f"pass a copy as {buffer.name}",
            )
        for name, other in views if buffer in states else ():
            if library.shares_memory(view, other):
                raise ArgumentError(
                    f"state {buffer.name!r} shares memory with {name!r}, and a call updates it",
                    code="state-aliased",
                    hint=f"pass a copy as {name}",
                )
        views.append((buffer.name, view))
