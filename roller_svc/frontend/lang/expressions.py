"""Type-check the expressions of a statement: syntax tree → typed expression, with conversions and bounds checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol, assert_never

from roller_svc.analysis.constant_folding import constant_int, holds
from roller_svc.errors import ExprTypeError, IndexRangeError, InputError, require
from roller_svc.frontend.lang import nodes as syntax
from roller_svc.frontend.lang.axes import Scope, check_rank, tensor_without_index
from roller_svc.frontend.lang.convert import (
    BY_VALUE,
    Typed,
    Weak,
    apply_by_value,
    common_type,
    compare,
    condition,
    constant,
    convert_count,
    convert_to,
    literal_cast,
    shift_type,
)
from roller_svc.frontend.lang.index_proofs import FromData, Inside, Leaves, Ranges, Undecided
from roller_svc.frontend.lang.limits import MAX_CONDITIONS
from roller_svc.frontend.lang.names import Function, Rule, function_named
from roller_svc.frontend.lang.nodes import Apply, Node
from roller_svc.frontend.lang.source import Span, Spanned
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select

_DIVIDING = frozenset({OpKind.TRUNC_DIV, OpKind.FMOD})


class Conversions(Protocol):
    """The methods of the expression checker that the function rules use."""

    def in_type(self, value: Typed, dtype: DType, node: Spanned) -> Expr: ...

    def refuse_zero(self, divisor: Expr, node: Spanned) -> None: ...

    def shift(self, kind: OpKind, values: Sequence[Typed], nodes: Sequence[Node], node: Spanned) -> Expr: ...

    def refuse(self, kind: type[InputError], code: str, message: str, node: Spanned, hint: str | None = None) -> NoReturn: ...


def apply_function(node: Apply, values: Sequence[Typed], checker: Conversions) -> Expr:
    """Apply the function named in `node` to the arguments."""
    function = require(function_named(node.function), f"function {node.function}, whose name calls.py has checked")
    match function.rule:
        case Rule.FLOATING:
            return _floating(function, values, node.args, checker)
        case Rule.NUMERIC:
            return _numeric(function, values, node.args, checker)
        case Rule.TO_INT32:
            return _to_int32(function, values[0], node.args[0], checker)
        case Rule.PREDICATE:
            return Op(function.kind, (_as_float(values[0], node.args[0], checker),), DType.INT8)
        case Rule.BITS:
            return _bits(node, function, values, checker)
        case Rule.REMAINDER:
            if len(values) == 2:
                return _numeric(function, values, node.args, checker)
            arg = _as_float(values[0], node.args[0], checker)
            return Op(OpKind.SUB, (arg, Op(OpKind.RFLOOR, (arg,), arg.dtype)), arg.dtype)
        case _ as other:
            assert_never(other)


def _as_float(value: Typed, node: Node, checker: Conversions) -> Expr:
    """Convert an argument of a floating function: integers become float32."""
    if isinstance(value, Weak):
        return checker.in_type(Weak(float(value.value)), DType.FLOAT32, node)
    return value if value.dtype.is_float else convert_to(value, DType.FLOAT32)


def _floating(function: Function, values: Sequence[Typed], nodes: Sequence[Node], checker: Conversions) -> Expr:
    if len(values) == 1:
        arg = _as_float(values[0], nodes[0], checker)
        return Op(function.kind, (arg,), arg.dtype)
    dtype = common_type(values)
    dtype = dtype if dtype.is_float else DType.FLOAT32
    return Op(function.kind, _in_type(values, dtype, nodes, checker), dtype)


def _numeric(function: Function, values: Sequence[Typed], nodes: Sequence[Node], checker: Conversions) -> Expr:
    dtype = common_type(values)
    args = _in_type(values, dtype, nodes, checker)
    if function.kind in _DIVIDING:
        checker.refuse_zero(args[1], nodes[1])
    return _apply(function.kind, values, args, dtype)


def _apply(kind: OpKind, values: Sequence[Typed], args: Sequence[Expr], dtype: DType) -> Expr:
    """Apply an operator to operands, which `args` has in their common type."""
    if kind not in BY_VALUE:
        return Op(kind, tuple(args), dtype)
    return apply_by_value(kind, [a if isinstance(v, Weak) else v for v, a in zip(values, args, strict=True)], dtype)


def _in_type(values: Sequence[Typed], dtype: DType, nodes: Sequence[Node], checker: Conversions) -> tuple[Expr, ...]:
    return tuple(checker.in_type(value, dtype, node) for value, node in zip(values, nodes, strict=True))


def _to_int32(function: Function, value: Typed, node: Node, checker: Conversions) -> Expr:
    arg = checker.in_type(value, common_type((value,)), node)
    if arg.dtype.is_float:
        return Op(function.kind, (arg,), DType.INT32)
    low, high = arg.dtype.integer_range
    int32_low, int32_high = DType.INT32.integer_range
    if int32_low <= low and high <= int32_high:
        return convert_to(arg, DType.INT32)
    # floor and ceil saturate; an integer conversion would wrap.
    return Op(function.kind, (convert_to(arg, DType.FLOAT64),), DType.INT32)


def _bits(node: Apply, function: Function, values: Sequence[Typed], checker: Conversions) -> Expr:
    if function.kind in _SHIFTS.values():
        return checker.shift(function.kind, values, node.args, node)
    dtype = common_type(values)
    if dtype.is_float:
        message = f"`{node.function}` takes integers, got {dtype.value}"
        checker.refuse(ExprTypeError, "type-error", message, node, "cast to an integer type first")
    args = _in_type(values, dtype, node.args, checker)
    if function.kind in _DIVIDING:
        checker.refuse_zero(args[1], node.args[1])
    return _apply(function.kind, values, args, dtype)


_ARITHMETIC = {"+": OpKind.ADD, "-": OpKind.SUB, "*": OpKind.MUL}
_COMPARISONS = {
    "<": OpKind.LT,
    "<=": OpKind.LE,
    ">": OpKind.GT,
    ">=": OpKind.GE,
    "==": OpKind.EQ,
    "!=": OpKind.NE,
}
_SHIFTS = {"<<": OpKind.SHL, ">>": OpKind.SHR}
_UP_CASTS = {
    DType.INT8: DType.INT32,
    DType.INT16: DType.INT32,
    DType.FLOAT16: DType.FLOAT32,
    DType.BFLOAT16: DType.FLOAT32,
}


class Expressions:
    """Check the expressions of one statement. `ranges` holds the guards around the current expression."""

    def __init__(self, scope: Scope, extents: Mapping[str, int], ranges: Ranges) -> None:
        self.scope = scope
        self.extents = extents
        self.ranges = ranges
        self._reads = True  # False inside .dtype() and .like(), which read nothing
        self._rules: dict[type, Callable[..., Typed]] = {
            syntax.Num: self._num,
            syntax.Ref: self._ref,
            syntax.Get: self._get,
            syntax.Unary: self._unary,
            syntax.Binary: self._binary,
            syntax.Apply: self._apply,
            syntax.CastTo: self._cast_to,
            syntax.When: self._when,
            syntax.Extent: self._extent,
            syntax.DimSize: self._dim_size,
            syntax.Like: self._like,
            syntax.UpCast: self._up_cast,
            syntax.Text: self._no_value,
            syntax.Group: self._no_value,
            syntax.TypeOf: self._no_value,
        }

    def check(self, node: syntax.Node) -> Typed:
        """Return the typed expression. Numbers stay weakly typed."""
        return self._rules[type(node)](node)

    def strong(self, node: syntax.Node) -> Expr:
        """Return the typed expression, with a bare number in its natural type."""
        value = self.check(node)
        return self.in_type(value, value.natural, node) if isinstance(value, Weak) else value

    def in_type(self, value: Typed, dtype: DType, node: Spanned) -> Expr:
        """Convert the value to that type. Rejects a number that the type cannot hold."""
        if not isinstance(value, Weak):
            return convert_to(value, dtype)
        if not holds(value.value, dtype):
            message = f"{dtype.value} cannot hold {value.value}"
            hint = "cast the other operand to a wider type" if not isinstance(node, syntax.Num) else None
            self.refuse(ExprTypeError, "literal-out-of-range", message, node, hint)
        return constant(value.value, dtype)

    def refuse(self, kind: type[InputError], code: str, message: str, node: Spanned, hint: str | None = None) -> NoReturn:
        raise self.scope.source.error(kind, code, message, node, hint)

    def index(self, nodes: tuple[syntax.Node, ...], get: syntax.Get) -> tuple[tuple[Expr, ...], tuple[bool, ...]]:
        """Return the indices of a tensor, and which dimensions must be checked at run time."""
        tensor = self.scope.tensor(get.tensor, Span(get.start, get.name_end))
        shape = tensor.type.shape
        check_rank(get, shape, self.scope)
        if len(nodes) < len(shape):  # x[] of one element
            return (Const(0, DType.INT32),), (False,)
        exprs: list[Expr] = []
        checked: list[bool] = []
        for dim, size in enumerate(shape):
            expr, from_data = self._one_index(nodes[dim], size, get.tensor, dim)
            exprs.append(expr)
            checked.append(from_data)
        return tuple(exprs), tuple(checked)

    def _one_index(self, node: syntax.Node, size: int, tensor: str, dim: int) -> tuple[Expr, bool]:
        expr = self.strong(node)
        if expr.dtype.is_float:
            message = f"an index of type {expr.dtype.value}; indices are integers"
            hint = "write ``.call(`floor`)`` or ``.cast(`int32`)``"
            self.refuse(ExprTypeError, "index-not-integer", message, node, hint)
        self._check_divisors(expr, node)
        if not self._reads:
            return expr, False
        verdict = self.ranges.decide(expr, size)
        match verdict:
            case Inside(index=index):
                return index, False
            case FromData(index=index):
                return index, True
            case Leaves():
                self._refuse_index(node, size, tensor, dim, verdict)
            case Undecided(reason=reason):
                message = f"cannot tell whether `{self._quote(node)}` stays inside dimension {dim} of `{tensor}`: {reason}"
                hint = f"clip it: `max(min({self._quote(node)}, {size - 1}), 0)`"
                self.refuse(IndexRangeError, "index-undecided", message, node, hint)

    def _refuse_index(self, node: syntax.Node, size: int, tensor: str, dim: int, leaves: Leaves) -> NoReturn:
        text = self._quote(node)
        at = ", ".join(f"{name} = {value}" for name, value in leaves.point.items())
        axes = ", ".join(f"{name} in 0..{self.extents[name] - 1}" for name in leaves.point)
        message = (
            f"index `{text}` leaves dimension {dim} of `{tensor}`: it is {leaves.value}"
            f"{f' at {at}' if at else ''}, the dimension has 0..{size - 1}{f' ({axes})' if axes else ''}"
        )
        side = f"{text} >= 0" if leaves.value < 0 else f"{text} < {size}"
        hint = f"guard the read: `{tensor}[...].when([{side}], 0)`"
        self.refuse(IndexRangeError, "index-out-of-range", message, node, hint)

    def _quote(self, node: Spanned) -> str:
        return self.scope.source.quote(node)

    def _check_divisors(self, expr: Expr, node: syntax.Node) -> None:
        """Check that // and % in integer index arithmetic have positive constant divisors."""
        stack = [expr]
        while stack:
            current = stack.pop()
            match current:
                case Op(kind=OpKind.FLOORDIV | OpKind.MOD, args=(left, right)) if not current.dtype.is_float:
                    divisor = constant_int(right)
                    if divisor is None or divisor < 1:
                        message = f"`//` and `%` in index `{self._quote(node)}` need a positive constant divisor"
                        self.refuse(ExprTypeError, "index-divisor", message, node)
                    stack.append(left)
                case Op(args=args) if not any(arg.dtype.is_float for arg in args):
                    stack.extend(args)
                case Cast(arg=arg) if not arg.dtype.is_float:
                    stack.append(arg)
                case Select(then=then, otherwise=otherwise):
                    stack += (then, otherwise)
                case _:
                    pass

    def _num(self, node: syntax.Num) -> Typed:
        return Weak(node.value)

    def _ref(self, node: syntax.Ref) -> Typed:
        if node.name in self.extents:
            return AxisRef(node.name)
        if node.name in self.scope.tensors:
            raise tensor_without_index(node.name, node, self.scope)
        self.refuse(ExprTypeError, "unknown-name", f"there is no axis `{node.name}`", node)

    def _get(self, node: syntax.Get) -> Typed:
        tensor = self.scope.tensor(node.tensor, Span(node.start, node.name_end))
        nodes = node.index if tensor.type.shape else ()
        index, checked = self.index(nodes, node)
        return Load(tensor.id, index, tensor.type.dtype, checked)

    def _unary(self, node: syntax.Unary) -> Typed:
        arg = self.strong(node.arg)
        if node.sign == "~":
            return Op(OpKind.LNOT, (condition(arg),), DType.INT8)
        return Op(OpKind.NEG, (arg,), arg.dtype)

    def _binary(self, node: syntax.Binary) -> Typed:
        if node.sign in ("&", "|"):
            return self._logical(node)
        left, right = self.check(node.left), self.check(node.right)
        if node.sign in _SHIFTS:
            return self.shift(_SHIFTS[node.sign], (left, right), (node.left, node.right), node)
        dtype = common_type((left, right))
        args = self.in_type(left, dtype, node.left), self.in_type(right, dtype, node.right)
        if node.sign not in _COMPARISONS:
            return _apply(self._arithmetic(node, dtype, args[1]), (left, right), args, dtype)
        if dtype.is_float or isinstance(left, Weak) or isinstance(right, Weak):
            return Op(_COMPARISONS[node.sign], args, DType.INT8)
        return compare(_COMPARISONS[node.sign], left, right, self.extents)

    def shift(self, kind: OpKind, values: Sequence[Typed], nodes: Sequence[syntax.Node], node: Spanned) -> Expr:
        """Return a shift, in the type of its left operand."""
        dtype = shift_type(values[0], values[1])
        if dtype.is_float:
            sign = next(sign for sign, shift in _SHIFTS.items() if shift is kind)
            self.refuse(ExprTypeError, "type-error", f"`{sign}` shifts integers, got {dtype.value}", node)
        left, count = values[0], values[1]
        if isinstance(count, Weak):  # a larger one than the width shifts all bits out, too
            count = self.in_type(Weak(min(count.value, dtype.bits)), dtype, nodes[1])
        return Op(kind, (self.in_type(left, dtype, nodes[0]), convert_count(count, dtype, self.extents)), dtype)

    def _arithmetic(self, node: syntax.Binary, dtype: DType, right: Expr) -> OpKind:
        """Return the operation of a sign on operands of that type."""
        sign = node.sign
        if sign in _ARITHMETIC:
            return _ARITHMETIC[sign]
        if sign == "**":
            return OpKind.POW
        if sign == "//" and dtype.is_float:
            hint = "write `floor(x / y)` for an int32, `rfloor(x / y)` for a float"
            self.refuse(ExprTypeError, "float-floor-division", f"`//` on {dtype.value}", node, hint)
        self.refuse_zero(right, node.right)
        if sign == "%":
            return OpKind.MOD
        return OpKind.DIV if dtype.is_float else OpKind.FLOORDIV

    def refuse_zero(self, divisor: Expr, node: Spanned) -> None:
        """Reject a divisor that is the constant 0."""
        if (isinstance(divisor, Const) and divisor.value == 0) or constant_int(divisor) == 0:
            self.refuse(ExprTypeError, "division-by-zero", "division by the constant 0", node)

    def _logical(self, node: syntax.Binary) -> Typed:
        """Check `&` or `|`. The right side is read only where the left does not decide."""
        left = condition(self.strong(node.left))
        self.ranges.push(left, holds=node.sign == "&")
        right = condition(self.strong(node.right))
        self.ranges.pop()
        return Op(OpKind.LAND if node.sign == "&" else OpKind.LOR, (left, right), DType.INT8)

    def conditions(self, nodes: tuple[syntax.Node, ...], *, any_holds: bool) -> Expr:
        """Combine the conditions of a `when`. A later one is read only where the earlier ones do not decide."""
        if len(nodes) > MAX_CONDITIONS:
            message = f"{len(nodes)} conditions; at most {MAX_CONDITIONS} are allowed"
            self.refuse(ExprTypeError, "too-deep", message, nodes[MAX_CONDITIONS])
        kind = OpKind.LOR if any_holds else OpKind.LAND
        combined = condition(self.strong(nodes[0]))
        for node in nodes[1:]:
            self.ranges.push(combined, holds=not any_holds)
            right = condition(self.strong(node))
            self.ranges.pop()
            combined = Op(kind, (combined, right), DType.INT8)
        return combined

    def _when(self, node: syntax.When) -> Typed:
        if node.other is None:
            hint = "write `x.when([condition], y)`; only a scatter's whole value may leave the else out"
            message = "`when` without an else value"
            self.refuse(ExprTypeError, "missing-else", message, node, hint)
        cond = self.conditions(node.conditions, any_holds=node.any_holds)
        self.ranges.push(cond, holds=True)
        then = self.check(node.value)
        self.ranges.pop()
        self.ranges.push(cond, holds=False)
        otherwise = self.check(node.other)
        self.ranges.pop()
        dtype = common_type((then, otherwise))
        return Select(cond, self.in_type(then, dtype, node.value), self.in_type(otherwise, dtype, node.other), dtype)

    def _apply(self, node: syntax.Apply) -> Typed:
        value = apply_function(node, [self.check(arg) for arg in node.args], self)
        if node.type is None:
            return value
        return self._cast(value, self.type_of(node.type))

    def _cast_to(self, node: syntax.CastTo) -> Typed:
        dtype = self.type_of(node.type)
        value = self.check(node.arg)
        if not isinstance(value, Weak):
            return self._cast(value, dtype)
        truncated = isinstance(value.value, float) and not dtype.is_float and math.isfinite(value.value)
        fits = holds(value.value, dtype) or truncated
        if node.literal_form and not fits:
            self.refuse(ExprTypeError, "literal-out-of-range", f"{dtype.value} cannot hold {value.value}", node.arg)
        return literal_cast(value.value, dtype)

    def _cast(self, value: Expr, dtype: DType) -> Expr:
        """Cast the value. A cast to its own type is kept only if it rounds: arithmetic on float32 may be wider."""
        rounds = dtype.is_narrow_float or (dtype is DType.FLOAT32 and isinstance(value, Op))
        return value if value.dtype is dtype and not rounds else Cast(value, dtype)

    def type_of(self, node: syntax.TypeArg) -> DType:
        """Return the type that a type argument names."""
        if isinstance(node, syntax.Text):
            dtype = dtype_named(node.value)
            if dtype is None:
                self.refuse(ExprTypeError, "unknown-type", f"`{node.value}` is not a type", node)
            return dtype
        if isinstance(node.arg, syntax.Ref) and node.arg.name in self.scope.tensors:
            return self.scope.tensors[node.arg.name].type.dtype
        return self._check_unread(node.arg).dtype

    def _check_unread(self, node: syntax.Node) -> Expr:
        reads, self._reads = self._reads, False
        value = self.strong(node)
        self._reads = reads
        return value

    def _extent(self, node: syntax.Extent) -> Typed:
        return literal_cast_int(self.extents[node.axis.name])

    def _dim_size(self, node: syntax.DimSize) -> Typed:
        shape = self.scope.tensor(node.tensor.name, Span(node.tensor.start, node.tensor.end)).type.shape
        if not 0 <= node.dim < len(shape):
            message = f"`{node.tensor.name}` has {len(shape)} dimensions; there is no dimension {node.dim}"
            self.refuse(ExprTypeError, "wrong-arguments", message, node)
        return literal_cast_int(shape[node.dim])

    def _like(self, node: syntax.Like) -> Typed:
        dtype = self._check_unread(node.model).dtype
        value = self.check(node.value)
        return literal_cast(value.value, dtype) if isinstance(value, Weak) else self._cast(value, dtype)

    def _up_cast(self, node: syntax.UpCast) -> Typed:
        arg = self.strong(node.arg)
        return self._cast(arg, _UP_CASTS.get(arg.dtype, arg.dtype))

    def _no_value(self, node: syntax.Text | syntax.Group | syntax.TypeOf) -> Typed:
        what = {syntax.Text: "a quoted name", syntax.Group: "a list", syntax.TypeOf: "a type"}[type(node)]
        self.refuse(ExprTypeError, "type-error", f"{what} is not a value", node)


def literal_cast_int(value: int) -> Cast:
    """Return an extent as a strong int32, or int64 if necessary."""
    return literal_cast(value, DType.INT32 if holds(value, DType.INT32) else DType.INT64)
