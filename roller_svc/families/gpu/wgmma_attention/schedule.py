"""Attention and its rProgram → schedule tree for matrix units that a warpgroup drives (`wgmma`).

FlashAttention-3 (Shah et al., arXiv:2407.08608, algorithm 2): a block's last warpgroup fills rings of keys and values,
each of the others has 64 rows of queries. Of two steps the products with the later's keys begin before those of the
earlier's weights and values, and exponentials are taken while the unit works on these. Weights stay in registers,
where they lie as a left factor does.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.attention.kv_loop import KeySteps
from roller_svc.families.common.gpu.attention.mask import KeyBounds, exact_bounds, key_bounds
from roller_svc.families.common.gpu.attention.softmax import (
    KEY_STEP,
    MAXIMUM,
    PEAK,
    RESCALE,
    SCORES,
    SHIFT,
    TOTAL,
    Softmax,
    cleared,
)
from roller_svc.families.common.gpu.matrix.epilogue import Outputs, word
from roller_svc.families.common.gpu.matrix.multistage_pipeline import ACC, Steps
from roller_svc.families.common.gpu.warpgroups.epilogue import FRAGMENT_WORDS, BulkResults, WarpgroupEpilogue
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, WARP, threads
from roller_svc.families.common.gpu.warpgroups.producer import matrix
from roller_svc.families.common.gpu.warpgroups.tile import ROWS, WARPS
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import BLOCK, VISIT
from roller_svc.families.common.view import GemmView
from roller_svc.families.gpu.wgmma_attention.producer import AttentionRing, attention_ring, turned
from roller_svc.families.gpu.wgmma_attention.workload import (
    WgmmaAttentionTile,
    wgmma_attention_facts,
    wgmma_attention_tile,
)
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load
from roller_svc.ir.group import AxisRole, ContractionOperands, KernelGroup
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.index import add, eq, lt, mul, num, ref, sub
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Let, Loop, LoopKind, Node, PackFragment, ScheduleTree
from roller_svc.ir.schedule_hopper import (
    RegisterMatrix,
    SetMaxNReg,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)
from roller_svc.schedule.nest_statements import register, wrap_in_storages

WEIGHTS = ".weights"  # of a step's keys, as the left factor of its values
WORDS = 4  # of a thread's left factor in one instruction
_F32 = DType.FLOAT32
RESULT = (ref("m.fragment"), add(mul(ref("n.fragment"), num(FRAGMENT_WORDS)), word()))


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """A block computes block.m rows and block.n columns of the result, a warpgroup 64 of the rows; or several such
    tiles one after the other, where no mask makes their steps differ."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is no attention")
    if program.persistent_blocks and key_bounds(group) != KeyBounds():
        raise InvariantError(f"{group.name} has a mask: its blocks compute one tile each")
    return (_Kernel.of(group, group.attention, program, hw.arch).tree(),)


