"""Whether a group is a direct convolution on a CPU, and its tile space taken apart."""

from __future__ import annotations

from roller_svc.families.common.cpu.image_space import ImageSpace, image_space
from roller_svc.ir.group import KernelGroup
from roller_svc.perf.workload import Workload


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ImageSpace] | None:
    """Prepare a contraction whose space is that of a direct convolution on a CPU; None for any other."""
    if base.machine.is_gpu or not base.is_contraction or base.space.winograd_tile:
        return None
    image = image_space(base.space)
    return None if image is None else base.with_facts(image)
