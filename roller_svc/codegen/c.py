"""Schedule trees → C text with vector extensions and OpenMP, for CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.c_scalar import CScalar, StaysArrayError
from roller_svc.codegen.c_walk import INDEX, CWalk, Setting
from roller_svc.codegen.names import Names
from roller_svc.codegen.place import Place
from roller_svc.codegen.preamble import ROUTINE, Function
from roller_svc.codegen.threads import in_region, parameter
from roller_svc.ir.kernel import Buffer, RuntimeCheck
from roller_svc.ir.schedule import ScheduleTree


@dataclass(frozen=True, slots=True)
class Above:
    """What stands in a text above a function: run-time checks, and routines, text → name."""

    checks: int
    routines: dict[str, str]


def emit_function(
    tree: ScheduleTree, views: dict[str, Place], args: tuple[Buffer, ...], setting: Setting, above: Above
) -> Function:  # fmt: skip
    """One launch as a C function over its buffers, in the order of `args`."""
    arrays: frozenset[str] = frozenset()
    while True:
        try:
            return _emit(tree, views, args, setting, above, arrays)
        except StaysArrayError as stays:
            arrays |= {stays.tensor}


def _emit(
    tree: ScheduleTree, views: dict[str, Place], args: tuple[Buffer, ...], setting: Setting, above: Above,
    arrays: frozenset[str],
) -> Function:  # fmt: skip
    names = Names()
    scalar = CScalar(dialects.C, names, INDEX, guard_reads=False, places=dict(views))
    names.reserve(*(p.identifier for p in views.values()))
    scalar.checks = [RuntimeCheck("", 0, 0, "")] * above.checks
    walker = CWalk(dialects.C, names, scalar, setting=setting, arrays=arrays, routines=dict(above.routines))
    walker.prefix = tree.name
    scalar.registers = walker.registers
    walker.nodes(tree.body)
    parameters = ", ".join([*(parameter(a) for a in args), *(["long task"] if setting.by_task else [])])
    head = f"{ROUTINE} {in_region(tree.name)}" if setting.in_region else f"void {tree.name}"
    text = f"{head}({parameters}) {{\n" + "\n".join(walker.lines) + "\n}\n"
    routines = tuple((name, text) for text, name in walker.routines.items() if text not in above.routines)
    return Function(
        text, tuple(scalar.helpers), tuple(scalar.library), tuple(walker.private_rooms), walker.tasks,
        tuple(scalar.checks[above.checks :]), routines,
    )  # fmt: skip
