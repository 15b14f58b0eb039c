"""Split-K within a cluster: blocks that share an output tile add their parts through distributed shared memory.

After the mainloop a block stores its accumulators over the pipeline's stages. When all blocks of the cluster have done
so, each reads some rows of all parts, adds them, and runs the epilogue on them. A row's parts are added in the order of
ranks from its own block's on, so results do not depend on timing. No block ends while others read its memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.epilogue import EpilogueStore
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.matrix.tile import CHUNK_BYTES, SHARED_A, SHARED_B
from roller_svc.families.common.gpu.warpgroups.epilogue import for_each_accumulator
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP
from roller_svc.families.common.gpu.warpgroups.result_store import MAX_OPERATIONS
from roller_svc.families.common.gpu.warpgroups.tile import READ_BATCH_WORDS, WgmmaTile, batch_rounds
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import K_RANK, RANK
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, ceil_div, div, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, RemoteShared, Scope, Storage
from roller_svc.ir.schedule_hopper import ClusterBarrier, NamedBarrier

PARTIAL, TOTAL = ".partial", ".total"

CONSUMER_BARRIER = 1  # named barrier of all consumers; 0 is that of the block
# Parts are complete; parts have been read.
BARRIERS: tuple[Node, ...] = (ClusterBarrier(roles=True), ClusterBarrier(roles=True))


@dataclass(frozen=True, slots=True)
class ClusterReductionEpilogue:
    """Epilogue of a tile whose k-tiles the blocks of a cluster share."""

    tile: WgmmaTile
    outputs: EpilogueStore

    @property
    def finish(self) -> tuple[Node, ...]:
        """Return nothing: no work is left after the last tile."""
        return ()

    def nodes(self) -> tuple[Node, ...]:
        """Store the block's part, then add some rows of all parts and run the epilogue on them."""
        tile, dtype = self.tile, self.outputs.view.dtype
        complete, read = BARRIERS
        nodes = (
            for_each_accumulator(tile, lambda row, column, value: Compute(PARTIAL, (row, column), value), dtype),
            complete, *self._add_parts(), read,
        )  # fmt: skip
        pad = tile.partial_row_words - tile.n
        part = Storage(PARTIAL, dtype, (tile.m, tile.n), Scope.SHARED, nodes, pad, overlays=(SHARED_A, SHARED_B))
        # wgmma of other consumers may still read the stages
        return (NamedBarrier(CONSUMER_BARRIER, WARPGROUP_THREADS * tile.consumers), part)

    def _add_parts(self) -> tuple[Node, ...]:
        """Process `width` adjacent outputs of a row by each thread; every `cluster_k`-th row is the block's own.

        All parts of a batch of rounds are in flight together, before the first result is stored.
        """
        tile, outputs, parts = self.tile, self.outputs, self.tile.pipeline.cluster_k
        width = min(outputs.vector_width(tile.n), CHUNK_BYTES // outputs.view.dtype.bytes)
        rounds = ceil_div(self._items(width), self._threads)
        most = min(READ_BATCH_WORDS // (width * parts), MAX_OPERATIONS // (width * outputs.operations))
        batch = batch_rounds(rounds, most)
        total = Load(TOTAL, (ref(".in_batch"), ref(".lane")), outputs.view.dtype)
        passes = tuple(
            Loop(".in_batch", batch, LoopKind.UNROLL, self._item(width, batch, nodes))
            for nodes in (self._total(width), outputs.nodes(total, width))
        )
        nodes: tuple[Node, ...] = (Storage(TOTAL, outputs.view.dtype, (batch, width), Scope.REGISTER, passes),)
        nodes = (Loop(".batch", rounds // batch, LoopKind.SERIAL, nodes),)
        for number in range(1, parts):
            nodes = (RemoteShared(_remote(number), PARTIAL, self._rank(number), nodes),)
        return nodes

    @property
    def _threads(self) -> int:
        return WARPGROUP_THREADS * self.tile.consumers

    def _items(self, width: int) -> int:
        """Return the vectors of the block's rows."""
        return self.tile.m // self.tile.pipeline.cluster_k * (self.tile.n // width)

    def _item(self, width: int, batch: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the position of a thread's outputs in a round of a batch."""
        tile = self.tile
        nodes = (Let("n.place", add(mul(ref("n.block"), num(tile.n)), ref(".element")), nodes),)
        nodes = (Let("m.place", add(mul(ref("m.block"), num(tile.m)), ref(".row")), nodes),)
        per_row = tile.n // width
        nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
        nodes = (Let(".row", add(mul(div(ref(".item"), per_row), num(tile.pipeline.cluster_k)), ref(K_RANK)), nodes),)
        if self._items(width) % self._threads:
            nodes = (Branch(lt(ref(".item"), num(self._items(width))), nodes),)
        thread = add(mul(ref(GROUP), num(WARPGROUP_THREADS)), ref(THREAD))
        number = add(mul(ref(".batch"), num(batch)), ref(".in_batch"))
        return (Let(".item", add(mul(number, num(self._threads)), thread), nodes),)

    def _total(self, width: int) -> tuple[Node, ...]:
        """Add the parts of `width` outputs, outside of the tensor too: later reads do not move up into a branch."""
        dtype = self.outputs.view.dtype
        index = (ref(".row"), add(ref(".element"), ref(".lane")))
        nodes: tuple[Node, ...] = ()
        for number in range(self.tile.pipeline.cluster_k):
            part = Load(_remote(number) if number else PARTIAL, index, dtype)
            value = Compute(TOTAL, (ref(".in_batch"), ref(".lane")), part, Combine.SUM if number else None)
            nodes += (Loop(".lane", width, LoopKind.VECTOR, (value,)),)
        return nodes

    def _rank(self, number: int) -> Expr:
        """Return the rank in the cluster of the block whose part is `number` after this block's."""
        size = math.prod(self.tile.pipeline.cluster)
        part = mul(mod(add(ref(K_RANK), num(number)), self.tile.pipeline.cluster_k), num(size))
        return add(part, ref(RANK)) if size > 1 else part


def _remote(number: int) -> str:
    return f".remote{number}"
