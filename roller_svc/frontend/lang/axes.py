"""Infer the axes of a statement and their extents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from roller_svc.errors import ExprTypeError, ShapeError
from roller_svc.frontend.lang.names import did_you_mean, known_names
from roller_svc.frontend.lang.nodes import Assign, DimSize, Extent, Get, Node, Num, Ref, Statement, TypeOf, WhereItem, children
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.ir.program import TensorType


@dataclass(frozen=True, slots=True)
class Tensor:
    """The id and the type of a tensor that a statement may read."""

    id: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Scope:
    """The names that are visible at a statement."""

    source: Source
    tensors: Mapping[str, Tensor]
    defined_later: frozenset[str]  # names that this or later statements write

    def tensor(self, name: str, span: Span) -> Tensor:
        """Return the tensor of that name. Raises an error at the span `at` if there is none."""
        tensor = self.tensors.get(name)
        if tensor is not None:
            return tensor
        if name in self.defined_later:
            message = f"`{name}` is read before it is written"
            raise self.source.error(ExprTypeError, "read-before-write", message, span, "reorder the statements")
        hint = did_you_mean(name, self.tensors)
        if not hint:
            declared = f'declare an input: inputs={{"{name}": ("float32", (64, 64))}}'
            hint = f"{known_names(name, self.tensors, 'tensors')}; or {declared}" if self.tensors else declared
        raise self.source.error(ExprTypeError, "unknown-name", f"there is no tensor `{name}`", span, hint)


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a statement in the order of the text; axes that only its `where` clause names come last."""

    extents: dict[str, int]
    spans: dict[str, Span]  # first occurrence


def infer_axes(statement: Statement, scope: Scope, *, scatter: bool, constant_of: Callable[[Node], int | None]) -> Axes:
    """Infer axes and extents of a statement. Rejects unknown names, wrong ranks, and axes without a unique extent."""
    stated = _where_extents(statement, scope, constant_of)
    spans: dict[str, Span] = {}
    bare_axes: dict[str, list[tuple[int, Span]]] = {}
    for node in _iter_nodes((*statement.index, statement.value)):
        match node:
            case Ref(name=name) | Extent(axis=Ref(name=name)):
                if name in scope.tensors:
                    raise tensor_without_index(name, node, scope)
                spans.setdefault(name, Span(node.start, node.end))
            case Get() if not is_own_state(node, statement, scope):
                _collect_bare_axes(node, scope, bare_axes)
            case DimSize(tensor=Ref(name=name)):
                scope.tensor(name, Span(node.tensor.start, node.tensor.end))
            case _:
                pass
    for item in statement.where:
        spans.setdefault(item.axis, Span(item.start, item.end))
    if scatter:
        _collect_bare_axes(lhs(statement), scope, bare_axes)
    extents = {name: stated[name] if name in stated else _extent(name, bare_axes, spans, scope) for name in spans}
    return Axes(extents, spans)


def is_own_state(node: Node, statement: Statement, scope: Scope) -> bool:
    """Return whether a node of a map reads another element of the map's own result, as a recurrence does."""
    if not isinstance(node, Get) or node.tensor != statement.name or node.tensor in scope.tensors:
        return False
    is_shifted = any(not isinstance(index, Ref) for index in node.index)
    return is_shifted and statement.assign is not Assign.SCATTER and not statement.sign


def reads_own_state(statement: Statement, scope: Scope) -> bool:
    """Return whether a statement is written as a recurrence."""
    return any(is_own_state(node, statement, scope) for node in _iter_nodes((statement.value,)))


def lhs(statement: Statement) -> Get:
    """Return the left-hand side of a scatter as an indexed tensor."""
    return Get(statement.name, statement.index, statement.name_end, start=statement.start, end=statement.end, depth=1)


