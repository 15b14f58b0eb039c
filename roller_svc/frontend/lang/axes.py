"""Statement → its axes and their extents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from roller_svc.errors import ExprTypeError, ShapeError
from roller_svc.frontend.lang.names import known_names
from roller_svc.frontend.lang.nodes import DimSize, Extent, Get, Node, Num, Ref, Statement, TypeOf, WhereItem, children
from roller_svc.frontend.lang.source import Source, Span
from roller_svc.ir.program import TensorType


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a statement may read: its id and its type."""

    id: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Scope:
    """What names mean where a statement stands. `later` are names that later statements write."""

    source: Source
    tensors: Mapping[str, Tensor]
    later: frozenset[str]

    def tensor(self, name: str, at: Span) -> Tensor:
        """The tensor of that name, or the error that says what is wrong with it."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        if name in self.later:
            message = f"`{name}` is read before it is written"
            raise self.source.error(ExprTypeError, "read-before-write", message, at, "reorder the statements")
        hint = known_names(name, self.tensors, "tensors")
        raise self.source.error(ExprTypeError, "unknown-name", f"there is no tensor `{name}`", at, hint)


@dataclass(frozen=True, slots=True)
class Axes:
    """Every axis of the statement in the order of the text, those only in its clause last, with its first place."""

    extents: dict[str, int]
    places: dict[str, Span]


def infer_axes(statement: Statement, scope: Scope, *, scatter: bool, constant_of: Callable[[Node], int | None]) -> Axes:
    """Axes and extents of a statement; refuses unknown names, wrong ranks, axes without one extent."""
    given = _where_extents(statement, scope, constant_of)
    places: dict[str, Span] = {}
    bare: dict[str, list[tuple[int, Span]]] = {}
    for node in _walk((*statement.index, statement.value)):
        match node:
            case Ref(name=name) | Extent(axis=Ref(name=name)):
                if name in scope.tensors:
                    raise tensor_without_index(name, node, scope)
                places.setdefault(name, Span(node.start, node.end))
            case Get():
                _bare_axes(node, scope, bare)
            case DimSize(tensor=Ref(name=name)):
                scope.tensor(name, Span(node.tensor.start, node.tensor.end))
            case _:
                pass
    for item in statement.where:
        places.setdefault(item.axis, Span(item.start, item.end))
    if scatter:
        _bare_axes(left_side(statement), scope, bare)
    extents = {name: given[name] if name in given else _extent(name, bare, places, scope) for name in places}
    return Axes(extents, places)


def left_side(statement: Statement) -> Get:
    """A scatter's left side, as what it is: an indexed tensor."""
    return Get(statement.name, statement.index, statement.start, statement.end, statement.name_end, 1)


def _walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node in the order of the text, but not a bare tensor's name under .dtype()."""
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
        message, hint = f"tensor `{name}` without an index", f"write `{name}[...]` with {rank} indices"
    return scope.source.error(ExprTypeError, "tensor-without-index", message, node, hint)


def _bare_axes(node: Get, scope: Scope, bare: dict[str, list[tuple[int, Span]]]) -> None:
    at = Span(node.start, node.name_end)
    shape = scope.tensor(node.tensor, at).type.shape
    check_rank(node, shape, scope)
    for index, size in zip(node.index, shape, strict=False):
        if isinstance(index, Ref):
            bare.setdefault(index.name, []).append((size, Span(node.start, node.end)))


def check_rank(node: Get, shape: tuple[int, ...], scope: Scope) -> None:
    """As many indices as dimensions; `x[]` may read a tensor of one element in one dimension, `x[0]` a scalar."""
    given = len(node.index)
    if given == len(shape) or (given == 0 and shape == (1,)):
        return
    if shape == () and given == 1 and isinstance(node.index[0], Num) and node.index[0].value == 0:
        return
    message = f"`{node.tensor}` has {len(shape)} dimensions, {list(shape)}, and {given} indices here"
    raise scope.source.error(ShapeError, "wrong-rank", message, node)


def _where_extents(statement: Statement, scope: Scope, constant_of: Callable[[Node], int | None]) -> dict[str, int]:
    given: dict[str, int] = {}
    for item in statement.where:
        if item.axis in given:
            message = f"axis `{item.axis}` is in `where` twice"
            raise scope.source.error(ShapeError, "duplicate-axis", message, item)
        if item.axis in scope.tensors:
            message = f"`{item.axis}` is a tensor, not an axis"
            raise scope.source.error(ExprTypeError, "tensor-without-index", message, item)
        given[item.axis] = _given_extent(item, scope, constant_of)
    return given


def _given_extent(item: WhereItem, scope: Scope, constant_of: Callable[[Node], int | None]) -> int:
    if any(isinstance(node, (Ref, Extent, Get, TypeOf)) for node in _walk((item.extent,))):
        extent = None
    else:
        extent = constant_of(item.extent)
    if extent is None or extent < 1:
        text = scope.source.cut(item.extent)
        message = f"the extent of axis `{item.axis}` is `{text}`, which is not a positive integer"
        raise scope.source.error(ShapeError, "bad-extent", message, item.extent)
    return extent


def _extent(name: str, bare: dict[str, list[tuple[int, Span]]], places: dict[str, Span], scope: Scope) -> int:
    found = bare.get(name)
    if not found:
        hint = f"add `where {name} in ...`"
        message = f"axis `{name}` has no extent: it indexes no dimension bare"
        raise scope.source.error(ShapeError, "axis-without-extent", message, places[name], hint)
    for size, at in found[1:]:
        if size != found[0][0]:
            message = f"axis `{name}` has extent {found[0][0]} in `{scope.source.cut(found[0][1])}` and {size} here"
            hint = f"add `where {name} in ...`, and a guard where it goes beyond a dimension"
            raise scope.source.error(ShapeError, "extent-conflict", message, at, hint)
    return found[0][0]
