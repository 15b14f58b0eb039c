"""Loops of CPU schedules: nests, full tiles and tails."""

from __future__ import annotations

import pytest

from roller_svc.families.common.cpu.parallel_loops import whole_or_tail
from roller_svc.ir.index import add, le, num, ref
from roller_svc.ir.schedule import Barrier, Branch, Let, Loop, LoopKind, Node
from roller_svc.schedule.nest_statements import nest_loops


def tile_of(count: int) -> tuple[Node, ...]:
    return (Let("count", num(count), (Barrier(),)),)


@pytest.mark.parametrize(("extent", "counts"), [(8, (8,)), (24, (8,)), (5, (5,)), (21, (8, 5))])
def test_only_tiles_that_occur_have_nodes(extent: int, counts: tuple[int, ...]) -> None:
    nodes = whole_or_tail(ref("first"), 8, extent, tile_of)
    if len(counts) == 1:
        assert nodes == tile_of(counts[0])
    else:
        test = le(add(ref("first"), num(8)), num(extent))
        assert nodes == (Branch(test, tile_of(8), tile_of(5)),)


def test_the_first_loop_of_a_nest_is_outermost() -> None:
    inner = Loop("j", 3, LoopKind.SERIAL, (Barrier(),))
    assert nest_loops(LoopKind.SERIAL, [("i", 2), ("j", 3)], [Barrier()]) == (Loop("i", 2, LoopKind.SERIAL, (inner,)),)
    assert nest_loops(LoopKind.SERIAL, (), [Barrier()]) == (Barrier(),)
