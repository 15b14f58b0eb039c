"""Find the machine instructions that CUDA source requests by name or by access width, like FileCheck patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.ir.kernel import KernelSource

_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__(?:cluster_dims|launch_bounds)__\([^)]*\)\s*)*(\w+)\s*\([^)]*\)\s*\{')
# Wrapper functions of PTX instructions and the SASS opcodes they become. mma.sync of float8 is QMMA on sm_89 and
# sm_120; NVRTC 13.0 converts to float16 on sm_90 and sm_100.
_WRAPPERS = (
    (re.compile(r"\bcopy_async_4\("), "asynchronous copies of 4 bytes", ("LDGSTS.32",)),
    (re.compile(r"\bcopy_async_8\("), "asynchronous copies of 8 bytes", ("LDGSTS.64",)),
    (re.compile(r"\bcopy_async_16\("), "asynchronous copies of 16 bytes", ("LDGSTS.128",)),
    (re.compile(r"\bload_matrix_[124]"), "matrix loads", ("LDSM",)),
    (re.compile(r"\bmma_\w+_(?:b?f16|tf32)\("), "tensor-core products", ("HMMA",)),
    (re.compile(r"\bmma_\w+_f64\("), "tensor-core products of float64", ("DMMA",)),
    (re.compile(r"\bmma_\w+_[su]8[su]8\("), "tensor-core products of integers", ("IMMA",)),
    (re.compile(r"\bmma_\w+_e[45]m[23]e[45]m[23]\("), "tensor-core products of float8", ("QMMA", "HMMA")),
    (re.compile(r"\bwgmma_\w+_(?:b?f16|tf32)_[kmr][km]\("), "warpgroup products", ("HGMMA",)),
    (re.compile(r"\bwgmma_\w+_[su]8[su]8_[kmr]k\("), "warpgroup products of integers", ("IGMMA",)),
    (re.compile(r"\bwgmma_\w+_e[45]m[23]e[45]m[23]_[kmr]k\("), "warpgroup products of float8", ("QGMMA",)),
    (re.compile(r"\btma_load_\w+\("), "bulk loads of tensors", ("UTMALDG",)),
    (re.compile(r"\btma_store_\w+\("), "bulk stores of tensors", ("UTMASTG",)),
    (re.compile(r"\bbarrier_(?:init|arrive|arrive_remote|expect|wait)\("), "barriers with phases", ("SYNCS",)),
    (re.compile(r"\bstore_matrix_[124]"), "matrix stores", ("STSM",)),
    (re.compile(r"\bregisters_(?:de|in)crease<"), "registers handed over", ("USETMAXREG",)),
    (re.compile(r"\bcluster_sync\("), "barriers of clusters", ("UCGABAR_WAIT",)),
)
_WIDE = r"\*\((?:const )?(?:uint4|int4|float4|double2|ulonglong2|longlong2) \*\)\s*&?\s*(\w+)"
_WIDE_WRITE = re.compile(rf"^\s*{_WIDE}(?:[^=;]|==)*=(?!=)", re.MULTILINE)  # an index may compare
_WIDE_ACCESS = re.compile(_WIDE)
_SHARED_BUFFER = re.compile(r"__shared__[^;\n]*?(\w+)\s*\[|\*\s*const (\w+) = \([^;\n]*\bshared_memory\b")


@dataclass(frozen=True, slots=True)
class ExpectedInstruction:
    """An instruction that the machine code must contain."""

    description: str
    opcodes: tuple[str, ...]  # at least one of them must occur (see SassFunction)


def find_expected_instructions(source: KernelSource) -> dict[str, tuple[ExpectedInstruction, ...]]:
    """Return the expected instructions of every launch, by its name."""
    buffers = frozenset(buffer.symbol for buffer in source.buffers)
    return {name: tuple(_find_in_body(body, buffers)) for name, body in entry_bodies(source.text).items()}


def entry_bodies(text: str) -> dict[str, str]:
    """Return the text of every entry function, from its name to the next entry function."""
    entries = list(_ENTRY.finditer(text))
    ends = [*(match.start() for match in entries[1:]), len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(entries, ends, strict=True)}


def _find_in_body(body: str, buffers: frozenset[str]) -> Iterator[ExpectedInstruction]:
    for pattern, description, opcodes in _WRAPPERS:
        if pattern.search(body):
            yield ExpectedInstruction(description, opcodes)
    shared = {name for match in _SHARED_BUFFER.finditer(body) for name in match.groups() if name}
    writes = [match[1] for match in _WIDE_WRITE.finditer(body)]
    reads = [match[1] for match in _WIDE_ACCESS.finditer(body)]
    for name in writes:
        reads.remove(name)
    for names, description, family in (
        (buffers.intersection(reads), "loads of 16 bytes from memory", "LDG"),
        (buffers.intersection(writes), "stores of 16 bytes to memory", "STG"),
        (shared.intersection(reads), "loads of 16 bytes from shared memory", "LDS"),
        (shared.intersection(writes), "stores of 16 bytes to shared memory", "STS"),
    ):
        if names:
            yield ExpectedInstruction(f"{description} ({', '.join(sorted(names))})", (f"{family}.128",))
