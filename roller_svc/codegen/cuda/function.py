"""Schedule trees → CUDA C++ for NVRTC, or HIP, without headers, and without inline assembly outside of wrappers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import get_args

from roller_svc.analysis.congruences import Congruence, congruence
from roller_svc.analysis.index_ranges import fold
from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.cuda.atomics import ODD_SUFFIX, PREFIX, atomic, atomic_name
from roller_svc.codegen.cuda.instructions import AMPERE, HIP_PREFIX, instruction
from roller_svc.codegen.cuda.matrix import MatrixNode, call_wrapper, hopper_statement, matrix_lines, pointer
from roller_svc.codegen.cuda.programmatic import find_first_access, find_read_tensors
from roller_svc.codegen.cuda.vector import WIDEST_BYTES, LetFacts, emit_wide_loop
from roller_svc.codegen.helpers import helper
from roller_svc.codegen.index_width import MAX_INT32, needs_wide_index
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.codegen.visitor import CodeGenVisitor
from roller_svc.errors import InvariantError
from roller_svc.ir.expr import Expr, axes_of
from roller_svc.ir.hardware import Arch
from roller_svc.ir.index import ceil_div
from roller_svc.ir.kernel import Buffer, Language, Role, RuntimeCheck
from roller_svc.ir.origin import shown
from roller_svc.ir.schedule import (
    SHARED_ALIGNMENT_BYTES,
    AnyThread,
    Barrier,
    Branch,
    BulkCopy,
    Compute,
    CpAsync,
    Let,
    Loop,
    LoopKind,
    Node,
    PageStream,
    RemoteShared,
    RingPage,
    ScheduleTree,
    Scope,
    Storage,
    WarpReduce,
    WarpScan,
    block_extents,
    child_lists,
    iter_nodes,
)
from roller_svc.ir.schedule_hopper import HopperNode, MbarrierWait, WarpBarrier
from roller_svc.ir.tensor_map import TensorMap

# Statements of one loop nest after full unrolling.
UNROLLED_STATEMENTS = 512
_NOT_UNROLLED_AROUND = (Barrier, MbarrierWait, WarpBarrier, CpAsync, RingPage)  # serial loops around these stay rolled
_COLLECTIVE = (Barrier, AnyThread, WarpReduce, WarpScan, *get_args(MatrixNode))  # threads wait for others
REGISTER_BYTES = 4
WARP, WAVE = 32, 64
# Named barrier of all roles, and of the threads of an rTask; 0 is that of __syncthreads (PTX ISA, "bar").
ROLES_BARRIER = 1
TASK = "task"  # the number of an rTask
FIRST_PAGE = "first_page"  # of an rTask, counted from the first of its block


@dataclass(frozen=True, slots=True)
class Function:
    text: str
    helpers: tuple[str, ...]
    grid: int
    block: int
    shared_bytes: int  # dynamic
    checks: tuple[RuntimeCheck, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()  # parameters after the buffers


@dataclass(frozen=True, slots=True)
class StreamedTask:
    """The bodies of rTasks whose operands come in pages, and of the warp that fetches these."""

    parameters: tuple[int, ...]  # the operands, which have to be constant
    body: str
    fill: str  # of the warp that fetches the pages
    helpers: tuple[str, ...]
    tiles: int  # which the rTasks take in turn
    pages: int  # of a tile
    page_bytes: int
    bytes: int  # of the operands, fetched by all rTasks
    pages_in_flight: int  # of a block that fetches its own pages
    registers: int  # of a thread that fetches none, by the performance model
    shared_bytes: int  # without the pages


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """A launch as rTasks: a device function of the number of a task and of its buffers."""

    parameters: tuple[str, ...]  # of the buffers
    body: str
    helpers: tuple[str, ...]
    tasks: int
    threads: int  # the first of a block
    shared_bytes: int
    alignment: int  # of the shared memory
    checks: tuple[RuntimeCheck, ...] = ()
    first_check: int = 0  # the number of the first one in the kernel's checks
    stream: StreamedTask | None = None  # how it streams an operand, if it can
    is_streamed: bool = False

    @property
    def warps(self) -> int:
        return ceil_div(self.threads, WARP)

    def streamed(self) -> TaskFunction:
        """Return the function that streams its operand."""
        if self.stream is None:
            raise InvariantError("the rTasks have no operand that streams")
        own = self.stream
        return replace(self, body=own.body, helpers=own.helpers, shared_bytes=own.shared_bytes, is_streamed=True)

    def definition(self, name: str, alignment: int) -> str:
        """Return the function under a name, and the one that fills its pages. All have the same shared memory.

        It is not inlined, so that the registers of a kernel are the most of one function, not of all.
        """
        shared = f"  {shared_memory(alignment)}\n" if self.shared_bytes else ""
        first = (f"const int {TASK}", *((f"const unsigned int {FIRST_PAGE}",) if self.is_streamed else ()))
        parameters = ", ".join((*first, *self.parameters))
        text = f"__device__ __noinline__ void {name}({parameters}) {{\n{shared}{self.body}}}\n"
        if self.stream is not None and self.is_streamed:
            text += f"__device__ __noinline__ void {name}_fill({parameters}) {{\n{self.stream.fill}}}\n"
        return text

    def count_pages(self, first: int, count: int) -> int:
        """Return the pages that these rTasks stream."""
        if self.stream is None or not self.is_streamed:
            return 0
        tiles = (ceil_div(self.stream.tiles - task, self.tasks) for task in range(first, first + count))
        return sum(tiles) * self.stream.pages

    def pages_text(self) -> str:
        """Return the expression of the pages of an rTask."""
        if self.stream is None or not self.is_streamed:
            return "0"
        return f"({self.stream.tiles + self.tasks - 1} - {TASK}) / {self.tasks} * {self.stream.pages}"


def shared_memory(alignment: int) -> str:
    """Return the declaration of dynamic shared memory."""
    return f"extern __shared__ __align__({alignment}) unsigned char shared_memory[];"


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """Shared memory of one tensor."""

    type_: str
    identifier: str
    elements: int
    bytes: int
    offset: int  # in the array of all shared buffers, if there is one
    reuses_memory: bool  # of other buffers
    alignment: int

    @property
    def end(self) -> int:
        return self.offset + ceil_div(self.bytes, SHARED_ALIGNMENT_BYTES) * SHARED_ALIGNMENT_BYTES


@dataclass(slots=True)
class CodeGenCuda(CodeGenVisitor):
    arch: Arch = AMPERE
    shared_buffers: dict[str, SharedBuffer] = field(default_factory=dict)  # shared, by tensor
    atomics: dict[str, None] = field(default_factory=dict)
    register_buffers: set[str] = field(default_factory=set)  # storage nodes in registers
    congruences: dict[str, Congruence] = field(default_factory=dict)  # of Lets in scope
    definitions: dict[str, Expr] = field(default_factory=dict)  # of Lets in scope that bind a variable once
    is_unlikely: bool = False  # within the body of an unlikely branch
    task_threads: int = 0  # an rTask: its threads, which may be fewer than the block's. 0: a kernel of its own
    page_number: str = ""  # of the page of the ring in scope
    fills_pages: bool = False  # the threads are the warp of a persistent block that fills pages
    waits_before: Node | None = None  # the node before which each thread waits for the launches before this one

    def visit(self, node: Node) -> None:
        if node is self.waits_before:
            self.waits_before = None  # the first access is the first visit of an equal node
            self.emit_line(f"{call_wrapper('grid_wait', self.scalar)}();")
        if isinstance(node, MatrixNode):
            for line in matrix_lines(node, self.scalar, self.arch):
                self.emit_line(line)
        elif isinstance(node, HopperNode):
            self.emit_line(hopper_statement(node, self.scalar))
        elif isinstance(node, RingPage):
            self.visit_ring_page(node)
        elif isinstance(node, BulkCopy):
            self.visit_bulk_copy(node)
        elif isinstance(node, AnyThread):
            self.visit_any_thread(node)
        elif isinstance(node, RemoteShared):
            self.visit_remote_shared(node)
        else:
            CodeGenVisitor.visit(self, node)

    def visit_loop(self, loop: Loop) -> None:
        match loop.kind:
            case LoopKind.BLOCK | LoopKind.THREAD:
                with self.bind_loop(loop):
                    self.visit_all(loop.body)
            case LoopKind.VECTOR if loop.extent > 1 and emit_wide_loop(
                self, loop, LetFacts(self.congruences, self.definitions), self.register_buffers
            ):
                pass
            case LoopKind.UNROLL | LoopKind.VECTOR if loop.extent > 1:
                copies = _statements(loop)
                if copies <= UNROLLED_STATEMENTS:
                    self.emit_line("#pragma unroll")
                else:
                    self.emit_line(f"#pragma unroll {max(1, UNROLLED_STATEMENTS * loop.extent // copies)}")
                CodeGenVisitor.visit_loop(self, loop)
            case LoopKind.SERIAL if self._must_stay_rolled(loop):
                self.emit_line("#pragma unroll 1")
                CodeGenVisitor.visit_loop(self, loop)
            case _:
                CodeGenVisitor.visit_loop(self, loop)

    def _must_stay_rolled(self, loop: Loop) -> bool:
        """Return whether unrolling only costs registers and instruction cache.

        True for staged steps, and in HIP for loops around unrolled ones, because LLVM unrolls without being told to.
        """
        if loop.extent == 1 and loop.stop is None:
            return False
        if self.is_unlikely:
            return True
        if any(isinstance(node, _NOT_UNROLLED_AROUND) for node in iter_nodes(loop.body)):
            return True
        unrolled = (node for node in iter_nodes(loop.body) if isinstance(node, Loop) and node.kind is LoopKind.UNROLL)
        return self.dialect.language is Language.HIP and any(node.extent > 1 for node in unrolled)

    def visit_let(self, let: Let) -> None:
        saved = self.congruences, self.definitions
        value = fold(let.value, self.scalar.values)
        self.congruences = {**self.congruences, let.var: congruence(value, self.congruences)}
        definitions = {**self.definitions, let.var: value}
        if let.var in self.definitions or let.var in self.scalar.ranges:
            # bound again: definitions that read it mean the earlier value
            definitions = {name: v for name, v in definitions.items() if let.var not in axes_of(v)}
        self.definitions = definitions
        CodeGenVisitor.visit_let(self, let)
        self.congruences, self.definitions = saved

    def visit_barrier(self) -> None:
        if self.task_threads:
            self.emit_line(f"{call_wrapper('named_barrier', self.scalar)}({ROLES_BARRIER}, {self.task_threads});")
        else:
            self.emit_line("__syncthreads();")

    def visit_branch(self, branch: Branch) -> None:
        saved = self.is_unlikely
        self.is_unlikely = saved or branch.unlikely
        CodeGenVisitor.visit_branch(self, branch)
        self.is_unlikely = saved

    def branch_condition(self, branch: Branch) -> str:
        if branch.elect:
            return f"{call_wrapper('elect_one', self.scalar)}()"
        condition = CodeGenVisitor.branch_condition(self, branch)
        return f"__builtin_expect({condition}, 0)" if branch.unlikely else condition

    def visit_any_thread(self, node: AnyThread) -> None:
        scalar, identifier = self.scalar, self.names.of(node.var)
        saved = scalar.values.copy(), scalar.ranges.copy()
        cond = scalar.value(node.cond)
        scalar.values.pop(node.var, None)
        scalar.ranges[node.var] = (0, 1)
        with self.declaring(identifier):
            vote = f"__syncthreads_or({cond}) != 0"
            threads = node.threads or self.task_threads
            if threads:
                vote = f"{call_wrapper('named_any', scalar)}({ROLES_BARRIER}, {threads}, {cond})"
            self.emit_line(f"const int {identifier} = {vote};")
            self.visit_all(node.body)
        scalar.values, scalar.ranges = saved

    def visit_remote_shared(self, node: RemoteShared) -> None:
        own, identifier = self.scalar.buffers[node.tensor], self.names.of(node.remote)
        self.scalar.buffers[node.remote] = replace(own, identifier=identifier)
        type_ = self.dialect.storage_type(own.dtype)
        with self.declaring(identifier):
            mapped = f"{call_wrapper('map_shared_rank', self.scalar)}({own.identifier}, {self.scalar.index(node.rank)})"
            self.emit_line(f"const {type_} *const {identifier} = {mapped};")
            self.visit_all(node.body)

    def visit_ring_page(self, node: RingPage) -> None:
        """Print the body between the calls that take and give back a page, or claim and commit it."""
        page, number, identifier = node.page, self.names.of(".ring_page"), self.names.of(node.page.tensor)
        self.scalar.buffers[page.tensor] = BufferRef(identifier, page.dtype, page.shape, page.pad, page.swizzled)
        const = "" if node.fills else "const "
        type_ = f"{const}{self.dialect.storage_type(page.dtype)} *"
        with self.block(""):
            self.emit_line(f"const unsigned int {number} = {FIRST_PAGE} + {self.scalar.index(node.number)};")
            self.emit_line(f"{type_}const {identifier} = ({type_})ring_{'claim' if node.fills else 'take'}({number});")
            self.page_number = number
            self.visit_all(node.body)
            done = "ring_commit" if node.fills else f"ring_release<{ceil_div(self.task_threads, WARP)}>"
            self.emit_line(f"{done}({number});")

    def visit_bulk_copy(self, node: BulkCopy) -> None:
        target, source = (pointer(self.scalar, tensor, index) for tensor, index in
                          ((node.tensor, node.index), (node.source.tensor, node.source.index)))  # fmt: skip
        size = f"{self.scalar.index(node.elements)} * {node.source.dtype.bytes}"
        self.emit_line(f"{call_wrapper('copy_bulk', self.scalar)}({target}, {source}, {size}, ring_filled({self.page_number}));")

    def visit_warp_reduce(self, node: WarpReduce) -> None:
        buffer = self.scalar.buffers[node.tensor]
        target = self.element(node.tensor, buffer, node.index)
        apart = f"_by{node.stride}" if node.stride > 1 else ""
        name = f"lane_{node.combine.name.lower()}{apart}_{dialects.SHORT[buffer.dtype]}"
        self.scalar.helpers.update(dict.fromkeys((*helper(name, self.dialect).needs, name)))
        self.emit_line(f"{target} = {name}({target}, {shown(node.lanes)});")

    def visit_warp_scan(self, node: WarpScan) -> None:
        buffer = self.scalar.buffers[node.tensor]
        target = self.element(node.tensor, buffer, node.index)
        which = "resets" if node.may_reset else node.combine.name.lower()
        name = f"before_{which}_{dialects.SHORT[buffer.dtype]}"
        self.scalar.helpers.update(dict.fromkeys((*helper(name, self.dialect).needs, name)))
        if node.gate is not None:
            gate = self.element(node.gate, self.scalar.buffers[node.gate], ())
            self.emit_line(
                f"{name}(&{target}, &{gate}, {self.scalar.index(node.place)}, {shown(node.lanes)}, {shown(node.stride)});"
            )
            return
        place, neutral = self.scalar.index(node.place), self.scalar.value(node.neutral)
        self.emit_line(f"{target} = {name}({target}, {neutral}, {place}, {shown(node.lanes)}, {shown(node.stride)});")

    def declare(self, storage: Storage) -> None:
        identifier = self.names.of(storage.tensor)
        # storage without dimensions is printed as a variable: in shared memory that is the element of an array
        name = f"{identifier}[0]" if storage.scope is Scope.SHARED and not storage.shape else identifier
        self.scalar.buffers[storage.tensor] = BufferRef(name, storage.dtype, storage.shape, storage.pad, storage.swizzled)
        type_ = self.dialect.storage_type(storage.dtype)
        if storage.scope is Scope.SHARED:
            reused = [self.shared_buffers[t] for t in (*storage.aliases, *storage.overlays)]
            end = max((buffer.end for buffer in reused or self.shared_buffers.values()), default=0)
            start = min(
                (buffer.offset for buffer in reused),
                default=ceil_div(end, storage.alignment_bytes) * storage.alignment_bytes,
            )
            extends_further = storage.overlays and start + storage.bytes > end
            if extends_further and any(buffer.offset >= end for buffer in self.shared_buffers.values()):
                raise InvariantError(f"{storage.tensor} is larger than {', '.join(storage.overlays)}, and others are behind them")
            self.shared_buffers[storage.tensor] = SharedBuffer(
                type_,
                identifier,
                storage.elements,
                storage.bytes,
                start,
                bool(reused),
                storage.alignment_bytes,
            )
            return
        self.register_buffers.add(storage.tensor)
        if storage.shape:
            # several elements share a register: accesses are whole registers
            aligned = f"__align__({WIDEST_BYTES}) " if storage.dtype.bytes < REGISTER_BYTES else ""
            self.emit_line(f"{aligned}{type_} {identifier}[{shown(math.prod(storage.shape))}];")
        else:
            self.emit_line(f"{type_} {identifier};")

    def assignment(self, node: Compute, buffer: BufferRef) -> str:
        if not node.atomic or node.combine is None:
            return CodeGenVisitor.assignment(self, node, buffer)
        elements = math.prod(buffer.shape)
        name = atomic_name(node.combine, buffer.dtype, elements)
        self.atomics[name] = None
        address = f"&{buffer.identifier}[{self.scalar.address(buffer, node.index)}]"
        last = f", &{buffer.identifier}[{elements - 1}]" if name.endswith(ODD_SUFFIX) else ""
        return f"{name}({address}, {self.scalar.to_element(node.value, buffer.dtype)}{last});"


def _statements(loop: Loop) -> int:
    """Return the statements after full unrolling of the loop and of the unrolled loops in it."""

    def count(nodes: tuple[Node, ...]) -> int:
        total = 0
        for node in nodes:
            inside = sum(count(body) for body in child_lists(node))
            unrolled = isinstance(node, Loop) and node.kind in (LoopKind.UNROLL, LoopKind.VECTOR)
            total += inside * (node.extent if unrolled and isinstance(node, Loop) else 1) or 1
        return total

    return count((loop,))


def emit_function(
    tree: ScheduleTree,
    views: dict[str, BufferRef],
    args: tuple[Buffer, ...],
    arch: Arch,
    first_check: int = 0,
    constants: frozenset[str] | None = None,
) -> Function:
    """Emit one launch as an extern "C" __global__ function over its buffers, as in `args`, and its tensor maps.

    `constants`: the tensors that a programmatic launch may read before it waits; None: the launch does not wait.
    """
    changing = None if constants is None else views.keys() - constants
    visitor, maps = _visit_tree(tree, views, args, arch, first_check, changing=changing)
    dialect, scalar = visitor.dialect, visitor.scalar
    blocks, threads = block_extents(tree)
    shared, dynamic = _shared_declarations(list(visitor.shared_buffers.values()), dialect.static_shared_bytes)
    # the compiler may load what is restricted before the wait, and past a cache that does not see new values
    read = frozenset() if changing is None else find_read_tensors(tree.body, changing)
    unrestricted = {views[tensor].identifier for tensor in read}
    parameters = [_parameter(a, dialect, is_restricted=a.symbol not in unrestricted) for a in args]
    parameters += [f"const __grid_constant__ TensorMap {m.symbol}" for m in maps]
    cluster = f"__cluster_dims__({shown(tree.cluster)}, 1, 1) " if tree.cluster > 1 else ""
    bounds = f"__launch_bounds__({shown(threads)}, {_min_resident(tree.resident, threads, dialect)})"
    text = (
        f'extern "C" __global__ void {cluster}{bounds}\n{tree.name}({", ".join(parameters)}) {{\n'
        + "".join(f"  {line}\n" for line in shared)
        + "\n".join(visitor.lines)
        + "\n}\n"
    )
    return Function(text, (*scalar.helpers, *visitor.atomics), blocks, threads, dynamic, tuple(scalar.checks[first_check:]), maps)


def emit_task_function(
    tree: ScheduleTree, views: dict[str, BufferRef], args: tuple[Buffer, ...], arch: Arch, first_check: int = 0
) -> TaskFunction:
    """Emit one launch as a device function of the number of an rTask and its buffers.

    Its threads are the first of a block that may have more. They meet at a named barrier, because the others do not
    come. Raises InvariantError for a launch that cannot join others in a kernel.
    """
    if reason := find_join_refusal(tree, arch):
        raise InvariantError(f"{tree.name} cannot join other launches in a kernel: {reason}")
    tasks, threads = block_extents(tree)
    visitor, _ = _visit_tree(tree, views, args, arch, first_check, task_threads=threads)
    buffers = list(visitor.shared_buffers.values())
    return TaskFunction(
        tuple(_parameter(a, visitor.dialect) for a in args),
        "".join(f"{line}\n" for line in (*(f"  {pointer}" for pointer in _shared_pointers(buffers)), *visitor.lines)),
        (*visitor.scalar.helpers, *visitor.atomics),
        tasks,
        threads,
        max((buffer.end for buffer in buffers), default=0),
        max((buffer.alignment for buffer in buffers), default=1),
        tuple(visitor.scalar.checks[first_check:]),
        first_check,
        _streamed_task(tree, tree.stream, views, args, arch, first_check, threads) if tree.stream is not None else None,
    )


def _streamed_task(
    tree: ScheduleTree,
    stream: PageStream,
    views: dict[str, BufferRef],
    args: tuple[Buffer, ...],
    arch: Arch,
    first_check: int,
    threads: int,
) -> StreamedTask:
    """Emit the bodies of a launch's rTasks that read pages, and of the warp that fills them."""
    reader, _ = _visit_tree(replace(tree, body=stream.body), views, args, arch, first_check, task_threads=threads)
    filler, _ = _visit_tree(replace(tree, body=stream.fill), views, args, arch, first_check, task_threads=WARP, fills_pages=True)
    buffers = list(reader.shared_buffers.values())
    return StreamedTask(
        tuple([each.symbol for each in args].index(views[operand].identifier) for operand in stream.operands),
        "".join(f"{line}\n" for line in (*(f"  {pointer}" for pointer in _shared_pointers(buffers)), *reader.lines)),
        "".join(f"{line}\n" for line in filler.lines),
        (*reader.scalar.helpers, *reader.atomics, *filler.scalar.helpers),
        stream.tiles,
        stream.pages,
        stream.page_bytes,
        stream.bytes,
        stream.pages_in_flight,
        stream.registers,
        max((buffer.end for buffer in buffers), default=0),
    )


