"""Image of a convolution → its window in a task's private room: every element once, guards decided, zeros in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.linear import Linear, linear
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.view import decoded, member_values
from roller_svc.families.cpu.convolution.workload import ImageSpace, Slide
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind, Select, axes_of, substitute
from roller_svc.ir.index import add, ceil_div, conjuncts, div, eq, logical_and, mod, mul, num, ref, sub
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node
from roller_svc.schedule.guards import without_guards_inside

WINDOW, ROW_OF_TILES = ".window", ".window.row"
UNROLLED_VECTORS = 8  # of one run; longer ones are loops over vectors


@dataclass(frozen=True, slots=True)
class ImageWindow:
    """Layout of the staged window: `pixels` of each slide, `channels` of them; channels innermost where they are so
    in memory, else coordinates of the last slide, those of one remainder of its stride together. Where tiles lie apart,
    those of `tile` pixels follow each other, in each the channels, and of each channel the pixels."""

    image: ImageSpace
    factor: Expr
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
        found = []
        for slide, pixels in zip(reversed(self.image.slides), reversed(self.pixels), strict=True):
            found.append(step)
            step *= self.image.held(slide, pixels)
        return tuple(reversed(found))

    @property
    def channel_pitch(self) -> int:
        if self.image.channels_last:
            return 1
        return math.prod(self.image.held(s, n) for s, n in zip(self.image.slides, self.pixels, strict=True))

    def place(self, channel: Expr, coordinates: tuple[Expr, ...]) -> Expr:
        """Of an element: `coordinates` count from the window's first, but for the last slide's, which comes as
        `sorted_place` makes it where its coordinates are sorted."""
        total = mul(channel, num(self.channel_pitch))
        for coordinate, pitch in zip(coordinates, self.pitches, strict=True):
            total = add(total, mul(coordinate, num(pitch)))
        return total

    def place_in_tile(self, channel: Expr, tiles: tuple[Expr, ...], inside: Expr) -> Expr:
        """Of an element where tiles lie apart: `tiles` count along each slide."""
        number: Expr = num(0)
        for tile, whole, size in zip(tiles, self.pixels, self.tile, strict=True):
            number = add(mul(number, num(whole // size)), tile)
        row = add(mul(number, num(self.channels)), channel)
        return add(mul(row, num(math.prod(self.tile))), inside)

    def sorted_place(self, pixel: Expr) -> Expr:
        """Place along the last slide of what a pixel meets under the tap, coordinates sorted by remainder."""
        slide, phases = self.image.slides[-1], self._phases
        if phases == 1:
            return add(mul(pixel, num(slide.stride)), tap_shift(slide))
        shift = tap_shift(slide)
        return add(add(mul(mod(shift, phases), num(self._phase_length)), div(shift, phases)), pixel)

    def coordinate(self, slide: Slide, pixel: Expr) -> Expr:
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
        value = substitute(Cast(self.factor, self.dtype, implicit=True), self._coordinates())
        guarded = _guarded(value)
        nodes = self._pixel_runs(guarded) if self.image.channels_last else self._rows(guarded)
        for slide, pixels in reversed([*zip(slides, self.pixels, strict=True)][:-1]):
            nodes = (self._coordinate_loop(slide, pixels, nodes),)
        if self.image.channels_last:
            return nodes
        return self._channel_loop(nodes)

    def _coordinate_loop(self, slide: Slide, pixels: int, nodes: tuple[Node, ...]) -> Node:
        """Over the coordinates that the pixels left in the image need."""
        limit: Expr | None = None
        if slide.pixel.extent % pixels:
            least = num((slide.taps - 1) * slide.dilation + 1)
            limit = add(mul(sub(pixels_left(slide), num(1)), num(slide.stride)), least)
        return Loop(coordinate_name(slide), slide.reach(pixels), LoopKind.SERIAL, nodes, limit)

    def _channel_loop(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        axis = self.image.channels
        if axis is None:
            return nodes
        position = add(mul(ref(".step"), num(self.channels)), ref(".channel"))
        limit = ref(".channels") if axis.extent % self.channels else None
        return (Loop(".channel", self.channels, LoopKind.SERIAL, decoded(axis, position, nodes), limit),)

    def _coordinates(self) -> dict[str, Expr]:
        """Axes of the factor → such that it is the element at the coordinate variables' place."""
        found: dict[str, Expr] = {}
        for slide, pixels in zip(self.image.slides, self.pixels, strict=True):
            at = add(mul(pixel_at(slide, pixels), num(slide.stride)), ref(coordinate_name(slide)))
            if slide.tap is None:
                found[slide.pixel.name] = at
            elif slide.dilation == 1:
                found |= {slide.tap.name: at, slide.pixel.name: num(0)}
            else:
                found |= {slide.pixel.name: at, slide.tap.name: num(0)}
        return found

    def _rows(self, guarded: _Guarded) -> tuple[Node, ...]:
        """One row of the last slide: its length is known, at most two cases."""
        slide = self.image.slides[-1]
        nodes = by_length(slide, self.pixels[-1], lambda pixels: self._row(guarded, slide.reach(pixels)))
        return self._row_of_tiles(nodes) if self.image.tiles_apart else nodes

    def _row(self, guarded: _Guarded, length: int) -> tuple[Node, ...]:
        x = coordinate_name(self.image.slides[-1])
        across = [term for term in guarded.terms if x not in axes_of(term)]
        along = [term for term in guarded.terms if x in axes_of(term)]
        nodes: tuple[Node, ...] = ()
        for phase in range(self._phases):
            nodes += self._phase(guarded, along, phase, ceil_div(length - phase, self._phases))
        if not across:
            return nodes
        outside: tuple[Node, ...] = ()
        for phase in range(self._phases):
            count = ceil_div(length - phase, self._phases)
            outside += self._run(phase, 0, count, guarded.outside)
        return (Branch(_all(across), nodes, outside),)

    def _phase(self, guarded: _Guarded, along: list[Expr], phase: int, count: int) -> tuple[Node, ...]:
        """The coordinates of one remainder: outside, inside, outside, where that is known; else decided on the spot."""
        x = coordinate_name(self.image.slides[-1])
        bounds = _bounds(along, x, phase, self._phases, count)
        if bounds is None:
            condition = _all(along)
            value = Select(condition, guarded.inside, guarded.outside, self.dtype)
            return self._run(phase, 0, count, value)
        first, last = bounds
        return (
            *self._run(phase, 0, first, guarded.outside),
            *self._run(phase, first, last, guarded.inside),
            *self._run(phase, last, count, guarded.outside),
        )

    def _run(self, phase: int, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        x = coordinate_name(self.image.slides[-1])
        if self.image.tiles_apart:
            return self._tile_runs(first, last, value)

        def filled(position: Expr) -> Compute:
            coordinate = add(mul(position, num(self._phases)), num(phase))
            others = tuple(ref(coordinate_name(s)) for s in self.image.slides[:-1])
            place = self.place(self._channel, (*others, add(num(phase * self._phase_length), position)))
            return Compute(WINDOW, (place,), substitute(value, {x: coordinate}))

        return run(first, last, self.lanes, filled)

    def _tile_runs(self, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        """The same tile by tile: a part of one, whole ones, a part of one."""
        size = self.tile[-1]
        if first >= last:
            return ()
        begun, ended = ceil_div(first, size), last // size
        if begun > ended:
            return self._in_tile(num(ended), first - ended * size, last - ended * size, value)
        nodes: tuple[Node, ...] = ()
        if first % size:
            nodes = self._in_tile(num(begun - 1), first % size, size, value)
        if ended > begun:
            whole = self._in_tile(add(num(begun), ref(".tile")), 0, size, value)
            nodes += (Loop(".tile", ended - begun, LoopKind.SERIAL, whole),)
        return (*nodes, *self._in_tile(num(ended), 0, last % size, value))

    def _in_tile(self, tile: Expr, first: int, last: int, value: Expr) -> tuple[Node, ...]:
        """Neighbours of the last slide in one tile."""
        size = self.tile[-1]

        def filled(position: Expr) -> Compute:
            first_row = self.place_in_tile(self._channel, (*[num(0)] * (len(self.tile) - 1), tile), position)
            coordinate = add(mul(tile, num(size)), position)
            x = coordinate_name(self.image.slides[-1])
            return Compute(WINDOW, (add(ref(ROW_OF_TILES), first_row),), substitute(value, {x: coordinate}))

        return run(first, last, self.lanes, filled)

    def _row_of_tiles(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes for one row of the last slide, with the place of its first element."""
        tiles: list[Expr] = []
        row: Expr = num(0)
        for slide, size in zip(self.image.slides[:-1], self.tile[:-1], strict=True):
            coordinate = ref(coordinate_name(slide))
            tiles.append(div(coordinate, size))
            row = add(mul(row, num(size)), mod(coordinate, size))
        place = self.place_in_tile(num(0), (*tiles, num(0)), mul(row, num(self.tile[-1])))
        return (Let(ROW_OF_TILES, place, nodes),)

    @property
    def _channel(self) -> Expr:
        return num(0) if self.image.channels is None else ref(".channel")

    def _pixel_runs(self, guarded: _Guarded) -> tuple[Node, ...]:
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
                    return Compute(WINDOW, (self.place(position, coordinates),), there)

                return at

            inside = run(0, count, self.lanes, filled(guarded.inside))
            if not guarded.terms:
                return inside
            return (Branch(_all(list(guarded.terms)), inside, run(0, count, self.lanes, filled(guarded.outside))),)

        rest = axis.extent % self.channels
        nodes = channels(self.channels)
        if rest:
            nodes = (Branch(eq(ref(".channels"), num(rest)), channels(rest), nodes),)
        return (self._coordinate_loop(slide, self.pixels[-1], nodes),)


# names that the window shares with the loops around it --------------------------------------------------------------
def coordinate_name(slide: Slide) -> str:
    return f"{slide.pixel.name}.coordinate"


def pixel_at(slide: Slide, pixels: int) -> Expr:
    """First pixel of a window of so many."""
    return num(0) if pixels >= slide.pixel.extent else ref(f"{slide.pixel.name}.at")


def pixels_left(slide: Slide) -> Expr:
    """Pixels of the window that the image has."""
    return ref(f"{slide.pixel.name}.count")


def tap_shift(slide: Slide) -> Expr:
    return num(0) if slide.tap is None else mul(ref(slide.tap.name), num(slide.dilation))


def by_length(slide: Slide, pixels: int, nodes: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
    """What `nodes` makes of a window's pixels along the slide: all of them, or those left at the end of the axis."""
    rest = slide.pixel.extent % pixels
    if slide.pixel.extent < pixels or not rest:
        return nodes(rest or pixels)
    return (Branch(eq(pixels_left(slide), num(rest)), nodes(rest), nodes(pixels)),)


def run(first: int, last: int, lanes: int, node: Callable[[Expr], Node]) -> tuple[Node, ...]:
    """node(position) for neighbouring positions: whole vectors, then the rest."""
    vectors, rest = divmod(max(0, last - first), lanes)
    nodes: list[Node] = []
    if vectors > UNROLLED_VECTORS:
        position = add(add(num(first), mul(ref(".part"), num(lanes))), ref(LANE))
        lane = without_guards_inside(Loop(LANE, lanes, LoopKind.VECTOR, (node(position),)))
        nodes.append(Loop(".part", vectors, LoopKind.SERIAL, (lane,)))
    elif vectors:
        whole = Loop(LANE, vectors * lanes, LoopKind.VECTOR, (node(add(num(first), ref(LANE))),))
        nodes.append(without_guards_inside(whole))
    if rest:
        tail = Loop(LANE, rest, LoopKind.VECTOR, (node(add(num(first + vectors * lanes), ref(LANE))),))
        nodes.append(without_guards_inside(tail))
    return tuple(nodes)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """`inside` where all terms hold, else `outside`."""

    terms: tuple[Expr, ...]
    inside: Expr
    outside: Expr


def _guarded(value: Expr) -> _Guarded:
    match value:
        case Select(cond=cond, then=then, otherwise=Const() as outside):
            inner = _guarded(then)
            if not inner.terms or inner.outside == outside:
                return _Guarded((*conjuncts(cond), *inner.terms), inner.inside, outside)
        case Cast(arg=arg, dtype=dtype):
            inner = _guarded(arg)
            if inner.terms:
                return _Guarded(
                    inner.terms, Cast(inner.inside, dtype, value.implicit), Cast(inner.outside, dtype, value.implicit)
                )
    return _Guarded((), value, value)


def _all(terms: list[Expr]) -> Expr:
    joined: Expr | None = None
    for term in terms:
        joined = logical_and(joined, term)
    return num(1) if joined is None else joined


def _bounds(along: list[Expr], x: str, phase: int, phases: int, count: int) -> tuple[int, int] | None:
    """First and last place of a row's phase at which all terms hold, found by trying; None where more than the place
    decides."""
    differences = [_difference(term) for term in along]
    holds = []
    for position in range(count):
        known = [_decided(term, x, position * phases + phase) for term in differences]
        if None in known:
            return None
        holds.append(all(known))
    inside = [i for i, held in enumerate(holds) if held]
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


def _decided(term: tuple[OpKind, Linear] | None, x: str, at: int) -> bool | None:
    """Whether the comparison holds where the axis is `at`; None where more than that decides it."""
    if term is None or term[1].keys() - {None, ref(x)}:
        return None
    kind, terms = term
    return _ORDER[kind](terms.get(None, 0) + at * terms.get(ref(x), 0))
