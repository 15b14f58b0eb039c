"""Convolution of bytes → its view on words of adjacent channels, which dot-product instructions multiply.

A word takes the place of a channel: in the tile space, in the staged patch and in the packed weights.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.families.common.cpu.dot import WORD, cast_element, dot_operands
from roller_svc.ir.affine import Dim
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, OpKind, Select, axes_of, substitute
from roller_svc.ir.group import AxisRole, KernelGroup, TileAccess, TileAxis, TileSpace
from roller_svc.ir.hardware import ComputeUnit
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis


def word_spaces(group: KernelGroup, unit: ComputeUnit, spaces: tuple[TileSpace, ...]) -> tuple[TileSpace, ...]:
    """Return the spaces of convolutions with words of channels in place of channels, where all words are complete.

    A convolution of one word may have fewer channels. Signs of bytes are not flipped. Patches and sums have one type.
    """
    operands = dot_operands(unit, group)
    if operands is None or operands.flips_sign_of_a or unit.acc_dtype is not WORD:
        return ()
    words = (_word_space(space, operands.group) for space in spaces)
    return tuple(space for space in words if space is not None)


def _word_space(space: TileSpace, group: int) -> TileSpace | None:
    channels = next(iter(space.role(AxisRole.K)), None)
    if not space.role(AxisRole.PIXEL) or channels is None or len(channels.members) > 1:
        return None
    (axis,) = channels.members
    if axis.extent % group and axis.extent > group:
        return None
    accesses = []
    for access in space.accesses:
        words = _word_access(access, axis.name, group) if access.operand else access
        if words is None:
            return None
        accesses.append(words)
    counted = TileAxis(channels.name, channels.role, (word_axis(axis, group),))
    axes = tuple(counted if each is channels else each for each in space.axes)
    return replace(space, axes=axes, accesses=tuple(accesses), word_elements=min(group, axis.extent))


def word_axis(axis: Axis, group: int) -> Axis:
    """Return an axis of words in place of one of channels."""
    return replace(axis, extent=-(-axis.extent // group))


def _word_access(access: TileAccess, channel: str, group: int) -> TileAccess | None:
    dims = tuple(_word_dim(dim, channel, group) if channel in dict(dim.coeffs) else dim for dim in access.dims)
    known = tuple(dim for dim in dims if dim is not None)
    return replace(access, dims=known, dtype=WORD) if len(known) == len(dims) else None


def _word_dim(dim: Dim, channel: str, group: int) -> Dim | None:
    """Return the dimension of channels counted in words; None if words are not aligned in it."""
    others = [c for name, c in dim.coeffs if name != channel]
    if not dim.is_affine or dict(dim.coeffs)[channel] != 1 or any(c % group for c in (*others, *dim.offsets)):
        return None
    coeffs = tuple((name, c if name == channel else c // group) for name, c in dim.coeffs)
    return replace(dim, size=-(-dim.size // group), coeffs=coeffs, offsets=tuple(offset // group for offset in dim.offsets))


def word_of(source: Expr, channel: Axis, dtype: DType, group: int) -> Expr:
    """Return the word of channels that begins at a number of words, from elements of a type.

    A condition that all channels share stays around the word. Beyond the last channel bytes are zeros.
    """
    element = cast_element(source, dtype)
    match element:
        case Select(cond=cond, then=then, otherwise=Const(value=int(value))) if channel.name not in axes_of(cond):
            bits = (value & ((1 << dtype.bits) - 1)).to_bytes(dtype.bytes, "little")
            fill = int.from_bytes(bits * group, "little", signed=True)
            return Select(cond, _word(then, channel, group), Const(fill, WORD), WORD)
        case _:
            return _word(element, channel, group)


def _word(element: Expr, channel: Axis, group: int) -> Expr:
    first = mul(ref(channel.name), num(group))
    places = range(min(group, channel.extent))
    return Op(OpKind.WORD, tuple(substitute(element, {channel.name: add(first, num(i))}) for i in places), WORD)
