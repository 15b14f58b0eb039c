"""Typed scalar expressions: the right-hand sides, guards and indices of statements.

Every node knows its dtype. The checker has made every conversion explicit: the arguments of an `Op` already have one
common operand type. Arithmetic on float16, bfloat16 and float8 happens in float32 and only a `Cast` written by the
caller, or a store, rounds; an `implicit` Cast converts the value and need not round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, is_
from typing import Any

from roller_svc.ir.dtype import DType


class OpKind(Enum):
    """Operators and functions. The value is the name a program would use."""

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
    # comparisons and logic: int8 0 or 1. LAND and LOR evaluate the right only when the left does not decide.
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
    # what lowering for CPUs makes of neighbours along k; no program has these
    WORD = "word"  # elements of 8 or 16 bits side by side, the first in the lowest bits -> int32
    # sum + the products of two words' elements: bytes, the first word's unsigned, the second's signed, for int32 sums,
    # which wrap; bfloat16 for float32
    DOT = "dot"

    __hash__ = object.__hash__


COMPARISONS = frozenset({OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE, OpKind.EQ, OpKind.NE})


@dataclass(frozen=True, slots=True)
class Const:
    """A number in the type its context gave it. `value` is a float exactly when `dtype` is one."""

    value: int | float
    dtype: DType


@dataclass(frozen=True, slots=True)
class AxisRef:
    """The current value of an axis (in a schedule tree: of a loop). int32."""

    name: str

    @property
    def dtype(self) -> DType:
        return DType.INT32


@dataclass(frozen=True, slots=True)
class Load:
    """tensor[index]. `checked[d]` is True where dimension d could not be proven inside and is checked at run time."""

    tensor: str
    index: tuple[Expr, ...]
    dtype: DType
    bounds_checked: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    kind: OpKind
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Cast:
    """Conversion to `dtype`. float -> integer truncates and saturates, NaN gives 0; to float8 saturates.

    An explicit one of integers to their own type is a cut: arithmetic below it may wrap (frontend/lang/cuts.py).
    """

    arg: Expr
    dtype: DType
    implicit: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether arithmetic of integers goes on through it, as if it were not there."""
        source, target = self.arg.dtype, self.dtype
        if source.is_float or target.is_float or target.bits < DType.INT32.bits:
            return False
        if source is target:
            return self.implicit
        low, high = target.integer_range
        return low <= source.integer_range[0] and source.integer_range[1] <= high


@dataclass(frozen=True, slots=True)
class Select:
    """`then` where `cond` is not 0, else `otherwise`; the branch not taken is never read. Both have `dtype`."""

    cond: Expr
    then: Expr
    otherwise: Expr
    dtype: DType


Expr = Const | AxisRef | Load | Op | Cast | Select


# A look into a table: printers ask this a hundred thousand times for a text, and matching takes twice as long.
_CHILDREN: Mapping[type, Callable[[Any], tuple[Expr, ...]]] = {
    Op: attrgetter("args"),
    Load: attrgetter("index"),
    Cast: lambda cast: (cast.arg,),
    Select: attrgetter("cond", "then", "otherwise"),
    Const: lambda _: (),
    AxisRef: lambda _: (),
}


def children(expr: Expr) -> tuple[Expr, ...]:
    """The operands of a node, left to right; a Load's are its indices."""
    return _CHILDREN[type(expr)](expr)


def iter_subexpressions(expr: Expr) -> Iterator[Expr]:
    """Every node below and including `expr`, parents first."""
    stack = [expr]
    while stack:
        node = stack.pop()
        yield node
        if operands := children(node):
            stack += operands[::-1]


def with_children(expr: Expr, new: tuple[Expr, ...]) -> Expr:
    """The same node over other operands (as many as `children` gives)."""
    match expr:
        case Op():
            return Op(expr.kind, new, expr.dtype)
        case Load():
            return Load(expr.tensor, new, expr.dtype, expr.bounds_checked)
        case Cast():
            return Cast(new[0], expr.dtype, expr.implicit)
        case Select():
            return Select(new[0], new[1], new[2], expr.dtype)
        case _:
            return expr


def rewrite(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Bottom-up: each node, its operands already rewritten, is replaced by change(node)."""
    operands = children(expr)
    if operands:
        new = tuple([rewrite(child, change) for child in operands])
        if not all(map(is_, new, operands)):
            expr = with_children(expr, new)
    return change(expr)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Every AxisRef whose name is in `values`, replaced."""
    if isinstance(expr, AxisRef):
        return values.get(expr.name, expr)
    operands = children(expr)
    new = tuple([substitute(child, values) for child in operands])
    return expr if all(map(is_, new, operands)) else with_children(expr, new)


def axes_of(expr: Expr) -> frozenset[str]:
    """Names of the axes that occur in the expression."""
    names, stack = set[str](), [expr]
    while stack:  # without walk's generator: printers ask this of every index, again and again
        node = stack.pop()
        if isinstance(node, AxisRef):
            names.add(node.name)
        else:
            stack += children(node)
    return frozenset(names)


def loads_of(expr: Expr) -> tuple[Load, ...]:
    """The loads in the expression, those inside indices too, in order of occurrence."""
    return tuple(node for node in iter_subexpressions(expr) if isinstance(node, Load))
