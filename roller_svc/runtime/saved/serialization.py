"""Save and load kernels: a directory with source, binary and metadata.json, enough to launch without roller_svc.

report.json beside them has what launching does not need. A kernel without it loads with an empty report.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from roller_svc.errors import ArgumentError, InvariantError, UnknownKernelError
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import ALIGNMENT_BYTES, CompiledKernel, KernelSource, Language, Role
from roller_svc.ir.quoting import quote_comment, require_identifier
from roller_svc.ir.symbol_names import is_in_headers
from roller_svc.runtime.binding import Array
from roller_svc.runtime.resident import resident_empty
from roller_svc.runtime.saved.launchers import launcher_files
from roller_svc.runtime.saved.metadata import (
    FORMAT,
    FORMAT_WITH_REPORT,
    MAX_METADATA_BYTES,
    REPORT_FORMAT,
    BufferEntry,
    CorruptKernelError,
    FileEntry,
    LaunchEntry,
    Metadata,
    Report,
)

METADATA, REPORT = "metadata.json", "report.json"
HEADER = "kernel.h"
_BINARY_NAMES = {Language.C: "kernel.so", Language.CUDA: "kernel.cubin", Language.HIP: "kernel.hsaco"}
_MAX_FILE_BYTES = 256 << 20
# What reading untrusted files raises. UnknownKernelError is none of it.
DAMAGE = (ArgumentError, InvariantError, ValueError, RecursionError)
T = TypeVar("T")
_C_TYPES = {
    DType.FLOAT64: "double", DType.FLOAT32: "float", DType.BFLOAT16: "uint16_t", DType.FLOAT16: "uint16_t",
    DType.FLOAT8_E4M3FN: "uint8_t", DType.FLOAT8_E5M2: "uint8_t", DType.BOOL: "uint8_t",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelBundle:
    """A kernel with what is saved beside its binary. `estimate` and `extra` are JSON values, stored unchanged."""

    compiled: CompiledKernel
    expression: str
    target: str
    digest: str
    estimate: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def save(kernel: KernelBundle, directory: str | os.PathLike[str], launchers: Iterable[str] = ()) -> Path:
    """Write the kernel to `directory`, which need not exist, and return its path.

    Readers see the whole kernel or none. Files of other names in an existing directory stay unchanged.
    Raises ArgumentError (unknown-launcher) for launchers that the kernel cannot have.
    """
    files = launcher_files(kernel.compiled, launchers) | _files(kernel)

    def write(folder: Path) -> None:
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return write_folder(directory, write)


def load(directory: str | os.PathLike[str]) -> KernelBundle:
    """Load the kernel in `directory`, checking its files against the digests stored there.

    Reads four files, follows no symbolic link and runs nothing. Running the kernel executes its machine code in this
    process: only run kernels from sources that you trust.
    Raises UnknownKernelError if there is no kernel, and ArgumentError (damaged-kernel) if its files have
    changed since it was saved.
    """
    return read_folder(directory, "kernel", _read)


def _read(path: Path) -> KernelBundle:
    metadata, report = _parse_metadata(read_file(path, METADATA, MAX_METADATA_BYTES))
    names = _file_names(metadata.language)
    text, binary = (read_file(path, name, _MAX_FILE_BYTES) for name in names)
    for name, content in zip(names, (text, binary), strict=True):
        check_digest(name, content, metadata.files)
    if os.path.lexists(path / REPORT) and metadata.format == FORMAT:
        content = read_file(path, REPORT, MAX_METADATA_BYTES)
        check_digest(REPORT, content, metadata.files)
        report = from_json(Report, _json_object(content, REPORT_FORMAT))
    compiled = metadata.compiled(text.decode(), binary, report.log)
    return KernelBundle(compiled, metadata.expression, metadata.target, metadata.digest, metadata.estimate, report.extra)


def c_header(compiled: CompiledKernel) -> str:
    """Return the prototypes of a C kernel's functions: the one that makes all launches, then these in order."""
    source = compiled.source
    name = require_identifier(source.name)
    about = (
        f"{name}_run makes all launches. It returns 0, or 1 if an index from data is out of range.\n"
        "Calls may overlap if each has a workspace of its own. Arrays are dense and row-major. The workspace has\n"
        f"{name}_WORKSPACE_BYTES, aligned to {ALIGNMENT_BYTES}; NULL for 0.\n"
        "Or make the launches yourself, in this order: metadata.json says which tensor each parameter is, what to\n"
        "zero before a launch and what is workspace. What is marked `once` need not run again while its constants\n"
        "and the workspace that it fills stay as they are."
    )
    if updated := ", ".join(b.symbol for b in source.updated_buffers):
        about += f"\nUpdated in place: {updated}."
    guard = f"{name}_KERNEL_H"
    parameters = _parameters(source)
    workspace = "void *" if "workspace" in parameters else "void *workspace"
    run_parameters = (*(parameters[b.symbol] for b in source.run_buffers), workspace)
    lines = [
        quote_comment(about) + f"#ifndef {guard}",
        f"#define {guard}",
        "#include <stdint.h>",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        f"#define {name}_WORKSPACE_BYTES {source.workspace_bytes}L",
        f"int {name}_run({', '.join(run_parameters)});",
    ]
    for launch in source.launches:
        arguments = ", ".join(parameters[symbol] for symbol in launch.args) or "void"
        once = "  /* once */" if launch.is_prepack else ""
        lines.append(f"void {require_identifier(launch.name)}({arguments});{once}")
    if source.is_parallel:
        lines += [
            f"/* Share one thread pool: before the first call, {name}_use_pool with the pool of a library that is",
            "   unloaded later. Returns 0 if that has another version. Kernels of gcc for Linux have these. */",
            f"void *{name}_own_pool(void);",
            f"int {name}_use_pool(void *pool);",
        ]
    lines += ["#ifdef __cplusplus", "}", "#endif", "#endif", ""]
    return "\n".join(lines)


