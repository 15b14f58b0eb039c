"""A C text with several programs → an object, and from it shared objects: of all its programs, of one alone.

What is delivered then is what was measured, and costs a run of the linker instead of the compiler's.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources, Role
from roller_svc.toolchain.confined import compile_confined
from roller_svc.toolchain.gcc import c_command
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.source_check import check_source

# Each function in a section of its own: the linker leaves out those that a program does not reach.
_SECTIONS = ("-c", "-ffunction-sections", "-fdata-sections")
_ROOMS = '__attribute__((visibility("hidden"))) '


def compile_together(source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS) -> CompiledKernel:
    """The shared object of a C text with several programs, and the object it is linked from.

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    check_source(source)
    command = c_command(source)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as folder:
        directory = Path(folder)
        (directory / "kernel.c").write_text(source.text, encoding="utf-8")
        log = _run(source, [*command, *_SECTIONS, "kernel.c", "-o", "kernel.o"], directory, limits)
        log += _run(source, [*command, "kernel.o", "-o", "kernel.so", "-lm"], directory, limits)
        unlinked, binary = ((directory / name).read_bytes() for name in ("kernel.o", "kernel.so"))
    resources = tuple(Resources() for _ in source.launches)
    return CompiledKernel(source, binary, log, resources, time.perf_counter() - start, unlinked)


def link_alone(
    whole: CompiledKernel, source: KernelSource, limits: CompileLimits = DEFAULT_LIMITS
) -> CompiledKernel | None:
    """The shared object of one program, from the object of a text with several.

    `whole` is compiled and has that program's launches; `source` is the text of the program by itself. None where
    functions of the two texts are called in different ways: arguments in another order, other numbers of checks.
    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    if not whole.unlinked or source.checks or _calls(source) != _calls(whole.source):
        return None
    check_source(source)
    source = replace(source, options=whole.source.options)
    names = {own.name: there.name for own, there in zip(source.launches, whole.source.launches, strict=True)}
    renamed = [f"-Wl,--defsym={own}={there}" for own, there in names.items() if own != there]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="roller-cc-") as folder:
        directory = Path(folder)
        (directory / "whole.o").write_bytes(whole.unlinked)
        (directory / "rooms.c").write_text(
            _ROOMS + source.scratch_definition if source.scratch_definition else "", encoding="utf-8"
        )
        (directory / "names").write_text(f"{{ global: {'; '.join(names)}; local: *; }};\n", encoding="utf-8")
        options = ["-Wl,--gc-sections", "-Wl,--version-script=names", *renamed]
        command = [*c_command(source), *options, "whole.o", "rooms.c", "-o", "kernel.so", "-lm"]
        log = _run(source, command, directory, limits)
        binary = (directory / "kernel.so").read_bytes()
    resources = tuple(Resources() for _ in source.launches)
    return CompiledKernel(source, binary, log, resources, time.perf_counter() - start)


def _run(source: KernelSource, command: list[str], directory: Path, limits: CompileLimits) -> str:
    """The log; the file behind -o is there."""
    output = directory / command[command.index("-o") + 1]
    return compile_confined(f"{source.name}: the C compiler", command, output, limits)


def _calls(source: KernelSource) -> list[object]:
    """How its functions are called: which memory they take, in order. Texts differ in the names of workspaces."""
    buffers = {b.symbol: b for b in source.buffers}

    def kind(symbol: str) -> object:
        b = buffers[symbol]
        return b.role, b.dtype, b.shape, b.name if b.role in (Role.INPUT, Role.OUTPUT) else None

    return [
        (tuple(map(kind, launch.args)), tuple(map(kind, launch.zeroed)), launch.is_prepack)
        for launch in source.launches
    ]
