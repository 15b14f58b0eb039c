"""Cubin → SASS, through nvdisasm in a confined subprocess: as text, and as counts of its instructions."""

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
from roller_svc.toolchain.binaries.cubin import read_code
from roller_svc.toolchain.confined import run_confined
from roller_svc.toolchain.limits import DEFAULT_LIMITS, CompileLimits
from roller_svc.toolchain.nvrtc import INSTALL_HINT, wheel_roots

TOOL = "nvdisasm"
_SYSTEM = Path("/usr/local/cuda/bin") / TOOL

# Instructions on matrices: mma (HMMA f16 bf16 tf32, IMMA integers, QMMA float8, DMMA f64), wgmma (HGMMA ...), tcgen05.
MATRIX_FAMILIES = (
    "HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA",
)  # fmt: skip
# Accesses counted by width as well, in bits: LDG.128. Global, shared, local, unknown space; LDGSTS is cp.async.
WIDE_FAMILIES = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST", "LDGSTS")
_OTHER_FAMILIES = (
    "LDSM", "STSM", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "UCGABAR_WAIT", "FFMA", "FFMA2", "DFMA", "HFMA2",
    "IMAD", "MUFU", "BAR", "SHFL", "ATOM", "ATOMG", "ATOMS", "RED",
)  # fmt: skip
_FAMILIES = frozenset((*MATRIX_FAMILIES, *WIDE_FAMILIES, *_OTHER_FAMILIES))
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
INSTRUCTION_BYTES = 16  # since Volta
_NEVER = "@!PT"  # the predicate of instructions that do nothing: padding for the hardware's sake


@dataclass(frozen=True, slots=True)
class SassFunction:
    """One function's code in numbers. `counts`: how often each family occurs, by its mnemonic, in alphabetical order;
    an access of memory has its width in bits too: ("LDG.128", 8). `instructions`: all of them, but for padding.
    """

    name: str
    instructions: int
    counts: tuple[tuple[str, int], ...]

    def count(self, *families: str) -> int:
        """Instructions of these families: "HMMA"; "LDG" for every width, "LDG.128" for one."""
        return sum(n for name, n in self.counts if name in families or name.partition(".")[0] in families)


def sass_text(binary: bytes, limits: CompileLimits = DEFAULT_LIMITS) -> str:
    """The SASS of a cubin, for people to read.

    Raises ToolchainMissingError where nvdisasm is not installed, CompileError where it does not read the cubin,
    KernelTimeoutError.
    """
    return _disassembled(binary, ("-c",), limits)


def sass_functions(
    binaries: Sequence[bytes], arch: Arch, limits: CompileLimits = DEFAULT_LIMITS
) -> list[dict[str, SassFunction]]:
    """For each cubin every function by its name, its instructions counted. Raises what `sass_text` raises.

    All cubins are for one architecture and read in one run: the tool takes longer to start (0.4 s) than to read.
    """
    codes = [read_code(binary) for binary in binaries]
    raw = b"".join(code for functions in codes for code in functions.values())
    instructions = iter(_instructions(_disassembled(raw, ("-b", f"SM{arch.number}{arch.suffix}", "-json"), limits)))
    return [
        {name: _function(name, islice(instructions, len(code) // INSTRUCTION_BYTES)) for name, code in one.items()}
        for one in codes
    ]


def _instructions(document: str) -> list[Mapping[str, Any]]:
    """What `nvdisasm -json` printed of raw code: a list of facts about the input and a list with one function."""
    try:
        _, (function,) = json.loads(document)
        return list(function["sass-instructions"])
    except (ValueError, KeyError, TypeError) as problem:
        raise CompileError(f"{TOOL} printed what is no disassembly: {problem!r}", code="bad-cubin") from problem


def family_of(opcode: str) -> str | None:
    """'LDG.E.128.CONSTANT' → 'LDG.128', 'HMMA.16816.F32' → 'HMMA'; None for what is not counted."""
    head, *modifiers = opcode.split(".")
    if head not in _FAMILIES:
        return None
    if head not in WIDE_FAMILIES:
        return head
    return f"{head}.{next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 32)}"


def disassembler() -> Path:
    """nvdisasm: the wheel's before the system's; raises ToolchainMissingError saying how to get it."""
    wheels = (path for root in wheel_roots() for path in sorted(root.glob(f"*/bin/{TOOL}"), reverse=True))
    system = shutil.which(TOOL)
    for path in (*wheels, *([Path(system)] if system else []), _SYSTEM):
        if path.is_file():
            return path
    raise ToolchainMissingError(f"{TOOL} is not installed: {INSTALL_HINT}")


def disassembler_version() -> str:
    """What nvdisasm says of itself. Raises ToolchainMissingError where it is not installed or does not say it."""
    return _version_of(disassembler())


@functools.cache
def _version_of(tool: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="roller-sass-") as folder:
        try:
            code, text = run_confined([str(tool), "--version"], Path(folder), CompileLimits(timeout_s=10.0))
        except KernelTimeoutError as late:
            raise ToolchainMissingError(f"{TOOL} --version does not end") from late
    if code != 0 or not text.strip():
        raise ToolchainMissingError(f"{TOOL} --version fails: {text.strip()[:200]}")
    return text.strip().splitlines()[-1]  # the first lines name the program and who made it


def _function(name: str, instructions: Iterable[Mapping[str, Any]]) -> SassFunction:
    real = [one["opcode"] for one in instructions if one.get("predicate") != _NEVER and one["opcode"] != "NOP"]
    counts = Counter(family for opcode in real if (family := family_of(opcode)) is not None)
    return SassFunction(name, len(real), tuple(sorted(counts.items())))


def _disassembled(binary: bytes, options: tuple[str, ...], limits: CompileLimits) -> str:
    tool = disassembler()
    with tempfile.TemporaryDirectory(prefix="roller-sass-") as folder:
        directory = Path(folder)
        (directory / "kernel").write_bytes(binary)
        output = directory / "kernel.sass"
        code, log = run_confined([str(tool), *options, "kernel"], directory, limits, output)
        if code != 0:
            raise CompileError(f"{TOOL} does not read the cubin: {log.strip()[:300]}", code="bad-cubin", log=log)
        return output.read_text(encoding="utf-8", errors="replace")
