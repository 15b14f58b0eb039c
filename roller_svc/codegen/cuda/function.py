"""Schedule trees → CUDA C++ text for NVRTC, or HIP: no headers, no inline assembly outside named wrappers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from roller_svc.analysis.congruences import Congruence, congruence
from roller_svc.analysis.index_ranges import fold
from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.buffer_ref import Place
from roller_svc.codegen.cuda.instructions import AMPERE, HIP_PREFIX, instruction
from roller_svc.codegen.cuda.matrix import MatrixNode, called, hopper_line, matrix_lines
from roller_svc.codegen.cuda.vector import WIDEST_BYTES, wide_loop
from roller_svc.codegen.helpers import helper
from roller_svc.codegen.index_width import MOST_INT32, needs_wide_index
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.codegen.visitor import Walk
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.index import ceil_div
from roller_svc.ir.kernel import Buffer, Language, Role, RuntimeCheck
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import (
    SHARED_ALIGNMENT_BYTES,
    AnyThread,
    Barrier,
    Compute,
    CpAsync,
    Let,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
    Scope,
    Storage,
    WarpReduce,
    block_extents,
    child_lists,
    iter_nodes,
)
from roller_svc.ir.schedule_hopper import HopperNode, MbarrierWait, WarpBarrier
from roller_svc.ir.tensor_map import TensorMap

# Straight-line statements that full unrolling may make of one loop nest.
UNROLLED_STATEMENTS = 512
_WHOLE = (Barrier, MbarrierWait, WarpBarrier, CpAsync)  # of what a serial loop is not unrolled around
REGISTER_BYTES = 4
WAVE = 64
ROLES_BARRIER = 1  # number of the one that roles meet in; 0 is that of __syncthreads (PTX ISA, "bar")


@dataclass(frozen=True, slots=True)
class Function:
    text: str
    helpers: tuple[str, ...]
    grid: int
    block: int
    shared_bytes: int  # dynamic
    checks: tuple[RuntimeCheck, ...] = ()
    maps: tuple[TensorMap, ...] = ()  # as parameters behind the buffers


@dataclass(frozen=True, slots=True)
class Room:
    """Shared memory of one tensor, from `offset` on where rooms lie in one array."""

    type_: str
    identifier: str
    elements: int
    bytes: int
    offset: int
    over: bool  # it takes the memory of others
    alignment: int

    @property
    def end(self) -> int:
        return self.offset + ceil_div(self.bytes, SHARED_ALIGNMENT_BYTES) * SHARED_ALIGNMENT_BYTES


@dataclass(slots=True)
class CudaWalk(Walk):
    arch: Arch = AMPERE
    rooms: dict[str, Room] = field(default_factory=dict)  # shared, by tensor
    atomics: dict[str, None] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)  # rooms that are a thread's registers
    known: dict[str, Congruence] = field(default_factory=dict)  # of Lets in scope

    def node(self, node: Node) -> None:
        if isinstance(node, MatrixNode):
            for line in matrix_lines(node, self.scalar, self.arch):
                self.line(line)
        elif isinstance(node, HopperNode):
            self.line(hopper_line(node, self.scalar))
        elif isinstance(node, AnyThread):
            self.any_thread(node)
        else:
            Walk.node(self, node)

    def loop(self, loop: Loop) -> None:
        match loop.kind:
            case LoopKind.BLOCK | LoopKind.THREAD:
                with self.bound(loop):
                    self.nodes(loop.body)
            case LoopKind.VECTOR if loop.extent > 1 and wide_loop(self, loop, self.known, self.private):
                pass
            case LoopKind.UNROLL | LoopKind.VECTOR if loop.extent > 1:
                copies = _statements(loop)
                if copies <= UNROLLED_STATEMENTS:
                    self.line("#pragma unroll")
                else:
                    self.line(f"#pragma unroll {max(1, UNROLLED_STATEMENTS * loop.extent // copies)}")
                Walk.loop(self, loop)
            case LoopKind.SERIAL if self._stays_loop(loop):
                self.line("#pragma unroll 1")
                Walk.loop(self, loop)
            case _:
                Walk.loop(self, loop)

    def _stays_loop(self, loop: Loop) -> bool:
        """Whether copies of it only cost registers and instruction cache: a staged step; in HIP a loop around unrolled
        ones, for LLVM unrolls even what nobody told it to."""
        if loop.extent == 1 and loop.stop is None:
            return False
        if any(isinstance(node, _WHOLE) for node in iter_nodes(loop.body)):
            return True
        unrolled = (node for node in iter_nodes(loop.body) if isinstance(node, Loop) and node.kind is LoopKind.UNROLL)
        return self.dialect.language is Language.HIP and any(node.extent > 1 for node in unrolled)

    def let(self, let: Let) -> None:
        saved = self.known
        self.known = {**saved, let.var: congruence(fold(let.value, self.scalar.values), saved)}
        Walk.let(self, let)
        self.known = saved

    def barrier(self) -> None:
        self.line("__syncthreads();")

    def any_thread(self, node: AnyThread) -> None:
        scalar, identifier = self.scalar, self.names.of(node.var)
        saved = scalar.values.copy(), scalar.ranges.copy()
        cond = scalar.value(node.cond)
        scalar.values.pop(node.var, None)
        scalar.ranges[node.var] = (0, 1)
        with self.declaring(identifier):
            meeting = f"__syncthreads_or({cond}) != 0"
            if node.threads is not None:
                meeting = f"{called('named_any', scalar)}({ROLES_BARRIER}, {node.threads}, {cond})"
            self.line(f"const int {identifier} = {meeting};")
            self.nodes(node.body)
        scalar.values, scalar.ranges = saved

    def lane_reduce(self, node: WarpReduce) -> None:
        place = self.scalar.places[node.tensor]
        target = self.element(node.tensor, place, node.index)
        name = f"lane_{node.combine.name.lower()}_{dialects.SHORT[place.dtype]}"
        self.scalar.helpers.update(dict.fromkeys((*helper(name, self.dialect).needs, name)))
        self.line(f"{target} = {name}({target}, {node.lanes});")

    def declare(self, storage: Storage) -> None:
        identifier = self.names.of(storage.tensor)
        self.scalar.places[storage.tensor] = Place(
            identifier, storage.dtype, storage.shape, storage.pad, storage.swizzled
        )
        type_ = self.dialect.storage_type(storage.dtype)
        if storage.scope is Scope.SHARED:
            count = math.prod(storage.shape[:-1]) * (storage.shape[-1] + storage.pad)
            start = min((self.rooms[t].offset for t in storage.aliases), default=None)
            if start is None:
                end = max((room.end for room in self.rooms.values()), default=0)
                start = ceil_div(end, storage.alignment_bytes) * storage.alignment_bytes
            self.rooms[storage.tensor] = Room(
                type_, identifier, count, count * storage.dtype.bytes, start, bool(storage.aliases),
                storage.alignment_bytes,
            )  # fmt: skip
            return
        self.private.add(storage.tensor)
        if storage.shape:
            # several elements a register: whole registers are moved to and fro
            aligned = f"__align__({WIDEST_BYTES}) " if storage.dtype.bytes < REGISTER_BYTES else ""
            self.line(f"{aligned}{type_} {identifier}[{math.prod(storage.shape)}];")
        else:
            self.line(f"{type_} {identifier};")

    def assignment(self, node: Compute, place: Place) -> str:
        if not node.atomic or node.combine is None:
            return Walk.assignment(self, node, place)
        name = f"atomic_{node.combine.name.lower()}_{dialects.SHORT[place.dtype]}"
        self.atomics[name] = None
        address = f"&{place.identifier}[{self.scalar.address(place, node.index)}]"
        return f"{name}({address}, {self.scalar.stored(node.value, place.dtype)});"


def _statements(loop: Loop) -> int:
    """Statements after full unrolling of this loop and of the unrolled ones in it."""

    def count(nodes: tuple[Node, ...]) -> int:
        total = 0
        for node in nodes:
            inside = sum(count(body) for body in child_lists(node))
            unrolled = isinstance(node, Loop) and node.kind in (LoopKind.UNROLL, LoopKind.VECTOR)
            total += inside * (node.extent if unrolled and isinstance(node, Loop) else 1) or 1
        return total

    return count((loop,))


def emit_function(
    tree: ScheduleTree, views: dict[str, Place], args: tuple[Buffer, ...], arch: Arch, first_check: int = 0
) -> Function:
    """One launch as an extern "C" __global__ function over its buffers, in the order of `args`, then its maps."""
    shapes = {tensor: place.shape for tensor, place in views.items()}
    wide = any(math.prod(b.shape) > MOST_INT32 for b in args) or needs_wide_index(tree.body, shapes)
    dialect = dialect_of(arch)
    names = Names()
    names.reserve(*(p.identifier for p in views.values()))
    maps = tuple(replace(m, symbol=names.of(m.symbol), buffer=views[m.buffer].identifier) for m in tree.tensor_maps)
    index = dialect.wide_index if wide else dialect.index
    scalar = Scalar(dialect, names, index, guard_reads=True, places=dict(views))
    scalar.checks = [RuntimeCheck("", 0, 0, "")] * first_check
    walker = CudaWalk(dialect, names, scalar, arch=arch)
    blocks, threads = block_extents(tree)
    _declare_ids(walker, tree)
    walker.nodes(tree.body)
    shared, dynamic = _shared_declarations(list(walker.rooms.values()), dialect.static_shared_bytes)
    parameters = [_parameter(a, dialect) for a in args]
    parameters += [f"const __grid_constant__ TensorMap {m.symbol}" for m in maps]
    cluster = f"__cluster_dims__({tree.cluster}, 1, 1) " if tree.cluster > 1 else ""
    bounds = f"__launch_bounds__({threads}, {_least_resident(tree.resident, threads, dialect)})"
    text = (
        f'extern "C" __global__ void {cluster}{bounds}\n{tree.name}({", ".join(parameters)}) {{\n'
        + "".join(f"  {line}\n" for line in shared)
        + "\n".join(walker.lines)
        + "\n}\n"
    )
    return Function(text, (*scalar.helpers, *walker.atomics), blocks, threads, dynamic,
                    tuple(scalar.checks[first_check:]), maps)  # fmt: skip


def dialect_of(arch: Arch) -> dialects.Dialect:
    """What text for a GPU of that architecture is written in."""
    return dialects.HIP if arch.prefix == HIP_PREFIX else dialects.CUDA


def _least_resident(blocks: int, threads: int, dialect: dialects.Dialect) -> int:
    """What a core shall hold, as launch bounds count it: blocks, or waves of each SIMD."""
    if not dialect.bounded_simds:
        return blocks
    return ceil_div(blocks * ceil_div(threads, WAVE), dialect.bounded_simds)


def _declare_ids(walker: CudaWalk, tree: ScheduleTree) -> None:
    """Block and thread loops as names: the innermost of each varies fastest, but for blocks that a raster groups."""
    for kind, source in ((LoopKind.BLOCK, "blockIdx.x"), (LoopKind.THREAD, "threadIdx.x")):
        loops = [n for n in iter_nodes(tree.body) if isinstance(n, Loop) and n.kind is kind]
        place = f"(int){source}"
        if kind is LoopKind.BLOCK and tree.raster > 1 and len(loops) > 1:
            place = _rastered(walker, (loops[-2], loops[-1]), tree.raster)
            loops = loops[:-2]
        stride = math.prod(x.extent for x in loops)
        total = stride
        for loop in loops:
            stride //= loop.extent
            if loop.extent == 1:
                continue
            text = place if stride == 1 else f"{place} / {stride}"
            if stride * loop.extent < total:
                text = f"{text} % {loop.extent}"
            walker.line(f"const {walker.scalar.index_type} {walker.names.of(loop.var)} = {text};")


def _rastered(walker: CudaWalk, tiles: tuple[Loop, Loop], raster: int) -> str:
    """The two innermost block loops as names, `raster` rows of tiles at a time, down each column first; gives what is
    left of the block's number."""
    row, column = tiles
    index = walker.scalar.index_type
    tile, first, rows, place = (walker.names.of(f".raster{part}") for part in ("", "_row", "_rows", "_at"))
    walker.line(f"const int {tile} = (int)blockIdx.x % {row.extent * column.extent};")
    walker.line(f"const int {first} = {tile} / {raster * column.extent} * {raster};")
    rest = f"{row.extent} - {first}"
    walker.line(f"const int {rows} = {rest} < {raster} ? {rest} : {raster};")
    walker.line(f"const int {place} = {tile} % {raster * column.extent};")
    walker.line(f"const {index} {walker.names.of(row.var)} = {first} + {place} % {rows};")
    walker.line(f"const {index} {walker.names.of(column.var)} = {place} / {rows};")
    return f"(int)blockIdx.x / {row.extent * column.extent}"


