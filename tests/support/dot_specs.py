"""Specs of CPUs with instructions for dot products."""

from __future__ import annotations

import pytest

from roller_svc import hardware
from roller_svc.hardware.detect import Machine, adapt_to_machine, probe
from roller_svc.ir.hardware import HardwareSpec, UnitKind

FLAGS = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq",
                   "avx512vl"})  # fmt: skip
DOTS = frozenset({"avx512_vnni", "avx512_bf16"})
# Only such a CPU can run these kernels; which are made, and their texts, is tested on any.
runs, runs_bytes = (
    pytest.mark.skipif(not probe().flags >= FLAGS | more, reason="the CPU at hand has no such instructions")
    for more in (DOTS, {"avx512_vnni"})
)


def machine(flags: frozenset[str]) -> Machine:
    caches = ((1, 32 << 10), (2, 1 << 20), (3, 32 << 20))
    return Machine("x86_64", "amd", "AMD EPYC", 25, flags, 2, 3.6e9, caches, 16 << 30)


def spec_with(flags: frozenset[str]) -> HardwareSpec:
    return adapt_to_machine(hardware.load("cpu-x86-avx512"), machine(FLAGS | flags))


BYTES_SPEC, BF16_SPEC = spec_with(frozenset({"avx512_vnni"})), spec_with(DOTS)
PAIRS_SPEC = hardware.load("cpu-x86-avx2")
VEX_SPEC = adapt_to_machine(PAIRS_SPEC, machine(frozenset({"avx", "avx2", "fma", "avx_vnni"})))
DOT, PAIRS = (next(unit for unit in spec.units if unit.kind is UnitKind.DOT) for spec in (BYTES_SPEC, PAIRS_SPEC))
