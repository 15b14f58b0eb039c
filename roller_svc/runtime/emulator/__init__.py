"""Emulator: run a CUDA or HIP kernel's source thread by thread on a CPU, to check its numbers."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import re
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roller_svc.errors import InvariantError, KernelTimeoutError, LaunchError, WrongAnswerError
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, Role
from roller_svc.runtime.binding import Array, Binding, NumpyArrays, bind, range_error
from roller_svc.runtime.emulator.text import program_source

__all__ = ["EmulatorLimits", "EmulatorModule"]

# (name for messages, files by name, arguments) → the file "output" that the compiler wrote
CxxCompiler = Callable[[str, Mapping[str, bytes], Sequence[str]], bytes]

_HERE = Path(__file__).parent
# -std=c++17, because gnu++17 defines the macros `linux` and `unix`. Multiplications and additions are contracted to FMA
# as on a GPU, so that results that depend on it show. Failed checks call runtime.cpp's handlers.
_FLAGS = (
    "-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-fno-math-errno",
    "-fno-exceptions", "-fno-rtti", "-fno-pie", "-fno-extern-tls-init", "-fno-stack-protector",
    "-Wno-unknown-pragmas", "-fmax-errors=20",
)  # fmt: skip
_CHECKS = (
    "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow,alignment,null",
    "-fno-sanitize-recover=all", "-ftrivial-auto-var-init=pattern",
)  # fmt: skip
# Race detector: every access that other threads might see becomes a call of races.h; -g1 maps addresses to lines.
_RACE_DETECTION = ("-fsanitize=thread", "--param=tsan-distinguish-volatile=1", "-g1")
_SHADOW_BYTES_PER_BYTE = 40  # shadow memory of races.h
_ARENA_ALIGNMENT_BYTES = 64
_WARP = {Language.CUDA: 32, Language.HIP: 64}  # threads of a warp; AMD's wavefronts have 64
_FAULT, _OUT_OF_RANGE = 3, 5
_BUSY_TRIES = 50


@dataclass(frozen=True, slots=True)
class EmulatorLimits:
    """Resource limits of one run."""

    timeout_s: float = 600.0
    memory_bytes: int = 4 << 30  # beyond the buffers


class EmulatorModule:
    """A CUDA or HIP kernel built for the CPU. Calls from several threads may overlap; each runs in its own process."""

    def __init__(
        self,
        compiled: CompiledKernel,
        compile_cxx: CxxCompiler,
        *,
        seed: int | None = None,
        races: bool = False,
        limits: EmulatorLimits | None = None,
    ) -> None:
        """Build a kernel for the emulator.

        Args:
            compiled: the kernel; only its source is used.
            compile_cxx: the C++ compiler.
            seed: seed of the thread schedule. 0 is the order of thread ids; odd seeds run blocks backwards. None: each
                call has its own schedule, derived from its inputs and the number of calls before.
            races: run the race detector: unordered accesses of a byte are errors in any schedule. Slower.
            limits: resource limits of a run.
        """
        if compiled.source.language not in _WARP:
            raise InvariantError(f"{compiled.source.name} is {compiled.source.language.value}, not a GPU's")
        self.source: KernelSource = compiled.source
        self.seed = seed
        self.limits = limits or EmulatorLimits()
        self.races = races
        self.program = _build(compiled.source, compile_cxx, _RACE_DETECTION if races else ())
        self._calls = itertools.count()

    def seed_of(self, binding: Binding[Array]) -> int:
        """Return the seed of the next call."""
        if self.seed is not None:
            return self.seed
        digest = next(self._calls)
        for buffer in self.source.buffers_of(Role.INPUT):
            digest = zlib.crc32(binding.memory[buffer.symbol].reshape(-1).view(np.uint8).data, digest)
        return digest

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array]:
        """Run the kernel.

        Raises ArgumentError for arrays that do not fit, IndexRangeError for a bad index, and WrongAnswerError for a
        fault of the kernel itself.
        """
        call = self.bind(arrays, out)
        call()
        return call.results()

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> EmulatorCall:
        """Return a bound call."""
        return EmulatorCall(self, bind(self.source.buffers, arrays, out, NumpyArrays()))


class EmulatorCall:
    """Arrays bound to a module. Results are valid after a call."""

    def __init__(self, module: EmulatorModule, binding: Binding[Array]) -> None:
        self._module = module
        self._binding = binding

    def __call__(self) -> None:
        """Run every launch in order, in one new process, and write the outputs."""
        source = self._module.source
        offsets: dict[str, int] = {}
        size = 0
        for buffer in source.buffers:
            if buffer.role is not Role.WORKSPACE:
                offsets[buffer.symbol] = size
                size += -(-buffer.bytes // _ARENA_ALIGNMENT_BYTES) * _ARENA_ALIGNMENT_BYTES
        descriptor = os.memfd_create("roller-emulator")
        try:
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as arena:
                self._copy(arena, offsets, (*source.buffers_of(Role.INPUT), *source.updated_buffers), to_arena=True)
                _execute(self._module, descriptor, self._module.seed_of(self._binding))
                self._copy(arena, offsets, source.buffers_of(Role.OUTPUT), to_arena=False)
        finally:
            os.close(descriptor)
        self._binding.copy_back()

    def device_name(self) -> str:
        return f"{self._module.source.language.value.upper()} emulator"

    def results(self) -> dict[str, Array]:
        """Return the results by output name."""
        return self._binding.results()

    def _copy(self, arena: mmap.mmap, offsets: Mapping[str, int], buffers: tuple[Buffer, ...], *, to_arena: bool) -> None:
        """Copy buffers into the arena or out of it."""
        for buffer in buffers:
            array = self._binding.memory[buffer.symbol].reshape(-1).view(np.uint8)
            start = offsets[buffer.symbol]
            if to_arena:
                arena[start : start + buffer.bytes] = array.data
            else:
                array[:] = np.frombuffer(arena[start : start + buffer.bytes], np.uint8)


# builds ---------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _build(source: KernelSource, compile_cxx: CxxCompiler, more_flags: tuple[str, ...]) -> bytes:
    """Build the executable for all seeds. It is cached for the next module of the same kernel."""
    warp = f"-DEMULATOR_WARP={_WARP[source.language]}"
    flags = (*_FLAGS, *_CHECKS, *more_flags, warp)
    headers = _files("emulator.h", "tensor_map.h", "vectors.h", "hopper.h", "instructions.h")
    files = {**headers, "program.cpp": program_source(source).encode()}
    program_object = compile_cxx(source.name, files, (*flags, "-c", "program.cpp", "-o", "output"))
    objects = {"program.o": program_object, "runtime.o": _runtime_object(compile_cxx, warp)}
    return compile_cxx(source.name, objects, ("-no-pie", "program.o", "runtime.o", "-lm", "-o", "output"))


def _files(*names: str) -> dict[str, bytes]:
    return {name: (_HERE / name).read_bytes() for name in names}


@functools.lru_cache(maxsize=4)
def _runtime_object(compile_cxx: CxxCompiler, warp: str) -> bytes:
    files = _files(*(path.name for path in _HERE.glob("*.h")), "runtime.cpp")
    return compile_cxx("emulator", files, (*_FLAGS, warp, "-c", "runtime.cpp", "-o", "output"))


# runs -----------------------------------------------------------------------------------------------------------------


def _execute(module: EmulatorModule, arena: int, seed: int) -> None:
    source, limits = module.source, module.limits
    copies = 2 + (_SHADOW_BYTES_PER_BYTE if module.races else 0)
    memory = limits.memory_bytes + copies * sum(b.bytes for b in source.buffers)
    arguments = [str(seed), str(arena), str(memory), str(round(limits.timeout_s) + 5)]
    process = _start(module.program, arguments, arena)
    try:
        _, text = process.communicate(timeout=limits.timeout_s)
    except subprocess.TimeoutExpired:
        raise KernelTimeoutError(f"{source.name} ran longer than {limits.timeout_s:g} s in the emulator") from None
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()
    if process.returncode == 0:
        return
    message = _resolve_addresses(text.strip(), module.program)
    if process.returncode == _OUT_OF_RANGE:
        check, value = (int(word) for word in message.split())
        raise range_error(source, check, value)
    if process.returncode == _FAULT:
        raise WrongAnswerError(f"the emulator stopped {source.name}, seed {seed}: {message}", code="emulator-fault")
    raise LaunchError(f"{source.name} in the emulator: exit {process.returncode}: {message}")


def _resolve_addresses(message: str, program: bytes) -> str:
    """Replace each `@address@` in the message by the line of the kernel's source."""
    addresses = re.findall(r"@([0-9a-f]+)@", message)
    tool = shutil.which("addr2line")
    for address in addresses:
        line = _line_of(tool, program, int(address, 16)) if tool else None
        message = message.replace(f"@{address}@", f"line {line}" if line else "an unknown line")
    return message