def _shared_declarations(rooms: list[Room], static_bytes: int) -> tuple[list[str], int]:
    """Declarations, and the dynamic bytes that they need: none while everything fits the static limit."""
    total = max((room.end for room in rooms), default=0)
    if total <= static_bytes and not any(room.over for room in rooms):
        return [
            f"__shared__ __align__({room.alignment}) {room.type_} {room.identifier}[{room.elements}];" for room in rooms
        ], 0
    static = total <= static_bytes
    size = str(total) if static else ""
    alignment = max(room.alignment for room in rooms)
    lines = [f"{'' if static else 'extern '}__shared__ __align__({alignment}) unsigned char shared_memory[{size}];"]
    lines += [
        f"{room.type_} *const {room.identifier} = ({room.type_} *)(shared_memory + {room.offset});" for room in rooms
    ]
    return lines, 0 if static else total


def _parameter(buffer: Buffer, dialect: dialects.Dialect) -> str:
    const = "const " if buffer.role is Role.INPUT else ""
    return f"{const}{dialect.storage_type(buffer.dtype)} *__restrict__ {buffer.symbol}"


def preamble(functions: tuple[Function, ...], dialect: dialects.Dialect) -> str:
    """Helpers and wrappers that the functions use."""
    names = list(dict.fromkeys(name for f in functions for name in f.helpers))
    plain = [(instruction(n) or helper(n, dialect)).text for n in names if not n.startswith("atomic_")]
    for name in names:
        if name.startswith("atomic_"):
            needed, text = _atomic(name, dialect)
            plain += [helper(n, dialect).text for n in needed if n not in names]
            plain.append(text)
    text = "\n".join(dict.fromkeys(plain))
    return text + "\n\n" if text else ""


