"""Attention and its rProgram → schedule tree for tensor cores driven by a warp (`mma.sync`, MFMA).

FlashAttention-2 (Dao, arXiv:2307.08691): a block has rows of Q and loops over KV tiles. A warp computes S = QK^T of its
rows in registers, turns it into P there, and multiplies P by V. K and V are staged in shared memory some tiles ahead.

If blocks, or warps, split the keys of a row (flash-decoding: Dao, Haziza, Massa and Sizov 2023), each stores its
partial O, row_max and row_sum for a second launch to combine.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.attention.kv_loop import SPLIT, KvTileCopy, KvTileLoop
from roller_svc.families.common.gpu.attention.mask import KeyBounds
from roller_svc.families.common.gpu.attention.score_rows import KEY_STEP, ROW
from roller_svc.families.common.gpu.attention.softmax import (
    MAXIMUM,
    PEAK,
    RESCALE,
    SHIFT,
    TOTAL,
    Softmax,
    init_softmax,
)
from roller_svc.families.common.gpu.attention.tile import (
    AttentionOperands,
    MmaAttentionTile,
    mma_attention_tile,
    partial_results,
)
from roller_svc.families.common.gpu.attention.weights import ChainWeights
from roller_svc.families.common.gpu.launch_bounds import mfma_resident_blocks
from roller_svc.families.common.gpu.matrix.epilogue import EpilogueStore, MmaEpilogue, column_of_word, lane_of_row, word
from roller_svc.families.common.gpu.matrix.mainloop import (
    ACC,
    LANE,
)
from roller_svc.families.common.gpu.matrix.multistage_pipeline import (
    EPILOGUE,
    MAIN_LOOP,
    STAGE,
    KTileRange,
    MultistagePipeline,
)
from roller_svc.families.common.gpu.matrix.staging import THREAD, MmaOperandCopy, TransposedCopy
from roller_svc.families.common.gpu.matrix.tile import SHARED_B, LoadKind
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.families.gpu.mma_attention import MMA_ATTENTION
from roller_svc.families.gpu.mma_attention.fragments import KEYS, QUERIES, SCORES_OF, VALUES, WarpFragments
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, substitute
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.index import add, div, eq, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Let,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import register, wrap_in_storages

_F32 = DType.FLOAT32


def lower(group: KernelGroup, program: RProgram, workload: Workload[AttentionOperands]) -> tuple[ScheduleTree, ...]:
    """Return one tree: a block computes block.m rows and block.n columns of O, a warp thread.m of the rows."""
    if group.attention is None:
        raise InvariantError(f"expected attention, got {group.name}")
    kernel = _Kernel.of(group, group.attention, program, workload.facts)
    resident = mfma_resident_blocks(MMA_ATTENTION.model(workload), program)
    return (ScheduleTree(group.name, kernel.nodes(), resident=resident),)


@dataclass(frozen=True, slots=True)
class _RowCopy(MmaOperandCopy):
    """Copy by whole rows: a thread's items are a fixed number of rows apart and share one address."""

    def _item_position(self) -> tuple[Expr, Expr]:
        per_row = self.staged.row // self._item_elements
        if self.staged.k_major != self.operand.k_major or self.threads % per_row:
            return MmaOperandCopy._item_position(self)
        row = add(mul(ref(".round"), num(self.threads // per_row)), div(ref(THREAD), per_row))
        return row, mod(ref(THREAD), per_row)


@dataclass(frozen=True, slots=True)
class _KvCopy(KvTileCopy, _RowCopy):
    """Copy of K by rows."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    view: GemmView
    attention: Attention
    tile: MmaAttentionTile
    kv_loop: KvTileLoop
    exact: KeyBounds | None
    softmax: Softmax | ChainWeights
    fragments: WarpFragments
    q: tuple[MmaOperandCopy, ...]  # of each product
    pipeline: MultistagePipeline

    @classmethod
    def of(cls, group: KernelGroup, attention: Attention, program: RProgram, facts: AttentionOperands) -> _Kernel:
        (head_dim,) = group.space.role(AxisRole.INNER)
        tile, view = mma_attention_tile(program, facts), GemmView.of_attention(group)
        m, n, keys = view.m, view.n, view.k
        of_q, of_k, of_v = (tile.m, tile.head_dim), (tile.kv, tile.head_dim), (tile.n, tile.kv)
        second_q, second_k = ((), ()) if facts.second is None else ((facts.second[0],), (facts.second[1],))
        q = tuple(
            _RowCopy(name, each.operand, tile.q, each.load, m, head_dim, of_q, tile.threads)
            for name, each in zip(QUERIES, (facts.q, *second_q), strict=False)
        )
        k = tuple(
            _KvCopy(name, each.operand, tile.k, each.load, keys, head_dim, of_k, tile.threads)
            for name, each in zip(KEYS, (facts.k, *second_k), strict=False)
        )
        copy_v = TransposedCopy if facts.v.load.kind is LoadKind.TRANSPOSE else _RowCopy
        v = copy_v(VALUES, facts.v.operand, tile.v, facts.v.load, n, keys, of_v, tile.threads)
        kv_loop = KvTileLoop(tile, m, keys, facts.bounds.of_tiles(tile.kv))
        of_kernel = (attention, tile, m, keys, n, (ref("m.fragment"), ref("n.fragment"), word(tile.fragment)))
        return cls(
            view,
            attention,
            tile,
            kv_loop,
            facts.exact,
            Softmax(*of_kernel) if facts.vectors is None else ChainWeights(*of_kernel, facts.vectors),
            WarpFragments(tile),
            q,
            MultistagePipeline(tile.stages, k if tile.has_values_in_keys else (*k, v)),
        )

    # the launch -----------------------------------------------------------------------------------------------------
    def nodes(self) -> tuple[Node, ...]:
        """Return the loops over all blocks."""
        tile, rows, halves = self.tile, self.tile.row_fragments, self.tile.fragment.halves
        storages = [register(ACC, _F32, rows, tile.fragments, 4)]
        if isinstance(self.softmax, Softmax):
            storages += [register(name, _F32, rows, halves) for name in (MAXIMUM, TOTAL)]
            initial = init_softmax(self.softmax)
        else:
            storages += self.softmax.row_storages
            initial = self.softmax.init()
        nodes = wrap_in_storages(storages, (*initial, *self._attend(), EPILOGUE, *self._store_results()))
        return self.kv_loop.block_loops(self.view, self.kv_loop.bind_bounds(self._threads(nodes)))

    def _threads(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        warp = add(mul(ref("m.warp"), num(self.tile.kv_warps)), ref("k.warp"))
        nodes = (Let("n.warp", num(0), nodes),)
        lanes = self.tile.fragment.lanes
        nodes = (Let(THREAD, add(mul(warp, num(lanes)), ref(LANE)), nodes),)
        for var, extent in ((LANE, lanes), ("k.warp", self.tile.kv_warps), ("m.warp", self.tile.row_warps)):
            nodes = (Loop(var, extent, LoopKind.THREAD, nodes),)
        return nodes

    # keys and values ------------------------------------------------------------------------------------------------
    def _attend(self) -> tuple[Node, ...]:
        """Compute O, row_max and row_sum over all keys."""
        tile, kv_loop = self.tile, self.kv_loop
        load: tuple[Node, ...] = ()
        for q in self.q:
            load += q.cp_async(num(0), num(0)) if q.is_async else q.copy_through_registers(num(0), num(0))
        nodes: tuple[Node, ...] = (*load, CpAsyncCommitGroup()) if self._has_async_copies else load
        if tile.is_q_overlaid:
            nodes = MultistagePipeline(1, self.q, overlays=(SHARED_B, VALUES)).allocate((*nodes, *self._load_q(0), Barrier()))
        counts: Expr = num(0)
        if isinstance(self.softmax, Softmax):
            counts = self.softmax.needs_fully_masked_pass(kv_loop.bounds.finite_fill or 0.0)
        nodes += (MAIN_LOOP, *kv_loop.passes(counts, lambda seen, _: self._pass(seen)))
        nodes += (CpAsyncWaitGroup(0),) if self._has_async_copies else ()  # for Q, if no KV tile was visible
        nodes = self.fragments.allocate_q(tile.products * tile.head_dim_steps if tile.has_q_in_registers else 1, nodes)
        nodes = self.pipeline.allocate(nodes)
        return nodes if tile.is_q_overlaid else MultistagePipeline(1, self.q).allocate(nodes)

    def _pass(self, k_tiles: KTileRange) -> tuple[Node, ...]:
        work = (Let(KEY_STEP, k_tiles.number, self._step()),)
        nodes = self.pipeline.prologue(k_tiles)
        if self.tile.has_q_in_registers and not self.tile.is_q_overlaid:
            nodes += self._load_q(self.pipeline.prefetch_stages if self.pipeline.is_async else 0)
        elif not self.tile.has_q_in_registers and self._has_async_copies and not self.pipeline.is_async:
            nodes += (CpAsyncWaitGroup(0),)  # for Q; each step begins with a barrier
        return (*nodes, self.pipeline.mainloop(k_tiles, work))

    def _load_q(self, pending: int) -> tuple[Node, ...]:
        """Load Q fragments to registers once the block's Q has arrived; `pending` groups of copies may be in flight."""
        nodes: tuple[Node, ...] = (CpAsyncWaitGroup(pending),) if self._has_async_copies else ()
        nodes += (Barrier(),)
        for product in range(self.tile.products):
            for step in range(self.tile.head_dim_steps):
                nodes += self._q_fragments(product, num(step), num(product * self.tile.head_dim_steps + step))
        return nodes

    @property
    def _has_async_copies(self) -> bool:
        return any(q.is_async for q in self.q) or self.pipeline.is_async

    def _q_fragments(self, product: int, step: Expr, buffer: Expr) -> tuple[Node, ...]:
        row = mul(ref("m.fragment"), num(self.tile.fragment.rows))
        row = add(mul(ref("m.warp"), num(self.tile.warp_m)), row)
        fragments = self.fragments.load_q(product, row, step, (buffer, ref("m.fragment")))
        return (Let(STAGE, num(0), (self._for_row_fragments(fragments),)),)

    def _step(self) -> tuple[Node, ...]:
        """Process a warp's keys of one KV tile."""
        tile, rows = self.tile, self.tile.row_fragments
        storages = [register(name, _F32, rows, tile.kv_fragments, 4) for name in SCORES_OF[: tile.products]]
        if isinstance(self.softmax, Softmax):
            unmasked = None if self.exact is None else self.kv_loop.is_unmasked(ref(KEY_STEP), self.exact)
            storages += [register(name, _F32, rows, tile.fragment.halves) for name in (PEAK, SHIFT, RESCALE)]
            weigh = (*self.softmax.update_probabilities(unmasked), self.softmax.rescale_o())
        else:
            storages += self.softmax.key_storages
            weigh = self.softmax.compute()
        products = tuple(node for product in range(tile.products) for node in self._qk(product))
        return wrap_in_storages((*storages, *self.fragments.storages), (*products, *weigh, *self._pv()))

    def _qk(self, product: int) -> tuple[Node, ...]:
        """Compute S = QK^T of a product, one k-step of the head dimension after the other."""
        tile, together = self.tile, self.fragments.together
        zero = Compute(SCORES_OF[product], (ref("m.fragment"), ref("key.fragment"), ref(".word")), Const(0.0, _F32))
        clear = Loop(".word", 4, LoopKind.UNROLL, (zero,))
        clear = Loop("key.fragment", tile.kv_fragments, LoopKind.UNROLL, (clear,))
        nodes: tuple[Node, ...] = (self._for_row_fragments((clear,)),)
        key = add(mul(ref("k.warp"), num(tile.warp_kv)), self._first_column)
        for step in range(tile.head_dim_steps):
            buffer = num(product * tile.head_dim_steps + step if tile.has_q_in_registers else 0)
            if not tile.has_q_in_registers:
                nodes += self._q_fragments(product, num(step), buffer)
            q = (buffer, ref("m.fragment"))
            products = tuple(self.fragments.multiply_k(product, self._loaded(i), q, i) for i in range(together))
            multiply = (*self.fragments.load_k(product, key, num(step)), self._for_row_fragments(products))
            nodes += (Loop(".pair", tile.kv_fragments // together, LoopKind.UNROLL, multiply),)
        return nodes

    def _pv(self) -> tuple[Node, ...]:
        """Accumulate O += PV; S of the keys of an instruction has the layout of its operand P."""
        tile, together = self.tile, self.fragments.together
        nodes: tuple[Node, ...] = ()
        for step in range(tile.kv_steps):
            nodes += (self._for_row_fragments(self.fragments.pack_p(step)),)
            along = add(mul(ref("k.warp"), num(tile.kv_steps)), num(step))
            products = tuple(self.fragments.multiply_v(self._loaded(i), i) for i in range(together))
            multiply = (*self.fragments.load_v(self._first_column, along), self._for_row_fragments(products))
            nodes += (Loop(".pair", tile.fragments // together, LoopKind.UNROLL, multiply),)
        return nodes

    @property
    def _first_column(self) -> Expr:
        """Return the first column of S or O, and so the first row of K^T or column of V, of fragments loaded together."""
        return mul(ref(".pair"), num(self.fragments.together * self.tile.fragment.columns))

    def _loaded(self, which: int) -> Expr:
        """Return the number of a fragment of S or O, the one that belongs to the loaded fragment `which`."""
        return add(mul(ref(".pair"), num(self.fragments.together)), num(which))

    def _for_row_fragments(self, nodes: tuple[Node, ...]) -> Node:
        return Loop("m.fragment", self.tile.row_fragments, LoopKind.UNROLL, nodes)

    # results --------------------------------------------------------------------------------------------------------
    def _store_results(self) -> tuple[Node, ...]:
        """Reduce row_sum and store O through the epilogue, or store partials under split KV."""
        normalize: tuple[Node, ...] = ()
        if isinstance(self.softmax, Softmax):
            if self.tile.num_splits > 1:
                return (self.softmax.reduce_row_sum(), *self._store_partials())
            normalize = (self.softmax.reduce_row_sum(), *self.softmax.store_rows(), *self.softmax.normalize())
        if self.tile.can_store_rows:
            return (*normalize, self._store_rows())
        return (*normalize, Barrier(), *MmaEpilogue(self.view, self.tile.result).nodes())

    def _store_rows(self) -> Node:
        """Run the epilogue on a lane's adjacent columns, and store them."""
        tile, fragment = self.tile, self.tile.fragment
        outputs = EpilogueStore(self.view, tile.m, tile.n)
        width = outputs.vector_width(fragment.half_sums)
        first = mul(ref(".part"), num(width))
        result = Load(ACC, (ref("m.fragment"), ref("n.fragment"), add(first, ref(".lane"))), _F32)
        column = add(mul(ref("n.fragment"), num(fragment.columns)), mul(lane_of_row(fragment), num(fragment.half_sums)))
        column = add(add(mul(ref("n.block"), num(tile.n)), column), first)
        nodes: tuple[Node, ...] = (Let("n.place", column, outputs.nodes(result, width)),)
        nodes = (Loop(".part", fragment.half_sums // width, LoopKind.UNROLL, nodes),)
        nodes = (Loop("n.fragment", tile.fragments, LoopKind.UNROLL, nodes),)
        return self._for_row_fragments((Let("m.place", self.softmax.row, nodes),))

    def _store_partials(self) -> tuple[Node, ...]:
        """Store a warp's partial O, row_max and row_sum."""
        (results, _), (maxima, _), (totals, _) = partial_results(self.view.group, self.tile)
        split: Expr = ref("k.warp")
        if self.tile.kv_splits > 1:
            split = add(mul(ref(SPLIT), num(self.tile.kv_warps)), split)
        total, rows = self.attention.row_sum, self.view.m
        ends = tuple(
            Compute(name, (split, *total.index), Load(accumulator, ROW, _F32))
            for name, accumulator in ((maxima, MAXIMUM), (totals, TOTAL))
        )
        columns = eq(ref("n.block"), num(0)) if self.view.n.extent > self.tile.n else None
        first = logical_and(eq(lane_of_row(self.tile.fragment), num(0)), columns)
        nodes: tuple[Node, ...] = (self._store_partial_row((results, split)), Branch(first, ends))
        if rows.extent % self.tile.m:
            nodes = (Branch(lt(ref("m.place"), num(rows.extent)), nodes),)
        return (self.softmax.for_each_row(self.softmax.bind_row(nodes)),)

    def _store_partial_row(self, partial: tuple[str, Expr]) -> Node:
        """Store O of a row, adjacent columns together if these are contiguous."""
        tile, n, mixed, fragment = self.tile, self.view.n, self.view.group.statements[0], self.tile.fragment
        lead = n.members[-1]
        is_vector = lead.extent % fragment.half_sums == 0
        index = tuple(substitute(i, {lead.name: add(ref(lead.name), ref(".pair"))}) for i in mixed.index)
        value = Load(ACC, self.softmax.result, _F32)
        nodes: tuple[Node, ...] = (Compute(partial[0], (partial[1], *(index if is_vector else mixed.index)), value),)
        first = mul(lane_of_row(fragment), num(fragment.half_sums))
        column = first if is_vector else column_of_word(fragment)
        column = add(mul(ref("n.block"), num(tile.n)), add(mul(ref("n.fragment"), num(fragment.columns)), column))
        if is_vector:
            nodes = (Loop(".pair", fragment.half_sums, LoopKind.VECTOR, nodes),)
        nodes = bind_members(n, ref("n.place"), nodes)
        if n.extent % tile.n:
            nodes = (Branch(lt(ref("n.place"), num(n.extent)), nodes),)
        nodes = (Let("n.place", column, nodes),)
        if not is_vector:
            nodes = (Loop(".pair", fragment.half_sums, LoopKind.UNROLL, nodes),)
        return Loop("n.fragment", tile.fragments, LoopKind.UNROLL, nodes)
