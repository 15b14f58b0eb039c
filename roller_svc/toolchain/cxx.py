"""C++ files → an object or a program, through g++ or clang++ in a confined subprocess."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from roller_svc.errors import ToolchainMissingError
from roller_svc.toolchain.confined import compile_confined
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits

OUTPUT = "output"
INSTALL = "apt install g++"
PROGRAMS = ("g++", "c++")


def cxx_compiler() -> str:
    """The C++ compiler of this machine; raises ToolchainMissingError."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    raise ToolchainMissingError(f"no C++ compiler found (looked for {', '.join(PROGRAMS)}): {INSTALL}")


def compile_cxx(
    name: str, files: Mapping[str, bytes], arguments: Sequence[str], limits: CompileLimits = DEFAULT_LIMITS
) -> bytes:
    """Runs the compiler with `arguments` in a folder of `files`; what it wrote to the file "output".

    Raises CompileError with the log, KernelTimeoutError, ToolchainMissingError.
    """
    command = [cxx_compiler(), *arguments]
    with tempfile.TemporaryDirectory(prefix="roller-cxx-") as folder:
        directory = Path(folder)
        for file, content in files.items():
            (directory / file).write_bytes(content)
        compile_confined(f"{name}: the C++ compiler", command, directory / OUTPUT, limits)
        return (directory / OUTPUT).read_bytes()
