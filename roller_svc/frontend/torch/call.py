"""A call of an ATen operator as its converter reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import Array, GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.tensors import DTYPES, TORCH_DTYPES, Empty
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

Converter = Callable[["AtenCall"], Operand | Sequence[Operand | Empty | None]]
Scalar = bool | int | float
# Arguments that no element depends on: they choose a place, an order of dimensions in memory or an algorithm, or are of
# training.
WITHOUT_EFFECT = frozenset(
    {
        "compute_mode", "cudnn_enable", "cudnn_enabled", "device", "implicit", "memory_format", "momentum", "non_blocking",
        "padding_idx", "path", "pin_memory", "scale_grad_by_freq", "sorted", "sparse", "sparse_grad", "stable", "unroll_dim",
    }
)  # fmt: skip
# Arguments that the types of operands and results tell.
OF_TYPES = frozenset({"dtype", "half_to_float", "out_dtype", "output_size", "shape", "size", "C", "HxW", "N", "m", "n"})


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One node of a torch program. It records which arguments its converter reads."""

    name: str  # of the overload, as "aten.add.Tensor"
    builder: GraphBuilder
    arguments: Mapping[str, Any]  # by the schema's names, defaults included; tensors as operands
    defaults: Mapping[str, Any]
    results: tuple[TensorType | Empty | None, ...]  # that torch infers; None: the result is not a tensor
    needed: frozenset[int]  # results that another node reads
    read: set[str] = field(default_factory=set)  # arguments read

    @property
    def dtype(self) -> DType:
        """The element type of the first result."""
        return self._result.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the first result."""
        return self._result.shape

    @property
    def _result(self) -> TensorType:
        result = self.results[0]
        if not isinstance(result, TensorType):
            raise self.unsupported("a result without elements")
        return result

    @property
    def x(self) -> Operand:
        """The first argument."""
        return self.operand(next(iter(self.arguments)))

    def value(self, name: str) -> Any:
        """Return an argument as it is."""
        self.read.add(name)
        return self.arguments[name]

    def operand(self, name: str) -> Operand:
        """Return a tensor that must be present and have elements."""
        operand = self.optional(name)
        if operand is None:
            raise self.unsupported(f"a call without {name}")
        return operand

    def optional(self, name: str) -> Operand | None:
        """Return a tensor; None if it is omitted."""
        return self._operand_or_none(self.value(name), name)

    def operands(self, name: str) -> list[Operand]:
        """Return a list of tensors."""
        listed = [self._operand_or_none(value, name) for value in self.value(name)]
        return [self._present(operand, name) for operand in listed]

    def _operand_or_none(self, value: object, name: str) -> Operand | None:
        if value is None or isinstance(value, Operand):
            return value
        if isinstance(value, Empty):
            raise self.unsupported(f"{name} without elements {list(value.shape)}")
        if isinstance(value, bool | int | float):
            array = np.asarray(value)
            return self.builder.add_constant(array, _dtype_of(array))
        raise self.unsupported(f"{name} of type {type(value).__name__}")

    def _present(self, operand: Operand | None, name: str) -> Operand:
        if operand is None:
            raise self.unsupported(f"an omitted tensor in {name}")
        return operand

    def number(self, name: str) -> Scalar:
        """Return a number that must be known."""
        value = self.value(name)
        if isinstance(value, Operand):
            array = self.builder.value(value)
            value = None if array is None or array.size != 1 else array.reshape(-1)[0].item()
        if not isinstance(value, bool | int | float):
            raise self.unsupported(f"{name} that is not a constant number")
        return value

    def integer(self, name: str) -> int:
        value = self.value(name)
        if not isinstance(value, int):
            raise self.unsupported(f"{name} that is not a constant whole number")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; a single number is a list of one."""
        value = self.value(name)
        listed = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(each, int) for each in listed):
            raise self.unsupported(f"{name} that is not a list of constant whole numbers")
        return listed

    def flag(self, name: str) -> bool:
        return bool(self.value(name))

    def text(self, name: str) -> str:
        return str(self.value(name))

    def has(self, name: str) -> bool:
        """Whether the operator has the argument, and it is given."""
        return self.arguments.get(name) is not None

    def run(self, operator: str, *operands: Operand, **parameters: object) -> Operand:
        """Add a call of a named operator."""
        return self.builder.call(operator, operands, **parameters)

    def cast(self, operand: Operand, dtype: DType | None = None) -> Operand:
        """Return the operand in an element type: that of the result if none is given."""
        target = self.dtype if dtype is None else dtype
        value = self.builder.value(operand) if operand.rank == 0 else None
        return self.builder.cast(operand, target) if value is None else self.constant(value, target)

    def scalar(self, value: Scalar, dtype: DType) -> Operand:
        """Return a constant without dimensions."""
        return self.constant(np.asarray(value), dtype)

    def constant(self, array: Array, dtype: DType) -> Operand:
        """Return a constant of the array's values in an element type."""
        return self.builder.add_constant(array.astype(dtype.value), dtype)

    def known(self, operand: Operand) -> Array | None:
        """Return the value of a constant; None for other tensors."""
        return self.builder.value(operand)

    def reshape(self, operand: Operand, shape: Sequence[int]) -> Operand:
        """Return the operand in another shape; itself if it has it."""
        return operand if operand.shape == tuple(shape) else self.run("reshape", operand, shape=tuple(shape))

    def expand(self, operand: Operand, shape: Sequence[int]) -> Operand:
        """Return the operand broadcast to a shape; itself if it has it."""
        return operand if operand.shape == tuple(shape) else self.run("broadcast_to", operand, shape=tuple(shape))

    def slice(self, operand: Operand, axis: int, start: int, stop: int, step: int = 1) -> Operand:
        """Return part of a dimension; the operand itself if that is all of it."""
        if (start, stop, step) == (0, operand.shape[axis], 1):
            return operand
        return self.run("slice", operand, starts=(start,), stops=(stop,), axes=(axis,), steps=(step,))

    def transposed_source(self, operand: Operand) -> Operand | None:
        """Return the matrix of which the operand is the transpose; None if no node before made it so."""
        if operand.rank != 2 or operand.name in self.builder.inputs or operand.name in self.builder.constants:
            return None
        made = next(node for node in reversed(self.builder.nodes) if operand.name in node.outputs)
        (source, *_) = made.inputs
        return Operand(source, made.input_types[0]) if made.operator == "transpose" else None

    def common_dtype(self, *names: str) -> DType:
        """Return the type to which torch promotes two arguments."""
        first, second = (self._like(self.value(name)) for name in names)
        return DTYPES[torch.result_type(first, second)]

    def _like(self, value: object) -> object:
        """Return a value that torch promotes as it does the argument: by type, and by whether it has dimensions."""
        if isinstance(value, Operand):
            return torch.empty((1,) * min(value.rank, 1), dtype=TORCH_DTYPES[value.dtype], device="meta")
        if isinstance(value, bool | int | float):
            return value
        raise self.unsupported(f"an argument of type {type(value).__name__}")

    def dimension(self, value: int, rank: int) -> int:
        """Return a dimension that may count from the last."""
        return value % max(rank, 1)

    def axis(self, name: str, rank: int) -> int:
        """Return the dimension that an argument names."""
        return self.dimension(self.integer(name), rank)

    def dimensions(self, name: str, rank: int) -> tuple[int, ...]:
        """Return dimensions; all of them if the argument is omitted or empty."""
        given = () if self.value(name) is None else self.integers(name)
        return tuple(sorted({self.dimension(d, rank) for d in given})) or tuple(range(rank))

    def check_all_read(self) -> None:
        """Raise ArgumentError if an argument was not read and is not its default."""
        for name, value in self.arguments.items():
            if name in self.read | WITHOUT_EFFECT | OF_TYPES:
                continue
            if not (name in self.defaults and self.defaults[name] == value) and value is not None:
                raise self.unsupported(f"{name}={value!r:.40}")

    def unsupported(self, what: str) -> ArgumentError:
        return ArgumentError(f"{what} is not supported", code="unsupported-attribute")


def _dtype_of(array: Array) -> DType:
    return DType(array.dtype.name)
