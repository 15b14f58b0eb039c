"""Vectorized accesses of GPU vector loops: one instruction loads or stores the elements of consecutive iterations."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from roller_svc.analysis.congruences import Congruence, Known, LaneStrideAnalysis, congruence, is_multiple
from roller_svc.analysis.index_ranges import fold, is_within_int32
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.cuda.packed_lanes import PackedLanes
from roller_svc.codegen.dialect import SHORT
from roller_svc.codegen.visitor import CodeGenVisitor
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    children,
    loads_of,
    rewrite,
    substitute,
    with_children,
)
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.kernel import Language
from roller_svc.ir.schedule import Compute, Let, Loop, Node

# Types that move a number of bytes in one instruction. 16 is the widest, and the alignment of shared buffers.
_WORDS = {2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}
WIDEST_BYTES = max(_WORDS)

Lets = tuple[tuple[str, Expr], ...]
Guard = tuple[Expr, ...]  # uniform conditions under which a load is executed


@dataclass(frozen=True, slots=True)
class _Statement:
    """A write with its enclosing Lets."""

    lets: Lets
    node: Compute
    whole: dict[str, Expr]  # Let → its value over variables outside of the loop


@dataclass(frozen=True, slots=True)
class LetFacts:
    """Facts about the Lets in scope."""

    congruences: Known
    definitions: Mapping[str, Expr]


def emit_wide_loop(visitor: CodeGenVisitor, loop: Loop, lets: LetFacts, register_buffers: Collection[str]) -> bool:
    """Print a vector loop, with wide accesses where elements are contiguous and aligned.

    Returns False, and prints nothing, if the body is not straight-line code. No iteration reads what another one
    writes, so each statement may run for all iterations before the next one.

    Args:
        visitor: prints the lines.
        loop: the vector loop.
        lets: the Lets in scope.
        register_buffers: storage nodes in registers.
    """
    statements = _straight(loop.body, (), {})
    if loop.stop is not None or statements is None:
        return False
    values = visitor.scalar.values
    congruences = {**lets.congruences, **{name: Congruence(0, value) for name, value in values.items()}}
    lanes = LaneStrideAnalysis(loop.var, loop.extent, congruences, frozenset(s.node.tensor for s in statements))
    with visitor.bind_loop(loop):
        printer = _WideLoop(visitor, loop, lanes, frozenset(register_buffers), lets.definitions)
        for statement in statements:
            printer.statement(statement)
    return True


def _straight(nodes: tuple[Node, ...], lets: Lets, whole: dict[str, Expr]) -> list[_Statement] | None:
    statements: list[_Statement] = []
    for node in nodes:
        match node:
            case Compute():
                statements.append(_Statement(lets, node, whole))
            case Let(var=var, value=value, body=body):
                inside = _straight(body, (*lets, (var, value)), {**whole, var: substitute(value, whole)})
                if inside is None:
                    return None
                statements += inside
            case _:
                return None
    return statements


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Contiguous elements that are moved by accesses of `bytes` each."""

    place: BufferRef
    index: tuple[Expr, ...]  # of an iteration's element
    bytes: int


