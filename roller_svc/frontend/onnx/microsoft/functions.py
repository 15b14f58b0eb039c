"""Operators of com.microsoft that are functions of ONNX operators, in ONNX's text syntax."""

from __future__ import annotations

from functools import cache

from onnx import FunctionProto, parser

_HEAD = '<domain: "com.microsoft", opset_import: ["" : %d, "com.microsoft" : 1]> %s'


def _quantized(operator: str, attributes: str = "") -> str:
    """Return the body of an operator on one quantized tensor."""
    return (
        f"(X, Xs, Xz, Ys, Yz) => (Y) {{ x = DequantizeLinear(X, Xs, Xz) y = {operator}{attributes}(x) "
        "Y = QuantizeLinear(y, Ys, Yz) }"
    )


def _quantized_pair(operator: str) -> str:
    return (
        "(A, As, Az, B, Bs, Bz, Cs, Cz) => (C) { a = DequantizeLinear(A, As, Az) b = DequantizeLinear(B, Bs, Bz) "
        f"c = {operator}(a, b) C = QuantizeLinear(c, Cs, Cz) }}"
    )


# Operator → attributes, inputs, outputs and body. Inputs that a node omits are omitted in the body.
_BODIES = {
    "BiasAdd": "(X, bias, skip) => (Y) { x = Add(X, bias) Y = Add(x, skip) }",
    "BiasGelu": "(A, B) => (C) { x = Add(A, B) C = Gelu(x) }",
    "BiasSplitGelu": "(X, bias) => (Y) { x = Add(X, bias) a, b = Split <axis = -1, num_outputs = 2> (x) g = Gelu(b) "
                     "Y = Mul(a, g) }",
    "DynamicQuantizeMatMul": "(A, B, Bs, Bz, bias) => (Y) { a, s, z = DynamicQuantizeLinear(A) "
                             "Y = com.microsoft.MatMulIntegerToFloat(a, B, s, Bs, z, Bz, bias) }",
    "FastGelu": '(X, bias) => (Y) { x = Sum(X, bias) Y = Gelu <approximate = "tanh"> (x) }',
    "QLinearAdd": _quantized_pair("Add"),
    "QLinearLeakyRelu": "<alpha: float = 0.01>" + _quantized("LeakyRelu", "<alpha: float = @alpha>"),
    "QLinearMul": _quantized_pair("Mul"),
    "QLinearReduceMean": "<axes, keepdims: int = 1>"
                         + _quantized("ReduceMean", "<axes: ints = @axes, keepdims: int = @keepdims>"),
    "QLinearSigmoid": _quantized("Sigmoid"),
    "QLinearWhere": "(C, X, Xs, Xz, Y, Ys, Yz, Zs, Zz) => (Z) { x = DequantizeLinear(X, Xs, Xz) "
                    "y = DequantizeLinear(Y, Ys, Yz) z = Where(C, x, y) Z = QuantizeLinear(z, Zs, Zz) }",
    "QuickGelu": "<alpha: float = 1.702>(X) => (Y) { k = Constant <value_float: float = @alpha> () c = CastLike(k, X) "
                 "x = Mul(c, X) g = Sigmoid(x) Y = Mul(X, g) }",
}  # fmt: skip
_OPSETS = {"QLinearReduceMean": 13}  # its axes are an attribute
_LATEST = 21
FUNCTIONS = frozenset(_BODIES)


@cache
def function_named(op_type: str) -> FunctionProto:
    """Return the function that an operator of FUNCTIONS is."""
    opset, signature = _OPSETS.get(op_type, _LATEST), _BODIES[op_type]
    head, attributes = _HEAD % (opset, op_type), ""
    if signature.startswith("<"):
        attributes, _, signature = signature.partition(">")
        attributes += "> "
    function: FunctionProto = parser.parse_function(f"{head} {attributes}{signature}")
    return function
