"""Expressions → C text, where some tensors are variables and functions are those that vectors have."""

from __future__ import annotations

from dataclasses import dataclass, field

from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.helpers import Helper
from roller_svc.codegen.ranges import fold
from roller_svc.codegen.scalar import Scalar
from roller_svc.codegen.vector import register_name
from roller_svc.codegen.vector_helpers import UNSIGNED, c_helper, library_of
from roller_svc.codegen.vector_math import has_function
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Load, Op, OpKind
from roller_svc.ir.kernel import RuntimeCheck


class StaysArrayError(Exception):
    """A storage node that was to be variables is indexed by something that is not known: it must be an array."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor


@dataclass(slots=True)
class CScalar(Scalar):
    """Reads single lanes of vector variables: acc_0[3]. Functions that vectors have are ours for single values too."""

    registers: dict[str, int] = field(default_factory=dict)

    def described(self, name: str) -> Helper:
        if (function := library_of(name)) is not None:
            self.library[function] = None
        return c_helper(name)

    def library_function(self, function: str, dtype: DType) -> str:
        if has_function(function, dtype):
            return self.helper(f"{function}_{dialects.SHORT[dtype]}")
        return Scalar.library_function(self, function, dtype)

    def ours(self, base: str, dtype: DType) -> str:
        if has_function(base, dtype):
            return self.helper(f"{base}_{dialects.SHORT[dtype]}")
        return Scalar.ours(self, base, dtype)

    def _op(self, op: Op) -> str:
        return self._word(op) if op.kind is OpKind.WORD else Scalar._op(self, op)

    def _word(self, op: Op) -> str:
        bits = op.args[0].dtype.bits
        narrow = dialects.C.storage_type(UNSIGNED[bits])
        parts = [f"(unsigned int)({narrow})({self.stored(arg, arg.dtype)})" for arg in op.args]
        return f"(int)({' | '.join(f'{part} << {i * bits}' if i else part for i, part in enumerate(parts))})"

    def numbered(self, tensor: str, d: int, size: int, text: str) -> int:
        """Vectors that follow each other check the same index again."""
        check = RuntimeCheck(tensor, d, size, text)
        return self.checks.index(check) if check in self.checks else Scalar.numbered(self, tensor, d, size, text)

    def load(self, load: Load) -> str:
        lanes = self.registers.get(load.tensor)
        if lanes is None:
            return Scalar.load(self, load)
        place = self.places[load.tensor]
        known = [fold(i, self.values) for i in load.index]
        if not all(isinstance(k, Const) for k in known):
            raise StaysArrayError(load.tensor)
        index = [int(k.value) for k in known if isinstance(k, Const)]
        return f"{register_name(place.identifier, index, lanes)}[{index[-1] % lanes}]"
