"""Bind a call's arrays to memory that a kernel may use: exact types and shapes, dense, aligned, unaliased."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import ArgumentError, IndexRangeError, InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import ALIGNMENT_BYTES, Buffer, KernelSource, Role

Array = NDArray[np.generic]
A = TypeVar("A")
ELEMENT_ALIGNMENT = 1  # in bytes: an array that only has the alignment of its elements is used in place
PAGE_BYTES = 4096

_EXTENSION_TYPES: dict[DType, type] = {
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
    DType.FLOAT8_E5M2: ml_dtypes.float8_e5m2,
}
_BUFFER_TYPES = frozenset("?bBhHiIlLqQefd")  # numpy's types that have a format in Python's buffer protocol
_addressof = ctypes.addressof  # several times as fast as array.ctypes
_from_buffer: Callable[[Array], ctypes.c_char] = ctypes.c_char.from_buffer  # type: ignore[assignment]  # arrays have the buffer protocol
_NUMPY_TYPES: dict[DType, np.dtype[np.generic]] = {d: np.dtype(_EXTENSION_TYPES.get(d, d.value)) for d in DType}


class ArrayLibrary(Protocol[A]):
    """Operations on arrays: numpy's, or those of a library for GPUs."""

    def view(self, what: str, buffer: Buffer, value: Any) -> A:
        """Return the memory of a caller's array. Raises ArgumentError if it does not fit the buffer."""

    def is_dense(self, array: A) -> bool:
        """Return whether a kernel may use the memory as it is."""

    def is_writeable(self, value: Any) -> bool:
        """Return whether a caller's array may be written."""

    def shares_memory(self, first: A, second: A) -> bool: ...

    def overlaps_itself(self, array: A) -> bool:
        """Return whether two elements of an array share memory."""

    def is_same(self, first: A, second: A) -> bool:
        """Return whether two arrays are the same elements in the same places."""

    def empty(self, buffer: Buffer) -> A:
        """Return memory for a buffer."""

    def copy_into(self, target: A, source: A) -> None: ...

    def result(self, array: A) -> Any:
        """Return memory as an array of the caller's library."""


@dataclass(frozen=True, slots=True)
class Binding(Generic[A]):
    """The memory of one call, and the copies into the caller's arrays after it."""

    library: ArrayLibrary[A]
    memory: dict[str, A]  # by Buffer symbol
    # The memory of results by output name, in the kernel's order; None for a result in the caller's own array.
    allocated: Mapping[str, A | None]
    given: dict[str, Any]  # results in the caller's own arrays, by output name
    copies: tuple[tuple[A, A], ...] = ()  # (to, from)
    written: tuple[Any, ...] = ()  # the caller's own arrays that a call writes

    def copy_back(self) -> None:
        """Copy the outputs that the kernel could not write in place."""
        for target, source in self.copies:
            self.library.copy_into(target, source)

    def results(self) -> dict[str, Any]:
        """Return the results in the kernel's order.

        Convert after the copies: a library that imports an array also imports the work to wait for.
        """
        return {name: self.given[name] if array is None else self.library.result(array) for name, array in self.allocated.items()}


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    return _NUMPY_TYPES[dtype]


def bind(
    buffers: Iterable[Buffer],
    arrays: Mapping[str, object],
    out: Mapping[str, object] | None,
    library: ArrayLibrary[A],
    in_use: Collection[A] = (),
) -> Binding[A]:
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
    views = {b.name: library.view("argument", b, arrays[b.name]) for b in inputs}
    targets = {b.name: library.view("output", b, out[b.name]) for b in outputs if b.name in out}
    memory: dict[str, A] = {}
    donated: dict[str, A] = {}
    written = list(out.values())
    for buffer in inputs:
        name, view = buffer.name, views[buffer.name]
        in_place = library.is_dense(view) and not (buffer.donated and not library.is_writeable(arrays[name]))
        memory[buffer.symbol] = view if in_place else _copy(library, buffer, view)
        if buffer.donated:
            _check_donated(library, name, views, in_use)
            donated[name] = memory[buffer.symbol]
            if in_place:
                written.append(arrays[name])
    allocated: dict[str, A | None] = {b.name: None for b in outputs}
    given = dict(out)
    copies: list[tuple[A, A]] = []
    for buffer in outputs:
        name = buffer.name
        if name not in targets:
            memory[buffer.symbol] = result = donated[name] if name in donated else library.empty(buffer)
            if result is views.get(name):
                given[name] = arrays[name]
            else:
                allocated[name] = result
            continue
        target = targets[name]
        if name in donated:
            result = donated[name]
        else:
            others = (*in_use, *views.values(), *(other for each, other in targets.items() if each != name))
            is_free = library.is_dense(target) and not _shares_any(library, target, others)
            result = target if is_free else library.empty(buffer)
        memory[buffer.symbol] = result
        if not library.is_same(target, result):
            copies.append((target, result))
    return Binding(library, memory, allocated, given, tuple(copies), tuple(written))


