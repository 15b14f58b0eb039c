"""Copies of a page of the matrix to the ring: by cp.async of some threads, or by a bulk copy of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.families.gpu.streamed_rows.product import COPY_BYTES
from roller_svc.families.gpu.streamed_rows.workload import FRAGMENT_ROWS, RING, ROWS_OF_MATRIX, RingTile
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
        return tuple(self._request_matrix(number, tile, page, slot) for number in range(len(self.tile.product.all)))

    def _request_matrix(self, matrix: int, tile: Expr, page: Expr, slot: tuple[Expr, ...]) -> Node:
        """Return the copies of one matrix's rows."""
        ring = self.tile
        each = COPY_BYTES // ring.product.streamed.dtype.bytes
        row_copies = ring.row_elements // each
        copies = ring.results * row_copies // self.threads
        unrolled = copies if self.threads == ring.threads else math.gcd(copies, UNROLLED_COPIES)
        copy_round = add(mul(ref(COPIES), num(unrolled)), ref(COPY)) if unrolled < copies else ref(COPY)
        number = add(mul(copy_round, num(self.threads)), self.thread)
        first = add(mul(page, num(ring.row_elements)), ref(FIRST))
        place = (*slot, self._row_of_page(matrix), ref(FIRST))
        copy: Node = CpAsync(RING, place, self._source(matrix, tile, first), each)
        if ring.product.k.extent % ring.depth:
            copy = Branch(lt(first, num(ring.product.k.extent // ring.product.per_element)), (copy,))
        nodes: tuple[Node, ...] = (Let(FIRST, mul(mod(number, row_copies), num(each)), (copy,)),)
        row = Loop(COPY, unrolled, LoopKind.UNROLL, (Let(ROW, div(number, row_copies), nodes),))
        return Loop(COPIES, copies // unrolled, LoopKind.SERIAL, (row,)) if unrolled < copies else row

    def request_rows(self, tile: Expr, page: Expr) -> tuple[Node, ...]:
        """Return the bulk copies of a page of a tile: the thread's row, a round of threads after another."""
        ring, product = self.tile, self.tile.product
        first = mul(page, num(ring.row_elements))
        elements: Expr = num(ring.row_elements)
        if product.k.extent % ring.depth:
            elements = min_(elements, sub(num(product.k.extent // product.per_element), first))
        loops: list[Node] = []
        for matrix in range(len(product.all)):
            copy: Node = BulkCopy(RING, (self._row_of_page(matrix), num(0)), self._source(matrix, tile, first), elements)
            if ring.results % self.threads:
                copy = Branch(lt(ref(ROW), num(ring.results)), (copy,))
            row = Let(ROW, add(mul(ref(COPY), num(self.threads)), self.thread), (copy,))
            loops.append(Loop(COPY, ceil_div(ring.results, self.threads), LoopKind.UNROLL, (row,)))
        return tuple(loops)

    def _row_of_page(self, matrix: int) -> Expr:
        """Return where the row of a matrix lies in a page: two matrices have eight rows of a fragment each."""
        if len(self.tile.product.all) == 1:
            return ref(ROW)
        fragment = add(mul(div(ref(ROW), ROWS_OF_MATRIX), num(FRAGMENT_ROWS)), mod(ref(ROW), ROWS_OF_MATRIX))
        return add(fragment, num(matrix * ROWS_OF_MATRIX))

    def _source(self, matrix: int, tile: Expr, element: Expr) -> Load:
        """Return the element of a matrix; of a row beyond the edge, the last row's."""
        ring, product = self.tile, self.tile.product.all[matrix]
        place = add(mul(tile, num(ring.results)), ref(ROW))
        if product.n.extent % ring.results:
            place = min_(place, num(product.n.extent - 1))
        *outer, _ = product.streamed.index
        return replace(product.streamed, index=(*(substitute(i, {product.n.name: place}) for i in outer), element))