def find_join_refusal(tree: ScheduleTree, arch: Arch) -> str | None:
    """Return why a launch cannot be rTasks of a kernel with others; None if it can."""
    if dialect_of(arch).language is not Language.CUDA:
        return f"rTasks in one kernel need CUDA, got {arch}"
    if tree.cluster > 1:
        return f"its blocks are in clusters of {tree.cluster}"
    if tree.tensor_maps:
        return f"it has {len(tree.tensor_maps)} tensor maps, which are parameters of a kernel"
    if any(isinstance(node, HopperNode | RemoteShared) for node in iter_nodes(tree.body)):
        return "it has mbarriers or warpgroups, whose threads are those of a whole block"
    if tree.zeroed:
        return f"{', '.join(tree.zeroed)} must be zero before the launch"
    threads = block_extents(tree)[1]
    if threads % WARP and any(isinstance(node, _COLLECTIVE) for node in iter_nodes(tree.body)):
        return f"its blocks have {threads} threads that meet, which are not whole warps"
    return None


def _visit_tree(
    tree: ScheduleTree,
    views: dict[str, BufferRef],
    args: tuple[Buffer, ...],
    arch: Arch,
    first_check: int,
    task_threads: int = 0,
    *,
    fills_pages: bool = False,
    changing: Collection[str] | None = None,
) -> tuple[CodeGenCuda, tuple[TensorMap, ...]]:
    """Emit the body of a launch, or of its rTasks if these have threads of their own.

    `changing`: what launches before a programmatic one may write or read; None: the launch does not wait for them.
    """
    shapes = {tensor: buffer.shape for tensor, buffer in views.items()}
    wide = any(math.prod(b.shape) > MAX_INT32 for b in args) or needs_wide_index(tree.body, shapes)
    dialect = dialect_of(arch)
    names = Names()
    names.reserve(*(p.identifier for p in views.values()))
    maps = tuple(replace(m, symbol=names.of(m.symbol), buffer=views[m.buffer].identifier) for m in tree.tensor_maps)
    index = dialect.wide_index if wide else dialect.index
    scalar = Scalar(dialect, names, index, guard_reads=True, buffers=dict(views))
    scalar.checks = [RuntimeCheck("", 0, 0, "")] * first_check
    visitor = CodeGenCuda(dialect, names, scalar, arch=arch, task_threads=task_threads, fills_pages=fills_pages)
    if changing is not None:
        visitor.waits_before = find_first_access(tree.body, changing)
        visitor.emit_line(f"{call_wrapper('grid_launch_dependents', scalar)}();")
    _declare_ids(visitor, tree, TASK if task_threads else "blockIdx.x")
    _prefetch_maps(visitor, maps)
    visitor.visit_all(tree.body)
    if visitor.waits_before is not None:
        raise InvariantError(f"{tree.name} does not wait for the launches before it")
    return visitor, maps


