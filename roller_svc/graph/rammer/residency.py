"""Count the vEUs of a cooperative kernel that are on a device at once."""

from __future__ import annotations

import math

from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, exceeded_limits


def count_veus(kernel: CompiledKernel, hw: HardwareSpec) -> int:
    """Return the blocks that are resident at once, by the resources of the linked kernel.

    Raises LaunchError if a core cannot hold one block.
    """
    launch, used = kernel.source.launches[0], kernel.resources[0]  # all launches are those of one function
    needs = BlockResources(math.prod(launch.block), used.registers_per_thread, used.shared_bytes)
    if exceeded := exceeded_limits(needs, hw):
        raise LaunchError(f"{launch.name} cannot run on {hw.id}: {'; '.join(exceeded)}", code="persistent-too-large")
    return hw.num_cores * blocks_per_core(needs, hw)


def check_resident(kernel: CompiledKernel, hw: HardwareSpec) -> None:
    """Check that all blocks of each cooperative launch fit on a device at once. Raises LaunchError if they do not.

    Blocks that are not resident would be waited for, but never start.
    """
    veus = count_veus(kernel, hw)
    for launch in kernel.source.launches:
        blocks = math.prod(launch.grid)
        if blocks > veus:
            raise LaunchError(
                f"{launch.name} has {blocks} vEUs, expected at most {veus}, which {hw.id} can hold at once: plan fewer vEUs",
                code="persistent-too-large",
            )
