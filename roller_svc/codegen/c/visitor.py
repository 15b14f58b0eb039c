"""The walk over a schedule tree that prints C with vector extensions and OpenMP.

Schedule trees → C text with vector extensions and OpenMP, for CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from roller_svc.analysis.index_ranges import fold
from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.buffer_ref import Place
from roller_svc.codegen.c.outliner import Outline, outline
from roller_svc.codegen.c.preamble import PRIVATE_ROOMS, ROUTINE, Function
from roller_svc.codegen.c.scalar import CScalar, StaysArrayError
from roller_svc.codegen.c.threads import in_region, nest, parameter
from roller_svc.codegen.c.vector.access import NotVectorError
from roller_svc.codegen.c.vector.expressions import Vector, statement
from roller_svc.codegen.c.vector.helpers import HORIZONTAL, SCALAR_BYTES, horizontal_name, horizontal_needs
from roller_svc.codegen.c.vector.loops import (
    MOST_VECTORS,
    in_turns,
    pieces,
    stored_below,
    tensors_of,
    tensors_read,
    vector_loops,
    widest_bytes,
    with_lanes,
)
from roller_svc.codegen.c.vector.types import register_name, vector_type
from roller_svc.codegen.c.vector_transpose import as_bits, turn_name
from roller_svc.codegen.names import Names
from roller_svc.codegen.visitor import Walk
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr
from roller_svc.ir.kernel import Buffer, RuntimeCheck
from roller_svc.ir.schedule import (
    Compute,
    HorizontalReduce,
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

# Larger private tensors than this do not go on a thread's stack, which may be small.
STACK_BYTES = 16 << 10
INDEX = "long"
# Of the last routines that were printed: a few programs' with their candidates.
ROUTINES_KEPT = 256


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a function stands. `in_region`: called by all threads of a parallel region, who share its loops and meet
    after the call; else these begin regions. `by_task`, of the former: it does one task of its caller's loop."""

    vector_bytes: int
    cores: int
    in_region: bool
    by_task: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """A routine's parameters and body, and the helpers and library functions that they call."""

    text: str
    helpers: tuple[str, ...]
    library: tuple[str, ...]