def _atomic(name: str, dialect: dialects.Dialect) -> tuple[tuple[str, ...], str]:
    """Joins a value to memory by compare-and-swap on the word around it, for any type and any reduction."""
    _, which, short = name.split("_", 2)
    dtype = next(d for d in DType if dialects.SHORT[d] == short)
    stored, value = dialect.storage_type(dtype), dialect.value_type(dtype)
    combine = Combine[which.upper()]
    needed: tuple[str, ...] = ()
    old, new = "old", "join"
    if dtype.is_narrow_float:
        back, to = f"{short}_to_f32", f"f32_to_{short}"
        needed = (*helper(back, dialect).needs, *helper(to, dialect).needs, back, to)
        old, new = f"{back}(old)", f"{to}(join)"
    if combine in (Combine.MAX, Combine.MIN):
        function = f"{which}_{dialects.SHORT[dtype.compute]}"
        needed = (*needed, function)
        join = f"{function}({old}, {'value' if not dtype.is_narrow_float else f'{short}_to_f32(value)'})"
    else:
        sign = "+" if combine is Combine.SUM else "*"
        operand = f"{short}_to_f32(value)" if dtype.is_narrow_float else "value"
        join = f"({value})({old} {sign} {operand})"
    word = {64: "unsigned long long", 16: "unsigned short"}.get(dtype.bits, "unsigned int")
    whole = f"*({word} *)&stored"
    if dtype.bits == 8:  # there is no swap of bytes: that of the word around them, which may reach past the array
        whole = "(seen & ~mask) | ((unsigned int)*(unsigned char *)&stored << shift & mask)"
    if dtype.bits > 8:
        locate = f"  {word} *at = ({word} *)place;\n"
        extract = f"    {stored} old = *({stored} *)&seen;\n"
    else:
        locate = (
            "  unsigned int *at = (unsigned int *)((unsigned long long)place & ~3ull);\n"
            "  unsigned int shift = ((unsigned long long)place & 3) * 8;\n"
            "  unsigned int mask = 255u << shift;\n"
        )
        extract = (
            "    unsigned char part = (unsigned char)((seen & mask) >> shift);\n"
            f"    {stored} old = *({stored} *)&part;\n"
        )
    text = (
        f"__device__ __forceinline__ void {name}({stored} *place, {stored} value) {{\n{locate}"
        f"  {word} seen = *(volatile {word} *)at, before;\n  do {{\n    before = seen;\n{extract}"
        f"    {value} join = {join};\n    {stored} stored = ({stored}){new};\n"
        f"    seen = atomicCAS(at, before, {whole});\n  }} while (seen != before);\n}}"
    )
    return needed, text
