"""Dequantized constant → its integers, which a product dequantizes itself, two of 4 bits in a byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from roller_svc.frontend.graph_builder import DEQUANTIZE
from roller_svc.graph.weights import Array, Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, loads_of, rewrite, substitute
from roller_svc.ir.graph import FUSED, Constant, OpNode
from roller_svc.ir.index import div, mod, mul, sub
from roller_svc.ir.index import num as number
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram, TensorType

_BYTES = (DType.INT8, DType.UINT8)
FIELD_BITS = 4
_FIELDS = DType.UINT8.bits // FIELD_BITS


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A float32 constant as a function of its index, before it is folded. Loads have names of tensors of the graph."""

    index: tuple[AxisRef, ...]
    body: Expr
    integers: str  # the tensor that is dequantized

    def at(self, index: tuple[Expr, ...]) -> Expr:
        """Return the element at an index."""
        return substitute(self.body, {axis.name: place for axis, place in zip(self.index, index, strict=True)})

    def inlined(
        self, node: OpNode, statement: TensorExpr, load: Load, weights: Weights, constants: dict[str, Constant]
    ) -> OpNode | None:
        """Return a node whose product has the element in place of a load of it; None if no form of it is known.

        Constants of the graph may grow by integers of 4 bits.
        """
        named = {name: (type_, tensor) for (name, type_), tensor in zip(node.program.inputs, node.inputs, strict=True)}
        del named[load.tensor]
        integers, names = self._store(weights, constants), dict[str, str]()
        for read in dict.fromkeys((integers, *(each.tensor for each in loads_of(self.body) if each.tensor != self.integers))):
            name = f"w{len(names)}"
            while name in named or name in node.program.types:
                name += "_"
            names[read] = name
            named[name] = (constants[read].type, read)

        fields = {tensor for tensor in names if integers != self.integers and _holds_fields(constants[tensor], weights)}

        def change(expr: Expr) -> Expr:
            match expr:
                case Cast(arg=Load(tensor=tensor) as read, dtype=dtype) if tensor == self.integers:
                    pass
                case Load(tensor=tensor, index=index, dtype=dtype) if tensor in names:
                    value = Load(names[tensor], index, dtype)
                    return Cast(_masked(Cast(value, DType.INT32, implicit=True)), dtype) if tensor in fields else value
                case _:
                    return expr
            if integers == self.integers:
                return replace(expr, arg=replace(read, tensor=names[integers]))
            field = _field(names[integers], read.index, read.dtype)
            return field if dtype is DType.INT32 else Cast(field, dtype)

        element = rewrite(self.at(load.index), change)
        if any(read.tensor == self.integers for read in loads_of(element)):
            return None
        body = rewrite(statement.body, lambda expr: element if expr == load else expr)
        statements = tuple(replace(each, body=body) if each is statement else each for each in node.program.statements)
        inputs = tuple((name, type_) for name, (type_, _) in named.items())
        program = TensorProgram(inputs, statements, node.program.outputs)
        return OpNode(node.name, FUSED, program, tuple(tensor for _, tensor in named.values()), node.outputs)

    def _store(self, weights: Weights, constants: dict[str, Constant]) -> str:
        """Return the tensor of integers as a product reads them: two in a byte if four bits hold each of them."""
        name, constant = f"{self.integers}.fields", constants[self.integers]
        array = weights.array(constant)
        least = -(1 << FIELD_BITS - 1) if constant.type.dtype.is_signed else 0
        if not array.ndim or int(array.min()) < least or int(array.max()) >= least + (1 << FIELD_BITS):
            return self.integers
        fields = _packed((array.astype(np.int16) - least).astype(np.uint8))
        constants[name] = weights.add_typed(fields, TensorType(DType.UINT8, fields.shape))
        return name


def packed_weight(node: OpNode, known: Mapping[str, PackedWeight], constants: Mapping[str, Constant]) -> PackedWeight | None:
    """Return a node's result as a dequantized constant, perhaps one whose dimensions change places; None for others."""
    (statement, *more), (*_, last) = node.program.statements, node.output_types
    index = tuple(each for each in statement.index if isinstance(each, AxisRef))
    if more or len(node.outputs) != 1 or statement.kind is not StatementKind.MAP or last.dtype is not DType.FLOAT32:
        return None
    if len(index) < len(statement.index) or len(index) < 2:
        return None
    tensors = {name: tensor for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)}
    if node.operator == DEQUANTIZE:
        is_constant = all(tensor in constants for tensor in node.inputs)
        if not is_constant or constants[node.inputs[0]].type.dtype not in _BYTES:
            return None
        body = rewrite(statement.body, lambda expr: replace(expr, tensor=tensors[expr.tensor]) if isinstance(expr, Load) else expr)
        return PackedWeight(index, body, node.inputs[0])
    match statement.body:
        case Load(tensor=tensor, index=places) if tensors[tensor] in known and len(places) == len(index) and {*places} == {*index}:
            before = known[tensors[tensor]]
            return PackedWeight(index, before.at(places), before.integers)
        case _:
            return None


def _packed(fields: Array) -> Array:
    """Return bytes of two fields each, along the last dimension, the first in the lower bits."""
    padded = np.zeros((*fields.shape[:-1], -(-fields.shape[-1] // _FIELDS) * _FIELDS), np.uint8)
    padded[..., : fields.shape[-1]] = fields
    packed: Array = padded[..., ::_FIELDS] | padded[..., 1::_FIELDS] << FIELD_BITS
    return packed


def _holds_fields(constant: Constant, weights: Weights) -> bool:
    """Return whether four bits hold each number of a constant: zero points, which a mask then bounds."""
    return constant.type.dtype is DType.UINT8 and int(weights.array(constant).max()) < 1 << FIELD_BITS


def _masked(value: Expr) -> Expr:
    return Op(OpKind.BITAND, (value, Const((1 << FIELD_BITS) - 1, DType.INT32)), DType.INT32)


def _field(tensor: str, index: tuple[Expr, ...], dtype: DType) -> Expr:
    """Return the integer of a type whose field is at an index of the tensor of bytes."""
    *outer, last = index
    word = Cast(Load(tensor, (*outer, div(last, _FIELDS)), DType.UINT8), DType.INT32, implicit=True)
    shifted = Op(OpKind.SHR, (word, mul(mod(last, _FIELDS), number(FIELD_BITS))), DType.INT32)
    value = _masked(shifted)
    return sub(value, number(1 << FIELD_BITS - 1)) if dtype.is_signed else value
