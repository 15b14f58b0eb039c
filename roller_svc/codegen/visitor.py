"""The depth-first walk over a schedule tree that all C-like generators share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from roller_svc.analysis.index_ranges import fold, range_of
from roller_svc.codegen.buffer_ref import Place
from roller_svc.codegen.dialect import Dialect
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.errors import InvariantError
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, num
from roller_svc.ir.program import COMBINE_OPS
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    Node,
    Prefetch,
    Routine,
    Storage,
    Transpose,
    WarpReduce,
)


@dataclass(slots=True)
class Walk:
    """Prints nodes as lines. A generator overrides what its language does differently: loops, storage."""

    dialect: Dialect
    names: Names
    scalar: Scalar
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    declared: list[set[str]] = field(default_factory=lambda: [set()])  # identifiers of each open block

    # lines ----------------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        self.declared.append(set())
        yield
        self.declared.pop()
        self.depth -= 1
        self.line("}")

    @contextmanager
    def declaring(self, identifier: str) -> Iterator[None]:
        """Room for a declaration: a block of its own where this one has that identifier already."""
        if identifier in self.declared[-1]:
            with self.block(""):
                self.declared[-1].add(identifier)
                yield
        else:
            self.declared[-1].add(identifier)
            yield

    # nodes ----------------------------------------------------------------------------------------------------------
    def nodes(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        match node:
            case Loop():
                self.loop(node)
            case Let():
                self.let(node)
            case Storage():
                self.storage(node)
            case Compute():
                self.compute(node)
            case Branch():
                self.branch(node)
            case Routine():
                self.routine(node)
            case Barrier():
                self.barrier()
            case Prefetch():
                self.prefetch(node)
            case HorizontalReduce():
                self.join_lanes(node)
            case WarpReduce():
                self.lane_reduce(node)
            case Transpose():
                self.transpose(node)

    def loop(self, loop: Loop) -> None:
        """A plain loop; one that runs once is no loop at all."""
        with self.bound(loop):
            if loop.extent == 1 and loop.stop is None:
                self.nodes(loop.body)
                return
            with self.block(self.head(loop)):
                self.nodes(loop.body)

    @contextmanager
    def bound(self, loop: Loop) -> Iterator[None]:
        """The loop's variable in scope: a constant where it takes one value, else a range."""
        scalar, name = self.scalar, loop.var
        saved = scalar.values.copy(), scalar.ranges.copy()
        if loop.extent == 1 and loop.stop is None:
            scalar.values[name] = 0
        else:
            scalar.values.pop(name, None)
        scalar.ranges[name] = (0, loop.extent - 1)
        yield
        scalar.values, scalar.ranges = saved

    def head(self, loop: Loop) -> str:
        var = self.names.of(loop.var)
        bound = str(loop.extent)
        if loop.stop is not None:
            limit = fold(loop.stop, self.scalar.values)
            known = range_of(limit, self.scalar.ranges)
            if known is None or known[0] < loop.extent:
                tight = known is not None and known[1] <= loop.extent
                least = Op(OpKind.MIN, (Const(loop.extent, limit.dtype), limit), limit.dtype)
                bound = self.scalar.index(limit if tight else least)
        index = self.scalar.index_type
        return f"for ({index} {var} = 0; {var} < {bound}; {var}++)"

    def let(self, let: Let) -> None:
        scalar = self.scalar
        value = fold(let.value, scalar.values)
        saved = scalar.values.copy(), scalar.ranges.copy()
        known = range_of(value, scalar.ranges)
        scalar.ranges.pop(let.var, None)
        scalar.values.pop(let.var, None)
        if isinstance(value, Const):
            scalar.values[let.var] = int(value.value)
            scalar.ranges[let.var] = (int(value.value), int(value.value))
            self.nodes(let.body)
        elif value == AxisRef(let.var):
            scalar.ranges.update(saved[1])
            self.nodes(let.body)
        else:
            text = scalar.index(value)
            if let.bounds_check is not None:
                tensor, d = let.bounds_check
                text, known = scalar.recorded(tensor, d, value), (0, scalar.places[tensor].shape[d] - 1)
            if known is not None:
                scalar.ranges[let.var] = known
            identifier = self.names.of(let.var)
            with self.declaring(identifier):
                self.line(f"const {scalar.index_type} {identifier} = {_bare(text)};")
                self.nodes(let.body)
        scalar.values, scalar.ranges = saved

    def storage(self, storage: Storage) -> None:
        saved = self.scalar.places.get(storage.tensor)
        with self.declaring(self.names.of(storage.tensor)):
            self.declare(storage)
            self.nodes(storage.body)
        if saved is not None:
            self.scalar.places[storage.tensor] = saved

    def declare(self, storage: Storage) -> None:
        raise InvariantError("a generator says where its storage lies")

    def routine(self, node: Routine) -> None:
        """In place, where the language has nothing better."""
        self.nodes(node.body)

    def barrier(self) -> None:
        raise InvariantError("no barriers in this language")

    def prefetch(self, node: Prefetch) -> None:
        """A hint only: languages without it lose nothing but time."""

    def join_lanes(self, node: HorizontalReduce) -> None:
        """Neighbours in pairs."""
        *row, start = node.first.index
        parts: list[Expr] = [replace(node.first, index=(*row, add(start, num(i)))) for i in range(node.lanes)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [Op(COMBINE_OPS[node.combine], (a, b), node.first.dtype) for a, b in pairs]
        self.compute(Compute(node.tensor, node.index, parts[0]))

    def lane_reduce(self, node: WarpReduce) -> None:
        raise InvariantError("no lanes in this language")

    def transpose(self, node: Transpose) -> None:
        raise InvariantError("no blocks are turned in this language")

    def branch(self, branch: Branch) -> None:
        cond = fold(branch.cond, self.scalar.values)
        decided = self._decided(cond)
        if decided is not None:
            self.nodes(branch.then if decided else branch.otherwise)
            return
        with self.block(f"if ({_bare(self.scalar.value(cond))})"):
            self.nodes(branch.then)
        if branch.otherwise:
            with self.block("else"):
                self.nodes(branch.otherwise)

    def _decided(self, cond: Expr) -> bool | None:
        """Whether ranges decide a comparison."""
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
    def compute(self, node: Compute) -> None:
        place = self.scalar.places[node.tensor]
        guards = [
            (i, place.shape[d], d) for d, (i, c) in enumerate(zip(node.index, node.bounds_checked, strict=False)) if c
        ]
        if not guards:
            self.line(self.assignment(node, place))
            return
        if self.scalar.guard_reads:
            tests = " && ".join(self.scalar.in_range(node.tensor, d, n, i) for i, n, d in guards)
        else:
            tests = " && ".join(f"(unsigned long long)({self.scalar.index(i)}) < {n}ull" for i, n, _ in guards)
        with self.block(f"if ({tests})"):
            self.line(self.assignment(node, place))
        if not self.scalar.guard_reads:
            with self.block("else"):
                for i, n, d in guards:
                    number = self.scalar.check(node.tensor, d, n, i)
                    self.line(f"checked({self.scalar.index(i)}, {n}, {number}, status);")

    def assignment(self, node: Compute, place: Place) -> str:
        target = self.element(node.tensor, place, node.index)
        if node.combine is None:
            return f"{target} = {_bare(self.scalar.stored(node.value, place.dtype))};"
        kind = COMBINE_OPS[node.combine]
        value: Expr = node.value
        if value.dtype.compute is not place.dtype.compute:
            value = Cast(value, place.dtype, implicit=True)
        if (
            kind in (OpKind.ADD, OpKind.MUL)
            and (place.dtype.compute is place.dtype)
            and (place.dtype.is_float or self.dialect.wraps or not place.dtype.is_signed)
        ):
            return f"{target} {kind.value}= {_bare(self.scalar.value(value))};"
        old = Load(node.tensor, node.index, place.dtype)
        joined = Op(kind, (old, value), place.dtype)
        return f"{target} = {_bare(self.scalar.stored(joined, place.dtype))};"

    def element(self, tensor: str, place: Place, index: tuple[Expr, ...]) -> str:
        if not place.shape and "." in tensor:
            return place.identifier
        return f"{place.identifier}[{self.scalar.address(place, index)}]"


def _bare(text: str) -> str:
    """Without the outermost parentheses, where they match each other."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else text
    return text
