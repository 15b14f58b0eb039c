"""Visitor of schedule trees that all C-like code generators share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from roller_svc.analysis.index_ranges import fold, range_of
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.dialect import Dialect
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.errors import InvariantError
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, num
from roller_svc.ir.origin import begin_part, end_part, shown
from roller_svc.ir.program import COMBINE_OPS
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    Node,
    Part,
    Prefetch,
    Routine,
    Storage,
    Transpose,
    WarpReduce,
    WarpScan,
)


@dataclass(slots=True)
class CodeGenVisitor:
    """Prints nodes as lines, depth first. Generators override what differs in their language: loops, storage."""

    dialect: Dialect
    names: Names
    scalar: Scalar
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    declared: list[set[str]] = field(default_factory=lambda: [set()])  # identifiers of each open block

    # lines ----------------------------------------------------------------------------------------------------------
    def emit_line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.emit_line(f"{head} {{" if head else "{")
        self.depth += 1
        self.declared.append(set())
        yield
        self.declared.pop()
        self.depth -= 1
        self.emit_line("}")

    @contextmanager
    def declaring(self, identifier: str) -> Iterator[None]:
        """Enter the scope of a declaration: a new block if this one has the identifier already."""
        if identifier in self.declared[-1]:
            with self.block(""):
                self.declared[-1].add(identifier)
                yield
        else:
            self.declared[-1].add(identifier)
            yield

    # nodes ----------------------------------------------------------------------------------------------------------
    def visit_all(self, nodes: tuple[Node, ...]) -> None:
        is_in_part = False
        for node in nodes:
            if not isinstance(node, Part):
                self.visit(node)
                continue
            self.lines += (*(end_part() if is_in_part else ()), *begin_part(node.name))
            is_in_part = True
        if is_in_part:
            self.lines += end_part()

    def visit(self, node: Node) -> None:
        match node:
            case Loop():
                self.visit_loop(node)
            case Let():
                self.visit_let(node)
            case Storage():
                self.visit_storage(node)
            case Compute():
                self.visit_compute(node)
            case Branch():
                self.visit_branch(node)
            case Routine():
                self.visit_routine(node)
            case Barrier():
                self.visit_barrier()
            case Prefetch():
                self.visit_prefetch(node)
            case HorizontalReduce():
                self.visit_horizontal_reduce(node)
            case WarpReduce():
                self.visit_warp_reduce(node)
            case WarpScan():
                self.visit_warp_scan(node)
            case Transpose():
                self.visit_transpose(node)

    def visit_loop(self, loop: Loop) -> None:
        """Print a plain loop; a loop of one iteration is only its body."""
        with self.bind_loop(loop):
            if loop.extent == 1 and loop.stop is None:
                self.visit_all(loop.body)
                return
            with self.block(self.loop_head(loop)):
                self.visit_all(loop.body)

    @contextmanager
    def bind_loop(self, loop: Loop) -> Iterator[None]:
        """Bind the loop's variable to a constant if it has one value, else to a range."""
        scalar, name = self.scalar, loop.var
        saved = scalar.values.copy(), scalar.ranges.copy()
        if loop.extent == 1 and loop.stop is None:
            scalar.values[name] = 0
        else:
            scalar.values.pop(name, None)
        scalar.ranges[name] = (0, loop.extent - 1)
        yield
        scalar.values, scalar.ranges = saved

    def loop_head(self, loop: Loop) -> str:
        var = self.names.of(loop.var)
        bound = shown(loop.extent)
        if loop.stop is not None:
            limit = fold(loop.stop, self.scalar.values)
            known = range_of(limit, self.scalar.ranges)
            if known is None or known[0] < loop.extent:
                tight = known is not None and known[1] <= loop.extent
                smaller = Op(OpKind.MIN, (Const(loop.extent, limit.dtype), limit), limit.dtype)
                bound = self.scalar.index(limit if tight else smaller)
        index = self.scalar.index_type
        return f"for ({index} {var} = 0; {var} < {bound}; {var}++)"

    def visit_let(self, let: Let) -> None:
        scalar = self.scalar
        value = fold(let.value, scalar.values)
        saved = scalar.values.copy(), scalar.ranges.copy()
        known = range_of(value, scalar.ranges)
        scalar.ranges.pop(let.var, None)
        scalar.values.pop(let.var, None)
        if isinstance(value, Const):
            scalar.values[let.var] = int(value.value)
            scalar.ranges[let.var] = (int(value.value), int(value.value))
            self.visit_all(let.body)
        elif value == AxisRef(let.var):
            scalar.ranges.update(saved[1])
            self.visit_all(let.body)
        else:
            text = scalar.index(value)
            if let.bounds_check is not None:
                tensor, d = let.bounds_check
                text, known = scalar.checked_index(tensor, d, value), (0, scalar.buffers[tensor].shape[d] - 1)
            if known is not None:
                scalar.ranges[let.var] = known
            identifier = self.names.of(let.var)
            with self.declaring(identifier):
                self.emit_line(f"const {scalar.index_type} {identifier} = {_strip_parentheses(text)};")
                self.visit_all(let.body)
        scalar.values, scalar.ranges = saved

    def visit_storage(self, storage: Storage) -> None:
        saved = self.scalar.buffers.get(storage.tensor)
        with self.declaring(self.names.of(storage.tensor)):
            self.declare(storage)
            self.visit_all(storage.body)
        if saved is not None:
            self.scalar.buffers[storage.tensor] = saved

    def declare(self, storage: Storage) -> None:
        raise InvariantError("the generator does not declare storage")

    def visit_routine(self, node: Routine) -> None:
        """Print the body in place."""
        self.visit_all(node.body)

    def visit_barrier(self) -> None:
        raise InvariantError("this language has no barriers")

    def visit_prefetch(self, node: Prefetch) -> None:
        """Print nothing: prefetches are optional."""

    def visit_horizontal_reduce(self, node: HorizontalReduce) -> None:
        """Reduce adjacent elements in pairs."""
        *row, start = node.first.index
        values: list[Expr] = [replace(node.first, index=(*row, add(start, num(i)))) for i in range(node.lanes)]
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [Op(COMBINE_OPS[node.combine], (a, b), node.first.dtype) for a, b in pairs]
        self.visit_compute(Compute(node.tensor, node.index, values[0]))

    def visit_warp_reduce(self, node: WarpReduce) -> None:
        raise InvariantError("this language has no warps")

    def visit_warp_scan(self, node: WarpScan) -> None:
        raise InvariantError("this language has no warps")

    def visit_transpose(self, node: Transpose) -> None:
        raise InvariantError("this language has no vector transposes")

    def visit_branch(self, branch: Branch) -> None:
        cond = fold(branch.cond, self.scalar.values)
        decided = self._decided(cond)
        if decided is not None:
            self.visit_all(branch.then if decided else branch.otherwise)
            return
        with self.block(f"if ({_strip_parentheses(self.branch_condition(replace(branch, cond=cond)))})"):
            self.visit_all(branch.then)
        if branch.otherwise:
            with self.block("else"):
                self.visit_all(branch.otherwise)

    def branch_condition(self, branch: Branch) -> str:
        return self.scalar.value(branch.cond)

    def _decided(self, cond: Expr) -> bool | None:
        """Return the value of a comparison that ranges decide, else None."""
        if isinstance(cond, Op) and len(cond.args) == 2:
            a, b = (range_of(x, self.scalar.ranges) for x in cond.args)
            if a and b:
                match cond.kind:
                    case OpKind.LT:
                        return True if a[1] < b[0] else False if a[0] >= b[1] else None
                    case OpKind.LE:
                        return True if a[1] <= b[0] else False if a[0] > b[1] else None
                    case OpKind.EQ if a[0] == a[1] == b[0] == b[1]:
                        return True
        return None

    # compute --------------------------------------------------------------------------------------------------------
    def visit_compute(self, node: Compute) -> None:
        buffer = self.scalar.buffers[node.tensor]
        guards = [(i, buffer.shape[d], d) for d, (i, c) in enumerate(zip(node.index, node.bounds_checked, strict=False)) if c]
        if not guards:
            self.emit_line(self.assignment(node, buffer))
            return
        if self.scalar.guard_reads:
            tests = " && ".join(self.scalar.in_range(node.tensor, d, n, i) for i, n, d in guards)
        else:
            tests = " && ".join(f"(unsigned long long)({self.scalar.index(i)}) < {shown(n)}ull" for i, n, _ in guards)
        with self.block(f"if ({tests})"):
            self.emit_line(self.assignment(node, buffer))
        if not self.scalar.guard_reads:
            with self.block("else"):
                for i, n, d in guards:
                    number = self.scalar.add_index_check(node.tensor, d, n, i)
                    self.emit_line(f"checked({self.scalar.index(i)}, {shown(n)}, {number}, status);")

    def assignment(self, node: Compute, buffer: BufferRef) -> str:
        target = self.element(node.tensor, buffer, node.index)
        if node.combine is None:
            return f"{target} = {_strip_parentheses(self.scalar.to_element(node.value, buffer.dtype))};"
        kind = COMBINE_OPS[node.combine]
        value: Expr = node.value
        if value.dtype.compute is not buffer.dtype.compute:
            value = Cast(value, buffer.dtype, implicit=True)
        if (
            kind in (OpKind.ADD, OpKind.MUL)
            and (buffer.dtype.compute is buffer.dtype)
            and (buffer.dtype.is_float or self.dialect.wraps or not buffer.dtype.is_signed)
        ):
            return f"{target} {kind.value}= {_strip_parentheses(self.scalar.value(value))};"
        old = Load(node.tensor, node.index, buffer.dtype)
        joined = Op(kind, (old, value), buffer.dtype)
        return f"{target} = {_strip_parentheses(self.scalar.to_element(joined, buffer.dtype))};"

    def element(self, tensor: str, buffer: BufferRef, index: tuple[Expr, ...]) -> str:
        if not buffer.shape and "." in tensor:
            return buffer.identifier
        return f"{buffer.identifier}[{self.scalar.address(buffer, index)}]"


def _strip_parentheses(text: str) -> str:
    """Strip the outermost parentheses if they match each other."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text
