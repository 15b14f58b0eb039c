"""Schedule trees → C with vector extensions and OpenMP, for CPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from roller_svc.analysis.congruences import ANY, Congruence, congruence
from roller_svc.analysis.index_ranges import fold
from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.c.outliner import Outline, outline
from roller_svc.codegen.c.preamble import ROUTINE, SCRATCH, Function
from roller_svc.codegen.c.scalar import CScalar, NotPromotableError
from roller_svc.codegen.c.threads import parallel_nest, parameter, region_function
from roller_svc.codegen.c.vector.access import NotVectorizableError
from roller_svc.codegen.c.vector.expressions import Vector, statement
from roller_svc.codegen.c.vector.helpers import HORIZONTAL, SCALAR_BYTES, horizontal_name, horizontal_needs
from roller_svc.codegen.c.vector.loops import (
    MAX_UNROLLED_ELEMENTS,
    MAX_UNROLLED_VECTORS,
    VECTORS_PER_ITERATION,
    accessed_tensors,
    expand_scalar,
    read_tensors,
    strip_mine,
    vector_cover,
    vector_loops,
    widest_bytes,
    written_tensors,
)
from roller_svc.codegen.c.vector.types import register_name, vector_type
from roller_svc.codegen.c.vector_transpose import as_bits, transpose_name
from roller_svc.codegen.names import Names
from roller_svc.codegen.visitor import CodeGenVisitor
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, OpKind, Select, iter_subexpressions, loads_of
from roller_svc.ir.kernel import Buffer, RuntimeCheck
from roller_svc.ir.origin import Marks, begin_part, current_marks, end_part, shown
from roller_svc.ir.schedule import (
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
    iter_nodes,
)

# Larger private tensors are not on a thread's stack, which may be small.
STACK_BYTES = 16 << 10
INDEX = "long"
# Recently emitted routines: those of a few programs with their candidates.
MAX_CACHED_ROUTINES = 256


@dataclass(frozen=True, slots=True)
class FunctionContext:
    """The context of a function."""

    vector_bytes: int
    cores: int
    in_parallel_region: bool  # all threads of a region call it and share its loops; else its loops start regions
    per_task: bool = False  # in a region: it computes one task of its caller's loop
    permutes_bytes: bool = False  # an instruction looks up bytes in two registers
    is_launch: bool = True  # callers of the kernel call it by its name


@dataclass(frozen=True, slots=True)
class EmittedRoutine:
    """Source of a routine, and the helpers and library functions that it calls."""

    text: str  # parameters and body
    helpers: tuple[str, ...]
    library: tuple[str, ...]


def _depends_on_alignment(node: Compute) -> bool:
    """Return whether adjacent lanes may share elements or the outcome of a condition: an index divides or chooses."""
    quotients = (OpKind.FLOORDIV, OpKind.MOD)
    parts = iter_subexpressions(node.value)
    return any(isinstance(part, Select) or (isinstance(part, Op) and part.kind in quotients) for part in parts)


@dataclass(slots=True)
class CodeGenC(CodeGenVisitor):
    context: FunctionContext = FunctionContext(16, 1, in_parallel_region=False)
    tasks: int = 0  # of the largest parallel loop
    arrays: frozenset[str] = frozenset()  # storage nodes that must be arrays
    scratch_buffers: list[str] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)  # storage nodes in vector variables → lanes
    opaque_registers: set[str] = field(default_factory=set)  # storage nodes that the compiler must not rematerialize
    ordered_registers: set[str] = field(default_factory=set)  # storage nodes whose reductions stay in program order
    prefix: str = ""
    routines: dict[str, str] = field(default_factory=dict)  # parameters and body → name
    congruences: dict[str, Congruence] = field(default_factory=dict)  # of Lets in scope

    def lanes(self, dtype: DType) -> int:
        return self.context.vector_bytes // dtype.bytes

    # loops ----------------------------------------------------------------------------------------------------------
    def visit_loop(self, loop: Loop) -> None:
        match loop.kind:
            case LoopKind.VECTOR:
                self._vector_loop(loop)
            case LoopKind.UNROLL:
                for value in range(loop.extent):
                    saved = self.scalar.values.copy(), self.scalar.ranges.copy()
                    self.scalar.values[loop.var] = value
                    self.scalar.ranges[loop.var] = (value, value)
                    self.visit_all(loop.body)
                    self.scalar.values, self.scalar.ranges = saved
            case LoopKind.PARALLEL:
                self._parallel(loop)
            case _:
                CodeGenVisitor.visit_loop(self, loop)

    def visit_let(self, let: Let) -> None:
        outer = self.congruences.get(let.var, ANY)
        self.congruences[let.var] = congruence(fold(let.value, self.scalar.values), self.congruences)
        CodeGenVisitor.visit_let(self, let)
        self.congruences[let.var] = outer

    def _parallel(self, loop: Loop) -> None:
        """Perfectly nested parallel loops become one loop over tasks."""
        chain = parallel_nest(loop)
        tasks = math.prod(x.extent for x in chain)
        saved = self.scalar.values.copy(), self.scalar.ranges.copy()
        wide = [x for x in chain if x.extent > 1]
        for each in chain:
            self.scalar.ranges[each.var] = (0, each.extent - 1)
            if each.extent == 1:
                self.scalar.values[each.var] = 0
        head = f"for (long task = 0; task < {shown(tasks)}; task++)"
        if not wide:
            self._visit_task(chain[-1].body)
        else:
            if self.context.per_task:
                head = ""
            elif self.context.in_parallel_region:
                if self.tasks:
                    self.emit_line("#pragma omp barrier")
                self.emit_line("#pragma omp for schedule(dynamic, 1) nowait")
            else:
                max_threads = min(tasks, self.context.cores)
                self.emit_line(f"#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_i32({max_threads}))")
            self.tasks = max(self.tasks, tasks)
            with self.block(head):
                stride = tasks
                for each in wide:
                    stride //= each.extent
                    text = "task" if stride == 1 else f"task / {shown(stride)}"
                    if each is not wide[0]:
                        text = f"{text} % {shown(each.extent)}"
                    self.emit_line(f"const long {self.names.of(each.var)} = {text};")
                self._visit_task(chain[-1].body)
        self.scalar.values, self.scalar.ranges = saved

    def _visit_task(self, nodes: tuple[Node, ...]) -> None:
        """Print the nodes of a task, and a store fence after non-temporal stores."""
        self.visit_all(nodes)
        if any(isinstance(node, Compute) and node.nontemporal for node in iter_nodes(nodes)):
            self.scalar.helpers["stores_done"] = None
            self.emit_line("stores_done();")

    def _vector_loop(self, loop: Loop) -> None:
        if (row := expand_scalar(loop)) is not None:
            self.visit_storage(row)
            return
        if (parts := self._strip_mine(loop)) is not None:
            self.visit_all(parts)
            return
        lines = self._vectorize(loop)
        if lines is not None:
            for text in lines:
                self.emit_line(text)
            return
        for name in written_tensors(loop):
            if name in self.registers:
                raise NotPromotableError(name)
        for node in iter_nodes(loop.body):
            for name in read_tensors(node):
                if name in self.registers:
                    raise NotPromotableError(name)
        with self.bind_loop(loop):
            if loop.extent > 1:
                self.emit_line("#pragma omp simd")
                with self.block(self.loop_head(loop)):
                    self.visit_all(loop.body)
            else:
                self.visit_all(loop.body)

    def _strip_mine(self, loop: Loop) -> tuple[Loop, ...] | None:
        """Strip-mine a long vector loop; None for short loops and for loops that cannot be vectorized."""
        if loop.extent <= MAX_UNROLLED_VECTORS or any(accessed_tensors(node) & self.registers.keys() for node in loop.body):
            return None
        _, lanes = self._vector_lanes(loop)
        if loop.extent > MAX_UNROLLED_VECTORS * lanes:
            vectors = VECTORS_PER_ITERATION
        elif loop.extent > 3 * lanes and self._count_strided(loop, lanes) * loop.extent > MAX_UNROLLED_ELEMENTS:
            vectors = 1  # and up to two in the remainder
        else:
            return None
        loops = strip_mine(loop, lanes, vectors)
        with self.bind_loop(loops[0]):
            inner = loops[0].body[0]
            return loops if isinstance(inner, Loop) and self._vectorize(inner) is not None else None

    def _count_strided(self, loop: Loop, lanes: int) -> int:
        """Return how many elements an iteration loads one by one."""
        vector = Vector(self.scalar, loop.var, lanes, 0, self.registers)
        loads = [load for node in loop.body if isinstance(node, Compute) for load in loads_of(node.value)]
        strides = [vector.stride(load.tensor, load.index) for load in loads if load.index]
        return sum(stride not in (None, 0, 1, 2) for stride in strides)  # those with other lanes are vectors

    def _vectorize(self, loop: Loop) -> list[str] | None:
        """Return the loop as vector statements, or None if a part of it cannot be vectorized."""
        if loop.stop is not None or not all(isinstance(n, Compute) and not any(n.bounds_checked) for n in loop.body):
            return None
        computes = [n for n in loop.body if isinstance(n, Compute)]
        widest, lanes = self._vector_lanes(loop)
        cover = vector_cover(loop.extent, lanes, max(2, SCALAR_BYTES // widest), overlapping=self._is_idempotent(computes))
        if not computes or cover[0][1] == 1:
            return None
        scalar, lines = self.scalar, list[str]()
        marks, helpers, library = len(scalar.checks), dict(scalar.helpers), dict(scalar.library)
        known = self.congruences if any(map(_depends_on_alignment, computes)) else None
        permutes = self.context.permutes_bytes
        try:
            with self.bind_loop(loop):
                for first, count in cover:
                    vector = Vector(scalar, loop.var, count, first, self.registers, congruences=known, permutes_bytes=permutes)
                    for n in computes:
                        if count < lanes:  # a partial-line non-temporal store costs as much as a full line
                            n = replace(n, nontemporal=False)
                        lines.append(statement(vector, n) if count > 1 else self._iteration(n, loop.var, first))
                        if n.tensor in (self.ordered_registers if n.combine else self.opaque_registers):
                            lines.append(self._opaque_asm(lines[-1].partition(" ")[0], volatile=n.combine is not None))
        except NotVectorizableError:
            del scalar.checks[marks:]
            scalar.helpers, scalar.library = helpers, library
            return None
        return lines

    def _opaque_asm(self, register: str, *, volatile: bool) -> str:
        """Return an empty `asm` that makes the register opaque, so that GCC cannot rematerialize the load.

        A volatile one also keeps program order.
        """
        kind = "v" if self.context.vector_bytes == 64 else "x"  # any of 32 registers, any of 16
        return f'__asm__{" volatile" if volatile else ""}("" : "+{kind}"({register}));'

    def _vector_lanes(self, loop: Loop) -> tuple[int, int]:
        """Return (bytes of the widest element of a vector loop, lanes of its vectors)."""
        widest, lanes = 1, self.context.vector_bytes
        for node in loop.body:
            if isinstance(node, Compute):
                widest = max(widest, widest_bytes(node, loop.var, self.scalar.buffers[node.tensor].dtype))
                used = [self.registers[t] for t in (node.tensor, *read_tensors(node)) if t in self.registers]
                lanes = min([lanes, *used])
        return widest, min(lanes, self.context.vector_bytes // widest)

    def _is_idempotent(self, computes: list[Compute]) -> bool:
        """Return whether an iteration may run twice: no iteration reads what it writes, and its stores are cached."""
        written = {n.tensor for n in computes}
        unread = written.isdisjoint({tensor for n in computes for tensor in read_tensors(n)} | set(self.registers))
        return unread and not any(n.combine or n.nontemporal for n in computes)

    def _iteration(self, node: Compute, var: str, value: int) -> str:
        saved = self.scalar.values.copy(), self.scalar.ranges.copy()
        self.scalar.values[var], self.scalar.ranges[var] = value, (value, value)
        text = self.assignment(node, self.scalar.buffers[node.tensor])
        self.scalar.values, self.scalar.ranges = saved
        return text

    def visit_horizontal_reduce(self, node: HorizontalReduce) -> None:
        """Print shuffles if one vector variable has all lanes."""
        first, dtype = node.first, node.first.dtype
        lanes = self.registers.get(first.tensor)
        index = [fold(i, self.scalar.values) for i in first.index]
        if lanes != node.lanes or node.combine not in HORIZONTAL or not all(isinstance(i, Const) for i in index):
            CodeGenVisitor.visit_horizontal_reduce(self, node)
            return
        for name in horizontal_needs(node.combine, dtype, node.lanes):
            self.scalar.helper(name)
        self.scalar.helpers[name := horizontal_name(node.combine, dtype, node.lanes)] = None
        buffer = self.scalar.buffers[first.tensor]
        known = [int(i.value) for i in index if isinstance(i, Const)]
        vector = register_name(buffer.identifier, known, node.lanes)
        self.emit_line(f"{self.element(node.tensor, self.scalar.buffers[node.tensor], node.index)} = {name}({vector});")

    def visit_prefetch(self, node: Prefetch) -> None:
        buffer = self.scalar.buffers[node.tensor]
        distance = f" + {shown(node.distance)}" if node.distance else ""
        address = f"{buffer.identifier} + {self.scalar.address(buffer, node.index)}{distance}"
        self.emit_line(f"__builtin_prefetch({address}, {int(node.for_write)}, {2 if node.to_l2 else 3});")

    def visit_transpose(self, node: Transpose) -> None:
        stored = self.scalar.buffers[node.tensor].dtype
        is_widened = node.dtype is None and stored is DType.FLOAT32 is not node.source.dtype
        dtype = stored if is_widened else as_bits(node.dtype or node.source.dtype)
        lanes = node.lanes or self.lanes(dtype)
        cast = "" if is_widened or dtype is node.source.dtype else f"({self.dialect.storage_type(dtype)} *)"
        target = f"{cast}&{self.element(node.tensor, self.scalar.buffers[node.tensor], node.index)}"
        source = self.element(node.source.tensor, self.scalar.buffers[node.source.tensor], node.source.index)
        source = f"{cast}&{source}"
        strides = (shown(node.stride), shown(node.source_stride))
        name = transpose_name(node, dtype, lanes)
        if is_widened:
            self.scalar.helper(f"from_{dialects.SHORT[node.source.dtype]}_{vector_type(dtype, lanes)}")
        if node.columns is not None:
            args = [target, strides[0], source]
        elif node.column_dim is not None:
            args = [target, source, strides[1]]
        else:
            args = [target, strides[0], source, strides[1]]
        self.scalar.helpers[name] = None
        self.emit_line(f"{name}({', '.join(args)});")

    # routines -------------------------------------------------------------------------------------------------------
    def visit_routine(self, node: Routine) -> None:
        """Print a call of an outlined function, or the body in place if it cannot be outlined."""
        outlined = outline(node.body, self.scalar, self.registers)
        printed = None if outlined is None else self._emit_outlined(node, outlined)
        if outlined is None or printed is None:
            self.visit_all(node.body)
            return
        # ends in a type, like the names of helpers, so that no tensor of a program has the name
        result = next(self.scalar.buffers[p.tensor].dtype for p in outlined.pointers if p.written)
        name = self.routines.setdefault(printed.text, f"{node.name}{len(self.routines)}_{dialects.SHORT[result]}")
        places = [f"{self.scalar.buffers[p.tensor].identifier} + {self.scalar.index(p.offset)}" for p in outlined.pointers]
        self.emit_line(f"{name}({', '.join([*places, *(self.scalar.index(n.value) for n in outlined.numbers)])});")

    def _emit_outlined(self, node: Routine, outlined: Outline) -> EmittedRoutine | None:
        """Emit the outlined function, or return None if it needs scratch memory."""
        dtypes = tuple(self.scalar.buffers[p.tensor].dtype for p in outlined.pointers)
        key = outlined.without_arguments, dtypes, self.context, self.arrays
        printed = _emit_routine(node.name, *key, current_marks())
        if printed is not None:
            self.scalar.helpers |= dict.fromkeys(printed.helpers)
            self.scalar.library |= dict.fromkeys(printed.library)
        return printed

    # storage --------------------------------------------------------------------------------------------------------
    def declare(self, storage: Storage) -> None:
        identifier = self.names.of(storage.tensor)
        self.scalar.buffers[storage.tensor] = BufferRef(identifier, storage.dtype, storage.shape, storage.pad)
        self.registers.pop(storage.tensor, None)
        self.opaque_registers.discard(storage.tensor)
        self.ordered_registers.discard(storage.tensor)
        type_ = self.dialect.storage_type(storage.dtype)
        count = math.prod(storage.shape)
        if not storage.shape:
            self.emit_line(f"{type_} {identifier};")
        elif (subview := storage.subview_of) is not None:
            first = self.element(subview.tensor, self.scalar.buffers[subview.tensor], subview.index)
            self.emit_line(f"{type_} *restrict {identifier} = &{first};")
        elif (lanes := self._register_lanes(storage)) is not None:
            self.registers[storage.tensor] = lanes
            if storage.no_rematerialize and self.context.vector_bytes >= 32:
                self.opaque_registers.add(storage.tensor)
            if storage.ordered and self.context.vector_bytes >= 32:
                self.ordered_registers.add(storage.tensor)
            columns = range(0, storage.shape[-1], lanes)
            suffixes = [register_name("", [*row, c], lanes) for row in _rows(storage.shape[:-1]) for c in columns]
            identifier = self.names.of_elements(storage.tensor, suffixes)
            self.scalar.buffers[storage.tensor] = BufferRef(identifier, storage.dtype, storage.shape, storage.pad)
            names = [identifier + suffix for suffix in suffixes]
            self.emit_line(f"{vector_type(storage.dtype, lanes)} {', '.join(names)};")
        elif count * storage.dtype.bytes <= STACK_BYTES:
            self.emit_line(f"{type_} {identifier}[{shown(count)}] __attribute__((aligned(64)));")
        else:
            # A thread reuses its scratch across tasks and calls: fresh pages each time cost more than the work.
            member = f"{self.prefix}_{identifier}"
            declaration = f"{type_} {member}[{count}] __attribute__((aligned(64)));"
            if declaration not in self.scratch_buffers:  # an unrolled loop declares it in each copy
                self.scratch_buffers.append(declaration)
            # an opaque address: gcc would recompute it by a call when registers run out
            self.emit_line(f"{type_} *restrict {identifier} = {SCRATCH}.{member};")
            self.emit_line(f'__asm__("" : "+r"({identifier}));')

    def _register_lanes(self, storage: Storage) -> int | None:
        """Return the lanes of the vector variables that hold a storage, or None if it is an array.

        Variables hold rows of whole vectors of a value type, which vector loops access.
        """
        if storage.scope is not Scope.REGISTER or storage.tensor in self.arrays or storage.dtype.is_narrow_float:
            return None
        loops = vector_loops(storage)
        if not loops:
            return None
        lanes = self.lanes(storage.dtype)
        saved = dict(self.scalar.buffers)
        for node in iter_nodes(storage.body):
            if isinstance(node, Storage):
                self.scalar.buffers.setdefault(node.tensor, BufferRef(node.tensor, node.dtype, node.shape))
        for loop in loops:
            lanes = min(lanes, self._vector_lanes(loop)[1])
        self.scalar.buffers = saved
        return None if storage.shape[-1] % lanes else lanes

    def element(self, tensor: str, buffer: BufferRef, index: tuple[Expr, ...]) -> str:
        if tensor in self.registers:
            raise NotPromotableError(tensor)
        return CodeGenVisitor.element(self, tensor, buffer, index)


def _rows(shape: tuple[int, ...]) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for extent in shape:
        rows = [[*row, i] for row in rows for i in range(extent)]
    return rows


@lru_cache(MAX_CACHED_ROUTINES)
def _emit_routine(
    name: str,
    outlined: Outline,
    dtypes: tuple[DType, ...],
    context: FunctionContext,
    arrays: frozenset[str],
    marks: Marks | None,
) -> EmittedRoutine | None:
    """Emit an outlined function with parameters of these types, or return None if it needs scratch memory.

    `marks` are part of the cache key: equal numbers may have different marks. Candidates and edge tiles share most
    routines: the cache halves the time of code generation.
    """
    names, places, parameters = Names(), dict[str, BufferRef](), list[str]()
    for p, dtype in zip(outlined.pointers, dtypes, strict=True):
        places[p.name] = BufferRef(names.of(p.name), dtype, (0,))
        const, restrict = "" if p.written else "const ", "restrict " if p.is_unaliased else ""
        parameters.append(f"{const}{dialects.C.storage_type(dtype)} *{restrict}{names.of(p.name)}")
    parameters += [f"{INDEX} {names.of(n.name)}" for n in outlined.numbers]
    ranges = {n.name: n.known for n in outlined.numbers if n.known is not None}
    scalar = CScalar(dialects.C, names, INDEX, guard_reads=False, buffers=places, ranges=ranges)
    visitor = CodeGenC(dialects.C, names, scalar, context=context, arrays=arrays)
    scalar.registers = visitor.registers
    visitor.lines += begin_part(name)
    visitor.visit_all(outlined.body)
    visitor.lines += end_part()
    if visitor.scratch_buffers:
        return None
    text = f"({', '.join(parameters)}) {{\n" + "\n".join(visitor.lines) + "\n}"
    return EmittedRoutine(text, tuple(scalar.helpers), tuple(scalar.library))


@dataclass(frozen=True, slots=True)
class EmittedSoFar:
    """Parts of a translation unit before a function."""

    checks: int  # run-time checks
    routines: dict[str, str]  # parameters and body → name


def _visit_tree(tree: ScheduleTree, views: dict[str, BufferRef], context: FunctionContext, emitted: EmittedSoFar) -> CodeGenC:
    """Print a tree again until each storage node that cannot be in vector variables is an array."""
    arrays: frozenset[str] = frozenset()
    while True:
        names = Names()
        scalar = CScalar(dialects.C, names, INDEX, guard_reads=False, buffers=dict(views))
        names.reserve(*(p.identifier for p in views.values()))
        scalar.checks = [RuntimeCheck("", 0, 0, "")] * emitted.checks
        visitor = CodeGenC(dialects.C, names, scalar, context=context, arrays=arrays, routines=dict(emitted.routines))
        visitor.prefix = tree.name
        scalar.registers = visitor.registers
        try:
            visitor.visit_all(tree.body)
        except NotPromotableError as error:
            arrays |= {error.tensor}
        else:
            return visitor


def emit_function(
    tree: ScheduleTree,
    views: dict[str, BufferRef],
    args: tuple[Buffer, ...],
    context: FunctionContext,
    emitted: EmittedSoFar,
) -> Function:
    """Emit one launch as a C function over its buffers, in the order of `args`."""
    visitor = _visit_tree(tree, views, context, emitted)
    scalar = visitor.scalar
    parameters = ", ".join([*(parameter(a) for a in args), *(["long task"] if context.per_task else [])])
    name = region_function(tree.name) if context.in_parallel_region else tree.name
    is_local = context.in_parallel_region or not context.is_launch
    head = f"{ROUTINE if is_local else 'void'} {name}"
    text = f"{head}({parameters}) {{\n" + "\n".join(visitor.lines) + "\n}\n"
    routines = tuple((name, text) for text, name in visitor.routines.items() if text not in emitted.routines)
    return Function(
        text,
        tuple(scalar.helpers),
        tuple(scalar.library),
        tuple(visitor.scratch_buffers),
        visitor.tasks,
        tuple(scalar.checks[emitted.checks :]),
        routines,
    )