def dialect_of(arch: Arch) -> dialects.Dialect:
    """Return the dialect of an architecture."""
    return dialects.HIP if arch.prefix == HIP_PREFIX else dialects.CUDA


def _min_resident(blocks: int, threads: int, dialect: dialects.Dialect) -> int:
    """Return the minimum residency for launch bounds: blocks, or waves per SIMD."""
    if not dialect.bounded_simds:
        return blocks
    return ceil_div(blocks * ceil_div(threads, WAVE), dialect.bounded_simds)


def _declare_ids(visitor: CodeGenCuda, tree: ScheduleTree, block: str) -> None:
    """Declare the variables of block and thread loops: the innermost varies fastest, except for rastered blocks."""
    for kind, source in ((LoopKind.BLOCK, block), (LoopKind.THREAD, "threadIdx.x")):
        loops = [n for n in iter_nodes(tree.body) if isinstance(n, Loop) and n.kind is kind]
        number = f"(int){source}"
        if kind is LoopKind.THREAD and visitor.fills_pages:
            number = f"{number} % {WARP}"  # the warp that fills pages is not the first of its block
        if kind is LoopKind.BLOCK and tree.raster > 1 and len(loops) > 1:
            number = _declare_rastered_ids(visitor, (loops[-2], loops[-1]), tree.raster, block)
            loops = loops[:-2]
        stride = math.prod(x.extent for x in loops)
        total = stride
        for loop in loops:
            stride //= loop.extent
            if loop.extent == 1:
                continue
            text = number if stride == 1 else f"{number} / {shown(stride)}"
            if stride * loop.extent < total:
                text = f"{text} % {shown(loop.extent)}"
            visitor.emit_line(f"const {visitor.scalar.index_type} {visitor.names.of(loop.var)} = {text};")


