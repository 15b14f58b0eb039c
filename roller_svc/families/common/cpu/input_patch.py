"""Input patch of a convolution: each input element staged once to a per-thread buffer, with zeros for padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.fused_axis import member_values
from roller_svc.analysis.linear import Linear, linear
from roller_svc.families.common.cpu.image_space import ImageSpace, ImageWindowDim
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.view import bind_members
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind, Select, axes_of, substitute
from roller_svc.ir.index import add, ceil_div, conjuncts, div, eq, linearize, logical_and, mod, mul, num, ref, sub
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node
from roller_svc.schedule.guards import unswitch_guards

WINDOW, ROW_OF_TILES = ".window", ".window.row"
UNROLLED_VECTORS = 8  # of one contiguous segment; longer segments are loops over vectors


@dataclass(frozen=True, slots=True)
class InputPatch:
    """Layout of the staged patch: `pixels` output positions of each window dimension and `channels` input channels.

    Channels are innermost if they are contiguous in memory. Otherwise coordinates of the last dimension are innermost,
    grouped by remainder (phase) of its stride. For non-overlapping tiles, the patch holds `tile` output positions after
    each other; within a tile channels are outermost.
    """

    image: ImageSpace
    source: Expr
    dtype: DType
    pixels: tuple[int, ...]
    tile: tuple[int, ...]
    channels: int
    lanes: int

    # layout ---------------------------------------------------------------------------------------------------------
    @property
    def elements(self) -> int:
        return self.image.patch_elements(self.pixels, self.channels) + self.lanes

    @property
    def pitches(self) -> tuple[int, ...]:
        """Return the distance in elements between adjacent coordinates of each dimension."""
        step = self.channels if self.image.channels_last else 1
        pitches = []
        for slide, pixels in zip(reversed(self.image.window_dims), reversed(self.pixels), strict=True):
            pitches.append(step)
            step *= self.image.staged_extent(slide, pixels)
        return tuple(reversed(pitches))

    @property
    def channel_pitch(self) -> int:
        if self.image.channels_last:
            return 1
        return math.prod(self.image.staged_extent(s, n) for s, n in zip(self.image.window_dims, self.pixels, strict=True))

    def offset(self, channel: Expr, coordinates: tuple[Expr, ...]) -> Expr:
        """Return the offset of an element; `coordinates` count from the patch's first element.

        The last coordinate is a phase offset if coordinates are grouped by phase.
        """
        offset = mul(channel, num(self.channel_pitch))
        for coordinate, pitch in zip(coordinates, self.pitches, strict=True):
            offset = add(offset, mul(coordinate, num(pitch)))
        return offset

    def offset_in_tile(self, channel: Expr, tiles: tuple[Expr, ...], inside: Expr) -> Expr:
        """Return the offset of an element for non-overlapping tiles; `tiles` are tile numbers of each dimension."""
        counts = (whole // size for whole, size in zip(self.pixels, self.tile, strict=True))
        number = linearize(zip(tiles, counts, strict=True))
        row = add(mul(number, num(self.channels)), channel)
        return add(mul(row, num(math.prod(self.tile))), inside)

    def phase_offset(self, pixel: Expr) -> Expr:
        """Return the offset along the last dimension of what an output position reads under the tap."""
        slide, phases = self.image.window_dims[-1], self._phases
        if phases == 1:
            return add(mul(pixel, num(slide.stride)), tap_shift(slide))
        shift = tap_shift(slide)
        return add(add(mul(mod(shift, phases), num(self._phase_length)), div(shift, phases)), pixel)

    def coordinate(self, slide: ImageWindowDim, pixel: Expr) -> Expr:
        """Return the coordinate along any other dimension of what an output position reads under the tap."""
        return add(mul(pixel, num(slide.stride)), tap_shift(slide))

    @property
    def _phases(self) -> int:
        return self.image.phases(self.image.window_dims[-1])

    @property
    def _phase_length(self) -> int:
        return self.image.staged_extent(self.image.window_dims[-1], self.pixels[-1]) // self._phases

    # staging --------------------------------------------------------------------------------------------------------
    def stage(self) -> tuple[Node, ...]:
        """Stage the patch for the channels of step `.step` and the output positions from each dimension's `at`."""
        slides = self.image.window_dims
        value = substitute(Cast(self.source, self.dtype, implicit=True), self._coordinates())
        guarded = _guarded(value)
        nodes = self._store_channels(guarded) if self.image.channels_last else self._store_rows(guarded)
        for slide, pixels in reversed([*zip(slides, self.pixels, strict=True)][:-1]):
            nodes = (self._coordinate_loop(slide, pixels, nodes),)
        if self.image.channels_last:
            return nodes
        return loop_over_channels(self.image, self.channels, nodes)

    def _coordinate_loop(self, slide: ImageWindowDim, pixels: int, nodes: tuple[Node, ...]) -> Node:
        """Loop over the coordinates that the remaining output positions need."""
        limit: Expr | None = None
        if slide.pixel.extent % pixels:
            min_extent = num((slide.taps - 1) * slide.dilation + 1)
            limit = add(mul(sub(remaining_pixels(slide), num(1)), num(slide.stride)), min_extent)
        return Loop(coordinate_name(slide), slide.input_extent(pixels), LoopKind.SERIAL, nodes, limit)

    def _coordinates(self) -> dict[str, Expr]:
        """Return values of the source's axes that select the element at the coordinate variables."""
        values: dict[str, Expr] = {}
        for slide, pixels in zip(self.image.window_dims, self.pixels, strict=True):
            at = add(mul(pixel_at(slide, pixels), num(slide.stride)), ref(coordinate_name(slide)))
            if slide.tap is None:
                values[slide.pixel.name] = at
            elif slide.dilation == 1:
                values |= {slide.tap.name: at, slide.pixel.name: num(0)}
            else:
                values |= {slide.pixel.name: at, slide.tap.name: num(0)}
        return values

    def _store_rows(self, guarded: GuardedValue) -> tuple[Node, ...]:
        """Stage one row of the last dimension; its length has at most two values."""
        slide = self.image.window_dims[-1]
        nodes = dispatch_length(slide, self.pixels[-1], lambda pixels: self._store_row(guarded, slide.input_extent(pixels)))
        return self._bind_tile_row(nodes) if self.image.tiles_are_disjoint else nodes

    def _store_row(self, guarded: GuardedValue, length: int) -> tuple[Node, ...]:
        x = coordinate_name(self.image.window_dims[-1])
        across = [term for term in guarded.terms if x not in axes_of(term)]
        along = [term for term in guarded.terms if x in axes_of(term)]
        nodes: tuple[Node, ...] = ()
        for phase in range(self._phases):
            nodes += self._store_phase(guarded, along, phase, ceil_div(length - phase, self._phases))
        if not across:
            return nodes
        outside: tuple[Node, ...] = ()
        for phase in range(self._phases):
            count = ceil_div(length - phase, self._phases)
            outside += self._store_segment(phase, 0, count, guarded.outside)
        return (Branch(_conjunction(across), nodes, outside),)

    def _store_phase(self, guarded: GuardedValue, along: list[Expr], phase: int, count: int) -> tuple[Node, ...]:
        """Stage the coordinates of one phase: padding, input, padding if the bounds are constant, else by a test."""
        x = coordinate_name(self.image.window_dims[-1])
        bounds = _bounds(along, x, phase, self._phases, count)
        if bounds is None:
            condition = _conjunction(along)
            value = Select(condition, guarded.inside, guarded.outside, self.dtype)
            return self._store_segment(phase, 0, count, value)
        first, last = bounds
        return (
            *self._store_segment(phase, 0, first, guarded.outside),
            *self._store_segment(phase, first, last, guarded.inside),
            *self._store_segment(phase, last, count, guarded.outside),
        )

    def _store_segment(self, phase: int, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        x = coordinate_name(self.image.window_dims[-1])
        if self.image.tiles_are_disjoint:
            return self._store_tiles(first, last, value)

        def filled(position: Expr) -> Compute:
            coordinate = add(mul(position, num(self._phases)), num(phase))
            others = tuple(ref(coordinate_name(s)) for s in self.image.window_dims[:-1])
            offset = self.offset(self._channel, (*others, add(num(phase * self._phase_length), position)))
            return Compute(WINDOW, (offset,), substitute(value, {x: coordinate}))

        return store_contiguous(first, last, self.lanes, filled)

    def _store_tiles(self, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        """Stage a segment tile by tile: a partial tile, full tiles, a partial tile."""
        size = self.tile[-1]
        if first >= last:
            return ()
        first_tile, last_tile = ceil_div(first, size), last // size
        if first_tile > last_tile:
            return self._store_in_tile(num(last_tile), first - last_tile * size, last - last_tile * size, value)
        nodes: tuple[Node, ...] = ()
        if first % size:
            nodes = self._store_in_tile(num(first_tile - 1), first % size, size, value)
        if last_tile > first_tile:
            whole = self._store_in_tile(add(num(first_tile), ref(".tile")), 0, size, value)
            nodes += (Loop(".tile", last_tile - first_tile, LoopKind.SERIAL, whole),)
        return (*nodes, *self._store_in_tile(num(last_tile), 0, last % size, value))

    def _store_in_tile(self, tile: Expr, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        """Stage adjacent elements of the last dimension in one tile."""
        size = self.tile[-1]

        def filled(position: Expr) -> Compute:
            first_row = self.offset_in_tile(self._channel, (*[num(0)] * (len(self.tile) - 1), tile), position)
            coordinate = add(mul(tile, num(size)), position)
            x = coordinate_name(self.image.window_dims[-1])
            return Compute(WINDOW, (add(ref(ROW_OF_TILES), first_row),), substitute(value, {x: coordinate}))

        return store_contiguous(first, last, self.lanes, filled)

    def _bind_tile_row(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the offset of the first element of a row of the last dimension around the nodes."""
        places = [(ref(coordinate_name(slide)), n) for slide, n in zip(self.image.window_dims[:-1], self.tile[:-1], strict=True)]
        tiles = [div(coordinate, size) for coordinate, size in places]
        row = linearize((mod(coordinate, size), size) for coordinate, size in places)
        offset = self.offset_in_tile(num(0), (*tiles, num(0)), mul(row, num(self.tile[-1])))
        return (Let(ROW_OF_TILES, offset, nodes),)

    @property
    def _channel(self) -> Expr:
        return num(0) if self.image.channels is None else ref(".channel")

    def _store_channels(self, guarded: GuardedValue) -> tuple[Node, ...]:
        """Stage the channels, contiguous in memory, of each coordinate of the last dimension."""
        slide, axis = self.image.window_dims[-1], self.image.channels
        if axis is None:
            return ()
        coordinates = tuple(ref(coordinate_name(s)) for s in self.image.window_dims)
        members = {member.name for member in axis.members}
        across = [term for term in guarded.terms if members.isdisjoint(axes_of(term))]
        along = [term for term in guarded.terms if term not in across]  # of a tap that is summed as channels are
        element = Select(_conjunction(along), guarded.inside, guarded.outside, self.dtype) if along else guarded.inside

        def channels(count: int) -> tuple[Node, ...]:
            def filled(value: Expr) -> Callable[[Expr], Compute]:
                def at(position: Expr) -> Compute:
                    channel = add(mul(ref(".step"), num(self.channels)), position)
                    staged = substitute(value, member_values(axis, channel))
                    return Compute(WINDOW, (self.offset(position, coordinates),), staged)

                return at

            inside = store_contiguous(0, count, self.lanes, filled(element))
            if not across:
                return inside
            return (
                Branch(
                    _conjunction(across),
                    inside,
                    store_contiguous(0, count, self.lanes, filled(guarded.outside)),
                ),
            )

        tail = axis.extent % self.channels
        nodes = channels(self.channels)
        if tail:
            nodes = (Branch(eq(ref(".channels"), num(tail)), channels(tail), nodes),)
        return (self._coordinate_loop(slide, self.pixels[-1], nodes),)


def loop_over_channels(image: ImageSpace, channels: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Loop over the input channels of step `.step`, `channels` or, in the last one, `.channels`."""
    axis = image.channels
    if axis is None:
        return nodes
    position = add(mul(ref(".step"), num(channels)), ref(".channel"))
    limit = ref(".channels") if axis.extent % channels else None
    return (Loop(".channel", channels, LoopKind.SERIAL, bind_members(axis, position, nodes), limit),)


# names shared with the loops around the patch --------------------------------------------------------------
def coordinate_name(slide: ImageWindowDim) -> str:
    return f"{slide.pixel.name}.coordinate"


def pixel_at(slide: ImageWindowDim, pixels: int) -> Expr:
    """Return the first output position of a patch of `pixels`."""
    return num(0) if pixels >= slide.pixel.extent else ref(f"{slide.pixel.name}.at")


def remaining_pixels(slide: ImageWindowDim) -> Expr:
    """Return the number of output positions of the patch that exist."""
    return ref(f"{slide.pixel.name}.count")


def tap_shift(slide: ImageWindowDim) -> Expr:
    return num(0) if slide.tap is None else mul(ref(slide.tap.name), num(slide.dilation))


def dispatch_length(slide: ImageWindowDim, pixels: int, nodes: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
    """Return `nodes` of a full patch, or of the tail at the end of the axis, by a test if both occur."""
    tail = slide.pixel.extent % pixels
    if slide.pixel.extent < pixels or not tail:
        return nodes(tail or pixels)
    return (Branch(eq(remaining_pixels(slide), num(tail)), nodes(tail), nodes(pixels)),)


def store_contiguous(first: int, last: int, lanes: int, node: Callable[[Expr], Node]) -> tuple[Node, ...]:
    """Return node(position) for adjacent positions: full vectors, then the tail."""
    vectors, tail_lanes = divmod(max(0, last - first), lanes)
    nodes: list[Node] = []
    if vectors > UNROLLED_VECTORS:
        position = add(add(num(first), mul(ref(".part"), num(lanes))), ref(LANE))
        lane = unswitch_guards(Loop(LANE, lanes, LoopKind.VECTOR, (node(position),)))
        nodes.append(Loop(".part", vectors, LoopKind.SERIAL, (lane,)))
    elif vectors:
        vectors_loop = Loop(LANE, vectors * lanes, LoopKind.VECTOR, (node(add(num(first), ref(LANE))),))
        nodes.append(unswitch_guards(vectors_loop))
    if tail_lanes:
        tail = Loop(LANE, tail_lanes, LoopKind.VECTOR, (node(add(num(first + vectors * lanes), ref(LANE))),))
        nodes.append(unswitch_guards(tail))
    return tuple(nodes)


@dataclass(frozen=True, slots=True)
class GuardedValue:
    """A value that is `inside` where all terms hold, else `outside`."""

    terms: tuple[Expr, ...]
    inside: Expr
    outside: Expr


def _guarded(value: Expr) -> GuardedValue:
    match value:
        case Select(cond=cond, then=then, otherwise=Const() as outside):
            inner = _guarded(then)
            if not inner.terms or inner.outside == outside:
                return GuardedValue((*conjuncts(cond), *inner.terms), inner.inside, outside)
        case Cast(arg=arg, dtype=dtype):
            inner = _guarded(arg)
            if inner.terms:
                return GuardedValue(
                    inner.terms, Cast(inner.inside, dtype, value.implicit), Cast(inner.outside, dtype, value.implicit)
                )
    return GuardedValue((), value, value)


def _conjunction(terms: list[Expr]) -> Expr:
    conjunction: Expr | None = None
    for term in terms:
        conjunction = logical_and(conjunction, term)
    return num(1) if conjunction is None else conjunction


def _bounds(along: list[Expr], x: str, phase: int, phases: int, count: int) -> tuple[int, int] | None:
    """Return the range of positions of a phase where all terms hold, found by enumeration.

    None if a term depends on more than the position, or if the range is not contiguous.
    """
    differences = [_difference(term) for term in along]
    holds = []
    for position in range(count):
        decisions = [_decided(term, x, position * phases + phase) for term in differences]
        if None in decisions:
            return None
        holds.append(all(decisions))
    inside = [i for i, holds_here in enumerate(holds) if holds_here]
    if not inside:
        return count, count
    return (inside[0], inside[-1] + 1) if len(inside) == inside[-1] + 1 - inside[0] else None


_ORDER: dict[OpKind, Callable[[int], bool]] = {
    OpKind.LT: lambda d: d < 0, OpKind.LE: lambda d: d <= 0, OpKind.GT: lambda d: d > 0, OpKind.GE: lambda d: d >= 0,
    OpKind.EQ: lambda d: d == 0, OpKind.NE: lambda d: d != 0,
}  # fmt: skip


def _difference(term: Expr) -> tuple[OpKind, Linear] | None:
    """Rewrite an integer comparison as a comparison of a linear form with 0, or return None."""
    match term:
        case Op(kind=kind, args=(a, b)) if kind in _ORDER and not a.dtype.is_float:
            return kind, linear(sub(a, b))
    return None


def _decided(term: tuple[OpKind, Linear] | None, x: str, position: int) -> bool | None:
    """Return whether the comparison holds at `position` of the axis, or None if it depends on more."""
    if term is None or term[1].keys() - {None, ref(x)}:
        return None
    kind, terms = term
    return _ORDER[kind](terms.get(None, 0) + position * terms.get(ref(x), 0))