def directory_path(directory: str | os.PathLike[str]) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentError(f"directory must be a path, got {type(directory).__qualname__}", code="invalid-argument")
    return Path(directory)


def write_folder(directory: str | os.PathLike[str], write: Callable[[Path], None]) -> Path:
    """Write a directory by a function that fills an empty one, and return its path.

    Readers see all of it or none. Files of other names in an existing directory stay unchanged.
    """
    target = directory_path(directory)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"{target} is not a directory", code="not-a-folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
            staged = Path(temporary) / "staged"
            staged.mkdir()
            write(staged)
            _move(staged, target)
    except OSError as failure:
        raise ArgumentError(f"cannot write to {target}: {failure.strerror}", code="unwritable-folder") from failure
    return target


def _move(staged: Path, target: Path) -> None:
    try:
        staged.rename(target)  # also replaces an empty directory
    except OSError:
        if not target.is_dir() or not any(target.iterdir()):
            raise
    else:
        return
    # Without its metadata a half-replaced directory is nothing that is saved, rather than something wrong.
    (target / METADATA).unlink(missing_ok=True)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == METADATA):  # metadata comes last
        replaced = target / path.name
        if path.is_dir() and replaced.is_dir() and not replaced.is_symlink():
            shutil.rmtree(replaced)
        path.replace(replaced)


def read_folder(directory: str | os.PathLike[str], what: str, read: Callable[[Path], T]) -> T:
    """Read what is saved in a directory.

    Raises UnknownKernelError if there is nothing, and ArgumentError (damaged-kernel) if its files cannot be read.
    """
    path = directory_path(directory)
    if not (path / METADATA).is_file():
        raise UnknownKernelError(f"{path} has no saved {what} ({METADATA} is missing)")
    try:
        return read(path)
    except DAMAGE as error:
        message = f"{path} is not a saved {what}: {error}"
        raise ArgumentError(message, code="damaged-kernel", hint=f"save the {what} again") from error


def _parameters(source: KernelSource) -> dict[str, str]:
    """Return {symbol: declaration} of the buffers; a macro where the header is included has none of their names."""
    used = {b.symbol for b in source.buffers}
    declared = {}
    for buffer in source.buffers:
        name = require_identifier(buffer.symbol)
        if is_in_headers(name):
            name = f"arg_{name}_"  # no prefix and no suffix of a macro's name is left
        while name != buffer.symbol and name in used:
            name += "_"
        used.add(name)
        type_ = _C_TYPES.get(buffer.dtype, f"{buffer.dtype.value}_t")
        declared[buffer.symbol] = f"{'const ' if buffer.role is Role.INPUT else ''}{type_} *{name}"
    return declared


def _files(kernel: KernelBundle) -> dict[str, bytes]:
    """Return the files by name, metadata last."""
    source = kernel.compiled.source
    files = {
        f"kernel{source.language.suffix}": source.text.encode(),
        _BINARY_NAMES[source.language]: kernel.compiled.binary,
    }
    files[REPORT] = _json_file(REPORT, Report(REPORT_FORMAT, kernel.compiled.log, kernel.extra))
    digests = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    if source.language is Language.C:
        files[HEADER] = c_header(kernel.compiled).encode()
    return files | {METADATA: _json_file(METADATA, _metadata(kernel, digests))}


def _json_file(name: str, record: object) -> bytes:
    indent = None if name == REPORT else 1  # a long one, for which the encoder without lines is ten times as fast
    content = (json.dumps(to_json(record), indent=indent, allow_nan=False) + "\n").encode()
    if len(content) > MAX_METADATA_BYTES:
        raise InvariantError(f"{name} has {len(content)} bytes, of which load takes {MAX_METADATA_BYTES} at most")
    return content


