"""Forms of a program: statements that compute the same results in other ways, between which the model chooses."""

from __future__ import annotations

from itertools import count

from roller_svc.ir.program import TensorProgram, rename_tensors


def align_form(other: TensorProgram, first: TensorProgram) -> TensorProgram:
    """Return another form whose results have the ids of the first one's, and whose other tensors have none of its ids."""
    results = {output.tensor: own.tensor for output, own in zip(other.outputs, first.outputs, strict=True)}
    used = {name for name, _ in first.inputs} | {statement.output for statement in first.statements}
    names = dict[str, str]()
    for statement in other.statements:
        id_ = statement.output
        names[id_] = results.get(id_) or next(name for n in count() if (name := f"{id_}__{n}" if n else id_) not in used)
        used.add(names[id_])
    return TensorProgram(other.inputs, tuple(rename_tensors(s, names) for s in other.statements), first.outputs)
