"""Vector types of C kernels, and the variables of such types."""

from __future__ import annotations

from roller_svc.codegen.dialect import SHORT
from roller_svc.ir.dtype import DType


def register_name(identifier: str, index: list[int], lanes: int) -> str:
    """acc, (2, 32), 16 → acc_2_2: the variable that holds elements 32 to 47 of row 2."""
    return "_".join([identifier, *(str(i) for i in index[:-1]), str(index[-1] // lanes)])


def vector_type(dtype: DType, lanes: int) -> str:
    return f"v{SHORT[dtype]}x{lanes}"


def vector_header(dtype: DType, lanes: int, c_type: str) -> str:
    """Unaligned vector type: dense tensors give no more than element alignment."""
    name = vector_type(dtype, lanes)
    attributes = f"vector_size({dtype.bytes * lanes}), aligned({dtype.bytes}), may_alias"
    return f"typedef {c_type} {name} __attribute__(({attributes}));"
