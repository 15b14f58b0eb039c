"""Bind a call's numpy arrays to memory that a kernel may use: exact types and shapes, dense, aligned, unaliased."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import ArgumentError, IndexRangeError, InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import ALIGNMENT_BYTES, Buffer, KernelSource, Role

Array = NDArray[np.generic]
ELEMENT_ALIGNMENT = 1  # in bytes: an array that only has the alignment of its elements is used in place
PAGE_BYTES = 4096

_EXTENSION_TYPES: dict[DType, type] = {
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
    DType.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
}
_NUMPY_TYPES: dict[DType, np.dtype[np.generic]] = {d: np.dtype(_EXTENSION_TYPES.get(d, d.value)) for d in DType}


@dataclass(frozen=True, slots=True)
class Binding:
    """The memory of one call, and the copies into the caller's arrays after it."""

    memory: dict[str, Array]  # by Buffer symbol
    results: dict[str, Array]  # the caller's results, by output name
    copies: tuple[tuple[Array, Array], ...]  # (to, from)

    def copy_back(self) -> dict[str, Array]:
        """Copy the outputs that the kernel could not write in place. Returns the results."""
        for target, source in self.copies:
            target[...] = source
        return self.results


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    return _NUMPY_TYPES[dtype]


def bind(
    buffers: Iterable[Buffer],
    arrays: Mapping[str, object],
    out: Mapping[str, object] | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
    in_use: Iterable[Array] = (),
) -> Binding:
    """Return memory for every input and output among `buffers`. Raises ArgumentError if an array does not fit.

    An input is used in place if it is dense, native and aligned, else copied. An array in `out` is written in place
    if it is also writeable and shares no byte with another array of the call or of `in_use`, else copied to. A donated
    input's memory, or that of its copy, becomes the result's.
    """
    signature = tuple(buffers)
    inputs = [b for b in signature if b.role is Role.INPUT]
    outputs = [b for b in signature if b.role is Role.OUTPUT]
    out = {} if out is None else out
    check_names("argument", [b.name for b in inputs], arrays, complete=True)
    check_names("output", [b.name for b in outputs], out, complete=False)
    memory: dict[str, Array] = {}
    in_use = list(in_use)
    call_arrays: list[Array] = [*in_use]
    for buffer in inputs:
        array = _check_array(buffer, arrays[buffer.name], "argument")
        call_arrays.append(array)
        donates = buffer.donated and array.flags.writeable
        memory[buffer.symbol] = _make_dense(array, alignment_bytes, copies=buffer.donated and not donates)
    donated = _donated_arrays(inputs, arrays, memory, in_use)
    targets = {b.name: _check_target(b, out[b.name]) for b in outputs if b.name in out}
    results: dict[str, Array] = {}
    copies: list[tuple[Array, Array]] = []
    for buffer in outputs:
        target = targets.get(buffer.name)
        if buffer.name in donated:
            memory[buffer.symbol] = donated[buffer.name]
            results[buffer.name] = memory[buffer.symbol] if target is None else target
            if target is not None and target is not memory[buffer.symbol]:
                copies.append((target, memory[buffer.symbol]))
            continue
        other_arrays = [*call_arrays, *(other for name, other in targets.items() if name != buffer.name)]
        if target is not None and _can_write_in_place(target, alignment_bytes, other_arrays):
            memory[buffer.symbol] = target
        else:
            memory[buffer.symbol] = aligned_empty(buffer.shape, numpy_dtype(buffer.dtype))
            if target is not None:
                copies.append((target, memory[buffer.symbol]))
        results[buffer.name] = memory[buffer.symbol] if target is None else target
    return Binding(memory, results, tuple(copies))


def _donated_arrays(
    inputs: list[Buffer], arrays: Mapping[str, object], memory: dict[str, Array], in_use: Iterable[Array]
) -> dict[str, Array]:
    """Return the memory of donated inputs by name. Raises ArgumentError where another input shares it."""
    donated = {b.name: memory[b.symbol] for b in inputs if b.donated}
    for name in donated:
        others = {b.name: np.asarray(arrays[b.name]) for b in inputs if b.name != name}
        shared = [other for other, array in others.items() if np.may_share_memory(arrays[name], array)]
        if shared or any(np.may_share_memory(arrays[name], other) for other in in_use):
            raise donated_alias_error(name, shared)
    return donated


