"""Contraction group -> its views as a Winograd convolution, one for each size of output tiles that is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roller_svc.analysis.winograd import POINTS, is_accurate
from roller_svc.families.common.cpu.image_space import ImageSpace, image_space, tiled_dims
from roller_svc.families.cpu.winograd.workload import summed_products
from roller_svc.ir.constraints import WinogradMode
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.group import AxisRole, KernelGroup, TileSpace


def winograd_spaces(group: KernelGroup, convolutions: Sequence[TileSpace], mode: WinogradMode, lanes: int) -> tuple[TileSpace, ...]:
    """Return the spaces of Winograd convolutions, given those of direct ones; none where the algorithm does not apply.

    It applies to 3 taps of stride 1 along one or two dimensions, float32, and constant weights. One more dimension,
    outside of these, may have taps. The filters of a group must fill the `lanes` of a vector: else products and
    transformed weights are mostly zeros.
    """
    if mode is WinogradMode.NEVER:
        return ()
    for space in convolutions:
        image = image_space(space)
        if image is not None and image.along_filters and _applies(group, space, image, lanes):
            return tuple(
                replace(space, winograd_tile=m)
                for m in POINTS
                if mode is WinogradMode.ALWAYS or is_accurate(m, summed_products(image), len(tiled_dims(image)))
            )
    return ()


def _applies(group: KernelGroup, space: TileSpace, image: ImageSpace, lanes: int) -> bool:
    if space.compute_dtype is not DType.FLOAT32 or image.channels is None:
        return False
    if space.role(AxisRole.BATCH) and image.filters.extent < lanes:
        return False
    tiled, dims = tiled_dims(image), image.window_dims
    if not tiled or any(slide.stride != 1 for slide in dims):
        return False
    summed = [slide for slide in dims if slide.tap is not None and slide not in tiled]
    if len(summed) > 1 or any(dims.index(slide) > dims.index(tiled[0]) for slide in summed):
        return False
    return _has_constant_weights(group, image)


def _has_constant_weights(group: KernelGroup, image: ImageSpace) -> bool:
    """Return whether the operand without output positions reads constants alone."""
    if group.operands is None or group.operands.b2 is not None:
        return False
    weights = group.operands.b if pixels_are_rows(group, image) else group.operands.a
    tensors = {load.tensor for load in loads_of(weights)}
    return bool(tensors) and tensors <= group.constants


def pixels_are_rows(group: KernelGroup, image: ImageSpace) -> bool:
    """Return whether output positions are the contraction's rows (m), so that filters are last in the output."""
    (m,) = group.space.role(AxisRole.M)
    return image.window_dims[0].pixel in m.members
