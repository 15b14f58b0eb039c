"""Typed scalar expressions: the right-hand sides, guards and indices of statements.

Every node has a dtype. The checker makes every conversion explicit: the arguments of an `Op` have one common operand
type. Arithmetic on float16, bfloat16 and float8 is done in float32. Only a `Cast` written by the caller, or a store,
rounds; an `implicit` Cast converts the value and need not round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, is_
from typing import Any

from roller_svc.ir.dtype import DType


class OpKind(Enum):
    """Operators and functions. The value is their name in the language."""

    # arithmetic: integers wrap
    ADD = "+"
    SUB = "-"
    MUL = "*"
    DIV = "/"  # floats only
    FLOORDIV = "//"  # integers only: floors, by zero gives 0
    MOD = "%"  # integers: floor-mod, by zero gives 0; floats: fmod
    NEG = "neg"
    SHL = "<<"
    SHR = ">>"
    # comparisons and logic: int8 0 or 1. LAND and LOR evaluate the right side only if the left one does not decide.
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="
    EQ = "=="
    NE = "!="
    LAND = "&"
    LOR = "|"
    LNOT = "~"
    # integer bits
    BITAND = "bitwise_and"
    BITOR = "bitwise_or"
    BITXOR = "bitwise_xor"
    BITNOT = "bitwise_not"
    # functions of one argument
    EXP = "exp"
    EXP2 = "exp2"
    EXPM1 = "expm1"
    LOG = "log"
    LOG2 = "log2"
    LOG10 = "log10"
    LOG1P = "log1p"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    RECIPROCAL = "reciprocal"
    SQUARE = "square"
    ABS = "abs"
    SIGN = "sign"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ASIN = "asin"
    ACOS = "acos"
    ATAN = "atan"
    SINH = "sinh"
    COSH = "cosh"
    TANH = "tanh"
    ASINH = "asinh"
    ACOSH = "acosh"
    ATANH = "atanh"
    ERF = "erf"
    NORMCDF = "normcdf"
    SIGMOID = "sigmoid"
    SILU = "silu"
    GELU = "gelu"
    RELU = "relu"
    SOFTPLUS = "softplus"
    FLOOR = "floor"  # float -> int32
    CEIL = "ceil"  # float -> int32
    RFLOOR = "rfloor"
    RCEIL = "rceil"
    ROUND = "round"
    TRUNC = "trunc"
    ISNAN = "isnan"  # int8
    ISINF = "isinf"  # int8
    # functions of two and three arguments
    MAX = "max"  # propagates NaN
    MIN = "min"
    FMAX = "fmax"  # ignores NaN
    FMIN = "fmin"
    POW = "pow"
    FMOD = "fmod"
    REMAINDER = "remainder"  # IEEE
    ATAN2 = "atan2"
    HYPOT = "hypot"
    FMA = "fma"
    CLIP = "clip"  # min(max(x, lo), hi)
    TRUNC_DIV = "trunc_div"  # integers: truncates, by zero gives 0
    # made by schedules for CPUs from consecutive elements along k; programs do not have these
    WORD = "word"  # adjacent elements of 8 or 16 bits, the first in the lowest bits -> int32
    # accumulator + the products of two words' elements. int32 (wraps): unsigned bytes of the first word, signed bytes
    # of the second. float32: bfloat16.
    DOT = "dot"
    DOT_PAIRS = "dot_pairs"  # the same of words of two int16, and an int32 (wraps)

    __hash__ = object.__hash__


COMPARISONS = frozenset({OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE, OpKind.EQ, OpKind.NE})


class _Known:
    """Keep the results of `axes_of` and `loads_of` for a node, which never changes: stages ask often."""

    __slots__ = ("axes", "loads")
    axes: frozenset[str]
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Const:
    """A number. `value` is a float exactly if `dtype` is a float type. 0.0 and -0.0 are two numbers."""

    value: int | float
    dtype: DType

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Const):
            return NotImplemented
        value, theirs = self.value, other.value
        if value is theirs:
            return self.dtype is other.dtype
        return self.dtype is other.dtype and value == theirs and (value != 0 or str(value) == str(theirs))


@dataclass(frozen=True, slots=True)
class AxisRef:
    """The value of an axis, in a schedule tree of a loop. int32."""

    name: str

    @property
    def dtype(self) -> DType:
        return DType.INT32


@dataclass(frozen=True, slots=True)
class Load(_Known):
    """tensor[index]."""

    tensor: str
    index: tuple[Expr, ...]
    dtype: DType
    bounds_checked: tuple[bool, ...] = ()  # dimensions that are checked at run time: not proven in bounds


@dataclass(frozen=True, slots=True)
class Op(_Known):
    kind: OpKind
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Cast(_Known):
    """Conversion to `dtype`. Float to integer truncates and saturates, and NaN gives 0. To float8 saturates.

    An explicit cast of an integer to its own type is a cut: arithmetic below it may wrap (frontend/lang/cuts.py).
    """

    arg: Expr
    dtype: DType
    implicit: bool = False

    @property
    def is_exact(self) -> bool:
        """Return whether integer arithmetic may ignore the cast."""
        source, target = self.arg.dtype, self.dtype
        if source.is_float or target.is_float or target.bits < DType.INT32.bits:
            return False
        if source is target:
            return self.implicit
        low, high = target.integer_range
        return low <= source.integer_range[0] and source.integer_range[1] <= high


@dataclass(frozen=True, slots=True)
class Select(_Known):
    """`then` where `cond` is not 0, else `otherwise`. The other branch is not read. Both have `dtype`.

    If it is restated, `then` is a product of which a factor has the condition, too, and `otherwise` is 0. A kernel may
    compute the product everywhere, or leave out the points where the condition fails.
    """

    cond: Expr
    then: Expr
    otherwise: Expr
    dtype: DType
    restated: bool = False


Expr = Const | AxisRef | Load | Op | Cast | Select
_NO_AXES = frozenset[str]()


# A table, because code generators call `children` often and matching takes twice as long.
_CHILDREN: Mapping[type, Callable[[Any], tuple[Expr, ...]]] = {
    Op: attrgetter("args"),
    Load: attrgetter("index"),
    Cast: lambda cast: (cast.arg,),
    Select: attrgetter("cond", "then", "otherwise"),
    Const: lambda _: (),
    AxisRef: lambda _: (),
}


def children(expr: Expr) -> tuple[Expr, ...]:
    """Return the operands of a node, left to right; of a Load its indices."""
    return _CHILDREN[type(expr)](expr)


def iter_subexpressions(expr: Expr) -> Iterator[Expr]:
    """Yield every node of `expr`, parents first."""
    stack = [expr]
    while stack:
        node = stack.pop()
        yield node
        if operands := children(node):
            stack += operands[::-1]


def with_children(expr: Expr, new: tuple[Expr, ...]) -> Expr:
    """Return the node with other operands (as many as `children` returns)."""
    match expr:
        case Op():
            return Op(expr.kind, new, expr.dtype)
        case Load():
            return Load(expr.tensor, new, expr.dtype, expr.bounds_checked)
        case Cast():
            return Cast(new[0], expr.dtype, expr.implicit)
        case Select():
            return Select(new[0], new[1], new[2], expr.dtype, expr.restated)
        case _:
            return expr


def rewrite(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Replace each node by change(node), bottom-up: its operands are rewritten already."""
    operands = children(expr)
    if operands:
        new = tuple([rewrite(child, change) for child in operands])
        if not all(map(is_, new, operands)):
            expr = with_children(expr, new)
    return change(expr)


