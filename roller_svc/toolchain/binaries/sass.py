"""Disassemble cubins to SASS through nvdisasm in a sandboxed subprocess: as text, and as instruction counts."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from roller_svc.errors import CompileError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.hardware import Arch
from roller_svc.toolchain.binaries.elf import read_code
from roller_svc.toolchain.confined import run_sandboxed
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.nvrtc import INSTALL_HINT, wheel_roots

TOOL = "nvdisasm"
_SYSTEM = Path("/usr/local/cuda/bin") / TOOL

# Matrix instructions: mma (HMMA f16 bf16 tf32, IMMA integers, QMMA float8, DMMA f64), wgmma (HGMMA ...), tcgen05.
MATRIX_FAMILIES = (
    "HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA",
)  # fmt: skip
# Accesses also counted by width in bits: LDG.128. Global, shared, local, generic; LDGSTS is cp.async.
WIDE_FAMILIES = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST", "LDGSTS")
_OTHER_FAMILIES = (
    "LDSM", "STSM", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "UCGABAR_WAIT", "FFMA", "FFMA2", "DFMA", "HFMA2",
    "IMAD", "MUFU", "BAR", "SHFL", "ATOM", "ATOMG", "ATOMS", "RED", "REDG",
)  # fmt: skip
_FAMILIES = frozenset((*MATRIX_FAMILIES, *WIDE_FAMILIES, *_OTHER_FAMILIES))
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
INSTRUCTION_BYTES = 16  # since Volta
_FALSE_PREDICATE = "@!PT"  # predicate of instructions that are padding


@dataclass(frozen=True, slots=True)
class SassFunction:
    """Instruction counts of one function."""

    name: str
    instructions: int  # without padding
    # Instructions by family in alphabetical order. Memory accesses have their width in bits: ("LDG.128", 8).
    counts: tuple[tuple[str, int], ...]

    def count(self, *families: str) -> int:
        """Return the number of instructions of these families: "HMMA"; "LDG" for every width, "LDG.128" for one."""
        return sum(n for name, n in self.counts if name in families or name.partition(".")[0] in families)


def sass_text(binary: bytes, limits: CompileLimits = DEFAULT_LIMITS, *, lines: bool = False) -> str:
    """Return the SASS of a cubin, for reading; with `lines`, those of the source that the cubin knows, as comments.

    Raises ToolchainMissingError if nvdisasm is not installed, CompileError if it cannot read the cubin, and
    KernelTimeoutError.
    """
    return _disassemble(binary, ("-c", "-gi") if lines else ("-c",), limits)


def sass_functions(binaries: Sequence[bytes], arch: Arch) -> list[dict[str, SassFunction]]:
    """Return the instruction counts of every function by name, for each cubin. Raises as `sass_text` does.

    All cubins must be for one architecture. They are read in one run, because nvdisasm takes longer to start than to
    read.
    """
    codes = [read_code(binary) for binary in binaries]
    raw = b"".join(code for functions in codes for code in functions.values())
    output = _disassemble(raw, ("-b", f"SM{arch.number}{arch.suffix}", "-json"), DEFAULT_LIMITS)
    instructions = iter(_instructions(output))
    return [
        {name: _function(name, islice(instructions, len(code) // INSTRUCTION_BYTES)) for name, code in one.items()} for one in codes
    ]


def _instructions(document: str) -> list[Mapping[str, Any]]:
    """Parse the output of `nvdisasm -json` for raw code: metadata, and a list with one function."""
    try:
        _, (function,) = json.loads(document)
        return list(function["sass-instructions"])
    except (ValueError, KeyError, TypeError) as problem:
        raise CompileError(f"{TOOL} printed malformed output: {problem!r}", code="bad-cubin") from problem


def family_of(opcode: str) -> str | None:
    """Return the family of an opcode, or None if it is not counted.

    'LDG.E.128.CONSTANT' → 'LDG.128', 'HMMA.16816.F32' → 'HMMA'.
    """
    head, *modifiers = opcode.split(".")
    if head not in _FAMILIES:
        return None
    if head not in WIDE_FAMILIES:
        return head
    return f"{head}.{next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 32)}"


def disassembler() -> Path:
    """Return nvdisasm, the wheel's before the system's. Raises ToolchainMissingError naming how to install it."""
    wheels = (path for root in wheel_roots() for path in sorted(root.glob(f"*/bin/{TOOL}"), reverse=True))
    system = shutil.which(TOOL)
    for path in (*wheels, *([Path(system)] if system else []), _SYSTEM):
        if path.is_file():
            return path
    raise ToolchainMissingError(f"{TOOL} is not installed: {INSTALL_HINT}")


def disassembler_version() -> str:
    """Return the version of nvdisasm. Raises ToolchainMissingError if it is not installed or fails."""
    return _version_of(disassembler())


@functools.cache
def _version_of(tool: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="roller-sass-") as temporary:
        try:
            code, text = run_sandboxed([str(tool), "--version"], Path(temporary), CompileLimits(timeout_s=10.0))
        except KernelTimeoutError as late:
            raise ToolchainMissingError(f"{TOOL} --version does not end") from late
    if code != 0 or not text.strip():
        raise ToolchainMissingError(f"{TOOL} --version fails: {text.strip()[:200]}")
    return text.strip().splitlines()[-1]  # the first lines are the program and its copyright


def _function(name: str, instructions: Iterable[Mapping[str, Any]]) -> SassFunction:
    opcodes = [one["opcode"] for one in instructions if one.get("predicate") != _FALSE_PREDICATE and one["opcode"] != "NOP"]
    counts = Counter(family for opcode in opcodes if (family := family_of(opcode)) is not None)
    return SassFunction(name, len(opcodes), tuple(sorted(counts.items())))


def _disassemble(binary: bytes, options: tuple[str, ...], limits: CompileLimits) -> str:
    tool = disassembler()
    with tempfile.TemporaryDirectory(prefix="roller-sass-") as temporary:
        directory = Path(temporary)
        (directory / "kernel").write_bytes(binary)
        output = directory / "kernel.sass"
        code, log = run_sandboxed([str(tool), *options, "kernel"], directory, limits, output)
        if code != 0:
            raise CompileError(f"{TOOL} cannot read the cubin: {log.strip()[:300]}", code="bad-cubin", log=log)
        return output.read_text(encoding="utf-8", errors="replace")