@dataclass(slots=True)
class CWalk(Walk):
    setting: Setting = Setting(16, 1, in_region=False)
    tasks: int = 0  # of the largest loop whose iterations go to threads
    arrays: frozenset[str] = frozenset()  # storage nodes that must be arrays
    private_rooms: list[str] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)  # storage nodes held in vector variables → lanes
    pinned: set[str] = field(default_factory=set)  # those of them that the compiler must not replace by memory
    joined_in_order: set[str] = field(default_factory=set)  # and those that values are joined to in the text's order
    prefix: str = ""
    routines: dict[str, str] = field(default_factory=dict)  # what stands behind the name → name

    def lanes(self, dtype: DType) -> int:
        return self.setting.vector_bytes // dtype.bytes

    # loops ----------------------------------------------------------------------------------------------------------
    def loop(self, loop: Loop) -> None:
        match loop.kind:
            case LoopKind.VECTOR:
                self._vector_loop(loop)
            case LoopKind.UNROLL:
                for value in range(loop.extent):
                    saved = self.scalar.values.copy(), self.scalar.ranges.copy()
                    self.scalar.values[loop.var] = value
                    self.scalar.ranges[loop.var] = (value, value)
                    self.nodes(loop.body)
                    self.scalar.values, self.scalar.ranges = saved
            case LoopKind.PARALLEL:
                self._parallel(loop)
            case _:
                Walk.loop(self, loop)

    def _parallel(self, loop: Loop) -> None:
        """Perfectly nested parallel loops become one loop over tasks."""
        chain = nest(loop)
        tasks = math.prod(x.extent for x in chain)
        saved = self.scalar.values.copy(), self.scalar.ranges.copy()
        wide = [x for x in chain if x.extent > 1]
        for each in chain:
            self.scalar.ranges[each.var] = (0, each.extent - 1)
            if each.extent == 1:
                self.scalar.values[each.var] = 0
        head = f"for (long task = 0; task < {tasks}; task++)"
        if not wide:
            self._task(chain[-1].body)
        else:
            if self.setting.by_task:
                head = ""
            elif self.setting.in_region:
                if self.tasks:
                    self.line("#pragma omp barrier")
                self.line("#pragma omp for schedule(dynamic, 1) nowait")
            else:
                most = min(tasks, self.setting.cores)
                self.line(f"#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_i32({most}))")
            self.tasks = max(self.tasks, tasks)
            with self.block(head):
                stride = tasks
                for each in wide:
                    stride //= each.extent
                    text = "task" if stride == 1 else f"task / {stride}"
                    if each is not wide[0]:
                        text = f"{text} % {each.extent}"
                    self.line(f"const long {self.names.of(each.var)} = {text};")
                self._task(chain[-1].body)
        self.scalar.values, self.scalar.ranges = saved

    def _task(self, nodes: tuple[Node, ...]) -> None:
        """Before a thread meets the others, its stores past the caches are done."""
        self.nodes(nodes)
        if any(isinstance(node, Compute) and node.nontemporal for node in iter_nodes(nodes)):
            self.scalar.helpers["stores_done"] = None
            self.line("stores_done();")

    def _vector_loop(self, loop: Loop) -> None:
        if (row := with_lanes(loop)) is not None:
            self.storage(row)
            return
        if (parts := self._parts(loop)) is not None:
            self.nodes(parts)
            return
        lines = self._as_vectors(loop)
        if lines is not None:
            for text in lines:
                self.line(text)
            return
        for name in stored_below(loop):
            if name in self.registers:
                raise StaysArrayError(name)
        for node in iter_nodes(loop.body):
            for name in tensors_read(node):
                if name in self.registers:
                    raise StaysArrayError(name)
        with self.bound(loop):
            if loop.extent > 1:
                self.line("#pragma omp simd")
                with self.block(self.head(loop)):
                    self.nodes(loop.body)
            else:
                self.nodes(loop.body)

    def _parts(self, loop: Loop) -> tuple[Loop, ...] | None:
        """A row of many vectors as a loop over some of them at a time; None for others, and for what is no vectors."""
        if loop.extent <= MOST_VECTORS or any(tensors_of(node) & self.registers.keys() for node in loop.body):
            return None
        _, lanes = self._vector_lanes(loop)
        if loop.extent <= MOST_VECTORS * lanes:
            return None
        parts = in_turns(loop, lanes)
        with self.bound(parts[0]):
            inner = parts[0].body[0]
            return parts if isinstance(inner, Loop) and self._as_vectors(inner) is not None else None

    def _as_vectors(self, loop: Loop) -> list[str] | None:
        """The loop as vector statements; None where some part has no vector form."""
        if loop.stop is not None or not all(isinstance(n, Compute) and not any(n.bounds_checked) for n in loop.body):
            return None
        computes = [n for n in loop.body if isinstance(n, Compute)]
        widest, lanes = self._vector_lanes(loop)
        cover = pieces(loop.extent, lanes, max(2, SCALAR_BYTES // widest), overlapping=self._may_repeat(computes))
        if not computes or cover[0][1] == 1:
            return None
        scalar, lines = self.scalar, list[str]()
        marks, helpers, library = len(scalar.checks), dict(scalar.helpers), dict(scalar.library)
        try:
            with self.bound(loop):
                for first, count in cover:
                    vector = Vector(scalar, loop.var, count, first, self.registers)
                    for n in computes:
                        if count < lanes:  # a part of a line that goes to memory by itself takes as long as all of it
                            n = replace(n, nontemporal=False)
                        lines.append(statement(vector, n) if count > 1 else self._iteration(n, loop.var, first))
                        if n.tensor in (self.joined_in_order if n.combine else self.pinned):
                            lines.append(self._pin(lines[-1].partition(" ")[0], volatile=n.combine is not None))
        except NotVectorError:
            del scalar.checks[marks:]
            scalar.helpers, scalar.library = helpers, library
            return None
        return lines

    def _pin(self, register: str, *, volatile: bool) -> str:
        """The compiler knows nothing of what is in the register from here on, so that it cannot read it anew; volatile
        pins stay in the order of the text, and so does what leads to them."""
        kind = "v" if self.setting.vector_bytes == 64 else "x"  # of any of 32 registers, of any of 16
        return f'__asm__{" volatile" if volatile else ""}("" : "+{kind}"({register}));'

    def _vector_lanes(self, loop: Loop) -> tuple[int, int]:
        """Bytes of the widest element that a vector loop computes with, and how many such one vector has."""
        widest, lanes = 1, self.setting.vector_bytes
        for node in loop.body:
            if isinstance(node, Compute):
                widest = max(widest, widest_bytes(node, loop.var, self.scalar.places[node.tensor].dtype))
                used = [self.registers[t] for t in (node.tensor, *tensors_read(node)) if t in self.registers]
                lanes = min([lanes, *used])
        return widest, min(lanes, self.setting.vector_bytes // widest)

    def _may_repeat(self, computes: list[Compute]) -> bool:
        """Whether an iteration may run twice: it writes memory that none of them reads, and through the caches."""
        written = {n.tensor for n in computes}
        unread = written.isdisjoint({tensor for n in computes for tensor in tensors_read(n)} | set(self.registers))
        return unread and not any(n.combine or n.nontemporal for n in computes)

    def _iteration(self, node: Compute, var: str, value: int) -> str:
        saved = self.scalar.values.copy(), self.scalar.ranges.copy()
        self.scalar.values[var], self.scalar.ranges[var] = value, (value, value)
        text = self.assignment(node, self.scalar.places[node.tensor])
        self.scalar.values, self.scalar.ranges = saved
        return text

    def join_lanes(self, node: HorizontalReduce) -> None:
        """In shuffles where one vector variable holds the lanes."""
        first, dtype = node.first, node.first.dtype
        held = self.registers.get(first.tensor)
        index = [fold(i, self.scalar.values) for i in first.index]
        if held != node.lanes or node.combine not in HORIZONTAL or not all(isinstance(i, Const) for i in index):
            Walk.join_lanes(self, node)
            return
        for name in horizontal_needs(node.combine, dtype, node.lanes):
            self.scalar.helper(name)
        self.scalar.helpers[name := horizontal_name(node.combine, dtype, node.lanes)] = None
        place = self.scalar.places[first.tensor]
        known = [int(i.value) for i in index if isinstance(i, Const)]
        vector = register_name(place.identifier, known, node.lanes)
        self.line(f"{self.element(node.tensor, self.scalar.places[node.tensor], node.index)} = {name}({vector});")

    def prefetch(self, node: Prefetch) -> None:
        place = self.scalar.places[node.tensor]
        ahead = f" + {node.distance}" if node.distance else ""
        address = f"{place.identifier} + {self.scalar.address(place, node.index)}{ahead}"
        self.line(f"__builtin_prefetch({address}, {int(node.for_write)}, {2 if node.to_l2 else 3});")

    def transpose(self, node: Transpose) -> None:
        dtype = as_bits(node.dtype or node.source.dtype)
        lanes = node.lanes or self.lanes(dtype)
        cast = "" if dtype is node.source.dtype else f"({self.dialect.storage_type(dtype)} *)"
        target = f"{cast}&{self.element(node.tensor, self.scalar.places[node.tensor], node.index)}"
        source = self.element(node.source.tensor, self.scalar.places[node.source.tensor], node.source.index)
        source = f"{cast}&{source}"
        strides = (str(node.stride), str(node.source_stride))
        name = turn_name(node, dtype, lanes)
        if node.columns is not None:
            args = [target, strides[0], source]
        elif node.column_dim is not None:
            args = [target, source, strides[1]]
        else:
            args = [target, strides[0], source, strides[1]]
        self.scalar.helpers[name] = None
        self.line(f"{name}({', '.join(args)});")

    # routines -------------------------------------------------------------------------------------------------------
    def routine(self, node: Routine) -> None:
        """A call of a function that the text has once, or the body in place where no function could do it."""
        found = outline(node.body, self.scalar, self.registers)
        printed = None if found is None else self._printed(found)
        if found is None or printed is None:
            self.nodes(node.body)
            return
        # like the other helpers' names it ends in a type, so that no tensor of a program has it
        result = next(self.scalar.places[p.tensor].dtype for p in found.pointers if p.written)
        name = self.routines.setdefault(printed.text, f"{node.name}{len(self.routines)}_{dialects.SHORT[result]}")
        places = [f"{self.scalar.places[p.tensor].identifier} + {self.scalar.index(p.offset)}" for p in found.pointers]
        self.line(f"{name}({', '.join([*places, *(self.scalar.index(n.value) for n in found.numbers)])});")

    def _printed(self, found: Outline) -> Printed | None:
        """Text of the function; None where it would need memory that outlives its call."""
        dtypes = tuple(self.scalar.places[p.tensor].dtype for p in found.pointers)
        printed = _routine(found.bare, found.zeros, dtypes, self.setting, self.arrays)
        if printed is not None:
            self.scalar.helpers |= dict.fromkeys(printed.helpers)
            self.scalar.library |= dict.fromkeys(printed.library)
        return printed

    # storage --------------------------------------------------------------------------------------------------------
    def declare(self, storage: Storage) -> None:
        identifier = self.names.of(storage.tensor)
        self.scalar.places[storage.tensor] = Place(identifier, storage.dtype, storage.shape, storage.pad)
        self.registers.pop(storage.tensor, None)
        self.pinned.discard(storage.tensor)
        self.joined_in_order.discard(storage.tensor)
        type_ = self.dialect.storage_type(storage.dtype)
        count = math.prod(storage.shape)
        if not storage.shape:
            self.line(f"{type_} {identifier};")
        elif (window := storage.subview_of) is not None:
            first = self.element(window.tensor, self.scalar.places[window.tensor], window.index)
            self.line(f"{type_} *restrict {identifier} = &{first};")
        elif storage.scope is Scope.REGISTER and storage.tensor not in self.arrays and self._as_registers(storage):
            lanes = self._register_lanes(storage)
            self.registers[storage.tensor] = lanes
            if storage.no_rematerialize and self.setting.vector_bytes >= 32:
                self.pinned.add(storage.tensor)
            if storage.ordered and self.setting.vector_bytes >= 32:
                self.joined_in_order.add(storage.tensor)
            names = [
                register_name(identifier, [*row, column], lanes)
                for row in _rows(storage.shape[:-1]) for column in range(0, storage.shape[-1], lanes)
            ]  # fmt: skip
            self.line(f"{vector_type(storage.dtype, lanes)} {', '.join(names)};")
        elif count * storage.dtype.bytes <= STACK_BYTES:
            self.line(f"{type_} {identifier}[{count}] __attribute__((aligned(64)));")
        else:
            # A thread keeps its room from task to task and call to call: fresh pages each time cost more than the work.
            member = f"{self.prefix}_{identifier}"
            room = f"{type_} {member}[{count}] __attribute__((aligned(64)));"
            if room not in self.private_rooms:  # an unrolled loop declares it once for each of its rounds
                self.private_rooms.append(room)
            # its address kept from gcc, which would ask for it again, by a call, where registers run out
            self.line(f"{type_} *restrict {identifier} = {PRIVATE_ROOMS}.{member};")
            self.line(f'__asm__("" : "+r"({identifier}));')

    def _as_registers(self, storage: Storage) -> bool:
        """Whether vector variables can hold it: a value type, rows of whole vectors, walked by vector loops."""
        if storage.dtype.is_narrow_float or not vector_loops(storage):
            return False
        return storage.shape[-1] % self._register_lanes(storage) == 0

    def _register_lanes(self, storage: Storage) -> int:
        """Lanes of the vectors in which its loops compute."""
        lanes = self.lanes(storage.dtype)
        saved = dict(self.scalar.places)
        for node in iter_nodes(storage.body):
            if isinstance(node, Storage):
                self.scalar.places.setdefault(node.tensor, Place(node.tensor, node.dtype, node.shape))
        for loop in vector_loops(storage):
            lanes = min(lanes, self._vector_lanes(loop)[1])
        self.scalar.places = saved
        return lanes

    def element(self, tensor: str, place: Place, index: tuple[Expr, ...]) -> str:
        if tensor in self.registers:
            raise StaysArrayError(tensor)
        return Walk.element(self, tensor, place, index)


def _rows(shape: tuple[int, ...]) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for extent in shape:
        rows = [[*row, i] for row in rows for i in range(extent)]
    return rows


@lru_cache(ROUTINES_KEPT)
def _routine(
    found: Outline, zeros: tuple[str, ...], dtypes: tuple[DType, ...], setting: Setting, arrays: frozenset[str]
) -> Printed | None:
    """Text of a function over parameters of those types. `zeros`: the outline's, which compare equal whatever their
    sign. Candidates and edges share most routines: half of the time of printing is saved."""
    names, places, parameters = Names(), dict[str, Place](), list[str]()
    for p, dtype in zip(found.pointers, dtypes, strict=True):
        places[p.name] = Place(names.of(p.name), dtype, (0,))
        const, restrict = "" if p.written else "const ", "restrict " if p.alone else ""
        parameters.append(f"{const}{dialects.C.storage_type(dtype)} *{restrict}{names.of(p.name)}")
    parameters += [f"{INDEX} {names.of(n.name)}" for n in found.numbers]
    ranges = {n.name: n.known for n in found.numbers if n.known is not None}
    scalar = CScalar(dialects.C, names, INDEX, guard_reads=False, places=places, ranges=ranges)
    walker = CWalk(dialects.C, names, scalar, setting=setting, arrays=arrays)
    scalar.registers = walker.registers
    walker.nodes(found.body)
    if walker.private_rooms:
        return None
    text = f"({', '.join(parameters)}) {{\n" + "\n".join(walker.lines) + "\n}"
    return Printed(text, tuple(scalar.helpers), tuple(scalar.library))


@dataclass(frozen=True, slots=True)
class Above:
    """What stands in a text above a function: run-time checks, and routines, text → name."""

    checks: int
    routines: dict[str, str]


def emit_function(
    tree: ScheduleTree, views: dict[str, Place], args: tuple[Buffer, ...], setting: Setting, above: Above
) -> Function:  # fmt: skip
    """One launch as a C function over its buffers, in the order of `args`."""
    arrays: frozenset[str] = frozenset()
    while True:
        try:
            return _emit(tree, views, args, setting, above, arrays)
        except StaysArrayError as stays:
            arrays |= {stays.tensor}


def _emit(
    tree: ScheduleTree, views: dict[str, Place], args: tuple[Buffer, ...], setting: Setting, above: Above,
    arrays: frozenset[str],
) -> Function:  # fmt: skip
    names = Names()
    scalar = CScalar(dialects.C, names, INDEX, guard_reads=False, places=dict(views))
    names.reserve(*(p.identifier for p in views.values()))
    scalar.checks = [RuntimeCheck("", 0, 0, "")] * above.checks
    walker = CWalk(dialects.C, names, scalar, setting=setting, arrays=arrays, routines=dict(above.routines))
    walker.prefix = tree.name
    scalar.registers = walker.registers
    walker.nodes(tree.body)
    parameters = ", ".join([*(parameter(a) for a in args), *(["long task"] if setting.by_task else [])])
    head = f"{ROUTINE} {in_region(tree.name)}" if setting.in_region else f"void {tree.name}"
    text = f"{head}({parameters}) {{\n" + "\n".join(walker.lines) + "\n}\n"
    routines = tuple((name, text) for text, name in walker.routines.items() if text not in above.routines)
    return Function(
        text, tuple(scalar.helpers), tuple(scalar.library), tuple(walker.private_rooms), walker.tasks,
        tuple(scalar.checks[above.checks :]), routines,
    )  # fmt: skip
