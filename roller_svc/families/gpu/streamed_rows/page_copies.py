"""Copies of a page of the matrix to the ring: by cp.async of all threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.families.gpu.streamed_rows.product import COPY_BYTES
from roller_svc.families.gpu.streamed_rows.workload import RING, RingTile
from roller_svc.ir.expr import Expr, Load, substitute
from roller_svc.ir.index import add, div, lt, min_, mod, mul, num, ref
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import Branch, CpAsync, CpAsyncCommitGroup, CpAsyncWaitGroup, Let, Loop, LoopKind, Node

COPY, ROW, FIRST = ".copy", ".copied_row", ".first"


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Requests pages, and waits for them."""

    tile: RingTile
    types: Mapping[str, TensorType]

    @property
    def commit(self) -> Node:
        """Return the node that ends the requests of a page, which may be none."""
        return CpAsyncCommitGroup()

    def wait(self, number: Expr) -> Node:
        """Return the node that waits for a page of that number; the block then synchronizes."""
        return CpAsyncWaitGroup(self.tile.stages - 2)

    def request(self, tile: Expr, page: Expr, slot: Expr) -> tuple[Node, ...]:
        """Return the copies of a page of a tile to a slot: the thread's 16 bytes, a round of threads after another."""
        ring, source = self.tile, self.tile.product.streamed
        each = COPY_BYTES // source.dtype.bytes
        row_copies = ring.row_elements // each
        number = add(mul(ref(COPY), num(ring.threads)), ref(".thread"))
        first = add(mul(page, num(ring.row_elements)), ref(FIRST))
        copy: Node = CpAsync(RING, (slot, ref(ROW), ref(FIRST)), self._source(tile, ref(ROW), first), each)
        if ring.product.k.extent % ring.depth:
            copy = Branch(lt(first, num(ring.product.k.extent // ring.product.per_element)), (copy,))
        nodes: tuple[Node, ...] = (Let(FIRST, mul(mod(number, row_copies), num(each)), (copy,)),)
        return (Loop(COPY, ring.copies, LoopKind.UNROLL, (Let(ROW, div(number, row_copies), nodes),)),)

    def _source(self, tile: Expr, row: Expr, element: Expr) -> Load:
        """Return the element of the matrix; of a row beyond the edge, the last row's."""
        ring, product = self.tile, self.tile.product
        place = add(mul(tile, num(ring.rows)), row)
        if product.n.extent % ring.rows:
            place = min_(place, num(product.n.extent - 1))
        *outer, _ = product.streamed.index
        return replace(product.streamed, index=(*(substitute(i, {product.n.name: place}) for i in outer), element))