@dataclass(frozen=True, slots=True)
class _Kernel:
    view: GemmView
    tile: WgmmaAttentionTile
    steps: KeySteps
    softmax: Softmax
    ring: AttentionRing
    results: BulkResults | WarpgroupEpilogue
    exact: KeyBounds | None
    blocks: int  # persistent; 0: one for each tile

    @classmethod
    def of(cls, group: KernelGroup, attention: Attention, program: RProgram, arch: Arch) -> _Kernel:
        space = program.space
        (m,), (n,), (keys,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
        known = wgmma_attention_facts(group, program.unit, arch)
        tile = wgmma_attention_tile(program, known)
        batch, factors = space.role(AxisRole.BATCH), ContractionOperands(attention.q, attention.v)
        view = GemmView(group, batch, m, n, keys, factors, space.compute_dtype)
        outputs = Outputs(view, tile.m, tile.n)
        stored = BulkResults.of(tile.result, outputs)
        ring = attention_ring(tile, known, (m, n), is_persistent=program.persistent_blocks > 0)
        return cls(
            view, tile, KeySteps(tile, m, keys, known.operands.bounds), Softmax(attention, tile, m, keys, RESULT), ring,
            stored or WarpgroupEpilogue(tile.result, outputs), exact_bounds(group), program.persistent_blocks,
        )  # fmt: skip

    def tree(self) -> ScheduleTree:
        """The launch."""
        tile, results = self.tile, self.results
        is_producer = eq(ref(GROUP), num(tile.consumers))
        nodes: tuple[Node, ...] = (
            self.ring.initialised(), Barrier(), Branch(is_producer, self._filled(), self._attended()),
        )  # fmt: skip
        nodes = self.ring.with_slots(results.rooms(self.ring.with_barriers(nodes)))
        nodes = threads(tile.consumers, nodes)
        if self.blocks:
            nodes = (Loop(BLOCK, self.blocks, LoopKind.BLOCK, nodes),)
        else:
            nodes = self.steps.blocks(self.view, self.steps.around(nodes))
        maps = (*self.ring.maps, results.map) if isinstance(results, BulkResults) else self.ring.maps
        return ScheduleTree(self.view.group.name, nodes, tensor_maps=maps)

    # roles ----------------------------------------------------------------------------------------------------------
    def _filled(self) -> tuple[Node, ...]:
        """The producer's."""
        none = Const(0, DType.INT8)  # of its threads has rows
        passes = self.steps.passes(none, self._fill, self.tile.threads)
        registers = self._registers(self.tile.producer_registers, increase=False)
        return (*registers, *self._visited((*self.ring.begun(), *passes)))

    def _fill(self, steps: Steps, before: Expr) -> tuple[Node, ...]:
        return self.ring.filled(steps, self._turns(before))

    def _attended(self) -> tuple[Node, ...]:
        """The consumers'."""
        tile = self.tile
        storages = [
            register(ACC, _F32, 1, tile.n // 2), register(MAXIMUM, _F32, 1, 2), register(TOTAL, _F32, 1, 2),
            register(WEIGHTS, DType.UINT32, tile.kv_steps, WORDS),
        ]  # fmt: skip
        counts = self.softmax.counts_beyond(self.steps.bounds.finite_fill or 0.0)
        nodes = (
            *cleared(self.softmax),
            *self.steps.passes(counts, self._pass, tile.threads),
            *self._settled(),
            self.softmax.joined(), *self.softmax.divided(), *self.results.nodes(),
        )  # fmt: skip
        nodes = (Let("m.warp", add(mul(ref(GROUP), num(WARPS)), ref(WARP)), (Let("k.warp", num(0), nodes),)),)
        registers = self._registers(tile.consumer_registers, increase=True)
        return (*registers, *self._visited(wrap_in_storages(storages, nodes)), *self.results.last)

    def _settled(self) -> tuple[Node, ...]:
        """Queries that met no key are there before their room goes."""
        return () if isinstance(self.steps.seen.count, Const) else (self.ring.queried(),)

    def _visited(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes for each tile of the block."""
        return self.steps.visits(self.view, self.blocks, nodes) if self.blocks else nodes

    def _turns(self, before: Expr) -> Expr:
        """Steps that the block has taken, `before` of them in this visit: all visits have as many."""
        return add(mul(ref(VISIT), num(self.steps.steps)), before) if self.blocks else before

    def _registers(self, count: int, *, increase: bool) -> tuple[Node, ...]:
        """One consumer has what it needs from the start."""
        return (SetMaxNReg(count, increase),) if self.tile.consumers > 1 else ()

    # steps ----------------------------------------------------------------------------------------------------------
    def _pass(self, steps: Steps, before: Expr) -> tuple[Node, ...]:
        """All steps of a pass, each one's values a step behind its keys."""
        before = self._turns(before)
        last = add(before, sub(steps.count, num(1)))
        nodes = (*self._first(steps, before), *self._later(steps, before), *self.ring.answered(),
                 *self._at(last, (*self._mixed(), WgmmaWaitGroup(0, ACC), self.ring.left(self.ring.v))))  # fmt: skip
        return nodes if isinstance(steps.count, Const) else (Branch(lt(num(0), steps.count), nodes),)

    def _first(self, steps: Steps, before: Expr) -> tuple[Node, ...]:
        """Weights of the first step."""
        products = (*self._scored(), WgmmaWaitGroup(0, SCORES), self.ring.left(self.ring.k))
        weighed = (self._weighed(steps.first), self.softmax.rescaled(), *self._packed())
        return self._in_registers((self.ring.queried(), *self._at(before, products), *weighed))

    def _later(self, steps: Steps, before: Expr) -> tuple[Node, ...]:
        """Each step but the first: its keys, values of the step before, its weights."""
        if steps.most == 1:
            return ()
        turn = add(before, ref("k.step"))
        number = add(steps.first, add(ref("k.step"), num(1)))
        nodes = self._in_registers((
            *self._at(add(turn, num(1)), self._scored()),
            *self._at(turn, self._mixed()),
            WgmmaWaitGroup(1, SCORES),
            *self._at(add(turn, num(1)), (self.ring.left(self.ring.k),)),
            self._weighed(number),
            WgmmaWaitGroup(0, ACC),
            *self._at(turn, (self.ring.left(self.ring.v),)),
            self.softmax.rescaled(),
            *self._packed(),
        ))  # fmt: skip
        limit = None if isinstance(steps.count, Const) else sub(steps.count, num(1))
        return (Loop("k.step", steps.most - 1, LoopKind.SERIAL, nodes, limit),)

    def _at(self, turn: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return turned(self.tile, turn, nodes)

    def _in_registers(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes with a step's own registers."""
        storages = [register(SCORES, _F32, 1, self.tile.kv_fragments, FRAGMENT_WORDS)]
        storages += [register(name, _F32, 1, 2) for name in (PEAK, SHIFT, RESCALE)]
        return wrap_in_storages(storages, nodes)

    # products -------------------------------------------------------------------------------------------------------
    def _scored(self) -> tuple[Node, ...]:
        """Queries times the turn's keys begin."""
        tile, (q, k) = self.tile, (self.ring.q, self.ring.k)
        row = mul(ref(GROUP), num(ROWS))
        nodes: tuple[Node, ...] = ()
        for step in range(tile.head_dim_steps):
            a = matrix(q.room, q.operand, row, 0, step, num(0))
            b = matrix(k.room, k.operand, num(0), 0, step)
            nodes += (WarpgroupMma(SCORES, (num(0), num(0), num(0)), tile.kv, a, b, num(int(step > 0))),)
        return (self.ring.awaited(k), WgmmaFence(), *nodes, WgmmaCommitGroup())

    def _mixed(self) -> tuple[Node, ...]:
        """Weights times the turn's values begin."""
        tile, v = self.tile, self.ring.v
        nodes: tuple[Node, ...] = ()
        for step in range(tile.kv_steps):
            weights = RegisterMatrix(WEIGHTS, (num(step), num(0)), v.operand.dtype)
            values = matrix(v.room, v.operand, num(0), 0, step)
            nodes += (WarpgroupMma(ACC, (num(0), num(0)), tile.n, weights, values, num(1)),)
        return (self.ring.awaited(v), WgmmaFence(), *nodes, WgmmaCommitGroup())

    def _weighed(self, step: Expr) -> Node:
        """Products with the keys of that step become weights: where all of them are kept, without asking for each."""
        whole = None if self.exact is None else self.steps.whole(ref(KEY_STEP), self.exact)
        return Let(KEY_STEP, step, self.softmax.weights(whole))

    def _packed(self) -> tuple[Node, ...]:
        """A warp's weights of 16 keys lie as a left factor does (PTX ISA, "Register Fragments for wgmma.mma_async")."""
        dtype = self.ring.v.operand.dtype
        return tuple(
            PackFragment(WEIGHTS, (num(step), num(w)), _weight(2 * step + w // 2, w % 2), dtype)
            for step in range(self.tile.kv_steps) for w in range(WORDS)
        )  # fmt: skip


def _weight(fragment: int, half: int) -> Load:
    return Load(SCORES, (num(0), num(fragment), num(2 * half)), _F32)
