"""Parsed calls and methods → syntax nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.frontend.lang import names
from roller_svc.frontend.lang.limits import MAX_TREE_DEPTH
from roller_svc.frontend.lang.nodes import (
    Apply,
    Binary,
    CastTo,
    DimSize,
    Extent,
    Group,
    Like,
    Node,
    Num,
    Ref,
    Text,
    TypeArg,
    TypeOf,
    UpCast,
    When,
)
from roller_svc.frontend.lang.source import Span, Spanned
from roller_svc.frontend.lang.synonyms import find_words
from roller_svc.ir.dtype import dtype_named


class SyntaxFault(Exception):
    """A syntax error found without access to the source text; grammar.py converts it to an InputError."""

    def __init__(self, code: str, message: str, at: Spanned, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.span, self.hint = code, message, at, hint


@dataclass(frozen=True, slots=True)
class Keyword:
    name: str
    value: Node
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call with its arguments, the span of its name and the span of the whole."""

    name: str
    name_start: int
    name_end: int
    positional: tuple[Node, ...]
    keywords: dict[str, Node]
    start: int
    end: int

    @property
    def at_name(self) -> Span:
        return Span(self.name_start, self.name_end)

    def expect(self, min_count: int, max_count: int, *keywords: str) -> None:
        """Reject a wrong number of arguments and unknown keywords."""
        if not min_count <= len(self.positional) <= max_count:
            raise self.wrong_arguments(min_count, max_count, len(self.positional))
        for name, value in self.keywords.items():
            if name not in keywords:
                hint = names.did_you_mean(name, keywords)
                raise SyntaxFault("wrong-arguments", f"`{self.name}` takes no argument `{name}`", value, hint)

    def wrong_arguments(self, min_count: int, max_count: int, count: int) -> SyntaxFault:
        message = f"`{self.name}` takes {names.arguments(min_count, max_count)}, got {count}"
        return SyntaxFault("wrong-arguments", message, self.at_name)


def depth_above(nodes: Sequence[Node], span: Spanned) -> int:
    """Return the depth of a node above these. Rejects a tree that is too deep for recursion."""
    depth = 1 + max((node.depth for node in nodes), default=0)
    if depth > MAX_TREE_DEPTH:
        hint = "split the expression into several statements, or balance it with brackets"
        raise SyntaxFault("too-deep", f"the expression is nested more than {MAX_TREE_DEPTH} deep", span, hint)
    return depth


def type_arg(node: Node) -> TypeArg:
    """Return a type argument: a quoted or bare type name, or x.dtype()."""
    match node:
        case TypeOf():
            return node
        case Text(value=name) | Ref(name=name):
            if dtype_named(name) is None:
                hint = names.find_right_form(name, names.TYPE_NAMES)
                raise SyntaxFault("unknown-type", f"`{name}` is not a type", node, hint)
            return Text(name, start=node.start, end=node.end)
        case _:
            raise SyntaxFault("unknown-type", "a type is a quoted name or `x.dtype()`", node)


def function_call(call: ParsedCall) -> Node:
    """Build the node of name(arguments)."""
    if call.name in ("const", "parse"):
        return _const(call)
    if call.name == "extent":
        call.expect(1, 1)
        return Extent(_axis(call.positional[0], call), start=call.start, end=call.end)
    if call.name in names.SELECTS:
        call.expect(3, 3)
        return _select(call, call.positional)
    if names.function_named(call.name) is not None or call.name in names.OPERATOR_FUNCTIONS:
        call.expect(0, 99, "dtype")
        type_ = call.keywords.get("dtype")
        return apply_named(call, call.name, call.at_name, call.positional, None if type_ is None else type_arg(type_))
    if dtype_named(call.name) is not None:
        call.expect(1, 1)
        return _cast(call, call.positional[0], Text(call.name, start=call.name_start, end=call.name_end))
    raise unknown_function(call.name, call.at_name)


def unknown_function(name: str, span: Spanned) -> SyntaxFault:
    if name in names.METHODS:
        return SyntaxFault("unknown-function", f"`{name}` is a method", span, f"write `x.{name}(...)`")
    known_names = (*names.FUNCTIONS, *names.FORMS, *names.TYPE_NAMES)
    return SyntaxFault("unknown-function", f"`{name}` is not a function", span, names.find_right_form(name, known_names))


def _const(call: ParsedCall) -> Node:
    call.expect(1, 2, "dtype")
    type_node = call.positional[1] if len(call.positional) > 1 else call.keywords.get("dtype")
    value = _infinity(call.positional[0])
    if type_node is None:
        return value
    type_ = type_arg(type_node)
    depth = depth_above((value, type_), call)
    return CastTo(value, type_, literal_form=True, start=call.start, end=call.end, depth=depth)


def _infinity(node: Node) -> Node:
    """Return the number that a quoted name of an infinity stands for; other nodes as they are."""
    value = names.INFINITIES.get(node.value) if isinstance(node, Text) else None
    return node if value is None else Num(value, start=node.start, end=node.end)


def _cast(call: ParsedCall, arg: Node, type_: TypeArg) -> CastTo:
    depth = depth_above((arg, type_), call)
    return CastTo(arg, type_, literal_form=False, start=call.start, end=call.end, depth=depth)


def _axis(node: Node, call: ParsedCall) -> Ref:
    if not isinstance(node, Ref):
        raise SyntaxFault("wrong-arguments", f"`{call.name}` takes an axis", node)
    return node


def _conditions(node: Node) -> tuple[Node, ...]:
    conditions = node.items if isinstance(node, Group) else (node,)
    if not conditions:
        raise SyntaxFault("wrong-arguments", "`when` needs a condition", node)
    return conditions


