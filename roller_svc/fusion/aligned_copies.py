"""Contractions of misaligned inputs → copies with rows of whole 16 bytes, and contractions of the copies.

TMA needs strides that are multiples of 16 bytes. Other tensors are copied by threads in every block that reads them,
element by element if a row has an odd number of 16-bit elements. An aligned copy pays that cost once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.operand import value_dtype
from roller_svc.fusion.contraction import Contraction
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Select, rewrite
from roller_svc.ir.index import lt, num
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorProgram, TensorType
from roller_svc.ir.tensor_map import STRIDE_BYTES

ContractionOf = Callable[[TensorExpr], Contraction | None]
NARROW_BITS = 16  # widest type that wgmma takes without conversion
MIN_ROW_BYTES = 32  # of a swizzled row of a box (PTX ISA, "Shared Memory Matrix Layout")


@dataclass(frozen=True, slots=True)
class AlignedStatements:
    """Statements with aligned copies."""

    statements: tuple[TensorExpr, ...]
    copies: Mapping[str, TensorType]  # types of the copies


def may_align(program: TensorProgram) -> bool:
    """Return whether an input has rows that TMA cannot copy."""
    return any(_is_unaligned(type_) for _, type_ in program.inputs)


def insert_aligned_copies(
    statements: Sequence[TensorExpr], inputs: Mapping[str, TensorType], contraction_of: ContractionOf
) -> AlignedStatements:
    """Insert aligned copies of `inputs` whose rows TMA cannot copy, and let contractions read these.

    `contraction_of` returns the contraction of a statement that gets tiles of its own.
    """
    copies: dict[str, TensorExpr] = {}
    result: list[TensorExpr] = []
    for statement in statements:
        contraction = contraction_of(statement)
        factors = () if contraction is None else (_memory_value(contraction.a), _memory_value(contraction.b))
        for factor in factors:
            if isinstance(factor, Load) and not any(factor.bounds_checked) and _is_unaligned(inputs.get(factor.tensor)):
                copies.setdefault(factor.tensor, _copy(factor.tensor, inputs[factor.tensor]))
        result.append(_read_copies(statement, copies) if contraction is not None else statement)
    return AlignedStatements((*copies.values(), *result), {copy.output: copy.type for copy in copies.values()})


def _is_unaligned(type_: TensorType | None) -> bool:
    if type_ is None:
        return False
    row_bytes = type_.shape[-1] * type_.dtype.bytes if len(type_.shape) > 1 else 0
    return type_.dtype.bits <= NARROW_BITS and row_bytes >= MIN_ROW_BYTES and row_bytes % STRIDE_BYTES != 0


def _memory_value(factor: Expr) -> Expr:
    """Return the operand as it is in memory, without lossless conversions."""
    is_lossless = isinstance(factor, Cast) and value_dtype(factor) is value_dtype(factor.arg)
    return _memory_value(factor.arg) if isinstance(factor, Cast) and is_lossless else factor


def _copy(tensor: str, type_: TensorType) -> TensorExpr:
    """Return a map that pads the rows with zeros."""
    *outer, row = type_.shape
    row_granule = STRIDE_BYTES // type_.dtype.bytes
    shape = (*outer, -(-row // row_granule) * row_granule)
    axes = tuple(Axis(f"{tensor}.{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(shape))
    index = tuple(AxisRef(axis.name) for axis in axes)
    zero = Const(0.0 if type_.dtype.is_float else 0, type_.dtype)
    body = Select(lt(index[-1], num(row)), Load(tensor, index, type_.dtype), zero, type_.dtype)
    name = f"{tensor}.aligned"
    return TensorExpr(name, name, StatementKind.MAP, TensorType(type_.dtype, shape), axes, index, body)


def _read_copies(statement: TensorExpr, copies: Mapping[str, TensorExpr]) -> TensorExpr:
    def use_copy(node: Expr) -> Expr:
        if isinstance(node, Load) and node.tensor in copies and not any(node.bounds_checked):
            return replace(node, tensor=copies[node.tensor].output)
        return node

    return replace(statement, body=rewrite(statement.body, use_copy))
