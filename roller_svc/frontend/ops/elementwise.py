"""Elementwise operators: arithmetic, comparisons, functions, activations; shapes broadcast by numpy's rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from roller_svc.frontend.ops.operator import Call, Operator
from roller_svc.frontend.ops.parameters import choice, dtype, flag, number, required, unbounded
from roller_svc.frontend.ops.text import broadcast, broadcast_shape, statement
from roller_svc.frontend.ops.text import number as literal
from roller_svc.ir.dtype import DType

# Functions of the language that are operators of the same name.
# fmt: off
_PLAIN = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "abs", "sign",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "erf", "normcdf", "sigmoid", "silu", "relu", "softplus", "round", "trunc", "isnan",
)
# fmt: on
# Name → expression of the operands' elements.
_UNARY = {
    **{name: f"{name}({{0}})" for name in _PLAIN},
    "identity": "{0}",
    "neg": "-{0}",
    "floor": "rfloor({0})",
    "ceil": "rceil({0})",
    "softsign": "{0} / (1.0 + abs({0}))",
    "mish": "{0} * tanh(softplus({0}))",
    "hard_swish": "{0} * clip({0} / 6.0 + 0.5, 0.0, 1.0)",
    "logical_not": "~{0}",
    "bitwise_not": "bitwise_not({0})",
}
_CHAINS = {"add": "+", "mul": "*", "logical_and": "&", "logical_or": "|"}
_BINARY = {
    "sub": "{0} - {1}",
    "pow": "pow({0}, {1})",
    "fmod": "fmod({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "atan2": "atan2({0}, {1})",
    "hypot": "hypot({0}, {1})",
    "shift_left": "{0} << {1}",
    "shift_right": "{0} >> {1}",
    "bitwise_and": "bitwise_and({0}, {1})",
    "bitwise_or": "bitwise_or({0}, {1})",
    "bitwise_xor": "bitwise_xor({0}, {1})",
    "logical_xor": "({0} != 0) != ({1} != 0)",
    "prelu": "where({0} >= 0, {0}, {0} * {1})",
    "silu_mul": "silu({0}) * {1}",
    "gelu_mul": "gelu({0}) * {1}",
}
_COMPARISONS = {
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=",
}  # fmt: skip
# The largest integers that round to the type's maximum: half a step above it if its last bit is 0, else less.
_E4M3_MAX, _E5M2_MAX = 464.0, 61439.0
_BOOLS = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not", "isnan"})


def map_elements(call: Call, body: Callable[[Sequence[str]], str], result: DType | None = None) -> str:
    """Return one elementwise statement over the operands' broadcast shape."""
    shape = broadcast_shape(call, [operand.shape for operand in call.operands])
    axes = call.axes(len(shape))
    return statement(call.output, axes, "=", body([broadcast(o, axes, shape) for o in call.operands]), dtype=result)


def _format(call: Call, pattern: str, *, as_bool: bool) -> str:
    return map_elements(call, lambda values: pattern.format(*values), DType.BOOL if as_bool else None)


def _chain(call: Call, sign: str, *, as_bool: bool) -> str:
    return map_elements(call, lambda values: f" {sign} ".join(values), DType.BOOL if as_bool else None)


def _max_min(call: Call) -> str:
    """Return max or min of any number of operands; the language's functions take 16."""

    def body(values: Sequence[str]) -> str:
        if len(values) == 1:
            return values[0]
        remaining = list(values)
        while len(remaining) > 16:
            remaining = [f"{call.operator}({', '.join(remaining[:16])})", *remaining[16:]]
        return f"{call.operator}({', '.join(remaining)})"

    return map_elements(call, body)


def _mean(call: Call) -> str:
    return map_elements(call, lambda values: f"({' + '.join(values)}) / {float(len(values))!r}")