def _metadata(kernel: KernelBundle, files: Mapping[str, FileEntry]) -> Metadata:
    compiled = kernel.compiled
    source = compiled.source
    buffers = {b.symbol: b for b in source.buffers}
    launches = zip(source.launches, compiled.resources, strict=True)
    return Metadata(
        FORMAT,
        source.name,
        kernel.expression,
        kernel.target,
        kernel.digest,
        source.language,
        str(source.arch),
        source.options,
        source.constants,
        source.key,
        kernel.estimate,
        source.workspace_bytes,
        tuple(map(BufferEntry.of, source.buffers)),
        tuple(LaunchEntry.of(launch, buffers, used) for launch, used in launches),
        source.checks,
        compiled.compile_seconds,
        files,
    )


def read_metadata(directory: Path, cls: type[T], limit_bytes: int, format_: str) -> T:
    """Read metadata.json of a format as a record. Raises ValueError for malformed text and for non-finite numbers."""
    return parse_metadata(read_file(directory, METADATA, limit_bytes), cls, format_)


def parse_compiled(metadata: bytes, text: str) -> CompiledKernel:
    """Return a kernel without its binary and log, from metadata.json and its source. Raises DAMAGE for other contents."""
    return _parse_metadata(metadata)[0].compiled(text, b"", "")


def _parse_metadata(content: bytes) -> tuple[Metadata, Report]:
    """Return the metadata, and the report that older files have inside; else an empty one."""
    document = _json_object(content, FORMAT, FORMAT_WITH_REPORT)
    report = Report(REPORT_FORMAT, "", {})
    if document["format"] == FORMAT_WITH_REPORT:
        report = from_json(Report, {"format": REPORT_FORMAT, **{key: document.pop(key, None) for key in ("log", "extra")}})
    return from_json(Metadata, document), report


def parse_metadata(content: bytes, cls: type[T], format_: str) -> T:
    """Return the record in a metadata.json. Raises ValueError for malformed text and for non-finite numbers."""
    return from_json(cls, _json_object(content, format_))


def _json_object(content: bytes, *formats: str) -> dict[str, Any]:
    """Return the object in a file of one of the formats."""
    document = json.loads(content, parse_float=_finite, parse_constant=_finite)
    if not isinstance(document, dict) or document.get("format") not in formats:
        found = str(document.get("format")).partition("/")[0] if isinstance(document, dict) else ""
        other = {"roller-model": "; a model is loaded by load_model", "roller-kernel": "; a kernel is loaded by load"}.get(
            found, ""
        )
        raise CorruptKernelError(f"the format is not {' or '.join(formats)}{other if found not in formats[0] else ''}")
    return document


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CorruptKernelError(f"a file has the number {text[:40]}")
    return value


def binary_name(language: Language) -> str:
    """Return the name of the file that has a kernel's binary."""
    return _BINARY_NAMES[language]


def _file_names(language: Language) -> tuple[str, str]:
    """Return the names of source and binary, from the language alone: names in the metadata are untrusted."""
    return f"kernel{language.suffix}", _BINARY_NAMES[language]


def check_digest(name: str, content: bytes | memoryview, files: Mapping[str, FileEntry]) -> None:
    """Check a file against the digest in the metadata."""
    if name not in files or files[name].sha256 != hashlib.sha256(content).hexdigest():
        raise CorruptKernelError(f"{name} is not the file that was saved (its sha256 differs)")


def read_file(directory: Path, name: str, limit_bytes: int) -> bytes:
    """Read a file, unless it is a link, not a regular file, or too large."""
    with _opened(directory, name, limit_bytes) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CorruptKernelError(f"{name} is larger than {limit_bytes} bytes")
    return data


def read_block(directory: Path, name: str, size_bytes: int) -> Array:
    """Return a file's bytes at an aligned address, unless it is a link, not a regular file, or of another size."""
    with _opened(directory, name, size_bytes) as file:
        got = os.fstat(file.fileno()).st_size
        block = resident_empty(size_bytes)[:size_bytes] if got == size_bytes else np.empty(0, np.uint8)
        if block.size:
            got = file.readinto(block.data)
    if got != size_bytes:
        raise CorruptKernelError(f"{name} has {got} bytes, expected {size_bytes}")
    return block


def _opened(directory: Path, name: str, limit_bytes: int) -> BufferedReader:
    """Open a regular file that is not too large."""
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptKernelError(f"{name} cannot be read: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CorruptKernelError(f"{name} is not a regular file")
    if status.st_size > limit_bytes:
        os.close(descriptor)
        raise CorruptKernelError(f"{name} is larger than {limit_bytes} bytes")
    return os.fdopen(descriptor, "rb")
