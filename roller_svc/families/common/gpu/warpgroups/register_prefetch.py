"""Packed operands whose words a producer prefetches into registers, for some k-tiles.

An item is one vector of a stage, of 16 bytes. A thread has items of adjacent rows, in one column of vectors. Sources
that its rows share are loaded once: scales and zero points of groups, and words that hold elements of several rows.

Words of a later k-tile replace those of a k-tile when these are unpacked. ptxas counts all of these loads by one
scoreboard, so that one use in `prefetched_k_tiles` k-tiles waits for every load in flight (seen in SASS of NVRTC 13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.linear import is_uniform
from roller_svc.analysis.packed_operands import is_looked_up
from roller_svc.analysis.packed_values import TABLE_ENTRIES
from roller_svc.families.common.gpu.matrix.lanes_of_items import LANE_OF_ITEM, share_word_loads
from roller_svc.families.common.gpu.matrix.tile import CHUNK_BYTES, WORD_BYTES, LoadKind, OperandLoad
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.ir.expr import (
    AxisRef,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    children,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, logical_and, num, ref
from roller_svc.ir.rprogram import WARPGROUP_THREADS

MAX_PREFETCHED_K_TILES = 8  # longer unrolled loops gain little


@dataclass(frozen=True, slots=True)
class SourceLoad:
    """A load of an item's source: element `.lane` of `elements` adjacent ones, from the item's first on."""

    load: Load
    of_element: Load  # as in the operand
    of_item: Load  # as in the value of an item
    elements: int  # 1 where the lanes of an item share an element
    lanes: int  # of an item that share an element
    is_shared: bool  # by all rows of a thread
    is_fixed: bool  # for all k-tiles
    guard: Expr | None  # equal for all lanes of an item; elsewhere nothing is read

    @property
    def is_table(self) -> bool:
        """Whether indices of its elements are data."""
        return any(map(loads_of, self.of_item.index))

    @property
    def registers(self) -> int:
        """Registers of a thread for one load."""
        return -(-self.elements * self.load.dtype.bytes // WORD_BYTES)

    @property
    def instructions(self) -> int:
        """Load instructions of a thread for one load."""
        return -(-self.elements * self.load.dtype.bytes // CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class RegisterPrefetch:
    """The items of a thread, and what it loads for them."""

    rows: int  # of a stage
    chunks: int  # vectors of a row
    sources: tuple[SourceLoad, ...]
    prefetched_k_tiles: int = 0  # whose words are in registers

    @property
    def row_groups(self) -> int:
        """Threads along the rows."""
        return WARPGROUP_THREADS // self.chunks

    @property
    def thread_rows(self) -> int:
        """Rows of a thread."""
        return ceil_div(self.rows, self.row_groups)

    @property
    def shared_loads(self) -> frozenset[Load]:
        """Loads of the operand that the rows of a thread share."""
        return frozenset(source.of_element for source in self.sources if source.is_shared)

    @property
    def load_instructions(self) -> int:
        """Load instructions of a thread for one k-tile."""
        return sum(source.instructions * self.loads_of(source) for source in self.sources if not source.is_fixed)

    @property
    def loaded_bytes(self) -> int:
        """Bytes that a thread loads for one k-tile."""
        moving = (source for source in self.sources if not source.is_fixed)
        return sum(source.elements * source.load.dtype.bytes * self.loads_of(source) for source in moving)

    def loads_of(self, source: SourceLoad) -> int:
        """Return how often a thread loads a source for one k-tile."""
        return 1 if source.is_shared else self.thread_rows

    def registers(self, *, is_fixed: bool) -> int:
        """Return the registers of a thread for sources of all k-tiles, or for those of one k-tile."""
        sources = (source for source in self.sources if source.is_fixed is is_fixed)
        return sum(source.registers * self.loads_of(source) for source in sources)


def choose_prefetched_k_tiles(prefetches: Sequence[RegisterPrefetch], registers: int) -> int:
    """Return the k-tiles whose words of all operands fit in `registers`; 0 if none fit."""
    fixed = sum(prefetch.registers(is_fixed=True) for prefetch in prefetches)
    moving = sum(prefetch.registers(is_fixed=False) for prefetch in prefetches)
    return min(MAX_PREFETCHED_K_TILES, max(0, registers - fixed) // moving) if moving else 0


def plan_register_prefetch(
    load: OperandLoad, rows: tuple[TileAxis, int], row: tuple[TileAxis, int], k: TileAxis, k_order: KTileOrder
) -> RegisterPrefetch | None:
    """Return the prefetch of a packed operand, without its length; None for other operands.

    Args:
        rows: Axis of the rows of a stage, and their number.
        row: Axis along a row, and its elements.
    """
    elements = CHUNK_BYTES // load.dtype.bytes
    chunks, tail = divmod(row[1], elements)
    if load.load.kind is not LoadKind.UNPACK or tail or chunks > WARPGROUP_THREADS or k_order.outer:
        return None
    value = item_value(load.operand.expr, row[0], elements)
    guards = _guards(load.operand.expr)
    if value is None or guards is None:
        return None
    prefetch = RegisterPrefetch(rows[1], chunks, ())
    sources: tuple[SourceLoad, ...] = ()
    k_names = {member.name for member in k.members}
    for of_element, of_item in dict.fromkeys(zip(loads_of(load.operand.expr), loads_of(value), strict=True)):
        if is_looked_up(of_element, load.dtype):
            sources += (_table(of_element, of_item),)
            continue
        adjacent = _adjacent_elements(of_item, elements)
        if adjacent is None:
            return None
        source, lanes = adjacent
        guard = guards[of_element]
        if guard is not None and not is_uniform(guard, row[0].members[-1].name, elements):
            return None
        is_shared = _is_shared(source, rows, prefetch.thread_rows)
        is_fixed = not any(k_names & axes_of(i) for i in source.index)
        sources += (SourceLoad(source, of_element, of_item, elements // lanes, lanes, is_shared, is_fixed, guard),)
    return replace(prefetch, sources=sources)


def _table(of_element: Load, of_item: Load) -> SourceLoad:
    """Return the source of a look-up table, whose entries are in registers for all k-tiles."""
    entries = replace(of_element, index=(LANE_OF_ITEM,))
    return SourceLoad(entries, of_element, of_item, TABLE_ENTRIES, 1, is_shared=True, is_fixed=True, guard=None)


def _guards(value: Expr) -> Mapping[Load, Expr | None] | None:
    """Return the condition under which each source is read; None if that is data, or one source has several."""
    guards: dict[Load, Expr | None] = {}

    def collect(node: Expr, guard: Expr | None) -> bool:
        match node:
            case Load(index=index):
                return guards.setdefault(node, guard) == guard and all(collect(i, guard) for i in index)
            case Select(cond=cond, then=then, otherwise=otherwise):
                is_data = bool(loads_of(cond) or loads_of(otherwise))
                return not is_data and collect(then, logical_and(guard, cond))
            case _:
                return all(collect(child, guard) for child in children(node))

    return guards if collect(value, None) else None


def item_value(value: Expr, row: TileAxis, elements: int) -> Expr | None:
    """Return the value of lane `.lane` of an item; None if the innermost axis of a row may end within an item."""
    lead = row.members[-1]
    if lead.extent % elements:
        return None
    return share_word_loads(substitute(value, {lead.name: add(ref(lead.name), LANE_OF_ITEM)}), elements)


def _adjacent_elements(load: Load, elements: int) -> tuple[Load, int] | None:
    """Return a load of adjacent elements that the lanes of an item read, and the lanes that share one of them.

    None where the elements are not adjacent, or their indices are data.
    """
    if any(load.bounds_checked) or any(loads_of(i) for i in load.index):
        return None
    if not any(map(_depends_on_lane, load.index)):
        return load, elements
    *outer, inner = load.index
    first, lanes = _divided(inner)
    if elements % lanes or any(map(_depends_on_lane, (*outer, first))):
        return None
    return replace(load, index=(*outer, add(div(first, lanes), LANE_OF_ITEM))), lanes


def _divided(index: Expr) -> tuple[Expr, int]:
    """Return x and d of an index (x + `.lane`) // d; the index itself for other indices."""
    match index:
        case Op(kind=OpKind.FLOORDIV, args=(dividend, Const(value=int(by)))) if by > 0:
            first, lanes = _divided(dividend)
            return (first, by) if lanes == 1 and first is not dividend else (index, 1)
        case Op(kind=OpKind.ADD, args=(first, lane)) if lane == LANE_OF_ITEM:
            return first, 1
        case _:
            return (num(0), 1) if index == LANE_OF_ITEM else (index, 1)


def _depends_on_lane(index: Expr) -> bool:
    return LANE_OF_ITEM.name in axes_of(index)


def _is_shared(load: Load, rows: tuple[TileAxis, int], thread_rows: int) -> bool:
    """Return whether a load is the same for `thread_rows` adjacent rows, the first of which is a multiple of them."""
    axis, extent = rows
    names = {member.name for member in axis.members}
    if len(names) > 1 or extent % thread_rows:
        return not any(names & axes_of(i) for i in load.index)

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(by)))):
                return num(0) if name in names and by > 0 and by % thread_rows == 0 else node
            case _:
                return node

    return not any(names & axes_of(rewrite(i, change)) for i in load.index)