def _mod(call: Call) -> str:
    """Return the remainder with the divisor's sign, as in Python; the language's `%` of floats has the dividend's."""
    if not any(operand.dtype.is_float for operand in call.operands):
        return map_elements(call, " % ".join)
    pattern = "fmod({0}, {1}) + where((fmod({0}, {1}) != 0) & ((fmod({0}, {1}) < 0) != ({1} < 0)), {1}, 0.0)"
    return map_elements(call, lambda values: pattern.format(*values))


def _divide(call: Call) -> str:
    whole = not any(operand.dtype.is_float for operand in call.operands)
    rounding = call.text("rounding")
    if rounding == "true":
        return map_elements(call, lambda v: f"{v[0]}.cast(`float32`) / {v[1]}" if whole else f"{v[0]} / {v[1]}")
    if not whole:
        function = "rfloor" if rounding == "floor" else "trunc"
        return map_elements(call, lambda v: f"{function}({v[0]} / {v[1]})")
    return map_elements(call, lambda v: f"{v[0]} // {v[1]}" if rounding == "floor" else f"trunc_div({v[0]}, {v[1]})")


def _gelu(call: Call) -> str:
    pattern = "gelu({0})"
    if call.text("approximate") == "tanh":
        pattern = "0.5 * {0} * (1.0 + tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))"
    return _format(call, pattern, as_bool=False)


def _clip(call: Call) -> str:
    kind = call.x.dtype

    def body(values: Sequence[str]) -> str:
        value = values[0]
        if call.has("least"):
            value = f"max({value}, {literal(call.number('least'), kind)})"
        return f"min({value}, {literal(call.number('most'), kind)})" if call.has("most") else value

    return map_elements(call, body)


def _is_inf(call: Call) -> str:
    negative, positive = call.flag("negative"), call.flag("positive")
    pattern = "isinf({0})" if negative or positive else "isinf({0}) & 0"
    if negative is not positive:
        pattern = f"isinf({{0}}) & ({{0}} {'>' if positive else '<'} 0)"
    return map_elements(call, lambda values: pattern.format(*values), DType.BOOL)


def _cast(call: Call) -> str:
    kind, source = DType(call.text("dtype")), call.x.dtype
    if kind is DType.BOOL and source is not kind:
        return map_elements(call, lambda values: f"{values[0]} != 0", DType.BOOL)
    saturate = call.flag("saturate")
    return map_elements(call, lambda values: cast_element(call, values[0], source, kind, saturate=saturate))


def cast_element(call: Call, value: str, source: DType, target: DType, *, saturate: bool) -> str:
    """Return a value of the source type in the target type, which is not bool."""
    if source is target:
        return value
    if not saturate:
        if becomes_infinite(source, target):
            raise call.wrong_parameter(f"saturate=false makes infinities of {source.value}, which no cast to {target.value} does")
        if target is DType.FLOAT8_E4M3FN and _max_magnitude(source) > _E4M3_MAX:
            x = value if source.is_float else f"{value}.cast(`float32`)"
            value = f"where(abs({x}) <= {_E4M3_MAX!r}, {x}, sqrt(const(-1.0, `float32`)))"
    return f"{value}.cast(`{target.value}`)"


def becomes_infinite(source: DType, target: DType) -> bool:
    """Whether a non-saturating cast may give infinities, which casts of the language never do."""
    return target is DType.FLOAT8_E5M2 and source is not target and _max_magnitude(source) > _E5M2_MAX


def _max_magnitude(dtype: DType) -> float:
    """Return the largest magnitude of a type, infinity included."""
    if dtype.is_float:
        return 448.0 if dtype is DType.FLOAT8_E4M3FN else math.inf
    return float(max(map(abs, dtype.integer_range)))


def _where(call: Call) -> str:
    return map_elements(call, lambda values: f"where({values[0]} != 0, {values[1]}, {values[2]})")


def _with_numbers(call: Call, pattern: str) -> str:
    """Format a pattern of the element `x` and of the call's parameters."""
    numbers = {name: repr(float(value)) for name, value in call.parameters.items() if isinstance(value, int | float)}
    return map_elements(call, lambda values: pattern.format(x=values[0], **numbers))


