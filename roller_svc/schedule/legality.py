"""Verifier of schedule trees. Every tree must pass it before code is generated.

Order: a tensor is computed before it is read. Scope: a storage node encloses all uses. Vectors: only innermost loops.
Extents: only serial loops end early. Dependence: parallel iterations write elements of their own. Barriers: collective
nodes are not in divergent control flow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from roller_svc.errors import ScheduleError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, axes_of, iter_subexpressions, loads_of
from roller_svc.ir.index import add, ref
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.ir.schedule import (
    AnyThread,
    Barrier,
    Branch,
    BulkCopy,
    Compute,
    CpAsync,
    CpAsyncWaitGroup,
    Exp2,
    HorizontalReduce,
    Let,
    LoadMatrix,
    Loop,
    LoopKind,
    Mma,
    Node,
    PackFragment,
    Prefetch,
    RemoteShared,
    RingPage,
    RoundFragment,
    Routine,
    Scope,
    Storage,
    Transpose,
    WarpReduce,
    WarpScan,
    expressions,
    iter_nodes,
)
from roller_svc.ir.schedule_hopper import (
    WARP_THREADS,
    HopperNode,
    StoreMatrix,
    TmaLoad,
    TmaStore,
    WarpgroupMma,
    hopper_expressions,
)
from roller_svc.schedule.async_verifier import AsyncVerifier, convergence_of
from roller_svc.schedule.dependence import Condition, Dependence, Value, Variables


@dataclass(slots=True)
class ScopeTracker:
    """Tracks the enclosing storage nodes and the tensors written so far. Its checks raise ScheduleError."""

    storages: frozenset[str]  # all of the tree
    computed: frozenset[str]
    buffers: Collection[str] | None
    # tensor → (loops around its storage node, scope)
    storages_in_scope: dict[str, tuple[int, Scope]] = field(default_factory=dict)
    dependence: Dependence = field(default_factory=Dependence)
    written: set[str] = field(default_factory=set)
    pending: set[str] = field(default_factory=set)  # read in a branch, perhaps written by an earlier iteration
    async_verifier: AsyncVerifier = field(default_factory=AsyncVerifier)

    @property
    def loops(self) -> list[Loop]:
        return self.dependence.loops

    @property
    def variables(self) -> Variables:
        return self.dependence.variables

    @contextmanager
    def bind(self, name: str, value: Value) -> Iterator[None]:
        """Enter a loop over the variable, or a binding of it."""
        values = self.variables.values
        saved = values.get(name)
        values[name] = value
        yield
        if saved is None:
            del values[name]
        else:
            values[name] = saved

    @contextmanager
    def enter_storage(self, storage: Storage) -> Iterator[None]:
        """Enter a storage node, without contents at first. On exit all reads of it must have been written."""
        name = storage.tensor
        saved = self.storages_in_scope.get(name)
        if alive := [t for t in storage.aliases if t in self.storages_in_scope]:
            raise ScheduleError(f"{name} aliases {', '.join(alive)}, which is still in scope", code="schedule-scope")
        if storage.overlays and (used := sorted(tensors_of(storage.body).intersection(storage.overlays))):
            raise ScheduleError(f"{name} overlays {', '.join(used)}, which its body uses", code="schedule-scope")
        self.storages_in_scope[name] = (len(self.loops), storage.scope)
        self.written.discard(name)
        self.variables.contents.pop(name, None)
        yield
        self.check_written(self.pending & {name})
        if saved is None:
            del self.storages_in_scope[name]
        else:
            self.storages_in_scope[name] = saved

    def storage_site(self, tensor: str) -> tuple[int, Scope | None]:
        return self.storages_in_scope.get(tensor, (0, None))

    def check_in_scope(self, tensor: str) -> None:
        if tensor in self.storages_in_scope:
            return
        if tensor in self.storages or (self.buffers is not None and tensor not in self.buffers):
            raise ScheduleError(f"{tensor} is used outside of its storage node", code="schedule-scope")

    def check_expr(self, expr: Expr) -> None:
        outside = sorted(axes_of(expr) - self.variables.values.keys())
        if outside:
            raise ScheduleError(f"{outside[0]} is used outside of its loop", code="schedule-scope")
        for load in loads_of(expr):
            self.check_load(load)

    def check_load(self, load: Load) -> None:
        tensor = load.tensor
        self.check_in_scope(tensor)
        if tensor not in self.computed and tensor not in self.storages_in_scope:
            return
        if tensor not in self.written:
            self._read_early(tensor)
        self.async_verifier.check_read(tensor)
        self.record_access(tensor, load.index, is_write=False)

    def _read_early(self, tensor: str) -> None:
        """Postpone the check of a read in a branch: an earlier iteration of a serial loop may have written it."""
        depth_of_storage = self.storage_site(tensor)[0]
        in_branch = any(each.depth > depth_of_storage for each in self.dependence.branches)
        if not in_branch or all(loop.kind is not LoopKind.SERIAL for loop in self.loops[depth_of_storage:]):
            raise ScheduleError(f"{tensor} is read before it is computed", code="schedule-order")
        self.pending.add(tensor)

    def end_iteration(self) -> None:
        """End the body of a serial loop: its next iteration may read the tensors that it wrote."""
        self.pending -= {t for t in self.pending if t in self.written and self.storage_site(t)[0] <= len(self.loops)}

    def check_written(self, pending: Collection[str]) -> None:
        if pending:
            raise ScheduleError(f"{min(pending)} is read before it is computed", code="schedule-order")

    def record_access(self, tensor: str, index: tuple[Expr, ...], *, is_write: bool) -> None:
        self.dependence.record_access(tensor, index, self.storage_site(tensor), is_write=is_write)


def tensors_of(nodes: tuple[Node, ...]) -> set[str]:
    """Return the names of the tensors that nodes read, write or pass on."""
    names: set[str] = set()
    for node in iter_nodes(nodes):
        for name in ("tensor", "source", "a", "b", "barrier"):
            value = getattr(node, name, None)
            names.update({value} if isinstance(value, str) else {getattr(value, "tensor", "")})
        for expr in expressions(node):
            names.update(load.tensor for load in loads_of(expr))
    return names


MAX_VECTOR_LANES = 64  # bytes in the widest vector
_SHARED_LOOPS = (LoopKind.PARALLEL, LoopKind.BLOCK, LoopKind.THREAD)


def check(nodes: tuple[Node, ...], buffers: Collection[str] | None = None, warp: int = WARP_THREADS) -> None:
    """Check all rules. Raises ScheduleError with the rule's code.

    Args:
        nodes: the tree.
        buffers: tensors in memory; None: all without a storage node.
        warp: threads of a warp of the device.
    """
    storages: set[str] = set()
    computed: set[str] = set()
    for node in iter_nodes(nodes):
        if isinstance(node, Storage):
            storages.add(node.tensor)
        elif isinstance(node, RingPage):
            storages.add(node.page.tensor)
            computed.add(node.page.tensor)
        elif isinstance(node, Compute | CpAsync | LoadMatrix | Transpose | TmaLoad | WarpgroupMma | StoreMatrix):
            computed.add(node.tensor)
    scopes = ScopeTracker(frozenset(storages), frozenset(computed), buffers)
    scopes.variables.changing = frozenset(storages | computed)
    _Verifier(scopes, _strides(nodes), warp).nodes(nodes)
    scopes.check_written(scopes.pending)
    scopes.async_verifier.check_all_waited()


def _strides(nodes: tuple[Node, ...]) -> dict[str, int]:
    """Return how many consecutive threads have the same value of each thread loop."""
    strides: dict[str, int] = {}
    stride = 1
    for loop in reversed([n for n in iter_nodes(nodes) if isinstance(n, Loop) and n.kind is LoopKind.THREAD]):
        strides[loop.var] = stride
        stride *= loop.extent
    return strides


class _Width(NamedTuple):
    """Hold how many consecutive threads agree on what is around a node."""

    threads: int
    cause: str  # what they agree on


@dataclass(slots=True)
class _Verifier:
    scopes: ScopeTracker
    strides: dict[str, int]  # thread loop → consecutive threads with the same value
    warp: int  # threads
    widths: list[_Width] = field(default_factory=list)  # of enclosing branches and loops

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            match node:
                case Loop():
                    self._loop(node)
                case Let():
                    self.scopes.check_expr(node.value)
                    with self.scopes.bind(node.var, self.scopes.variables.value(node.value)):
                        self.nodes(node.body)
                case Storage():
                    self._storage(node)
                case Compute():
                    self._compute(node)
                case Branch() | Routine() | AnyThread() | RemoteShared() | RingPage():
                    self._inside(node)
                case Barrier():
                    self._barrier()
                case Prefetch():
                    self.scopes.check_in_scope(node.tensor)
                    for expr in node.index:
                        self.scopes.check_expr(expr)
                case HorizontalReduce() | WarpReduce() | WarpScan():
                    self._lanes(node)
                case Transpose():
                    self._transpose(node)
                case _:
                    self._of_matrix_units(node)

    def _of_matrix_units(self, node: Node) -> None:
        match node:
            case CpAsync() | BulkCopy():
                self._copy(node)
            case CpAsyncWaitGroup():
                self.scopes.async_verifier.cp_async_waited()
            case LoadMatrix() | RoundFragment() | Mma():
                self._fragment(node)
            case PackFragment() | Exp2():
                self._compute(_computed(node))
            case _ if isinstance(node, HopperNode):
                self._hopper(node)

    def _loop(self, loop: Loop) -> None:
        if any(outer.kind is LoopKind.VECTOR for outer in self.scopes.loops):
            raise ScheduleError(
                f"loop {loop.var} is inside of a vector loop: only innermost loops can be vectorized",
                code="schedule-vector-inner",
            )
        alike: tuple[_Width, ...] = ()
        if loop.stop is not None:
            if loop.kind is not LoopKind.SERIAL:
                raise ScheduleError(
                    f"{loop.kind.value} loop {loop.var} ends early: only serial loops may",
                    code="schedule-extent",
                )
            self.scopes.check_expr(loop.stop)
            alike = self._convergence_widths(loop.stop, f"the end of loop {loop.var}")
        self.widths += alike
        with self.scopes.bind(loop.var, Value.of_loop(loop.var)), self.scopes.dependence.inside(loop):
            self.nodes(loop.body)
        del self.widths[len(self.widths) - len(alike) :]
        if loop.kind is LoopKind.SERIAL:
            self.scopes.end_iteration()

    def _storage(self, storage: Storage) -> None:
        with self.scopes.enter_storage(storage):
            if storage.subview_of is not None:
                self._subview(storage, storage.subview_of)
            self.nodes(storage.body)

    def _subview(self, storage: Storage, window: Load) -> None:
        """Check a private buffer in memory: it may be read; if written, each iteration must have its own."""
        if storage.scope is not Scope.STACK:
            raise ScheduleError(f"{storage.tensor} is a subview, but not thread-private", code="schedule-scope")
        self.scopes.check_in_scope(window.tensor)
        for expr in window.index:
            self.scopes.check_expr(expr)
        self.scopes.written.add(storage.tensor)
        writers = [n for n in iter_nodes(storage.body) if isinstance(n, Compute | Transpose | HorizontalReduce)]
        if any(node.tensor == storage.tensor for node in writers):
            self.scopes.record_access(window.tensor, window.index, is_write=True)

    def _inside(self, node: Branch | Routine | AnyThread | RemoteShared | RingPage) -> None:
        match node:
            case Branch():
                self._branch(node)
            case Routine():
                self._routine(node)
            case AnyThread():
                self._any_thread(node)
            case RingPage():
                self._ring_page(node)
            case RemoteShared():
                self._remote_shared(node)

    def _branch(self, branch: Branch) -> None:
        self.scopes.check_expr(branch.cond)
        if branch.elect:
            self._check_convergent("warp")
        alike = self._convergence_widths(branch.cond, "a condition")
        self.widths += alike
        branches = self.scopes.dependence.branches
        for holds, nodes in ((True, branch.then), (False, branch.otherwise)):
            branches.append(Condition(len(self.scopes.loops), branch.cond, holds))
            self.nodes(nodes)
            branches.pop()
        del self.widths[len(self.widths) - len(alike) :]

    def _routine(self, routine: Routine) -> None:
        """Check that a routine is the work of one thread."""
        for node in iter_nodes(routine.body):
            if isinstance(node, Routine) or (isinstance(node, Loop) and node.kind in _SHARED_LOOPS):
                raise ScheduleError(
                    f"routine {routine.name} contains a loop over threads or another routine",
                    code="schedule-routine",
                )
        self.nodes(routine.body)

    def _barrier(self) -> None:
        self._check_convergent("block")
        self.scopes.async_verifier.block_barrier()

    def _check_convergent(self, threads: str) -> None:
        known = {"warp": self.warp, "warpgroup": WARPGROUP_THREADS}
        uneven = [cause for alike, cause in self.widths if threads not in known or alike % known[threads]]
        uneven += [f"{x.kind.value} loop {x.var}" for x in self.scopes.loops if x.kind in (LoopKind.VECTOR, LoopKind.PARALLEL)]
        if uneven:
            tiles = [name for name, (_, scope) in self.scopes.storages_in_scope.items() if scope is Scope.SHARED]
            where = f" where they share {tiles[-1]}" if tiles else ""
            raise ScheduleError(
                f"{threads}-collective node in divergent control flow: threads disagree on {uneven[0]}{where}",
                code="schedule-barrier",
            )

    def _lanes(self, node: HorizontalReduce | WarpReduce | WarpScan) -> None:
        """Check a reduction over lanes of a vector, or over threads: their values must be in registers."""
        if isinstance(node, HorizontalReduce):
            self._compute(Compute(node.tensor, node.index, node.first))
            return
        self._check_convergent("warp")
        self.scopes.check_in_scope(node.tensor)
        if self.scopes.storage_site(node.tensor)[1] is not Scope.REGISTER:
            raise ScheduleError(f"{node.tensor} is reduced over threads, but not in registers", code="schedule-scope")
        for expr in expressions(node):
            self.scopes.check_expr(expr)
        if node.tensor not in self.scopes.written:
            raise ScheduleError(f"{node.tensor} is accumulated before it has a value", code="schedule-order")

    def _transpose(self, node: Transpose) -> None:
        """Check a transpose into a thread-private buffer; into memory, as two loops over its elements."""
        if node.column_dim is not None:
            self._transpose_to_memory(node, node.column_dim)
            return
        self.scopes.check_in_scope(node.tensor)
        if self.scopes.storage_site(node.tensor)[1] is not Scope.STACK:
            raise ScheduleError(f"{node.tensor}: a transpose must write a thread-private buffer", code="schedule-scope")
        for expr in node.index:
            self.scopes.check_expr(expr)
        self.scopes.check_expr(node.source)
        self.scopes.written.add(node.tensor)
        self.scopes.record_access(node.tensor, node.index, is_write=True)

    def _transpose_to_memory(self, node: Transpose, column_dim: int) -> None:
        offsets = {column_dim: ref(".transpose.column"), len(node.index) - 1: ref(".transpose.row")}
        index = tuple(add(i, offsets[d]) if d in offsets else i for d, i in enumerate(node.index))
        nodes: tuple[Node, ...] = (Compute(node.tensor, index, node.source),)
        for var, extent in ((".transpose.row", node.rows), (".transpose.column", node.columns)):
            nodes = (Loop(var, extent or node.lanes or MAX_VECTOR_LANES, LoopKind.SERIAL, nodes),)
        self.nodes(nodes)

    def _any_thread(self, node: AnyThread) -> None:
        """Check a vote of the block; roles of warps take part warp by warp."""
        self.scopes.check_expr(node.cond)
        if node.threads is None:
            self._barrier()
        else:
            self._check_convergent("warp")
        with self.scopes.bind(node.var, Value.of_loop(node.var)):
            self.nodes(node.body)

    def _remote_shared(self, node: RemoteShared) -> None:
        """Check that another block's shared memory is read, not written, and that it has been written."""
        scopes = self.scopes
        scopes.check_expr(node.rank)
        scopes.check_in_scope(node.tensor)
        if scopes.storage_site(node.tensor)[1] is not Scope.SHARED:
            raise ScheduleError(f"{node.tensor} of another block is not in shared memory", code="schedule-scope")
        if any(isinstance(n, Compute) and n.tensor == node.remote for n in iter_nodes(node.body)):
            raise ScheduleError(f"{node.remote} of another block is written", code="schedule-dependence")
        if node.tensor not in scopes.written:
            raise ScheduleError(f"{node.remote} is read before {node.tensor} is computed", code="schedule-order")
        scopes.storages_in_scope[node.remote] = (len(scopes.loops), Scope.SHARED)
        scopes.written.add(node.remote)
        self.nodes(node.body)
        del scopes.storages_in_scope[node.remote]

    def _ring_page(self, node: RingPage) -> None:
        """Check that the warps of a page meet there, and that a page that is read is not written, nor the reverse."""
        self.scopes.check_expr(node.number)
        self._check_convergent("warp")
        if node.page.body or node.page.scope is not Scope.SHARED:
            raise ScheduleError(f"{node.page.tensor} is a page, which is shared memory without a body", code="schedule-scope")
        writes = [n for n in iter_nodes(node.body) if isinstance(n, CpAsync | BulkCopy | Compute) and n.tensor == node.page.tensor]
        exprs = (part for n in iter_nodes(node.body) for e in expressions(n) for part in iter_subexpressions(e))
        reads = any(isinstance(part, Load) and part.tensor == node.page.tensor for part in exprs)
        if (writes and not node.fills) or (reads and node.fills) or any(isinstance(n, Compute) for n in writes):
            what = "read while copies fill it" if node.fills else "written by its readers"
            raise ScheduleError(f"{node.page.tensor} is {what}", code="schedule-dependence")
        with self.scopes.enter_storage(node.page):
            if not node.fills:
                self.scopes.written.add(node.page.tensor)
            self.nodes(node.body)

    # tensor cores ---------------------------------------------------------------------------------------------------
    def _copy(self, node: CpAsync | BulkCopy) -> None:
        """Check a copy from memory to shared memory and record it as in flight."""
        self.scopes.check_in_scope(node.tensor)
        if self.scopes.storage_site(node.tensor)[1] is not Scope.SHARED or node.source.tensor in self.scopes.storages_in_scope:
            raise ScheduleError(f"cp.async to {node.tensor} must copy from memory to shared memory", code="schedule-scope")
        more = node.elements if isinstance(node, BulkCopy) else node.guard
        for expr in (*node.index, *node.source.index, *((more,) if more is not None else ())):
            self.scopes.check_expr(expr)
        self.scopes.check_load(node.source)
        self.scopes.written.add(node.tensor)
        self.scopes.async_verifier.cp_async_issued(node.tensor)
        self.scopes.record_access(node.tensor, node.index, is_write=True)

    def _fragment(self, node: LoadMatrix | RoundFragment | Mma) -> None:
        """Check that fragments are in registers and that the node is warp-collective, except for rounding."""
        if not isinstance(node, RoundFragment):
            self._check_convergent("warp")
        read: list[tuple[str, tuple[Expr, ...]]] = [(node.tensor, node.index)]
        match node:
            case LoadMatrix():
                self.scopes.check_load(Load(node.source, node.source_index, DType.UINT32))
                read = []
            case Mma():
                read += [(node.a, node.a_index), (node.b, node.b_index)]
                read += [(node.a, node.a_below)] if node.a_below is not None else []
        for expr in node.index:
            self.scopes.check_expr(expr)
        for tensor, index in ((node.tensor, node.index), *read):
            self.scopes.check_in_scope(tensor)
            if self.scopes.storage_site(tensor)[1] is not Scope.REGISTER:
                raise ScheduleError(f"{tensor} is a fragment, but not in registers", code="schedule-scope")
            for expr in index:
                self.scopes.check_expr(expr)
        for tensor, _ in read:
            if tensor not in self.scopes.written:
                raise ScheduleError(f"{tensor} is used before it has a value", code="schedule-order")
        self.scopes.written.add(node.tensor)

    def _hopper(self, node: HopperNode) -> None:
        """Check an sm_90 node: collectives are convergent and operands are ready. Record the work that it starts."""
        if (threads := convergence_of(node)) is not None:
            self._check_convergent(threads)
        for expr in hopper_expressions(node):
            self.scopes.check_expr(expr)
        self.scopes.async_verifier.visit(node)
        match node:
            case TmaLoad(tensor=tensor):
                self.scopes.check_in_scope(tensor)
                self.scopes.written.add(tensor)
            case StoreMatrix(tensor=tensor, source=source, source_index=index):
                self.scopes.check_in_scope(tensor)
                self.scopes.check_load(Load(source, index, DType.UINT16))
                self.scopes.written.add(tensor)
            case TmaStore(tensor=tensor, index=index):
                self.scopes.check_load(Load(tensor, index, DType.UINT32))
            case WarpgroupMma(tensor=tensor, a=a, b=b):
                for side in (a, b):
                    # several wgmma may read the same registers
                    if side.tensor not in self.scopes.async_verifier.in_flight:
                        self.scopes.check_load(Load(side.tensor, side.index, side.dtype))
                self.scopes.check_in_scope(tensor)
                if self.scopes.storage_site(tensor)[1] is not Scope.REGISTER:
                    raise ScheduleError(f"{tensor} is a wgmma accumulator, but not in registers", code="schedule-scope")
                self.scopes.written.add(tensor)
            case _:
                pass

    def _convergence_widths(self, expr: Expr, what: str) -> tuple[_Width, ...]:
        """Return how many consecutive threads agree on a value, where threads of a block may differ."""
        value = self.scopes.variables.value(expr)
        threads = {loop.var for loop in self.scopes.loops if loop.kind is LoopKind.THREAD}
        if threads and value.from_data:
            return (_Width(1, f"{what} that follows from data"),)
        strides = {var: self.strides[var] for var in sorted(threads & value.loops)}
        return (_Width(math.gcd(*strides.values()), f"{what} that follows from {', '.join(strides)}"),) if strides else ()

    def _compute(self, node: Compute) -> None:
        self.scopes.check_in_scope(node.tensor)
        for expr in (*node.index, node.value):
            self.scopes.check_expr(expr)
        if node.combine is not None and node.tensor in self.scopes.storages_in_scope and node.tensor not in self.scopes.written:
            raise ScheduleError(f"{node.tensor} is accumulated before it has a value", code="schedule-order")
        self.scopes.written.add(node.tensor)
        if self.scopes.storage_site(node.tensor)[1] is Scope.SHARED:
            self.scopes.async_verifier.note_shared_write(node.tensor)
        self.scopes.async_verifier.check_register_write(node.tensor)
        if node.tensor in self.scopes.storages_in_scope and not node.value.dtype.is_float:
            known = self.scopes.variables.contents.get(node.tensor, frozenset())
            self.scopes.variables.contents[node.tensor] = known | self.scopes.variables.dependencies(node.value)[0]
        if not node.atomic:
            self.scopes.record_access(node.tensor, node.index, is_write=True)


def _computed(node: PackFragment | Exp2) -> Compute:
    """Return the node as a write of a thread's own registers."""
    if isinstance(node, PackFragment):
        return Compute(node.tensor, node.index, node.first)
    return Compute(node.tensor, node.index, Load(node.tensor, node.index, DType.FLOAT32))