def _iter_nodes(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield every node in the order of the text, except a bare tensor's name under .dtype()."""
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        yield node
        if not (isinstance(node, TypeOf) and isinstance(node.arg, Ref)):
            stack.extend(reversed(children(node)))


def tensor_without_index(name: str, node: Ref | Extent, scope: Scope) -> ExprTypeError:
    if isinstance(node, Extent):
        message, hint = f"`{name}` is a tensor, not an axis", f"`{name}.val(0)` is the size of its first dimension"
    else:
        rank = len(scope.tensors[name].type.shape)
        message, hint = f"tensor `{name}` without an index", f"write `{name}[{', '.join('ijklmnop'[:rank])}]`"
    return scope.source.error(ExprTypeError, "tensor-without-index", message, node, hint)


def _collect_bare_axes(node: Get, scope: Scope, bare: dict[str, list[tuple[int, Span]]]) -> None:
    span = Span(node.start, node.name_end)
    shape = scope.tensor(node.tensor, span).type.shape
    check_rank(node, shape, scope)
    for index, size in zip(node.index, shape, strict=False):
        if isinstance(index, Ref):
            bare.setdefault(index.name, []).append((size, Span(node.start, node.end)))


def check_rank(node: Get, shape: tuple[int, ...], scope: Scope) -> None:
    """Check that there is one index per dimension. `x[]` may also read a tensor of shape [1], and `x[0]` a scalar."""
    count = len(node.index)
    if count == len(shape) or (count == 0 and shape == (1,)):
        return
    if shape == () and count == 1 and isinstance(node.index[0], Num) and node.index[0].value == 0:
        return
    message = f"`{node.tensor}` has {len(shape)} dimensions, {list(shape)}, and {count} indices here"
    hint = f"write an index for each dimension: `{node.tensor}[{', '.join('ijklmnop'[: len(shape)])}]`"
    raise scope.source.error(ShapeError, "wrong-rank", message, node, hint)


def _where_extents(statement: Statement, scope: Scope, constant_of: Callable[[Node], int | None]) -> dict[str, int]:
    stated: dict[str, int] = {}
    for item in statement.where:
        if item.axis in stated:
            message = f"axis `{item.axis}` is in `where` twice"
            raise scope.source.error(ShapeError, "duplicate-axis", message, item)
        if item.axis in scope.tensors:
            message = f"`{item.axis}` is a tensor, not an axis"
            raise scope.source.error(ExprTypeError, "tensor-without-index", message, item)
        stated[item.axis] = _stated_extent(item, scope, constant_of)
    return stated


def _stated_extent(item: WhereItem, scope: Scope, constant_of: Callable[[Node], int | None]) -> int:
    if any(isinstance(node, (Ref, Extent, Get, TypeOf)) for node in _iter_nodes((item.extent,))):
        extent = None
    else:
        extent = constant_of(item.extent)
    if extent is None or extent < 1:
        text = scope.source.quote(item.extent)
        message = f"the extent of axis `{item.axis}` is `{text}`, which is not a positive integer"
        raise scope.source.error(ShapeError, "bad-extent", message, item.extent)
    return extent


def _extent(name: str, bare: dict[str, list[tuple[int, Span]]], places: dict[str, Span], scope: Scope) -> int:
    uses = bare.get(name)
    if not uses:
        divides = "/" in scope.source.text.replace("//", "")
        hint = (
            f"add `where {name} in N` with the number of its values, or declare a number `{name}=float32` and read `{name}[]`"
            + ("; indices are divided by `//`" if divides else "")
        )
        message = f"axis `{name}` has no extent: it indexes no dimension bare"
        raise scope.source.error(ShapeError, "axis-without-extent", message, places[name], hint)
    for size, span in uses[1:]:
        if size != uses[0][0]:
            message = f"axis `{name}` has extent {uses[0][0]} in `{scope.source.quote(uses[0][1])}` and {size} here"
            hint = f"add `where {name} in ...`, and a guard where it goes beyond a dimension"
            raise scope.source.error(ShapeError, "extent-conflict", message, span, hint)
    return uses[0][0]