def donated_alias_error(name: str, others: list[str]) -> ArgumentError:
    """Return the error of a donated array that other arguments share."""
    shared = ", ".join(others) or "a constant"
    return ArgumentError(
        f"argument {name!r} is donated and may be overwritten, but shares memory with {shared}",
        code="donated-alias", hint=f"pass a copy as {name}",
    )  # fmt: skip


def check_names(what: str, expected: list[str], provided: Mapping[str, object], *, complete: bool) -> None:
    """Check that every name is expected and, if `complete`, that no expected name is missing."""
    for name in provided:
        if name not in expected:
            known = ", ".join(expected) or "none"
            raise ArgumentError(f"unknown {what} {name!r}; expected: {known}", code=f"unknown-{what}")
    missing = [name for name in expected if name not in provided]
    if complete and missing:
        raise ArgumentError(f"missing {what}{'s' if len(missing) > 1 else ''}: {', '.join(missing)}",
                            code=f"missing-{what}")  # fmt: skip


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an uninitialised dense array, aligned to ALIGNMENT_BYTES; a large one to a page.

    The page alignment avoids 4K aliasing. Otherwise outputs of power-of-two size may start two cache lines further
    into a page than the inputs, and loads wait for recent stores with the same low 12 address bits.
    """
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    alignment = PAGE_BYTES if size >= PAGE_BYTES else ALIGNMENT_BYTES
    raw = np.empty(size + alignment, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(raw.data)) % alignment
    return np.ndarray(shape, dtype, raw, start)


def range_error(source: KernelSource, check: int, value: int) -> IndexRangeError:
    """Return the error of a failed run-time check of the source, whose index had that value."""
    if not 0 <= check < len(source.checks):
        raise InvariantError(f"{source.name} reported run-time check {check} of {len(source.checks)}")
    failed = source.checks[check]
    axis = f" (axis {failed.axis})" if failed.axis else ""
    return IndexRangeError(
        f"index {value} is outside dimension {failed.dimension}{axis} of {failed.tensor}, "
        f"which has extent {failed.size}: {failed.index}",
        hint=f"values of {failed.index} must be in 0 .. {failed.size - 1}",
    )


def _check_array(buffer: Buffer, value: object, what: str) -> Array:
    if not isinstance(value, np.ndarray | np.generic):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise ArgumentError(f"{what} {buffer.name!r} must be a numpy array, got {kind}", code="not-an-array")
    array: Array = np.asarray(value)
    expected = numpy_dtype(buffer.dtype)
    if array.dtype != expected:
        # Byte order shows only in the string form: '>f4' prints as float32 too.
        shown = array.dtype.name if array.dtype.name != expected.name else array.dtype.str
        raise ArgumentError(f"{what} {buffer.name!r} has dtype {shown}, expected {expected.name}",
                            code="dtype-mismatch")  # fmt: skip
    # numpy often turns scalars into arrays of one element (ascontiguousarray): a scalar accepts both
    if array.shape != buffer.shape and not (buffer.shape == () and array.shape == (1,)):
        raise ArgumentError(f"{what} {buffer.name!r} has shape {array.shape}, expected {buffer.shape}",
                            code="shape-mismatch")  # fmt: skip
    return array


def _check_target(buffer: Buffer, value: object) -> Array:
    if isinstance(value, np.generic):
        raise ArgumentError(f"output {buffer.name!r} is a numpy scalar, which cannot be written; pass an array",
                            code="out-not-writeable")  # fmt: skip
    array = _check_array(buffer, value, "output")
    if not array.flags.writeable:
        raise ArgumentError(f"output {buffer.name!r} is read-only", code="out-not-writeable")
    return array


def _is_dense(array: Array, alignment_bytes: int) -> bool:
    alignment = max(alignment_bytes, array.dtype.itemsize)
    return array.flags.c_contiguous and array.ctypes.data % alignment == 0


def _make_dense(array: Array, alignment_bytes: int, *, copies: bool = False) -> Array:
    if _is_dense(array, alignment_bytes) and not copies:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _can_write_in_place(target: Array, alignment_bytes: int, other_arrays: list[Array]) -> bool:
    return _is_dense(target, alignment_bytes) and not any(np.may_share_memory(target, other) for other in other_arrays)