def _copy(library: ArrayLibrary[A], buffer: Buffer, array: A) -> A:
    copy = library.empty(buffer)
    library.copy_into(copy, array)
    return copy


def _shares_any(library: ArrayLibrary[A], array: A, others: Iterable[A]) -> bool:
    return any(library.shares_memory(array, other) for other in others)


def _check_donated(library: ArrayLibrary[A], name: str, views: Mapping[str, A], in_use: Collection[A]) -> None:
    """Raise ArgumentError if a donated array shares memory with another argument or a constant."""
    shared = [other for other, array in views.items() if other != name and library.shares_memory(views[name], array)]
    if shared or _shares_any(library, views[name], in_use):
        others = ", ".join(shared) or "a constant"
        raise ArgumentError(
            f"argument {name!r} is donated and may be overwritten, but shares memory with {others}",
            code="donated-alias",
            hint=f"pass a copy as {name}",
        )


def check_names(what: str, expected: list[str], provided: Mapping[str, object], *, complete: bool) -> None:
    """Check that every name is expected and, if `complete`, that no expected name is missing."""
    for name in provided:
        if name not in expected:
            known = ", ".join(expected) or "none"
            raise ArgumentError(f"unknown {what} {name!r}; expected: {known}", code=f"unknown-{what}")
    missing = [name for name in expected if name not in provided]
    if complete and missing:
        raise ArgumentError(f"missing {what}{'s' if len(missing) > 1 else ''}: {', '.join(missing)}", code=f"missing-{what}")