def _about(pattern: str) -> str:
    return f"`{pattern.format('x', 'y')}`, elementwise."


_SHAPED = {
    "leaky_relu": ("where({x} >= 0, {x}, {alpha} * {x})", {"alpha": 0.01}),
    "elu": ("where({x} >= 0, {x}, {alpha} * expm1({x}))", {"alpha": 1.0}),
    "celu": ("where({x} >= 0, {x}, {alpha} * expm1({x} / {alpha}))", {"alpha": 1.0}),
    "selu": (
        "{gamma} * where({x} >= 0, {x}, {alpha} * expm1({x}))",
        {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805},
    ),
    "hard_sigmoid": ("clip({alpha} * {x} + {beta}, 0.0, 1.0)", {"alpha": 0.2, "beta": 0.5}),
    "shrink": (
        "where({x} < -{lambd}, {x} + {bias}, where({x} > {lambd}, {x} - {bias}, 0.0))",
        {"lambd": 0.5, "bias": 0.0},
    ),
    "thresholded_relu": ("where({x} > {alpha}, {x}, 0.0)", {"alpha": 1.0}),
}


OPERATORS = (
    *(
        Operator(name, _about(pattern), ("x",), partial(_format, pattern=pattern, as_bool=name in _BOOLS))
        for name, pattern in _UNARY.items()
    ),
    *(
        Operator(
            name, f"`x {sign} y`, elementwise; more operands are chained.", ("x", "y"),
            partial(_chain, sign=sign, as_bool=name in _BOOLS), needed=1, more=True,
        )
        for name, sign in _CHAINS.items()
    ),
    *(
        Operator(name, _about(pattern), ("x", "y"), partial(_format, pattern=pattern, as_bool=name in _BOOLS))
        for name, pattern in _BINARY.items()
    ),
    *(
        Operator(
            name, f"`x {sign} y`, elementwise; the result is bool.", ("x", "y"),
            partial(_format, pattern=f"{{0}} {sign} {{1}}", as_bool=True),
        )
        for name, sign in _COMPARISONS.items()
    ),
    *(
        Operator(name, f"`{name}(x, y, ...)`; NaN is handed on.", ("x", "y"), _max_min, needed=1, more=True)
        for name in ("max", "min")
    ),
    Operator("mod", "Remainder with the sign of `y`, elementwise, as Python's `%`.", ("x", "y"), _mod),
    Operator("mean", "Mean of the operands' elements.", ("x", "y"), _mean, needed=1, more=True),
    Operator(
        "div",
        "`x / y`, elementwise.",
        ("x", "y"),
        _divide,
        (choice("rounding", "true", ("true", "floor", "trunc"), "what is made of the quotient; `true` is a float"),),
    ),
    Operator("gelu", "Gaussian error linear unit.", ("x",), _gelu,
             (choice("approximate", "none", ("none", "tanh"), "formed with erf, or with tanh"),)),
    Operator("isinf", "Whether an element is infinite.", ("x",), _is_inf,
             (flag("negative", "-inf is", default=True), flag("positive", "inf is", default=True))),
    Operator("clip", "Elements kept between two numbers.", ("x",), _clip,
             (unbounded("least", None, "the lower one"), unbounded("most", None, "the upper one"))),
    Operator("cast", "Elements in another type.", ("x",), _cast,
             (required(dtype("dtype", None, "the type")),
              flag("saturate", "what is beyond float8 becomes its greatest number, else no number", default=True))),
    Operator("where", "`x` where `condition` is not 0, else `y`.", ("condition", "x", "y"), _where),
    *(
        Operator(
            name, f"`{pattern.format(x='x', **{each: each for each in numbers})}`, elementwise.", ("x",),
            partial(_with_numbers, pattern=pattern),
            tuple(number(parameter, default, f"`{parameter}` above") for parameter, default in numbers.items()),
        )
        for name, (pattern, numbers) in _SHAPED.items()
    ),
)  # fmt: skip
