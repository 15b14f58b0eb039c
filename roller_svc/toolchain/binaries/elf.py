"""Sections and notes of ELF files, through pyelftools. The bytes are untrusted: any damage is a CompileError."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roller_svc.errors import CompileError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

TEXT = ".text."  # with a function's name: the section of its code in a cubin


@contextmanager
def elf_errors(what: str, code: str) -> Iterator[None]:
    """Raise a CompileError for whatever reading damaged bytes raises."""
    from elftools.common.exceptions import ELFError
    from elftools.construct import ConstructError

    of_python = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
    try:
        yield
    except (ELFError, ConstructError, struct.error, *of_python) as failure:
        raise CompileError(f"the compiler's output is not a {what}: {failure!r}", code=code) from failure


def read_code(binary: bytes) -> dict[str, bytes]:
    """Return the machine code of every function of a cubin by name. Raises CompileError for other bytes."""
    with elf_errors("cubin", "bad-cubin"):
        spans = {each.name: (each["sh_offset"], each["sh_size"]) for each in _open(binary).iter_sections()}
        code = {name: binary[at : at + size] for name, (at, size) in spans.items()}
        return {name.removeprefix(TEXT): content for name, content in code.items() if name.startswith(TEXT)}


def read_notes(binary: bytes, owner: str) -> Iterator[tuple[Any, bytes]]:
    """Yield type and content of an owner's notes. Call it within `elf_errors`."""
    from elftools.elf.sections import NoteSection

    for section in _open(binary).iter_sections("SHT_NOTE"):
        for note in section.iter_notes() if isinstance(section, NoteSection) else ():
            if note["n_name"] == owner:
                yield note["n_type"], note["n_descdata"]


def _open(binary: bytes) -> ELFFile:
    from elftools.elf.elffile import ELFFile

    file = ELFFile(io.BytesIO(binary))
    if file.elfclass != 64 or not file.little_endian:
        raise ValueError("it is not a little-endian ELF file of 64 bits")
    return file
