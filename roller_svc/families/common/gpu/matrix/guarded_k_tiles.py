"""K-tiles of a block's tile of results that the guard of a product leaves, and the order of blocks under a guard.

A block visits at least one k-tile: where a guard leaves none, its operands are staged as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.analysis.tile_bounds import IndexSpan, grows_along, max_bound_index, min_bound_index
from roller_svc.families.common.gpu.matrix.multistage_pipeline import KTileRange
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import TileAxis, TileSpace
from roller_svc.ir.index import add, ceil_div, div, max_, min_, num, ref, sub
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node

FIRST, COUNT = ".first_k_tile", ".num_k_tiles"


@dataclass(frozen=True, slots=True)
class GuardedKTiles:
    """K-tiles of `depth` points, `steps` of all of k, of the tile `tile` at `m.block`, `n.block`."""

    space: TileSpace
    axes: tuple[TileAxis, TileAxis]  # m, n
    tile: tuple[int, int]
    depth: int
    steps: int

    @property
    def range(self) -> KTileRange:
        if self.space.k_bounds is None:
            return KTileRange(num(0), num(self.steps), self.steps)
        return KTileRange(ref(FIRST), ref(COUNT), self.steps)

    def bind(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the first k-tile and the number of k-tiles around the nodes."""
        bounds = self.space.k_bounds
        if bounds is None:
            return nodes
        spans = tuple(
            IndexSpan.of_tile(axis, tile, ref(block_index(axis))) for axis, tile in zip(self.axes, self.tile, strict=True)
        )
        first: Expr = num(0)
        for lower in bounds.lowers:
            first = max_(first, min_bound_index(lower, spans))
        end: Expr = num(self.steps)
        for upper in bounds.uppers:
            end = min_(end, div(add(max_bound_index(upper, spans), num(self.depth)), self.depth))
        nodes = (Let(COUNT, max_(sub(end, ref(FIRST)), num(1)), nodes),)
        return (Let(FIRST, min_(div(first, self.depth), num(self.steps - 1)) if bounds.lowers else num(0), nodes),)


def block_index(axis: TileAxis) -> str:
    """Return the name of the number of a block's tile along m or n."""
    return f"{axis.role.value}.block"


def tile_loops(space: TileSpace, axes: Sequence[tuple[TileAxis, int]], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Loop over blocks along axes of results, outermost first, with their tiles; under a guard the longest come first."""
    loops: list[tuple[str, int]] = []
    for axis, tile in axes:
        name, count = block_index(axis), ceil_div(axis.extent, tile)
        if grows_along(space, axis):
            position = f"{axis.role.value}.position"
            nodes = (Let(name, sub(num(count - 1), ref(position)), nodes),)
            name = position
        loops.append((name, count))
    for name, count in reversed(loops):
        nodes = (Loop(name, count, LoopKind.BLOCK, nodes),)
    return nodes
