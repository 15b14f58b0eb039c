"""Check syntax trees and build the TensorProgram: names, statement kinds, axes, outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.analysis.constant_folding import constant_int, holds
from roller_svc.analysis.intervals import Bounds, bounds, cast_bounds
from roller_svc.analysis.scans import match_scan, recurrence_body
from roller_svc.errors import ArgumentError, ExprTypeError, ShapeError
from roller_svc.frontend.lang.axes import Axes, Scope, Tensor, infer_axes, lhs, reads_own_state
from roller_svc.frontend.lang.convert import Weak, common_type, constant
from roller_svc.frontend.lang.cuts import mark_wrapping, mark_wrapping_index
from roller_svc.frontend.lang.expressions import Expressions
from roller_svc.frontend.lang.index_proofs import Budget, Ranges
from roller_svc.frontend.lang.limits import MAX_AXES, MAX_DIMENSIONS, MAX_ELEMENTS, MAX_NAME_CHARACTERS
from roller_svc.frontend.lang.names import did_you_mean, known_names
from roller_svc.frontend.lang.nodes import Assign, Get, Node, Num, Ref, Statement, When, children
from roller_svc.frontend.lang.recurrence import NotLinear, Recurrence, find_recurrence
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.expr import AxisRef, Expr, Op, OpKind, substitute
from roller_svc.ir.program import Axis, AxisKind, Combine, Output, StatementKind, TensorExpr, TensorProgram, TensorType

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME_CHARACTERS - 1}}}")


@dataclass(slots=True)
class _Program:
    """The program checked so far."""

    source: Source
    tensors: dict[str, Tensor]
    inputs: frozenset[str]
    used_names: set[str]  # ids and names that a new version's id must avoid
    written: dict[str, Span] = field(default_factory=dict)
    statements: list[TensorExpr] = field(default_factory=list)
    bounds: dict[str, Bounds] = field(default_factory=dict)  # of the integers of written tensors
    budget: Budget = field(default_factory=Budget)


def check_program(
    statements: Sequence[Statement],
    source: Source,
    inputs: Mapping[str, TensorType],
    outputs: Sequence[str] | None,
) -> TensorProgram:
    """Check the statements. Returns the typed program."""
    tensors = {name: Tensor(name, type_) for name, type_ in inputs.items()}
    used_names = {*inputs, *(statement.name for statement in statements)}
    program = _Program(source, tensors, frozenset(inputs), used_names)
    for i, statement in enumerate(statements):
        later = frozenset(s.name for s in statements[i:])
        _check_statement(statement, program, Scope(source, dict(program.tensors), later))
    checked = tuple(program.statements)
    return TensorProgram(tuple(inputs.items()), checked, _outputs(program, outputs))


def _check_statement(statement: Statement, program: _Program, scope: Scope) -> None:
    scatter = _is_scatter(statement, scope)
    if scatter:
        _check_scatter_target(statement, scope)
    else:
        _check_new_name(statement, program)
    axes = infer_axes(statement, scope, scatter=scatter, constant_of=_constant_in(scope, program.budget))
    expressions = Expressions(scope, axes.extents, Ranges(axes.extents, program.budget, program.bounds))
    if len(axes.extents) > MAX_AXES:
        message = f"{len(axes.extents)} axes; at most {MAX_AXES} are allowed"
        raise scope.source.error(ShapeError, "too-many-dimensions", message, statement)
    if not scatter and reads_own_state(statement, scope):
        checked = _recurrence(statement, axes, scope, program)
    else:
        make = _scatter if scatter else _map_or_reduce
        checked = make(statement, axes, expressions, program)
    domain = checked.axes if match_scan(checked) is None else checked.spatial  # a scan is one pass
    _check_size(tuple(axis.extent for axis in domain), "the iteration domain", statement, scope)
    program.statements.append(checked)
    if checked.kind is StatementKind.MAP and not checked.type.dtype.is_float:
        program.bounds[checked.output] = cast_bounds(bounds(checked.body, axes.extents, program.bounds), checked.type.dtype)
    program.tensors[statement.name] = Tensor(checked.output, checked.type)
    program.written[statement.name] = Span(statement.start, statement.end)


def _is_scatter(statement: Statement, scope: Scope) -> bool:
    if statement.assign is Assign.SCATTER:
        return True
    for node in statement.index:
        if isinstance(node, Ref) and node.name in scope.tensors:
            continue  # rejected with the other names
        if not (isinstance(node, Ref) or (isinstance(node, Num) and node.value == 0 and isinstance(node.value, int))):
            return True
    return False


def _check_scatter_target(statement: Statement, scope: Scope) -> None:
    span = Span(statement.start, statement.name_end)
    if statement.name not in scope.tensors:
        if statement.assign is Assign.SCATTER:
            message = f"scatter into `{statement.name}`, which is neither an input nor written before"
            hint = did_you_mean(statement.name, scope.tensors) or "declare it as an input"
        else:
            message = f"`{statement.name}` has a computed index, which makes this a scatter, but it is not an input"
            hint = "write bare axes on the left, or declare the target as an input"
        raise scope.source.error(ExprTypeError, "scatter-target", message, span, hint)
    if statement.sign not in ("", "+", "*", ">", "<"):
        message = f"scatters cannot combine with `{statement.sign}`"
        hint = "scatters are =. +=. *=. >=. <=."
        raise scope.source.error(ExprTypeError, "unknown-reduction", message, span, hint)
    if statement.type is not None:
        message = "a scatter has its target's type"
        raise scope.source.error(ExprTypeError, "type-error", message, statement.type)


def _check_new_name(statement: Statement, program: _Program) -> None:
    span = Span(statement.start, statement.name_end)
    if statement.name in program.written:
        message = f"`{statement.name}` is written twice"
        raise program.source.error(ExprTypeError, "written-twice", message, span, "give the second one another name")
    if statement.name in program.inputs:
        message = f"`{statement.name}` is an input; only a scatter (`=.`) may write it"
        raise program.source.error(ExprTypeError, "input-written", message, span)


def _constant_in(scope: Scope, budget: Budget) -> Callable[[Node], int | None]:
    """Return a function that evaluates a `where` extent: an expression of numbers and sizes."""

    def constant_of(node: Node) -> int | None:
        if isinstance(node, Num) and isinstance(node.value, int):
            return node.value  # an extent has no type: it may exceed int32
        value = Expressions(scope, {}, Ranges({}, budget)).strong(node)
        return None if value.dtype.is_float else constant_int(value)

    return constant_of


def _check_size(shape: tuple[int, ...], what: str, statement: Statement, scope: Scope) -> None:
    if len(shape) > MAX_DIMENSIONS and what != "the iteration domain":
        message = f"`{statement.name}` has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed"
        raise scope.source.error(ShapeError, "too-many-dimensions", message, statement)
    if math.prod(shape) > MAX_ELEMENTS:
        message = f"{what} has {math.prod(shape)} points; at most 2^48 are allowed"
        raise scope.source.error(ShapeError, "too-large", message, statement)


def _map_or_reduce(statement: Statement, axes: Axes, expressions: Expressions, program: _Program) -> TensorExpr:
    source = program.source
    spatial: dict[str, Axis] = {}
    index: list[Expr] = []
    shape: list[int] = []
    for node in statement.index:
        expr = expressions.strong(node)
        index.append(expr)
        if not isinstance(node, Ref):
            shape.append(1)
            continue
        if node.name in spatial:
            message = f"axis `{node.name}` is on the left twice"
            raise source.error(ShapeError, "duplicate-axis", message, node)
        spatial[node.name] = Axis(node.name, axes.extents[node.name], AxisKind.SPATIAL)
        shape.append(axes.extents[node.name])
    reduced = [name for name in axes.extents if name not in spatial]
    if reduced and not statement.sign:
        name = reduced[0]
        message = f"axis `{name}` is not on the left of `{statement.name}`, and `=` reduces nothing"
        hint = did_you_mean(name, spatial) or f"reduce with `+=!`, or add `{name}` on the left"
        raise source.error(ShapeError, "free-axis", message, axes.spans[name], hint)
    _check_size(tuple(shape), f"`{statement.name}`", statement, expressions.scope)
    stated = None if statement.type is None else dtype_named(statement.type.value)
    body = mark_wrapping(_check_value(statement.value, stated, expressions), axes.extents)
    return TensorExpr(
        output=statement.name,
        name=statement.name,
        kind=StatementKind.REDUCE if statement.sign else StatementKind.MAP,
        type=TensorType(stated or body.dtype, tuple(shape)),
        axes=(*spatial.values(), *(Axis(name, axes.extents[name], AxisKind.REDUCE) for name in reduced)),
        index=tuple(index),
        body=body,
        combine=Combine(statement.sign) if statement.sign else None,
    )


def _recurrence(statement: Statement, axes: Axes, scope: Scope, program: _Program) -> TensorExpr:
    """Check a map that reads its own result, and return it as a scan of linear steps."""
    shape = tuple(axes.extents[node.name] if isinstance(node, Ref) else 1 for node in statement.index)
    stated = None if statement.type is None else dtype_named(statement.type.value)
    dtype = stated or common_type([Weak(0), *(constant(0, d) for d in _value_types(statement.value, statement.name, scope))])
    for _ in range(2):  # a literal or a function may widen the type of the tensors that are read
        own = Tensor(statement.name, TensorType(dtype, shape))
        inside = replace(scope, tensors={**scope.tensors, statement.name: own})
        expressions = Expressions(inside, axes.extents, Ranges(axes.extents, program.budget, program.bounds))
        written = _map_or_reduce(statement, axes, expressions, program)
        if written.type.dtype is dtype:
            break
        dtype = written.type.dtype
    spatial = {axis.name: axis for axis in written.spatial}
    found = find_recurrence(written.body, statement.name, spatial, written.index)
    if isinstance(found, Recurrence) and (written.type.dtype is not dtype or dtype.is_float is not written.body.dtype.is_float):
        found = NotLinear("the state has another type than its step; state the type, or cast the operands")
    if isinstance(found, Recurrence) and dtype is DType.BOOL:
        found = NotLinear("a state is not bool; state another type (`: int32`), and compare the result with 0")
    if isinstance(found, NotLinear):
        message = f"`{statement.name}` reads itself: {found.reason}"
        hint = f"`{statement.name}[t] = a[t] * {statement.name}[t - 1].when([t > 0], initial) + b[t]`"
        raise scope.source.error(ExprTypeError, "not-a-recurrence", message, statement, hint)
    if found.axis.extent == 1:
        step = Op(OpKind.ADD, (Op(OpKind.MUL, (found.gate, found.initial), found.value.dtype), found.value), found.value.dtype)
        return replace(written, body=step)
    before = f"{found.axis.name}_before"
    while before in axes.extents or before in scope.tensors:
        before += "_"
    at = {found.axis.name: AxisRef(before)}
    gate, value = substitute(found.gate, at), substitute(found.value, at)
    body = recurrence_body(gate, found.initial, value, (before, found.axis.name), is_reversed=found.is_reversed)
    reduced = Axis(before, found.axis.extent, AxisKind.REDUCE)
    return replace(
        written, kind=StatementKind.REDUCE, combine=Combine.RECURRENCE, axes=(*written.axes, reduced), body=body,
    )  # fmt: skip


def _value_types(node: Node, own: str, scope: Scope) -> Iterator[DType]:
    """Yield the types of the tensors that make the value of an expression, without its own result."""
    match node:
        case Get(tensor=tensor):
            if tensor != own and tensor in scope.tensors:
                yield scope.tensors[tensor].type.dtype
        case When(value=value, other=other):
            for part in (value, other):
                if part is not None:
                    yield from _value_types(part, own, scope)
        case _:
            for child in children(node):
                yield from _value_types(child, own, scope)


def _scatter(statement: Statement, axes: Axes, expressions: Expressions, program: _Program) -> TensorExpr:
    target = program.tensors[statement.name]
    value, predicate = _split_predicate(statement.value, expressions)
    body = _check_value(value, target.type.dtype, expressions)
    index, checked = expressions.index(statement.index, lhs(statement))
    body, index = mark_wrapping(body, axes.extents), tuple(mark_wrapping_index(i, axes.extents) for i in index)
    overwrites = statement.assign is Assign.SCATTER or bool(statement.sign)
    points = math.prod(axes.extents.values())
    scatter = TensorExpr(
        output=_next_version(statement.name, program),
        name=statement.name,
        kind=StatementKind.SCATTER,
        type=target.type,
        axes=tuple(Axis(name, extent, AxisKind.SPATIAL) for name, extent in axes.extents.items()),
        index=index if target.type.shape else (),
        body=body,
        combine=Combine(statement.sign) if statement.sign else None,
        target=target.id,
        predicate=None if predicate is None else mark_wrapping(predicate, axes.extents),
        bounds_checked=checked if target.type.shape else (),
        writes_once=not overwrites and points <= target.type.elements,
    )
    program.used_names.add(scatter.output)
    return scatter


def _check_value(node: Node, stored: DType | None, expressions: Expressions) -> Expr:
    """Check the value of a statement. A bare number takes the stored type if that can hold it."""
    value = expressions.check(node)
    if isinstance(value, Weak):
        dtype = stored if stored is not None and holds(value.value, stored) else value.natural
        return expressions.in_type(value, dtype, node)
    return value


def _split_predicate(value: Node, expressions: Expressions) -> tuple[Node, Expr | None]:
    """Split `v.when(c)` without an else, a scatter's whole value, into v and c. Leaves c on the stack of guards."""
    predicate: Expr | None = None
    while isinstance(value, When) and value.other is None:
        cond = expressions.conditions(value.conditions, any_holds=value.any_holds)
        expressions.ranges.push(cond, holds=True)
        predicate = cond if predicate is None else Op(OpKind.LAND, (predicate, cond), cond.dtype)
        value = value.value
    return value, predicate


