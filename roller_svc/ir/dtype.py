"""Element types: names, sizes, promotion."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Element types in promotion order: the earlier of two wins."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    UINT64 = "uint64"
    INT32 = "int32"
    UINT32 = "uint32"
    INT16 = "int16"
    UINT16 = "uint16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    # Faster than Enum's hash of the member's name: types are parts of many keys.
    __hash__ = object.__hash__

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def bytes(self) -> int:
        return _BITS[self] // 8

    @property
    def is_float(self) -> bool:
        return _RANK[self] < _RANK[DType.INT64]

    @property
    def is_signed(self) -> bool:
        return self.is_float or self in _SIGNED

    @property
    def is_narrow_float(self) -> bool:
        """Return whether it is float16, bfloat16 or float8: arithmetic on these is done in float32."""
        return _RANK[DType.FLOAT32] < _RANK[self] < _RANK[DType.INT64]

    @property
    def compute(self) -> DType:
        """Return the type of arithmetic on this type: float32 for narrow floats."""
        return DType.FLOAT32 if self.is_narrow_float else self

    @property
    def integer_range(self) -> tuple[int, int]:
        """Return the lowest and the highest value of an integer type."""
        return _INTEGER_RANGE[self]


_BITS = {
    DType.FLOAT64: 64, DType.FLOAT32: 32, DType.BFLOAT16: 16, DType.FLOAT16: 16,
    DType.FLOAT8_E4M3FN: 8, DType.FLOAT8_E5M2: 8,
    DType.INT64: 64, DType.UINT64: 64, DType.INT32: 32, DType.UINT32: 32,
    DType.INT16: 16, DType.UINT16: 16, DType.INT8: 8, DType.UINT8: 8, DType.BOOL: 8,
}  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(DType)}
_SIGNED = frozenset({DType.INT64, DType.INT32, DType.INT16, DType.INT8})
_INTEGER_RANGE = {
    dtype: (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype in _SIGNED else (0, (1 << bits) - 1)
    for dtype, bits in (_BITS | {DType.BOOL: 1}).items()
    if not dtype.is_float
}

ALIASES: dict[str, DType] = {
    "float": DType.FLOAT32, "double": DType.FLOAT64, "half": DType.FLOAT16, "int": DType.INT32,
    "short": DType.INT16, "char": DType.INT8, "fp64": DType.FLOAT64, "fp32": DType.FLOAT32, "fp16": DType.FLOAT16,
    "bf16": DType.BFLOAT16, "f64": DType.FLOAT64, "f32": DType.FLOAT32, "f16": DType.FLOAT16,
    "float8_e4m3": DType.FLOAT8_E4M3FN,
}  # fmt: skip

_BY_NAME = {dtype.value: dtype for dtype in DType} | ALIASES


def dtype_named(name: str) -> DType | None:
    """Return the type with that name or alias, or None."""
    return _BY_NAME.get(name)


def promote(a: DType, b: DType) -> DType:
    """Return the type of an operation on the two (docs/language.md, Types)."""
    return a if _RANK[a] <= _RANK[b] else b
