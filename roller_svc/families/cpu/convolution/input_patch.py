"""Image of a convolution → its window in a task's private room: every element once, guards decided, zeros in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.linear import Linear, linear
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.view import bind_members, member_values
from roller_svc.families.cpu.convolution.workload import ImageSpace, ImageWindowDim
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind, Select, axes_of, substitute
from roller_svc.ir.index import add, ceil_div, conjuncts, div, eq, logical_and, mod, mul, num, ref, sub
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node
from roller_svc.schedule.guards import unswitch_guards

WINDOW, ROW_OF_TILES = ".window", ".window.row"
UNROLLED_VECTORS = 8  # of one run; longer ones are loops over vectors


@dataclass(frozen=True, slots=True)
class InputPatch:
    """Layout of the staged window: `pixels` of each slide, `channels` of them; channels innermost where they are so
    in memory, else coordinates of the last slide, those of one remainder of its stride together. Where tiles lie apart,
    those of `tile` pixels follow each other, in each the channels, and of each channel the pixels."""

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
        return self.image.window_elements(self.pixels, self.channels) + self.lanes

    @property
    def pitches(self) -> tuple[int, ...]:
        """Elements between neighbouring coordinates of each slide."""
        step = self.channels if self.image.channels_last else 1
        pitches = []
        for slide, pixels in zip(reversed(self.image.slides), reversed(self.pixels), strict=True):
            pitches.append(step)
            step *= self.image.held(slide, pixels)
        return tuple(reversed(pitches))

    @property
    def channel_pitch(self) -> int:
        if self.image.channels_last:
            return 1
        return math.prod(self.image.held(s, n) for s, n in zip(self.image.slides, self.pixels, strict=True))

    def offset(self, channel: Expr, coordinates: tuple[Expr, ...]) -> Expr:
        """Of an element: `coordinates` count from the window's first, but for the last slide's, which comes as
        `sorted_place` makes it where its coordinates are sorted."""
        offset = mul(channel, num(self.channel_pitch))
        for coordinate, pitch in zip(coordinates, self.pitches, strict=True):
            offset = add(offset, mul(coordinate, num(pitch)))
        return offset

    def offset_in_tile(self, channel: Expr, tiles: tuple[Expr, ...], inside: Expr) -> Expr:
        """Of an element where tiles lie apart: `tiles` count along each slide."""
        number: Expr = num(0)
        for tile, whole, size in zip(tiles, self.pixels, self.tile, strict=True):
            number = add(mul(number, num(whole // size)), tile)
        row = add(mul(number, num(self.channels)), channel)
        return add(mul(row, num(math.prod(self.tile))), inside)

    def phase_offset(self, pixel: Expr) -> Expr:
        """Place along the last slide of what a pixel meets under the tap, coordinates sorted by remainder."""
        slide, phases = self.image.slides[-1], self._phases
        if phases == 1:
            return add(mul(pixel, num(slide.stride)), tap_shift(slide))
        shift = tap_shift(slide)
        return add(add(mul(mod(shift, phases), num(self._phase_length)), div(shift, phases)), pixel)

    def coordinate(self, slide: ImageWindowDim, pixel: Expr) -> Expr:
        """Of what a pixel meets under the tap, along any other slide."""
        return add(mul(pixel, num(slide.stride)), tap_shift(slide))

    @property
    def _phases(self) -> int:
        return self.image.phases(self.image.slides[-1])

    @property
    def _phase_length(self) -> int:
        return self.image.held(self.image.slides[-1], self.pixels[-1]) // self._phases

    # filling --------------------------------------------------------------------------------------------------------
    def stage(self) -> tuple[Node, ...]:
        """Fill it for the channels of step `.step` and the pixels from each slide's `at` on."""
        slides = self.image.slides
        value = substitute(Cast(self.source, self.dtype, implicit=True), self._coordinates())
        guarded = _guarded(value)
        nodes = self._store_channels(guarded) if self.image.channels_last else self._store_rows(guarded)
        for slide, pixels in reversed([*zip(slides, self.pixels, strict=True)][:-1]):
            nodes = (self._coordinate_loop(slide, pixels, nodes),)
        if self.image.channels_last:
            return nodes
        return self._channel_loop(nodes)

    def _coordinate_loop(self, slide: ImageWindowDim, pixels: int, nodes: tuple[Node, ...]) -> Node:
        """Over the coordinates that the pixels left in the image need."""
        limit: Expr | None = None
        if slide.pixel.extent % pixels:
            min_extent = num((slide.taps - 1) * slide.dilation + 1)
            limit = add(mul(sub(remaining_pixels(slide), num(1)), num(slide.stride)), min_extent)
        return Loop(coordinate_name(slide), slide.reach(pixels), LoopKind.SERIAL, nodes, limit)

    def _channel_loop(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        axis = self.image.channels
        if axis is None:
            return nodes
        position = add(mul(ref(".step"), num(self.channels)), ref(".channel"))
        limit = ref(".channels") if axis.extent % self.channels else None
        return (Loop(".channel", self.channels, LoopKind.SERIAL, bind_members(axis, position, nodes), limit),)

    def _coordinates(self) -> dict[str, Expr]:
        """Axes of the factor → such that it is the element at the coordinate variables' place."""
        values: dict[str, Expr] = {}
        for slide, pixels in zip(self.image.slides, self.pixels, strict=True):
            at = add(mul(pixel_at(slide, pixels), num(slide.stride)), ref(coordinate_name(slide)))
            if slide.tap is None:
                values[slide.pixel.name] = at
            elif slide.dilation == 1:
                values |= {slide.tap.name: at, slide.pixel.name: num(0)}
            else:
                values |= {slide.pixel.name: at, slide.tap.name: num(0)}
        return values

    def _store_rows(self, guarded: GuardedValue) -> tuple[Node, ...]:
        """One row of the last slide: its length is known, at most two cases."""
        slide = self.image.slides[-1]
        nodes = dispatch_length(slide, self.pixels[-1], lambda pixels: self._store_row(guarded, slide.reach(pixels)))
        return self._bind_tile_row(nodes) if self.image.tiles_apart else nodes

    def _store_row(self, guarded: GuardedValue, length: int) -> tuple[Node, ...]:
        x = coordinate_name(self.image.slides[-1])
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
        """The coordinates of one remainder: outside, inside, outside, where that is known; else decided on the spot."""
        x = coordinate_name(self.image.slides[-1])
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
        x = coordinate_name(self.image.slides[-1])
        if self.image.tiles_apart:
            return self._store_tiles(first, last, value)

        def filled(position: Expr) -> Compute:
            coordinate = add(mul(position, num(self._phases)), num(phase))
            others = tuple(ref(coordinate_name(s)) for s in self.image.slides[:-1])
            offset = self.offset(self._channel, (*others, add(num(phase * self._phase_length), position)))
            return Compute(WINDOW, (offset,), substitute(value, {x: coordinate}))

        return store_contiguous(first, last, self.lanes, filled)

    def _store_tiles(self, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        """The same tile by tile: a part of one, whole ones, a part of one."""
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
        """Neighbours of the last slide in one tile."""
        size = self.tile[-1]

        def filled(position: Expr) -> Compute:
            first_row = self.offset_in_tile(self._channel, (*[num(0)] * (len(self.tile) - 1), tile), position)
            coordinate = add(mul(tile, num(size)), position)
            x = coordinate_name(self.image.slides[-1])
            return Compute(WINDOW, (add(ref(ROW_OF_TILES), first_row),), substitute(value, {x: coordinate}))

        return store_contiguous(first, last, self.lanes, filled)

    def _bind_tile_row(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes for one row of the last slide, with the place of its first element."""
        tiles: list[Expr] = []
        row: Expr = num(0)
        for slide, size in zip(self.image.slides[:-1], self.tile[:-1], strict=True):
            coordinate = ref(coordinate_name(slide))
            tiles.append(div(coordinate, size))
            row = add(mul(row, num(size)), mod(coordinate, size))
        offset = self.offset_in_tile(num(0), (*tiles, num(0)), mul(row, num(self.tile[-1])))
        return (Let(ROW_OF_TILES, offset, nodes),)

    @property
    def _channel(self) -> Expr:
        return num(0) if self.image.channels is None else ref(".channel")

    def _store_channels(self, guarded: GuardedValue) -> tuple[Node, ...]:
        """Channels of one coordinate of the last slide, neighbours in memory."""
        slide, axis = self.image.slides[-1], self.image.channels
        if axis is None:
            return ()
        coordinates = tuple(ref(coordinate_name(s)) for s in self.image.slides)

        def channels(count: int) -> tuple[Node, ...]:
            def filled(value: Expr) -> Callable[[Expr], Compute]:
                def at(position: Expr) -> Compute:
                    channel = add(mul(ref(".step"), num(self.channels)), position)
                    there = substitute(value, member_values(axis, channel))
                    return Compute(WINDOW, (self.offset(position, coordinates),), there)

                return at

            inside = store_contiguous(0, count, self.lanes, filled(guarded.inside))
            if not guarded.terms:
                return inside
            return (Branch(_conjunction(list(guarded.terms)), inside, store_contiguous(0, count, self.lanes, filled(guarded.outside))),)

        tail = axis.extent % self.channels
        nodes = channels(self.channels)
        if tail:
            nodes = (Branch(eq(ref(".channels"), num(tail)), channels(tail), nodes),)
        return (self._coordinate_loop(slide, self.pixels[-1], nodes),)


# names that the window shares with the loops around it --------------------------------------------------------------
def coordinate_name(slide: ImageWindowDim) -> str:
    return f"{slide.pixel.name}.coordinate"


def pixel_at(slide: ImageWindowDim, pixels: int) -> Expr:
    """First pixel of a window of so many."""
    return num(0) if pixels >= slide.pixel.extent else ref(f"{slide.pixel.name}.at")


def remaining_pixels(slide: ImageWindowDim) -> Expr:
    """Pixels of the window that the image has."""
    return ref(f"{slide.pixel.name}.count")


def tap_shift(slide: ImageWindowDim) -> Expr:
    return num(0) if slide.tap is None else mul(ref(slide.tap.name), num(slide.dilation))


def dispatch_length(slide: ImageWindowDim, pixels: int, nodes: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
    """What `nodes` makes of a window's pixels along the slide: all of them, or those left at the end of the axis."""
    tail = slide.pixel.extent % pixels
    if slide.pixel.extent < pixels or not tail:
        return nodes(tail or pixels)
    return (Branch(eq(remaining_pixels(slide), num(tail)), nodes(tail), nodes(pixels)),)


def store_contiguous(first: int, last: int, lanes: int, node: Callable[[Expr], Node]) -> tuple[Node, ...]:
    """node(position) for neighbouring positions: whole vectors, then the rest."""
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
    """`inside` where all terms hold, else `outside`."""

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
    """First and last place of a row's phase at which all terms hold, found by trying; None where more than the place
    decides."""
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
    """A comparison as one of a sum with 0; None for anything else."""
    match term:
        case Op(kind=kind, args=(a, b)) if kind in _ORDER and not a.dtype.is_float:
            return kind, linear(sub(a, b))
    return None


def _decided(term: tuple[OpKind, Linear] | None, x: str, position: int) -> bool | None:
    """Whether the comparison holds where the axis is `at`; None where more than that decides it."""
    if term is None or term[1].keys() - {None, ref(x)}:
        return None
    kind, terms = term
    return _ORDER[kind](terms.get(None, 0) + position * terms.get(ref(x), 0))
