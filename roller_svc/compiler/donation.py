"""Inputs whose memory a scatter may overwrite: no copy of its target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from roller_svc.errors import ArgumentError
from roller_svc.ir.program import TensorProgram


def donate_targets(program: TensorProgram, names: Iterable[str]) -> TensorProgram:
    """Return the program with scatters that update these inputs in place. Raises ArgumentError where one cannot."""
    for name in names:
        if reason := _refusal(program, name):
            raise ArgumentError(
                f"donate: {name} {reason}",
                code="invalid-option",
                hint="donate an input that one scatter updates, that no statement reads, and that is an output",
            )
    donated = tuple(names)
    statements = tuple(replace(s, in_place=True) if s.target in donated else s for s in program.statements)
    return replace(program, statements=statements, donated=donated)


def find_donatable(program: TensorProgram) -> tuple[str, ...]:
    """Return the inputs that scatters copy, and could update in place."""
    targets = {s.target for s in program.statements if not s.in_place}
    return tuple(name for name, _ in program.inputs if name in targets and not _refusal(program, name))


def _refusal(program: TensorProgram, name: str) -> str:
    """Return why an input cannot be donated, or ''."""
    updates = [s for s in program.statements if s.target == name]
    if len(updates) != 1:
        return f"must be the target of one scatter, got {len(updates)}"
    if any(load.tensor == name for s in program.statements for load in s.reads):
        return "is also read, which would see updates"
    if name in program.constants:
        return "is a constant, which stays the same"
    if (name, updates[0].output) not in [(output.name, output.tensor) for output in program.outputs]:
        return "is updated again, or is not an output"
    return ""