def split_restated(expr: Expr) -> tuple[Expr, tuple[Expr, ...]]:
    """Return a product without its restated conditions, and these."""
    if not (isinstance(expr, Select) and expr.restated):
        return expr, ()
    product, conditions = split_restated(expr.then)
    return product, (expr.cond, *conditions)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace every AxisRef whose name is in `values`."""
    if isinstance(expr, AxisRef):
        return values.get(expr.name, expr)
    operands = children(expr)
    new = tuple([substitute(child, values) for child in operands])
    return expr if all(map(is_, new, operands)) else with_children(expr, new)


def convert(expr: Expr, dtype: DType) -> Expr:
    """Return an expression in a type, by an implicit conversion where it has another one."""
    return expr if expr.dtype is dtype else Cast(expr, dtype, implicit=True)


def axes_of(expr: Expr) -> frozenset[str]:
    """Return the names of the axes in the expression."""
    if isinstance(expr, Const):
        return _NO_AXES
    if isinstance(expr, AxisRef):
        return frozenset((expr.name,))
    try:
        return expr.axes
    except AttributeError:
        axes = _NO_AXES.union(*[axes_of(child) for child in children(expr)])
        object.__setattr__(expr, "axes", axes)
        return axes


def loads_of(expr: Expr) -> tuple[Load, ...]:
    """Return the loads in the expression, in indices too, in order of occurrence."""
    if isinstance(expr, Const | AxisRef):
        return ()
    try:
        return expr.loads
    except AttributeError:
        loads: tuple[Load, ...] = (expr,) if isinstance(expr, Load) else ()
        for child in children(expr):
            loads += loads_of(child)
        object.__setattr__(expr, "loads", loads)
        return loads