def _select(call: ParsedCall, args: Sequence[Node]) -> When:
    condition, value, other = args
    conditions = _conditions(condition)
    depth = depth_above((*conditions, value, other), call)
    return When(value, conditions, other, any_holds=False, start=call.start, end=call.end, depth=depth)


def apply_named(call: ParsedCall, name: str, span: Span, args: Sequence[Node], type_: TypeArg | None) -> Node:
    """Build the node of a named function, with a cast of its result if a type is given."""
    if name in names.SELECTS:
        if len(args) != 3:
            raise SyntaxFault("wrong-arguments", f"`{name}` takes 3 arguments, got {len(args)}", span)
        return _select(call, args)
    if name in names.OPERATOR_FUNCTIONS:
        if len(args) != 2:
            raise SyntaxFault("wrong-arguments", f"`{name}` takes 2 arguments, got {len(args)}", span)
        sign = names.OPERATOR_FUNCTIONS[name]
        return Binary(sign, args[0], args[1], start=call.start, end=call.end, depth=depth_above(args, call))
    function = names.function_named(name)
    if function is None:
        raise unknown_function(name, span)
    if not function.min_arguments <= len(args) <= function.max_arguments:
        takes = names.arguments(function.min_arguments, function.max_arguments)
        hint = find_words(name) if len(args) < function.min_arguments else None
        raise SyntaxFault("wrong-arguments", f"`{name}` takes {takes}, got {len(args)}", span, hint)
    below = args if type_ is None else (*args, type_)
    return Apply(name, tuple(args), type_, span.start, span.end, start=call.start, end=call.end, depth=depth_above(below, call))


def method_call(receiver: Node, call: ParsedCall) -> Node:
    """Build the node of receiver.name(arguments)."""
    make = _METHODS.get(call.name)
    if make is None:
        if names.function_named(call.name) is not None:
            hint: str | None = f"write `{call.name}(x)` or ``x.call(`{call.name}`)``"
        else:
            hint = names.find_right_form(call.name, names.METHODS)
        raise SyntaxFault("unknown-method", f"`{call.name}` is not a method", call.at_name, hint)
    return make(receiver, call)


def _method_call(receiver: Node, call: ParsedCall) -> Node:
    call.expect(1, 3, "others", "dtype", "output_dtype")
    name = call.positional[0]
    if not isinstance(name, Text):
        raise SyntaxFault("wrong-arguments", "the first argument of `call` is a function's name in quotes", name)
    others = call.positional[1] if len(call.positional) > 1 else call.keywords.get("others")
    args = () if others is None else others.items if isinstance(others, Group) else (others,)
    type_node = call.positional[2] if len(call.positional) > 2 else None
    type_node = type_node or call.keywords.get("dtype") or call.keywords.get("output_dtype")
    span = Span(name.start, name.end)
    return apply_named(call, name.value, span, (receiver, *args), None if type_node is None else type_arg(type_node))


def _method_cast(receiver: Node, call: ParsedCall) -> Node:
    call.expect(0, 1, "dtype")
    type_nodes = (*call.positional, *call.keywords.values())
    if len(type_nodes) != 1:
        raise call.wrong_arguments(1, 1, len(type_nodes))
    return _cast(call, receiver, type_arg(type_nodes[0]))


def _method_when(receiver: Node, call: ParsedCall) -> Node:
    call.expect(1, 3, "other", "merge_op")
    conditions = _conditions(call.positional[0])
    other = call.positional[1] if len(call.positional) > 1 else call.keywords.get("other")
    merge = call.positional[2] if len(call.positional) > 2 else call.keywords.get("merge_op")
    if merge is not None and not (isinstance(merge, Text) and merge.value in ("all", "any")):
        raise SyntaxFault("wrong-arguments", "merge_op is `all` or `any`", merge)
    any_holds = merge is not None and merge.value == "any"
    below = (receiver, *conditions) if other is None else (receiver, *conditions, other)
    return When(receiver, conditions, other, any_holds, start=call.start, end=call.end, depth=depth_above(below, call))


def _method_val(receiver: Node, call: ParsedCall) -> Node:
    if not isinstance(receiver, Ref):
        raise SyntaxFault("wrong-arguments", f"`{call.name}` takes an axis or a tensor's name", receiver)
    call.expect(1 if call.name == "size" else 0, 1)
    if not call.positional:
        return Extent(receiver, start=call.start, end=call.end)
    dim = call.positional[0]
    if not (isinstance(dim, Num) and isinstance(dim.value, int)):
        raise SyntaxFault("wrong-arguments", "the number of a dimension is an integer", dim)
    return DimSize(receiver, dim.value, start=call.start, end=call.end)


def _method_dtype(receiver: Node, call: ParsedCall) -> Node:
    call.expect(0, 0)
    return TypeOf(receiver, start=call.start, end=call.end, depth=depth_above((receiver,), call))


def _method_like(receiver: Node, call: ParsedCall) -> Node:
    call.expect(1, 1)
    value = call.positional[0]
    return Like(receiver, value, start=call.start, end=call.end, depth=depth_above((receiver, value), call))


def _method_up_cast(receiver: Node, call: ParsedCall) -> Node:
    call.expect(0, 0)
    return UpCast(receiver, start=call.start, end=call.end, depth=depth_above((receiver,), call))


_METHODS = {
    "call": _method_call,
    "cast": _method_cast,
    "to": _method_cast,
    "when": _method_when,
    "val": _method_val,
    "size": _method_val,
    "dtype": _method_dtype,
    "like": _method_like,
    "up_cast": _method_up_cast,
}
