"""Calls and methods as written → the few syntax nodes that they stand for."""

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
from roller_svc.ir.dtype import dtype_named


class Fault(Exception):
    """Something wrong in the text, found where the text itself is not at hand; grammar.py makes it an error."""

    def __init__(self, code: str, message: str, at: Spanned, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.at, self.hint = code, message, at, hint


@dataclass(frozen=True, slots=True)
class Keyword:
    name: str
    value: Node
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Written:
    """One call as written: the name's place, the arguments, the whole's place."""

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

    def expect(self, least: int, most: int, *keywords: str) -> None:
        """Refuse a wrong number of arguments and unknown keywords."""
        if not least <= len(self.positional) <= most:
            raise self.wrong(least, most, len(self.positional))
        for name, value in self.keywords.items():
            if name not in keywords:
                hint = names.did_you_mean(name, keywords)
                raise Fault("wrong-arguments", f"`{self.name}` takes no argument `{name}`", value, hint)

    def wrong(self, least: int, most: int, given: int) -> Fault:
        message = f"`{self.name}` takes {names.arguments(least, most)}, not {given}"
        return Fault("wrong-arguments", message, self.at_name)


def depth_above(nodes: Sequence[Node], at: Spanned) -> int:
    """Depth of a node over these ones; refuses a tree that is too deep to walk."""
    depth = 1 + max((node.depth for node in nodes), default=0)
    if depth > MAX_TREE_DEPTH:
        hint = "split the expression into several statements, or balance it with brackets"
        raise Fault("too-deep", f"the expression is nested more than {MAX_TREE_DEPTH} deep", at, hint)
    return depth


def type_arg(node: Node) -> TypeArg:
    """A type argument: a quoted or bare type's name, or x.dtype()."""
    match node:
        case TypeOf():
            return node
        case Text(value=name) | Ref(name=name):
            if dtype_named(name) is None:
                hint = names.did_you_mean(name, names.TYPE_NAMES)
                raise Fault("unknown-type", f"`{name}` is no type", node, hint)
            return Text(name, node.start, node.end)
        case _:
            raise Fault("unknown-type", "a type is a quoted name or `x.dtype()`", node)


def function_call(call: Written) -> Node:
    """name(arguments)."""
    if call.name in ("const", "parse"):
        return _const(call)
    if call.name == "extent":
        call.expect(1, 1)
        return Extent(_axis(call.positional[0], call), call.start, call.end)
    if call.name in names.SELECTS:
        call.expect(3, 3)
        return _select(call, call.positional)
    if names.function_named(call.name) is not None or call.name in names.OPERATOR_FUNCTIONS:
        call.expect(0, 99, "dtype")
        type_ = call.keywords.get("dtype")
        return applied(call, call.name, call.at_name, call.positional, None if type_ is None else type_arg(type_))
    if dtype_named(call.name) is not None:
        call.expect(1, 1)
        return _cast(call, call.positional[0], Text(call.name, call.name_start, call.name_end))
    raise unknown_function(call.name, call.at_name)


def unknown_function(name: str, at: Spanned) -> Fault:
    if name in names.METHODS:
        return Fault("unknown-function", f"`{name}` is a method", at, f"write `x.{name}(...)`")
    known = (*names.FUNCTIONS, *names.FORMS, *names.TYPE_NAMES)
    return Fault("unknown-function", f"`{name}` is no function", at, names.did_you_mean(name, known))


def _const(call: Written) -> Node:
    call.expect(1, 2, "dtype")
    given = call.positional[1] if len(call.positional) > 1 else call.keywords.get("dtype")
    value = call.positional[0]
    if given is None:
        return value
    type_ = type_arg(given)
    depth = depth_above((value, type_), call)
    return CastTo(value, type_, literal_form=True, start=call.start, end=call.end, depth=depth)


def _cast(call: Written, arg: Node, type_: TypeArg) -> CastTo:
    depth = depth_above((arg, type_), call)
    return CastTo(arg, type_, literal_form=False, start=call.start, end=call.end, depth=depth)


def _axis(node: Node, call: Written) -> Ref:
    if not isinstance(node, Ref):
        raise Fault("wrong-arguments", f"`{call.name}` is of an axis", node)
    return node


def _conditions(node: Node) -> tuple[Node, ...]:
    conditions = node.items if isinstance(node, Group) else (node,)
    if not conditions:
        raise Fault("wrong-arguments", "`when` needs a condition", node)
    return conditions


def _select(call: Written, args: Sequence[Node]) -> When:
    condition, value, other = args
    conditions = _conditions(condition)
    depth = depth_above((*conditions, value, other), call)
    return When(value, conditions, other, any_holds=False, start=call.start, end=call.end, depth=depth)


def applied(call: Written, name: str, at: Span, args: Sequence[Node], type_: TypeArg | None) -> Node:
    """A named function of these arguments, its result cast where a type is given."""
    if name in names.SELECTS:
        if len(args) != 3:
            raise Fault("wrong-arguments", f"`{name}` takes 3 arguments, not {len(args)}", at)
        return _select(call, args)
    if name in names.OPERATOR_FUNCTIONS:
        if len(args) != 2:
            raise Fault("wrong-arguments", f"`{name}` takes 2 arguments, not {len(args)}", at)
        sign = names.OPERATOR_FUNCTIONS[name]
        return Binary(sign, args[0], args[1], call.start, call.end, depth_above(args, call))
    function = names.function_named(name)
    if function is None:
        raise unknown_function(name, at)
    if not function.least <= len(args) <= function.most:
        takes = names.arguments(function.least, function.most)
        raise Fault("wrong-arguments", f"`{name}` takes {takes}, not {len(args)}", at)
    below = args if type_ is None else (*args, type_)
    return Apply(name, tuple(args), type_, call.start, call.end, at.start, at.end, depth_above(below, call))


def method_call(receiver: Node, call: Written) -> Node:
    """receiver.name(arguments)."""
    make = _METHODS.get(call.name)
    if make is None:
        if names.function_named(call.name) is not None:
            hint: str | None = f"write `{call.name}(x)` or ``x.call(`{call.name}`)``"
        else:
            hint = names.did_you_mean(call.name, names.METHODS)
        raise Fault("unknown-method", f"`{call.name}` is no method", call.at_name, hint)
    return make(receiver, call)


def _method_call(receiver: Node, call: Written) -> Node:
    call.expect(1, 3, "others", "dtype", "output_dtype")
    name = call.positional[0]
    if not isinstance(name, Text):
        raise Fault("wrong-arguments", "the first argument of `call` is a function's name in quotes", name)
    others = call.positional[1] if len(call.positional) > 1 else call.keywords.get("others")
    args = () if others is None else others.items if isinstance(others, Group) else (others,)
    given = call.positional[2] if len(call.positional) > 2 else None
    given = given or call.keywords.get("dtype") or call.keywords.get("output_dtype")
    at = Span(name.start, name.end)
    return applied(call, name.value, at, (receiver, *args), None if given is None else type_arg(given))


def _method_cast(receiver: Node, call: Written) -> Node:
    call.expect(0, 1, "dtype")
    given = (*call.positional, *call.keywords.values())
    if len(given) != 1:
        raise call.wrong(1, 1, len(given))
    return _cast(call, receiver, type_arg(given[0]))


def _method_when(receiver: Node, call: Written) -> Node:
    call.expect(1, 3, "other", "merge_op")
    conditions = _conditions(call.positional[0])
    other = call.positional[1] if len(call.positional) > 1 else call.keywords.get("other")
    merge = call.positional[2] if len(call.positional) > 2 else call.keywords.get("merge_op")
    if merge is not None and not (isinstance(merge, Text) and merge.value in ("all", "any")):
        raise Fault("wrong-arguments", "merge_op is `all` or `any`", merge)
    any_holds = merge is not None and merge.value == "any"
    below = (receiver, *conditions) if other is None else (receiver, *conditions, other)
    return When(receiver, conditions, other, any_holds, call.start, call.end, depth_above(below, call))


def _method_val(receiver: Node, call: Written) -> Node:
    if not isinstance(receiver, Ref):
        raise Fault("wrong-arguments", f"`{call.name}` is of an axis or a tensor's name", receiver)
    call.expect(1 if call.name == "size" else 0, 1)
    if not call.positional:
        return Extent(receiver, call.start, call.end)
    dim = call.positional[0]
    if not (isinstance(dim, Num) and isinstance(dim.value, int)):
        raise Fault("wrong-arguments", "the number of a dimension is an integer", dim)
    return DimSize(receiver, dim.value, call.start, call.end)


def _method_dtype(receiver: Node, call: Written) -> Node:
    call.expect(0, 0)
    return TypeOf(receiver, call.start, call.end, depth_above((receiver,), call))


def _method_like(receiver: Node, call: Written) -> Node:
    call.expect(1, 1)
    value = call.positional[0]
    return Like(receiver, value, call.start, call.end, depth_above((receiver, value), call))


def _method_up_cast(receiver: Node, call: Written) -> Node:
    call.expect(0, 0)
    return UpCast(receiver, call.start, call.end, depth_above((receiver,), call))


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