def _prefetch_maps(visitor: CodeGenCuda, maps: tuple[TensorMap, ...]) -> None:
    """Load the tensor maps into the cache of TMA before the first copies read them."""
    if maps:
        with visitor.block("if (threadIdx.x == 0)"):
            for tensor_map in maps:
                visitor.emit_line(f"{call_wrapper('prefetch_map', visitor.scalar)}(&{tensor_map.symbol});")


def _declare_rastered_ids(visitor: CodeGenCuda, tiles: tuple[Loop, Loop], raster: int, block: str) -> str:
    """Declare the variables of the two innermost block loops, and return the rest of the block's number.

    Blocks take `raster` rows of tiles at a time, down each column first.
    """
    row, column = tiles
    index = visitor.scalar.index_type
    tile, first, rows, position = (visitor.names.of(f".raster{part}") for part in ("", "_row", "_rows", "_at"))
    visitor.emit_line(f"const int {tile} = (int){block} % {shown(row.extent * column.extent)};")
    visitor.emit_line(f"const int {first} = {tile} / {shown(raster * column.extent)} * {shown(raster)};")
    remaining = f"{shown(row.extent)} - {first}"
    visitor.emit_line(f"const int {rows} = {remaining} < {shown(raster)} ? {remaining} : {shown(raster)};")
    visitor.emit_line(f"const int {position} = {tile} % {shown(raster * column.extent)};")
    visitor.emit_line(f"const {index} {visitor.names.of(row.var)} = {first} + {position} % {rows};")
    visitor.emit_line(f"const {index} {visitor.names.of(column.var)} = {position} / {rows};")
    return f"(int){block} / {shown(row.extent * column.extent)}"


