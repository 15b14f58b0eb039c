"""Forms of a program: statements that compute the same results in other ways, between which the model chooses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from roller_svc.errors import InvariantError
from roller_svc.ir.program import TensorProgram, rename_tensors


def align_form(other: TensorProgram, first: TensorProgram, own_names: Iterable[str]) -> TensorProgram:
    """Return another form with the ids of the first one for what the caller names, and other ids for all else.

    Args:
        own_names: Names of tensors that have the same value in both forms at the end, the results among them.
    """
    last, last_of_first = ({s.name: s for s in form.statements} for form in (other, first))
    names = dict[str, str]()
    for name in last.keys() & last_of_first.keys() & set(own_names):
        if last[name].type != last_of_first[name].type:
            raise InvariantError(f"{name} has another type in another form of the program")
        names[last[name].output] = last_of_first[name].output
    used = {name for name, _ in first.inputs} | {statement.output for statement in first.statements}
    for id_ in (statement.output for statement in other.statements if statement.output not in names):
        names[id_] = next(name for n in count() if (name := f"{id_}__{n}" if n else id_) not in used)
        used.add(names[id_])
    return TensorProgram(other.inputs, tuple(rename_tensors(s, names) for s in other.statements), first.outputs)
