"""Compile the thread pool that is linked into C kernels with parallel regions (pool.c)."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from roller_svc.ir.kernel import KernelSource
from roller_svc.toolchain.confined import compile_sandboxed
from roller_svc.toolchain.limits import DEFAULT_LIMITS

COMPILE_FLAGS = ("-DROLLER_POOL",)
# The names that a kernel with a pool exports beside its functions.
EXPORTS = ("roller_own_pool", "roller_use_pool")
_SOURCE = Path(__file__).with_name("pool.c")
_OBJECT = "pool.o"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-c")
_lock = threading.Lock()
_objects: dict[tuple[str, ...], bytes] = {}  # by command


def has_pool(source: KernelSource, *, clang: bool) -> bool:
    """Return whether the pool takes the place of libgomp: clang has other entry points, other systems have no futex."""
    return "-fopenmp" in source.options and not clang and sys.platform == "linux"


def is_parallel(text: str) -> bool:
    """Return whether C source has a parallel region."""
    return "omp parallel" in text


def write_pool(directory: Path, compiler: list[str], arch_flags: list[str]) -> list[str]:
    """Write the pool's object to `directory`. Returns the linker's arguments.

    It takes the place of libgomp, which -fopenmp puts after it. Raises CompileError, ToolchainMissingError.
    """
    (directory / _OBJECT).write_bytes(_pool_object([*compiler, *_FLAGS, *arch_flags]))
    return ["-Wl,--as-needed", _OBJECT]


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