@dataclass(slots=True)
class _WideLoop:
    visitor: CodeGenVisitor
    loop: Loop
    lanes: LaneStrideAnalysis
    register_buffers: frozenset[str]
    definitions: Mapping[str, Expr]  # of Lets in scope
    read: dict[tuple[Load, Guard], str] = field(default_factory=dict)  # loads that are in a local array already

    # statements -----------------------------------------------------------------------------------------------------
    def statement(self, statement: _Statement) -> None:
        """Print all lanes of one write: wide loads, a loop over the lanes, wide stores."""
        node, buffer = statement.node, self.visitor.scalar.buffers[statement.node.tensor]
        value = self._read(node.value, (), statement.whole)
        chunks = None
        if not node.atomic and not any(node.bounds_checked):
            chunks = self._chunks(buffer, tuple(substitute(i, statement.whole) for i in node.index))
        if chunks is None or (node.tensor in self.register_buffers and not self._is_packed(buffer)):
            index = tuple(self._read(i, (), statement.whole) for i in node.index)
            self._each_lane(statement, replace(node, index=index, value=value))
        elif node.combine is None and (source := self._copied_array(value, buffer)) is not None:
            self._move(chunks, source, store=True)
        else:
            local = self._local(node.tensor, buffer, "")
            if node.combine is not None:
                self._move(chunks, local, store=False)
            if not self._store_packed(local, substitute(value, statement.whole), node):
                self._each_lane(statement, Compute(local, (ref(self.loop.var),), value, node.combine))
            self._move(chunks, local, store=True)
        self.read = {key: local for key, local in self.read.items() if key[0].tensor not in self.lanes.written}

    def _each_lane(self, statement: _Statement, node: Compute) -> None:
        """Print the write for each lane, unrolled, inside the Lets that it uses."""
        node = replace(node, value=rewrite(node.value, lambda expr: self._known_remainder(expr, statement.whole)))
        nodes: tuple[Node, ...] = (node,)
        used = frozenset[str]().union(*(axes_of(e) for e in (*node.index, node.value)))
        for var, value in reversed(statement.lets):
            if var in used:
                nodes = (Let(var, value, nodes),)
                used = used - {var} | axes_of(value)
        self.visitor.emit_line("#pragma unroll")
        with self.visitor.block(self.visitor.loop_head(self.loop)):
            self.visitor.visit_all(nodes)

    def _known_remainder(self, expr: Expr, whole: dict[str, Expr]) -> Expr:
        """Replace a remainder that is known in every lane: the place of a packed value in its word.

        Arithmetic of axes in a value wraps, which remainders are only free of in a known range.
        """
        if not isinstance(expr, Op) or expr.kind is not OpKind.MOD or expr.dtype is not DType.INT32 or loads_of(expr):
            return expr
        exact = substitute(expr, whole)
        first, step = congruence(self.lanes.first_value(exact), self.lanes.known), self.lanes.stride(exact)
        if first.modulus or step is None or not is_within_int32(exact, self.visitor.scalar.ranges):
            return expr
        return add(num(first.remainder), mul(ref(self.loop.var), num(step)))

    def _store_packed(self, local: str, value: Expr, node: Compute) -> bool:
        """Print the stores of the lanes in pairs, if these are unpacked together."""
        buffer = self.visitor.scalar.buffers[local]
        if node.combine is not None or self.visitor.dialect.language is not Language.CUDA:
            return False
        packed = PackedLanes(self.visitor, self.lanes, buffer.dtype)
        if node.tensor in self.register_buffers:  # read by elements
            unordered = packed.unordered_words(value)
            for number, (word, lanes) in enumerate(unordered or ()):
                name = self.visitor.names.of(f"{local}.pair{number}")
                self.visitor.emit_line(f"const unsigned int {name} = {word};")
                for half, lane in zip((name, f"({name} >> 16)"), lanes, strict=True):
                    self.visitor.emit_line(f"{buffer.identifier}[{lane}] = (unsigned short){half};")
            return unordered is not None
        words = packed.words(value)
        for number, word in enumerate(words or ()):
            self.visitor.emit_line(f"*(unsigned int *)&{buffer.identifier}[{2 * number}] = {word};")
        return words is not None

    def _copied_array(self, value: Expr, buffer: BufferRef) -> str | None:
        """Return the local array that already has the stored values, or None."""
        if not isinstance(value, Load) or value.tensor not in self.read.values():
            return None
        source = self.visitor.scalar.buffers[value.tensor]
        return value.tensor if source.shape and source.dtype is buffer.dtype else None

    # loads ----------------------------------------------------------------------------------------------------------
    def _read(self, expr: Expr, guard: Guard | None, whole: dict[str, Expr]) -> Expr:
        """Replace loads by local arrays that are loaded before the loop over lanes.

        `guard` None: lanes differ in whether they load, so each lane loads for itself what is not loaded yet.
        """
        match expr:
            case Load(tensor=tensor, index=places, dtype=dtype, bounds_checked=checked):
                load = Load(tensor, tuple(substitute(i, whole) for i in places), dtype, checked)
                local = self.read.get((load, ())) if guard is None else self._load_wide(load, guard)
                if local is not None:
                    index = (ref(self.loop.var),) if self.visitor.scalar.buffers[local].shape else ()
                    return Load(local, index, dtype)
            case Select(cond=cond, then=then, otherwise=otherwise, dtype=dtype):
                test = substitute(cond, whole)
                same = guard is not None and self.lanes.is_uniform(test)
                holds = (*guard, self.lanes.first_value(test)) if same and guard is not None else None
                fails = None if holds is None else (*holds[:-1], Op(OpKind.LNOT, (holds[-1],), DType.INT8))
                new = self._read(then, holds, whole)
                if holds is not None and self._is_zero_unless(holds, new) and _is_zero(otherwise):
                    return new
                test_read = self._read(holds[-1], guard, {}) if holds else self._read(cond, guard, whole)
                return Select(test_read, new, self._read(otherwise, fails, whole), dtype)
            case Op(kind=OpKind.LAND | OpKind.LOR, args=(first, second)):
                return replace(expr, args=(self._read(first, guard, whole), self._read(second, None, whole)))
            case _:
                pass
        parts = children(expr)
        return with_children(expr, tuple(self._read(part, guard, whole) for part in parts)) if parts else expr

    def _is_zero_unless(self, guard: Guard, value: Expr) -> bool:
        """Return whether it is a local array that was loaded under exactly this guard, with zeros elsewhere."""
        return isinstance(value, Load) and any(local == value.tensor and key[1] == guard for key, local in self.read.items())

    def _load_wide(self, load: Load, guard: Guard) -> str | None:
        """Load the elements of all lanes into a local array, or a uniform element into a variable; None for neither."""
        buffer = self.visitor.scalar.buffers[load.tensor]
        if load.tensor in self.register_buffers and not self._is_packed(buffer):
            return None
        for known in (guard, ()):
            if (load, known) in self.read:
                return self.read[load, known]
        checked = [i for i, is_checked in zip(load.index, load.bounds_checked, strict=False) if is_checked]
        if any(not self.lanes.is_uniform(i) or any(any(x.bounds_checked) for x in loads_of(i)) for i in checked):
            return None
        if not guard and not checked and load.tensor not in self.lanes.written and all(map(self.lanes.is_uniform, load.index)):
            return self._load_uniform(load, buffer)
        chunks = self._chunks(buffer, load.index)
        if chunks is None:
            return None
        local = self.read[load, guard] = self._local(load.tensor, buffer, " = {}" if guard or checked else "")
        tests = (*map(self.visitor.scalar.value, guard), *self._checks(load, buffer))
        self._move(chunks, local, store=False, tests=tests)
        return local

    def _load_uniform(self, load: Load, buffer: BufferRef) -> str | None:
        if not load.index and "." in load.tensor:
            return None  # already a variable
        name = self._name(load.tensor, "once")
        identifier = self.visitor.names.of(name)
        element = self.visitor.element(load.tensor, buffer, tuple(self.lanes.first_value(i) for i in load.index))
        self.visitor.emit_line(f"const {self.visitor.dialect.storage_type(buffer.dtype)} {identifier} = {element};")
        self.visitor.scalar.buffers[name] = BufferRef(identifier, buffer.dtype, ())
        self.read[load, ()] = name
        return name

    def _checks(self, load: Load, buffer: BufferRef) -> tuple[str, ...]:
        """Return the range tests of indices from data."""
        return tuple(
            self.visitor.scalar.in_range(load.tensor, d, buffer.shape[d], self.lanes.first_value(load.index[d]))
            for d, is_checked in enumerate(load.bounds_checked)
            if is_checked
        )

    # memory ---------------------------------------------------------------------------------------------------------
    def _chunks(self, buffer: BufferRef, index: tuple[Expr, ...]) -> _Chunks | None:
        """Return the wide accesses of the elements of all lanes, or None if these are not contiguous and aligned.

        Buffers start at an aligned address, so the offset of an element determines the alignment of its address.
        """
        size, step, divisor = buffer.dtype.bytes, 0, 0
        for i, stride in zip(index, buffer.strides, strict=True):
            lane_stride = self.lanes.stride(i)
            if lane_stride is None:
                return None
            step += lane_stride * stride
            divisor = math.gcd(divisor, congruence(self.lanes.first_value(i), self.lanes.known).divisor * stride)
        if step != 1:
            return None
        width = math.gcd(divisor * size, self.lanes.count * size, WIDEST_BYTES)
        widest = math.gcd(self.lanes.count * size, WIDEST_BYTES)
        if width < widest and self._starts_at_multiple(buffer, index, widest // size):
            width = widest
        return _Chunks(buffer, index, width) if width > size else None

    def _starts_at_multiple(self, buffer: BufferRef, index: tuple[Expr, ...], elements: int) -> bool:
        """Return whether the first iteration's element has an offset that is a multiple of `elements`.

        Rows that begin at any alignment have vectors that begin at a multiple in memory.
        """
        offset: Expr = num(0)
        for i, stride in zip(index, buffer.strides, strict=True):
            if (stride % elements) != 0:
                offset = add(offset, mul(fold(self.lanes.first_value(i), self.visitor.scalar.values), num(stride)))
        return is_multiple(offset, elements, self.lanes.known, self.definitions)

    def _move(self, chunks: _Chunks, local: str, *, store: bool, tests: tuple[str, ...] = ()) -> None:
        """Print the copy between memory and the local array."""
        if tests:
            with self.visitor.block(f"if ({' && '.join(tests)})"):
                self._move(chunks, local, store=store)
            return
        buffer, identifier = chunks.place, self.visitor.scalar.buffers[local].identifier
        word, each = self._word(chunks), chunks.bytes // buffer.dtype.bytes
        for lane in range(0, self.lanes.count, each):
            at = tuple(substitute(i, {self.loop.var: num(lane)}) for i in chunks.index)
            far = f"&{buffer.identifier}[{self.visitor.scalar.address(buffer, at)}]"
            near = f"&{identifier}[{lane}]"
            if store:
                self.visitor.emit_line(f"*({word} *){far} = *(const {word} *){near};")
            else:
                self.visitor.emit_line(f"*({word} *){near} = *(const {word} *){far};")

    def _word(self, chunks: _Chunks) -> str:
        """Return the type of a wide access.

        HIP: a vector of elements. Otherwise LLVM keeps an array in memory that is written by elements, read by words.
        """
        if self.visitor.dialect.language is not Language.HIP:
            return _WORDS[chunks.bytes]
        dtype = chunks.place.dtype
        return self.visitor.scalar.helper(f"run{chunks.bytes // dtype.bytes}_{SHORT[dtype]}")

    def _local(self, tensor: str, buffer: BufferRef, initial: str) -> str:
        """Declare a local array of one element a lane, which becomes registers."""
        name = self._name(tensor, "wide")
        identifier = self.visitor.names.of(name)
        type_ = self.visitor.dialect.storage_type(buffer.dtype)
        self.visitor.emit_line(f"__align__({WIDEST_BYTES}) {type_} {identifier}[{self.lanes.count}]{initial};")
        self.visitor.scalar.buffers[name] = BufferRef(
            identifier, buffer.dtype, (self.lanes.count,), in_words=self.lanes.count % 2 == 0
        )
        return name

    def _name(self, tensor: str, what: str) -> str:
        count = 0
        while (name := f"{tensor}.{what}{count}") in self.visitor.scalar.buffers:
            count += 1
        return name

    @staticmethod
    def _is_packed(buffer: BufferRef) -> bool:
        """Return whether several elements share a register."""
        return buffer.dtype.bytes < 4 and bool(buffer.shape)


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, Const) and expr.value == 0 and math.copysign(1, expr.value) > 0
