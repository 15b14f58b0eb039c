"""Compile the thread pool that is linked into C kernels with parallel regions (pool.c)."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from pathlib import Path

from roller_svc.errors import BuildError
from roller_svc.fork_lock import ForkLock
from roller_svc.ir.kernel import KernelSource
from roller_svc.toolchain.confined import compile_sandboxed
from roller_svc.toolchain.limits import DEFAULT_LIMITS

COMPILE_FLAGS = ("-DROLLER_POOL",)
# What a library with a pool exports beside its functions, behind its own name; the pool's names stay inside.
_EXPORTS = ("own_pool", "use_pool")
_SOURCE = Path(__file__).with_name("pool.c")
_OBJECT, SYMBOLS = "pool.o", "symbols"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-c")
_lock = ForkLock()
_objects: dict[tuple[str, ...], bytes] = {}  # by command


def has_pool(source: KernelSource, *, clang: bool) -> bool:
    """Return whether the pool takes the place of libgomp: clang has other entry points, other systems have no futex."""
    return "-fopenmp" in source.options and not clang and sys.platform == "linux"


def prepare_pool(compiler: list[str], arch_flags: list[str]) -> None:
    """Compile the pool's object in another thread, unless this process has it: what is linked later then waits less."""
    command = [*compiler, *_FLAGS, *arch_flags]

    def compile_it() -> None:
        with contextlib.suppress(BuildError):  # linking raises it
            _pool_object(command)

    if tuple(command) not in _objects:
        threading.Thread(target=compile_it, name="roller-pool").start()


def write_pool(directory: Path, compiler: list[str], arch_flags: list[str], name: str) -> list[str]:
    """Write the pool's object to `directory`. Returns the arguments that link it into the library of that name.

    It takes the place of libgomp, which -fopenmp puts after it. Raises CompileError, ToolchainMissingError.
    """
    (directory / _OBJECT).write_bytes(_pool_object([*compiler, *_FLAGS, *arch_flags]))
    return ["-Wl,--as-needed", _OBJECT, *(f"-Wl,--defsym={name}_{own}=roller_{own}" for own in _EXPORTS)]


def hide_pool(directory: Path) -> str:
    """Return the linker's argument that hides the pool's own names and exports all others that are visible."""
    hidden = "; ".join(f"roller_{own}" for own in _EXPORTS)
    (directory / SYMBOLS).write_text(f"{{ local: {hidden}; }};\n", encoding="utf-8")
    return f"-Wl,--version-script={SYMBOLS}"


def export_named(directory: Path, name: str) -> str:
    """Return the linker's argument that exports the symbols behind that name and "_", and hides all others."""
    (directory / SYMBOLS).write_text(f"{{ global: {name}_*; local: *; }};\n", encoding="utf-8")
    return f"-Wl,--version-script={SYMBOLS}"


def _pool_object(command: list[str]) -> bytes:
    """Return the pool's object, compiled once in a process."""
    with _lock:
        if tuple(command) not in _objects:
            with tempfile.TemporaryDirectory(prefix="roller-cc-") as temporary:
                directory = Path(temporary)
                (directory / _SOURCE.name).write_bytes(_SOURCE.read_bytes())
                output = directory / _OBJECT
                arguments = [*command, _SOURCE.name, "-o", _OBJECT]
                compile_sandboxed("the thread pool: the C compiler", arguments, output, DEFAULT_LIMITS)
                _objects[tuple(command)] = output.read_bytes()
        return _objects[tuple(command)]
