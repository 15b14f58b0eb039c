"""TensorProgram → default schedule (Halide's): row-major serial loops, maps inlined, everything else at root."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from roller_svc.analysis.inlining import canonicalize, inline_producers, is_inlinable
from roller_svc.errors import ScheduleError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Load, iter_subexpressions
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorProgram, TensorType, live_statements
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import UPDATE, Fixed, Function, Schedule, Stage, StageLoop, StagePart

# The default schedule stores a map with more nodes: chains must not double for ever.
MAX_DEFAULT_NODES = 400


def default_schedule(program: TensorProgram) -> Schedule:
    """Return the default schedule, without statements that no output needs.

    A reduction whose accumulator has another type than its tensor becomes two functions: `C.acc` and the map C.
    """
    outputs = frozenset(o.tensor for o in program.outputs)
    statements: list[TensorExpr] = []
    for statement in live_statements(program, outputs):
        if statement.combine is Combine.RECURRENCE:
            raise ScheduleError(
                f"{statement.name} reads its own earlier elements: recurrences have no schedule by hand",
                hint="compile it without a schedule",
            )
        statements += _with_accumulator(canonicalize(statement), is_output=statement.output in outputs)
    functions = [Function(s, _stages(s)) for s in statements]
    bodies: dict[str, TensorExpr] = {}
    for i, function in enumerate(functions):
        producers = {f.name: bodies[f.name] for f in functions[:i] if f.computed is Fixed.INLINE}
        try:
            bodies[function.name] = inline_producers(function.statement, producers)
        except ScheduleError:  # too large: store the functions that it reads
            read = set(function.statement.reads_tensors)
            functions[:i] = [Function(f.statement, f.stages) if f.name in read else f for f in functions[:i]]
            bodies[function.name] = function.statement
        readers = tuple(f.statement for f in functions[i + 1 :])
        size = sum(1 for _ in iter_subexpressions(bodies[function.name].body)) * max(1, _loads(function.name, readers))
        if function.name not in outputs and size <= MAX_DEFAULT_NODES and is_inlinable(function.statement, readers):
            functions[i] = replace(function, computed=Fixed.INLINE, stored=Fixed.INLINE)
    return Schedule(program, tuple(functions))


def _loads(tensor: str, readers: tuple[TensorExpr, ...]) -> int:
    return sum(load.tensor == tensor for reader in readers for load in reader.reads)


def _with_accumulator(statement: TensorExpr, *, is_output: bool) -> tuple[TensorExpr, ...]:
    """Return the statement, split in two where the tensor cannot be the accumulator."""
    stored = stored_dtype(statement.type.dtype, is_output=is_output)
    if statement.kind is not StatementKind.REDUCE or statement.accumulator is stored:
        return (statement,)
    return split_accumulator(statement)


def split_accumulator(statement: TensorExpr) -> tuple[TensorExpr, TensorExpr]:
    """Return a reduction as two statements: its accumulator, and the map that writes it.

    The map converts to the type of the tensor, not of the terms: a partial accumulator keeps the identity of a wider type.
    """
    name, dtype, result = acc_name(statement.output), statement.accumulator, statement.type.dtype
    total = Cast(Load(name, statement.index, dtype), result, implicit=result.is_float)
    return (
        replace(statement, output=name, name=name, type=TensorType(dtype, statement.type.shape)),
        replace(statement, kind=StatementKind.MAP, combine=None, axes=statement.spatial, body=total),
    )


def stored_dtype(dtype: DType, *, is_output: bool) -> DType:
    """Return the type of a tensor in memory: an intermediate of a narrow float is not rounded."""
    return dtype if is_output else dtype.compute


def storage_types(schedule: Schedule) -> Mapping[str, TensorType]:
    """Return the type in memory of every function that is stored whole."""
    inputs = {name for name, _ in schedule.program.inputs}
    whole = schedule.outputs | {f.name for f in schedule.functions if _is_copy(f.statement, inputs)}
    return {
        f.name: TensorType(stored_dtype(f.statement.type.dtype, is_output=f.name in whole), f.statement.type.shape)
        for f in schedule.functions
    }


def _is_copy(statement: TensorExpr, inputs: Collection[str]) -> bool:
    """Return whether a statement copies elements of an input, which are rounded to their type already."""
    body = statement.body
    is_map = statement.kind is StatementKind.MAP
    return is_map and isinstance(body, Load) and body.tensor in inputs and body.dtype is statement.type.dtype


def _stages(statement: TensorExpr) -> tuple[Stage, ...]:
    name = statement.output
    match statement.kind:
        case StatementKind.MAP:
            return (stage_of(name, StagePart.VALUE, statement.spatial),)
        case StatementKind.REDUCE:
            return (
                stage_of(name, StagePart.INIT, statement.spatial),
                stage_of(name + UPDATE, StagePart.UPDATE, statement.axes),
            )
        case StatementKind.SCATTER:
            dimensions = tuple(Axis(f"d{d}", n, AxisKind.SPATIAL) for d, n in enumerate(statement.type.shape))
            return (stage_of(name, StagePart.INIT, dimensions), stage_of(name + UPDATE, StagePart.UPDATE, statement.axes))


def stage_of(name: str, part: StagePart, axes: tuple[Axis, ...]) -> Stage:
    """Return a stage with a serial loop for each axis."""
    return Stage(name, part, axes, tuple(StageLoop(a.name) for a in axes))
