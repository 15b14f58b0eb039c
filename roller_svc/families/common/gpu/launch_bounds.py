"""Resident blocks that a kernel asks the compiler to leave registers for (`__launch_bounds__`)."""

from __future__ import annotations

from typing import Any

from roller_svc.ir.hardware import UnitKind
from roller_svc.ir.index import ceil_div
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model
from roller_svc.perf.occupancy import blocks_per_core

# Registers of addresses and hoisted values, relative to those live through a loop.
REGISTER_MARGIN = 1.25


def min_resident_blocks(model: Model[Any], program: RProgram, margin: float = REGISTER_MARGIN) -> int:
    """Return the resident blocks for the launch bounds: as predicted by the model, at most those of the grid."""
    needs, hw = model.resources(program), model.workload.machine.hw
    if needs is None:
        return 1
    needs = needs._replace(registers_per_thread=round(needs.registers_per_thread * margin))
    return min(blocks_per_core(needs, hw), ceil_div(program.grid, hw.num_cores))


def mfma_resident_blocks(model: Model[Any], program: RProgram) -> int:
    """Return the blocks for the launch bounds of a matrix kernel.

    NVRTC minimises registers. LLVM uses all 512 of a SIMD unless more than one wave is requested, so MFMA kernels
    request the predicted number of blocks.
    """
    needs = model.resources(program) if program.unit.kind is UnitKind.MFMA else None
    return 1 if needs is None else blocks_per_core(needs, model.workload.machine.hw)
