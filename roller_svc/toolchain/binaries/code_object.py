"""Read the resources of kernels from an AMD code object: the compiler's metadata in an ELF note.

The note is a map in MessagePack (LLVM, "User Guide for AMDGPU Backend": Code Object Metadata; the MessagePack
specification).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from roller_svc.errors import CompileError
from roller_svc.ir.kernel import Resources
from roller_svc.toolchain.binaries.elf import elf_errors, read_notes

_OWNER, _METADATA = "AMDGPU", 32

Value = int | bool | float | str | bytes | None | list["Value"] | dict[str, "Value"]


def read_code_object(binary: bytes) -> dict[str, Resources]:
    """Return every kernel of a code object by name. Raises CompileError for other bytes.

    Registers are per thread and include accumulator registers. Private memory of a thread, whether spilled registers or
    arrays, counts as spilled.
    """
    with elf_errors("code object", "bad-code-object"):
        kernels = dict(_kernels(binary))
    if not kernels:
        raise CompileError("the compiler's output is a code object without kernels", code="bad-code-object")
    return kernels


def _kernels(binary: bytes) -> Iterator[tuple[str, Resources]]:
    for type_, note in read_notes(binary, _OWNER):
        metadata = _unpack(note, 0)[0] if type_ == _METADATA else None
        kernels = metadata["amdhsa.kernels"] if isinstance(metadata, dict) else None
        for kernel in kernels if isinstance(kernels, list) else ():
            if isinstance(kernel, dict):
                registers, shared, private = (
                    _count(kernel[key]) for key in (".vgpr_count", ".group_segment_fixed_size", ".private_segment_fixed_size")
                )
                yield str(kernel[".name"]), Resources(registers, shared, private)


def _count(value: Value) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    return value


# MessagePack ----------------------------------------------------------------------------------------------------------

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_SIZED = {  # first byte → the format of the size that follows, and the type
    0xC4: (">B", bytes), 0xC5: (">H", bytes), 0xC6: (">I", bytes), 0xD9: (">B", str), 0xDA: (">H", str),
    0xDB: (">I", str), 0xDC: (">H", list), 0xDD: (">I", list), 0xDE: (">H", dict), 0xDF: (">I", dict),
}  # fmt: skip
_CONSTANTS: dict[int, Value] = {0xC0: None, 0xC2: False, 0xC3: True}


def _unpack(text: bytes, at: int) -> tuple[Value, int]:
    """Return the value at that offset, and the offset of the next one."""
    first = text[at]
    at += 1
    if first < 0x80:
        return first, at
    if first < 0x90:
        return _container(dict, first & 0xF, text, at)
    if first < 0xA0:
        return _container(list, first & 0xF, text, at)
    if first < 0xC0:
        return _container(str, first & 0x1F, text, at)
    if first >= 0xE0:
        return first - 0x100, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        (number,) = struct.unpack_from(_NUMBERS[first], text, at)
        return number, at + struct.calcsize(_NUMBERS[first])
    size_format, kind = _SIZED[first]
    (size,) = struct.unpack_from(size_format, text, at)
    return _container(kind, size, text, at + struct.calcsize(size_format))


def _container(kind: type, size: int, text: bytes, at: int) -> tuple[Value, int]:
    if kind in (str, bytes):
        content = text[at : at + size]
        return (content.decode() if kind is str else content), at + size
    items: list[Value] = []
    for _ in range(size * (2 if kind is dict else 1)):
        item, at = _unpack(text, at)
        items.append(item)
    if kind is list:
        return items, at
    return {str(key): value for key, value in zip(items[::2], items[1::2], strict=True)}, at
