"""Expressions → C, with tensors in vector variables and the elementary functions of vectors."""

from __future__ import annotations

from dataclasses import dataclass, field

from roller_svc.analysis.index_ranges import fold
from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.c.vector.elementary import has_function
from roller_svc.codegen.c.vector.helpers import UNSIGNED, c_helper, library_of
from roller_svc.codegen.c.vector.types import register_name
from roller_svc.codegen.c.vector.words import are_contiguous
from roller_svc.codegen.helpers import Helper
from roller_svc.codegen.scalar import Scalar
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Load, Op, OpKind
from roller_svc.ir.kernel import RuntimeCheck


class NotPromotableError(Exception):
    """A storage node cannot be promoted to vector variables: an index is not constant."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor


@dataclass(slots=True)
class CScalar(Scalar):
    """Prints lanes of vector variables (acc_0[3]), and scalar calls of the vector functions."""

    registers: dict[str, int] = field(default_factory=dict)

    def find_helper(self, name: str) -> Helper:
        if (function := library_of(name)) is not None:
            self.library[function] = None
        return c_helper(name)

    def library_function(self, function: str, dtype: DType) -> str:
        if has_function(function, dtype):
            return self.helper(f"{function}_{dialects.SHORT[dtype]}")
        return Scalar.library_function(self, function, dtype)

    def typed_helper(self, base: str, dtype: DType) -> str:
        if has_function(base, dtype):
            return self.helper(f"{base}_{dialects.SHORT[dtype]}")
        return Scalar.typed_helper(self, base, dtype)

    def _op(self, op: Op) -> str:
        return self._word(op) if op.kind is OpKind.WORD else Scalar._op(self, op)

    def _word(self, op: Op) -> str:
        bits, first = op.args[0].dtype.bits, op.args[0]
        is_whole = isinstance(first, Load) and len(op.args) * bits == op.dtype.bits
        if isinstance(first, Load) and is_whole and are_contiguous(op.args, self.buffers, self.registers):
            buffer = self.buffers[first.tensor]
            return f"{self.helper('word_at')}({buffer.identifier} + {self.address(buffer, first.index)})"
        narrow = dialects.C.storage_type(UNSIGNED[bits])
        parts = [f"(unsigned int)({narrow})({self.to_element(arg, arg.dtype)})" for arg in op.args]
        return f"(int)({' | '.join(f'{part} << {i * bits}' if i else part for i, part in enumerate(parts))})"

    def add_check(self, tensor: str, d: int, size: int, text: str) -> int:
        """Add a check once: consecutive vectors check the same index."""
        check = RuntimeCheck(tensor, d, size, text)
        return self.checks.index(check) if check in self.checks else Scalar.add_check(self, tensor, d, size, text)

    def load(self, load: Load) -> str:
        lanes = self.registers.get(load.tensor)
        if lanes is None:
            return Scalar.load(self, load)
        buffer = self.buffers[load.tensor]
        known = [fold(i, self.values) for i in load.index]
        if not all(isinstance(k, Const) for k in known):
            raise NotPromotableError(load.tensor)
        index = [int(k.value) for k in known if isinstance(k, Const)]
        return f"{register_name(buffer.identifier, index, lanes)}[{index[-1] % lanes}]"
