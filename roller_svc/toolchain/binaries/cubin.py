"""Read the resources of kernels from a cubin's ELF: a cross-check of the compiler's log without NVIDIA's tools."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from roller_svc.errors import CompileError, require

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ATTRIBUTE = struct.Struct("<BBH")
_RESERVED_SHARED_BYTES = 1024  # sm_90 and later: reserved by the system, before every kernel's own
_TEXT = ".text."  # with a function's name: the section of its code
_WITH_BODY = 4  # the attribute's 16 bits are a size, and that many bytes follow
# Attributes of .nv.info (the names are cuobjdump's, EIATTR_...).
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F  # in the file's table: (symbol, value)
_MAX_THREADS, _PARAMETER_BYTES, _BARRIERS = 0x05, 0x19, 0x4C  # in a kernel's own


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """One entry function."""

    name: str
    registers_per_thread: int
    shared_bytes: int  # static, without the system's reserve
    barriers: int
    stack_bytes: int
    parameter_bytes: int
    code_bytes: int
    max_threads: int | None = None  # from __launch_bounds__


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    flags: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(slots=True)
class _KernelFacts:
    values: dict[int, int] = field(default_factory=dict)
    shared_bytes: int = 0
    code_bytes: int = 0
    text: _Section | None = None


def read_cubin(binary: bytes) -> dict[str, CubinKernel]:
    """Return every kernel of a cubin by name. Raises CompileError for other bytes."""
    with _as_compile_errors():
        return _read(binary)


def read_code(binary: bytes) -> dict[str, bytes]:
    """Return the machine code of every function of a cubin by name. Raises CompileError for other bytes."""
    with _as_compile_errors():
        sections = [s for s in _sections(binary) if s.name.startswith(_TEXT)]
        return {s.name.removeprefix(_TEXT): binary[s.offset : s.offset + s.size] for s in sections}


@contextlib.contextmanager
def _as_compile_errors() -> Iterator[None]:
    try:
        yield
    except (struct.error, ValueError, IndexError) as error:
        raise CompileError(f"not a cubin: {error}", code="bad-cubin") from error


def _read(binary: bytes) -> dict[str, CubinKernel]:
    sections = _sections(binary)
    kernels: dict[str, _KernelFacts] = {s.name.removeprefix(_TEXT): _KernelFacts(text=s, code_bytes=s.size)
                                for s in sections if s.name.startswith(_TEXT)}  # fmt: skip
    symbols = _symbols(binary, sections)
    reserved_bytes = _RESERVED_SHARED_BYTES if any(s.name == ".nv.shared.reserved.0" for s in sections) else 0
    for section in sections:
        prefix, _, kernel = section.name.rpartition(".")
        if section.name == ".nv.info":
            for code, value in _attributes(binary, section):
                if len(value) == 2 and (owner := kernels.get(symbols.get(value[0], ""))):
                    owner.values[code] = value[1]
        elif prefix == ".nv.info" and kernel in kernels:
            for code, value in _attributes(binary, section):
                if value:
                    kernels[kernel].values[code] = value[0]
        elif prefix == ".nv.shared" and kernel in kernels:
            kernels[kernel].shared_bytes = max(0, section.size - reserved_bytes)
    return {name: _kernel(name, facts) for name, facts in sorted(kernels.items()) if _REGISTER_COUNT in facts.values}


def _kernel(name: str, facts: _KernelFacts) -> CubinKernel:
    text = require(facts.text, f"section of the text of {name}")
    return CubinKernel(
        name=name,
        registers_per_thread=facts.values[_REGISTER_COUNT],
        shared_bytes=facts.shared_bytes,
        barriers=facts.values.get(_BARRIERS, (text.flags >> 20) & 0x7F),
        stack_bytes=facts.values.get(_FRAME_SIZE, 0),
        parameter_bytes=facts.values.get(_PARAMETER_BYTES, 0),
        code_bytes=facts.code_bytes,
        max_threads=facts.values.get(_MAX_THREADS),
    )


def _sections(binary: bytes) -> list[_Section]:
    if binary[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", binary, 0x3A)
    raw = [_SECTION.unpack_from(binary, table + i * entry_size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_string(binary, names + r[0]), r[2], r[4], r[5], r[6], r[7]) for r in raw]


def _symbols(binary: bytes, sections: list[_Section]) -> dict[int, str]:
    for section in sections:
        if section.name == ".symtab":
            names = sections[section.link].offset
            count = section.size // _SYMBOL.size
            return {i: _string(binary, names + _SYMBOL.unpack_from(binary, section.offset + i * _SYMBOL.size)[0])
                    for i in range(count)}  # fmt: skip
    return {}


def _attributes(binary: bytes, section: _Section) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield code and value of every attribute: the words of its body, or the number in its header."""
    position, end = section.offset, section.offset + section.size
    while position < end:
        form, code, size = _ATTRIBUTE.unpack_from(binary, position)
        position += _ATTRIBUTE.size
        if form != _WITH_BODY:
            yield code, (size,)
            continue
        yield code, struct.unpack_from(f"<{size // 4}I", binary, position)
        position += size


def _string(binary: bytes, start: int) -> str:
    return binary[start : binary.index(b"\0", start)].decode()