def _shared_declarations(buffers: list[SharedBuffer], static_bytes: int) -> tuple[list[str], int]:
    """Return (declarations, dynamic bytes); dynamic bytes are 0 if everything fits the static limit."""
    total = max((buffer.end for buffer in buffers), default=0)
    if total <= static_bytes and not any(buffer.reuses_memory for buffer in buffers):
        return [
            f"__shared__ __align__({buffer.alignment}) {buffer.type_} {buffer.identifier}[{shown(buffer.elements)}];"
            for buffer in buffers
        ], 0
    static = total <= static_bytes
    size = shown(total) if static else ""
    alignment = max(buffer.alignment for buffer in buffers)
    lines = [f"{'' if static else 'extern '}__shared__ __align__({alignment}) unsigned char shared_memory[{size}];"]
    return lines + _shared_pointers(buffers), 0 if static else total


def _shared_pointers(buffers: list[SharedBuffer]) -> list[str]:
    return [
        f"{buffer.type_} *const {buffer.identifier} = ({buffer.type_} *)(shared_memory + {shown(buffer.offset)});"
        for buffer in buffers
    ]


def _parameter(buffer: Buffer, dialect: dialects.Dialect, *, is_restricted: bool = True) -> str:
    const = "const " if buffer.role is Role.INPUT else ""
    restrict = "__restrict__ " if is_restricted else ""
    return f"{const}{dialect.storage_type(buffer.dtype)} *{restrict}{buffer.symbol}"


def preamble(helpers: Iterable[str], arch: Arch) -> str:
    """Return the texts of helpers and wrappers, by their names."""
    dialect = dialect_of(arch)
    names = list(dict.fromkeys(helpers))
    plain = [(instruction(n) or helper(n, dialect)).text for n in names if not n.startswith(PREFIX)]
    for name in names:
        if name.startswith(PREFIX):
            found = atomic(name, arch, dialect)
            plain += [(instruction(n) or helper(n, dialect)).text for n in found.needs if n not in names]
            plain.append(found.text)
    text = "\n".join(dict.fromkeys(plain))
    return text + "\n\n" if text else ""
