"""Copies of a page of the matrix to the ring: by cp.async of some threads, or by a bulk copy of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.families.gpu.streamed_rows.product import COPY_BYTES
from roller_svc.families.gpu.streamed_rows.workload import RING, RingTile
from roller_svc.ir.expr import Expr, Load, substitute
from roller_svc.ir.index import add, ceil_div, div, lt, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import Branch, BulkCopy, CpAsync, CpAsyncCommitGroup, CpAsyncWaitGroup, Let, Loop, LoopKind, Node

COPY, COPIES, ROW, FIRST = ".copy", ".copies", ".copied_row", ".first"
UNROLLED_COPIES = 8  # of a thread that copies a whole page


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Requests pages, and waits for them."""

    tile: RingTile
    types: Mapping[str, TensorType]
    thread: Expr
    threads: int  # that copy

    @property
    def commit(self) -> Node:
        """Return the node that ends the requests of a page, which may be none."""
        return CpAsyncCommitGroup()

    def wait(self, number: Expr) -> Node:
        """Return the node that waits for a page of that number; the block then synchronizes."""
        return CpAsyncWaitGroup(self.tile.stages - 2)

    def request(self, tile: Expr, page: Expr, slot: tuple[Expr, ...]) -> tuple[Node, ...]:
        """Return the copies of a page of a tile to a place: the thread's 16 bytes, a round of threads after another.

        Few rounds are unrolled: their addresses would take more registers than a thread has.
        """
        ring, source = self.tile, self.tile.product.streamed
        each = COPY_BYTES // source.dtype.bytes
        row_copies = ring.row_elements // each
        copies = ring.page_bytes // COPY_BYTES // self.threads
        unrolled = copies if self.threads == ring.threads else math.gcd(copies, UNROLLED_COPIES)
        copy_round = add(mul(ref(COPIES), num(unrolled)), ref(COPY)) if unrolled < copies else ref(COPY)
        number = add(mul(copy_round, num(self.threads)), self.thread)
        first = add(mul(page, num(ring.row_elements)), ref(FIRST))
        copy: Node = CpAsync(RING, (*slot, ref(ROW), ref(FIRST)), self._source(tile, ref(ROW), first), each)
        if ring.product.k.extent % ring.depth:
            copy = Branch(lt(first, num(ring.product.k.extent // ring.product.per_element)), (copy,))
        nodes: tuple[Node, ...] = (Let(FIRST, mul(mod(number, row_copies), num(each)), (copy,)),)
        row = Loop(COPY, unrolled, LoopKind.UNROLL, (Let(ROW, div(number, row_copies), nodes),))
        return (Loop(COPIES, copies // unrolled, LoopKind.SERIAL, (row,)),) if unrolled < copies else (row,)

    def request_rows(self, tile: Expr, page: Expr) -> tuple[Node, ...]:
        """Return the bulk copies of a page of a tile: the thread's row, a round of threads after another."""
        ring, product = self.tile, self.tile.product
        first = mul(page, num(ring.row_elements))
        elements: Expr = num(ring.row_elements)
        if product.k.extent % ring.depth:
            elements = min_(elements, sub(num(product.k.extent // product.per_element), first))
        copy: Node = BulkCopy(RING, (ref(ROW), num(0)), self._source(tile, ref(ROW), first), elements)
        if ring.rows % self.threads:
            copy = Branch(lt(ref(ROW), num(ring.rows)), (copy,))
        row = Let(ROW, add(mul(ref(COPY), num(self.threads)), self.thread), (copy,))
        return (Loop(COPY, ceil_div(ring.rows, self.threads), LoopKind.UNROLL, (row,)),)

    def _source(self, tile: Expr, row: Expr, element: Expr) -> Load:
        """Return the element of the matrix; of a row beyond the edge, the last row's."""
        ring, product = self.tile, self.tile.product
        place = add(mul(tile, num(ring.rows)), row)
        if product.n.extent % ring.rows:
            place = min_(place, num(product.n.extent - 1))
        *outer, _ = product.streamed.index
        return replace(product.streamed, index=(*(substitute(i, {product.n.name: place}) for i in outer), element))
