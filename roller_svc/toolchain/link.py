"""Compile a C translation unit with several programs to an object, and link shared objects of all or one of them.

The delivered program is the machine code that was measured, and costs a linker run instead of a compiler run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources, Role
from roller_svc.toolchain.confined import compile_sandboxed
from roller_svc.toolchain.gcc import c_command, pool_arguments
from roller_svc.toolchain.limits import DEFAULT_LIMITS
from roller_svc.toolchain.pool import export_named, hide_pool
from roller_svc.toolchain.source_check import check_source

# One section for each function: the linker removes those that a program does not call.
_SECTIONS = ("-c", "-ffunction-sections", "-fdata-sections")
_HIDDEN = '__attribute__((visibility("hidden"))) '


def compile_combined(source: KernelSource) -> CompiledKernel:
    """Compile C source with several programs to a shared object and the object it is linked from.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    check_source(source)
    command = c_command(source)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "kernel.c").write_text(source.text, encoding="utf-8")
        log = _run(source, [*command, *_SECTIONS, "kernel.c", "-o", "kernel.o"], directory)
        log += _link_alone(source, directory)
        object_code, binary = ((directory / name).read_bytes() for name in ("kernel.o", "kernel.so"))
    resources = tuple(Resources() for _ in source.launches)
    return CompiledKernel(source, binary, log, resources, time.perf_counter() - start, object_code)


def link_single(combined: CompiledKernel, source: KernelSource) -> CompiledKernel | None:
    """Link the shared object of one program from the object of several.

    Args:
        combined: the compiled programs, with the launches of the one to link.
        source: the source of that program alone.

    Returns:
        The program; None if its functions have other signatures in `combined`: another order of arguments, or other
        numbers of checks.

    Raises:
        CompileError: with the log. Also KernelTimeoutError, ToolchainMissingError.
    """
    if not combined.object_code or source.checks or _signatures(source) != _signatures(combined.source):
        return None
    check_source(source)
    source = replace(source, options=combined.source.options)
    names = {own.name: combined_name.name for own, combined_name in zip(source.launches, combined.source.launches, strict=True)}
    renamed = [f"-Wl,--defsym={own}={there}" for own, there in names.items() if own != there]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "combined.o").write_bytes(combined.object_code)
        scratch = _HIDDEN + source.scratch_definition if source.scratch_definition else ""
        (directory / "own.c").write_text(f"{scratch}\n{source.run_definition}", encoding="utf-8")
        options = ["-Wl,--gc-sections", export_named(directory, source.name), *renamed]
        parallel = combined.source.is_parallel
        inputs = ["combined.o", "own.c", *pool_arguments(source, directory, parallel=parallel)]
        command = [*c_command(source), *options, *inputs, "-o", "kernel.so", "-lm"]
        log = _run(source, command, directory)
        binary = (directory / "kernel.so").read_bytes()
    resources = tuple(Resources() for _ in source.launches)
    return CompiledKernel(source, binary, log, resources, time.perf_counter() - start)


def compile_unlinked(source: KernelSource, text: str) -> CompiledKernel:
    """Compile a kernel to the object of models, without a binary: `link_kernel` makes it from the object.

    `text` begins with that of the source, and may have hidden functions for models.
    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    unit = replace(source, text=text)
    check_source(unit)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "kernel.c").write_text(text, encoding="utf-8")
        log = _run(unit, object_command(unit), directory)
        object_code = (directory / "kernel.o").read_bytes()
    resources = tuple(Resources() for _ in source.launches)
    return CompiledKernel(source, b"", log, resources, time.perf_counter() - start, object_code)


def link_kernel(source: KernelSource, object_code: bytes) -> bytes:
    """Link the shared object of a kernel from its object of models.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "kernel.o").write_bytes(object_code)
        _link_alone(source, directory)
        return (directory / "kernel.so").read_bytes()


def object_command(unit: KernelSource, *, parallel: bool | None = None) -> list[str]:
    """Return the command of a model's object, which determines it together with the unit's text.

    A kernel's shared object, which exports its functions, is linked from the same object. Calls inside are direct.
    """
    return [*c_command(unit, parallel=parallel), "-fno-semantic-interposition", "-c", "kernel.c", "-o", "kernel.o"]


def compile_object(source: KernelSource, text: str, *, parallel: bool | None = None) -> bytes:
    """Compile `text`, which has the source's options, to an object whose functions other objects of a model see.

    `parallel`: whether other objects of the model have parallel regions; by default, whether the text has any.
    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    unit = replace(source, text=text)
    check_source(unit)
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        (directory / "kernel.c").write_text(text, encoding="utf-8")
        _run(unit, object_command(unit, parallel=parallel), directory)
        return (directory / "kernel.o").read_bytes()


def link_model(source: KernelSource, functions: Mapping[str, str], objects: Mapping[str, bytes]) -> bytes:
    """Link the objects of a model to a shared object, which exports symbols of the source's name alone.

    Args:
        source: the model's name, the architecture and options.
        functions: {exported name: name in the objects}.
        objects: by file name without suffix.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
        directory = Path(temporary)
        for name, content in objects.items():
            (directory / f"{name}.o").write_bytes(content)
        (directory / "objects").write_text("".join(f"{name}.o\n" for name in objects), encoding="utf-8")
        renamed = [f"-Wl,--defsym={own}={there}" for own, there in functions.items() if own != there]
        options = [export_named(directory, source.name), *renamed]
        inputs = ["@objects", *pool_arguments(source, directory, parallel=True)]
        _run(source, [*c_command(source), *options, *inputs, "-o", "model.so", "-lm"], directory)
        return (directory / "model.so").read_bytes()


def _link_alone(source: KernelSource, directory: Path) -> str:
    """Link kernel.o to kernel.so, with the thread pool if it has parallel regions. Returns the log."""
    pool = pool_arguments(source, directory)
    hide = [hide_pool(directory)] if pool else []
    return _run(source, [*c_command(source), "kernel.o", *pool, *hide, "-o", "kernel.so", "-lm"], directory)


def _run(source: KernelSource, command: list[str], directory: Path) -> str:
    """Run the compiler, which must create the file after -o. Returns its log."""
    output = directory / command[command.index("-o") + 1]
    return compile_sandboxed(f"{source.name}: the C compiler", command, output, DEFAULT_LIMITS)


def _signatures(source: KernelSource) -> list[object]:
    """Return the signatures of the source's functions without the names of workspaces, which differ."""
    buffers = {b.symbol: b for b in source.buffers}

    def kind(symbol: str) -> object:
        b = buffers[symbol]
        return b.role, b.dtype, b.shape, b.name if b.role in (Role.INPUT, Role.OUTPUT) else None

    return [(tuple(map(kind, launch.args)), tuple(map(kind, launch.zeroed)), launch.is_prepack) for launch in source.launches]