def _next_version(name: str, program: _Program) -> str:
    version = 1
    while f"{name}__{version}" in program.used_names:
        version += 1
    return f"{name}__{version}"


def _outputs(program: _Program, requested: Sequence[str] | None) -> tuple[Output, ...]:
    if requested is None:
        read = {tensor for statement in program.statements for tensor in statement.reads_tensors}
        last = {statement.name: statement.output for statement in program.statements}
        return tuple(Output(name, tensor) for name, tensor in last.items() if tensor not in read)
    if isinstance(requested, str) or not requested or not all(isinstance(name, str) for name in requested):
        raise ArgumentError("outputs is a list of one or more names", code="unknown-output")
    return tuple(_output(name, program) for name in dict.fromkeys(requested))


def _output(name: str, program: _Program) -> Output:
    if name in program.written:
        return Output(name, program.tensors[name].id)
    if name in program.inputs:
        message = f"output `{name}` is an input that no statement writes"
        raise ArgumentError(message, code="unknown-output", hint="leave it out: the caller has it")
    raise ArgumentError(
        f"output `{name}` is written by no statement",
        code="unknown-output",
        hint=known_names(name, program.written, "tensors that statements write"),
    )


def check_inputs(inputs: Mapping[str, TensorType]) -> None:
    """Reject invalid names, shapes and ranks of inputs."""
    for name, type_ in inputs.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("where", "in"):
            raise ArgumentError(f"`{name!r}` is not a valid name of an input", code="bad-name")
        if len(type_.shape) > MAX_DIMENSIONS:
            message = f"input `{name}` has {len(type_.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed"
            raise ShapeError(message, code="too-many-dimensions")
        for size in type_.shape:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                message = f"input `{name}` has shape {list(type_.shape)}; sizes are positive integers"
                raise ShapeError(message, code="bad-extent")
        if type_.elements > MAX_ELEMENTS:
            message = f"input `{name}` has {type_.elements} elements; at most 2^48 are allowed"
            raise ShapeError(message, code="too-large")