def _line_of(addr2line: str, program: bytes, address: int) -> str | None:
    """Return the source line of the call that returns to `address`; for inlined code the outermost line."""
    with _executable(program) as file:
        command = [addr2line, "-i", "-e", f"/proc/self/fd/{file}", hex(address - 1)]
        result = subprocess.run(
            command, pass_fds=(file,), capture_output=True, text=True, errors="replace", check=False, timeout=60
        )
    # the compiler names the source either by its #line directive or by its file
    lines = re.findall(r"(?:kernel\.cu|program\.cpp):(\d+)", result.stdout)
    return lines[-1] if lines else None


def _start(program: bytes, arguments: list[str], arena: int) -> subprocess.Popen[str]:
    """Start the program from a file in memory."""
    with _executable(program) as file:
        path = f"/proc/self/fd/{file}"
        for _ in range(_BUSY_TRIES):
            try:
                return subprocess.Popen(
                    [path, *arguments],
                    cwd="/",
                    env={"LC_ALL": "C"},
                    pass_fds=(arena, file),
                    start_new_session=True,
                    text=True,
                    errors="replace",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            except OSError as failure:
                if failure.errno != errno.ETXTBSY:
                    raise LaunchError(f"the emulator cannot be started: {failure}") from failure
                time.sleep(0.01)  # another thread's fork has the file still open for writing
    raise LaunchError("the emulator cannot be started: its file is still open for writing")


@contextlib.contextmanager
def _executable(program: bytes) -> Iterator[int]:
    """Yield a read-only descriptor of an in-memory file with the program; a file open for writing cannot run."""
    with os.fdopen(os.memfd_create("roller-emulator"), "wb") as writable:
        writable.write(program)
        writable.flush()
        file = os.open(f"/proc/self/fd/{writable.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
