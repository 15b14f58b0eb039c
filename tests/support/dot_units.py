"""A CPU with dot products of bytes, on any machine that tests run on."""

from __future__ import annotations

import pytest

from roller_svc import hardware
from roller_svc.hardware.detect import Machine, adapt_to_machine, probe
from roller_svc.ir.hardware import HardwareSpec, UnitKind

_FLAGS = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
                    "avx512_vnni"})  # fmt: skip
_CACHES = ((1, 32 << 10), (2, 1 << 20), (3, 32 << 20))


def _spec(flags: frozenset[str]) -> HardwareSpec:
    machine = Machine("x86_64", "amd", "AMD EPYC", 25, flags, 2, 3.6e9, _CACHES, 16 << 30)
    return adapt_to_machine(hardware.load("cpu-x86-avx512"), machine)


SPEC, BF16_SPEC = _spec(_FLAGS), _spec(_FLAGS | {"avx512_bf16"})
DOT = next(unit for unit in SPEC.units if unit.kind is UnitKind.DOT)
# Only such a CPU can run these kernels.
runs = pytest.mark.skipif(not probe().flags >= _FLAGS, reason="the CPU at hand has no such instructions")
