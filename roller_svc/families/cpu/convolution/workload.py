"""Whether a group is a direct convolution on a CPU, and its tile space taken apart."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.cpu.image_space import ImageSpace, image_space
from roller_svc.ir.group import KernelGroup
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class ConvolutionTask:
    """Sizes of a task, of the patches that it stages and of the panels that it packs."""

    pixels: tuple[int, ...]  # output positions of a patch along each window dimension
    tile: tuple[int, ...]  # of a register tile
    channels: int  # of a block of channels
    steps: int  # blocks of channels
    panels: int  # of filters
    wide: int  # filters of a panel


def plan_task(p: Workload[ImageSpace], block: Tile, thread: Tile) -> ConvolutionTask:
    """Return what a task of `block` stages and packs, for register tiles of `thread`."""
    image, names = p.facts, [axis.name for axis in p.space.axes]
    of_block, of_thread = (dict(zip(names, tile, strict=True)) for tile in (block, thread))
    channels = image.depth if image.channels is None else min(image.depth, of_block[image.channels.name])
    wide = of_thread[image.filters.name]
    return ConvolutionTask(
        pixels=image.patch_shape(of_block, of_thread, channels, p.machine.hw.block_level.capacity_bytes),
        tile=tuple(of_thread[slide.pixel.name] for slide in image.window_dims),
        channels=channels,
        steps=-(-image.depth // channels),
        panels=of_block[image.filters.name] // wide,
        wide=wide,
    )


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ImageSpace] | None:
    """Prepare a contraction whose space is that of a direct convolution on a CPU; None for any other."""
    if base.machine.is_gpu or not base.is_contraction or base.space.winograd_tile:
        return None
    image = image_space(base.space)
    return None if image is None else base.with_facts(image)