def overlap(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Return whether two elements at strides in bytes share memory."""
    axes = sorted((abs(stride), extent) for stride, extent in zip(strides, shape, strict=True) if extent != 1)
    if not all(extent for _, extent in axes):
        return False
    end = item_bytes  # of the elements along the axes so far
    for stride, extent in axes:
        if stride < end:
            break
        end += (extent - 1) * stride
    else:
        return False
    if axes[0][0] < item_bytes:  # neighbours along an axis
        return True
    offsets = np.zeros(1, np.int64)  # the axes interleave: look at every element
    for stride, extent in axes:
        offsets = np.add.outer(offsets, np.arange(extent) * stride).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < item_bytes).any())


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
    start = -_addressof(_from_buffer(raw)) % alignment
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


class PlainArrays:
    """The arrays of calls that use numpy's arrays as they are.

    Small kernels run for a fraction of the time that `bind` takes.
    """

    def __init__(self, buffers: Iterable[Buffer], in_use: Iterable[Array] = ()) -> None:
        """Take inputs and outputs, and arrays that no output may share memory with."""
        listed = tuple(buffers)
        self._inputs = [(b.name, b.shape, numpy_dtype(b.dtype), _viewed(b)) for b in listed if b.role is Role.INPUT]
        self._outputs = [
            (b.name, b.shape, numpy_dtype(b.dtype), _viewed(b), np.empty if b.bytes < PAGE_BYTES else aligned_empty)
            for b in listed
            if b.role is Role.OUTPUT
        ]
        self._bytes = [b.bytes for role in (Role.INPUT, Role.OUTPUT) for b in listed if b.role is role]
        self._in_use = [(start := array.ctypes.data, start + array.nbytes) for array in in_use]

    def inputs(self, arrays: Mapping[str, object]) -> list[int] | None:
        """Return the addresses of the inputs in order; None if `bind` has to convert or refuse one."""
        if len(arrays) != len(self._inputs):
            return None
        addresses: list[int] = []
        ndarray = np.ndarray  # a local name is faster
        for name, shape, dtype, viewed in self._inputs:
            array = arrays.get(name)
            if type(array) is not ndarray or array.shape != shape or not (array.dtype is dtype or array.dtype == dtype):
                return None
            flags = array.flags
            if flags.carray:
                addresses.append(_addressof(_from_buffer(array)) if viewed is None else _address_of(array, viewed))
            elif flags.c_contiguous and flags.aligned:
                addresses.append(array.ctypes.data)
            else:
                return None
        return addresses

    def outputs(self, out: Mapping[str, object] | None, inputs: Sequence[int]) -> tuple[dict[str, Array], list[int]] | None:
        """Return the results and their addresses in order; None if `bind` has to copy or refuse an array of `out`.

        Args:
            out: arrays of some results, by name; others are new.
            inputs: addresses of the inputs, which share no memory with results.
        """
        results: dict[str, Array] = {}
        addresses: list[int] = []
        given = 0
        for name, shape, dtype, viewed, allocate in self._outputs:
            if out is None or name not in out:
                result = allocate(shape, dtype)
            else:
                array = out[name]
                if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype or not array.flags.carray:
                    return None
                result = array
                given += 1
            results[name] = result
            addresses.append(_addressof(_from_buffer(result)) if viewed is None else _address_of(result, viewed))
        if out is None:
            return results, addresses
        return (results, addresses) if given == len(out) and self._are_separate(inputs, addresses) else None

    def _are_separate(self, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """Return whether the results share no memory with each other, inputs, or what is in use."""
        spans = [(start, start + size) for start, size in zip((*inputs, *outputs), self._bytes, strict=True)]
        written = sorted(spans[len(inputs) :])
        read = (*spans[: len(inputs)], *self._in_use)
        return all(a[1] <= b[0] for a, b in itertools.pairwise(written)) and not any(
            start < other_end and other_start < end for start, end in written for other_start, other_end in read
        )


def _viewed(buffer: Buffer) -> np.dtype[np.generic] | None:
    """Return a type of the same size that Python's buffer protocol has; None if it has this type, and there are elements."""
    dtype = numpy_dtype(buffer.dtype)
    return None if dtype.char in _BUFFER_TYPES and buffer.bytes else np.dtype(f"u{dtype.itemsize}")


def _address_of(array: Array, viewed: np.dtype[np.generic]) -> int:
    """Return the address of a writeable dense array. `viewed` is a type of the same size that has the buffer protocol."""
    try:
        return _addressof(_from_buffer(array.view(viewed)))
    except ValueError:  # it has no elements
        return array.ctypes.data


@dataclass(frozen=True, slots=True)
class NumpyArrays:
    """Arrays of numpy, aligned as a kernel expects."""

    alignment_bytes: int = ALIGNMENT_BYTES

    def view(self, what: str, buffer: Buffer, value: Any) -> Array:
        if not isinstance(value, np.ndarray | np.generic):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise ArgumentError(f"{what} {buffer.name!r} must be a numpy array, got {kind}", code="not-an-array")
        if what == "output" and isinstance(value, np.generic):
            raise ArgumentError(
                f"output {buffer.name!r} is a numpy scalar, which cannot be written; pass an array", code="out-not-writeable"
            )
        array: Array = np.asarray(value)
        expected = numpy_dtype(buffer.dtype)
        if array.dtype != expected:
            # Byte order shows only in the string form: '>f4' prints as float32 too.
            shown = array.dtype.name if array.dtype.name != expected.name else array.dtype.str
            raise ArgumentError(f"{what} {buffer.name!r} has dtype {shown}, expected {expected.name}", code="dtype-mismatch")
        # numpy often turns scalars into arrays of one element (ascontiguousarray): a scalar accepts both
        if array.shape != buffer.shape and not (buffer.shape == () and array.shape == (1,)):
            raise ArgumentError(f"{what} {buffer.name!r} has shape {array.shape}, expected {buffer.shape}", code="shape-mismatch")
        if what == "output" and not array.flags.writeable:
            raise ArgumentError(f"output {buffer.name!r} is read-only", code="out-not-writeable")
        return array

    def is_dense(self, array: Array) -> bool:
        alignment = max(self.alignment_bytes, array.dtype.itemsize)
        return array.flags.c_contiguous and array.ctypes.data % alignment == 0

    def is_writeable(self, value: Array) -> bool:
        return value.flags.writeable

    def shares_memory(self, first: Array, second: Array) -> bool:
        return np.may_share_memory(first, second)

    def overlaps_itself(self, array: Array) -> bool:
        return overlap(array.shape, array.strides, array.itemsize)

    def is_same(self, first: Array, second: Array) -> bool:
        return first is second

    def empty(self, buffer: Buffer) -> Array:
        return aligned_empty(buffer.shape, numpy_dtype(buffer.dtype))

    def copy_into(self, target: Array, source: Array) -> None:
        target[...] = source.reshape(target.shape)

    def result(self, array: Array) -> Array:
        return array
