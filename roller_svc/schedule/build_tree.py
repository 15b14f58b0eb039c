"""Schedule → schedule tree: loops, storage around its users, producers at their sites."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.analysis.linear import expression, linear
from roller_svc.errors import InvariantError
from roller_svc.ir.expr import AxisRef, Expr, Load, axes_of, children, substitute, with_children
from roller_svc.ir.index import add, div, eq, le, logical_and, lt, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorType, identity
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.schedule.bounds import CONCURRENT, Guard, Nest, NestLoop, Nests, infer_bounds
from roller_svc.schedule.default import storage_types
from roller_svc.schedule.legality import check, tensors_of
from roller_svc.schedule.nest_statements import convert_to_type
from roller_svc.schedule.schedule import At, Fixed, Function, Schedule, Site, StagePart


def build_tree(schedule: Schedule) -> tuple[Node, ...]:
    """Return the nodes of the schedule. Every tensor but the outputs is in a storage node `T.tile`."""
    return _TreeBuilder(infer_bounds(schedule), storage_types(schedule)).at_site(Fixed.ROOT, ())


def build_launches(schedule: Schedule, name: str) -> tuple[tuple[ScheduleTree, ...], tuple[tuple[str, TensorType], ...]]:
    """Return a launch for each function that is computed at root, in order, and the buffers that they exchange."""
    nests, types = infer_bounds(schedule), storage_types(schedule)
    exchanged = [f.name for f in nests.functions.values() if f.stored is Fixed.ROOT and f.name not in schedule.outputs]
    names = _name_buffers(exchanged, schedule.program.types)
    builder = _TreeBuilder(nests, types, names)
    launches = [builder.stages(function) for function in nests.functions.values() if function.computed is Fixed.ROOT]
    trees = tuple(ScheduleTree(f"{name}{number}", nodes) for number, nodes in enumerate(launches))
    return trees, tuple((names[tensor], types[tensor]) for tensor in exchanged)


def check_launches(schedule: Schedule) -> Nests:
    """Check the launches that differ from those of `schedule.nests`, and return the nests of all. Raises ScheduleError."""
    known, nests = schedule.nests, infer_bounds(schedule)
    inputs = frozenset(name for name, _ in schedule.program.inputs)
    rooted = {f.name: tile_name(f.name) for f in nests.functions.values() if f.stored is Fixed.ROOT}
    builder = _TreeBuilder(nests, storage_types(schedule), rooted)
    buffers = inputs | nests.outputs | {*rooted.values()}
    for root, members in nests.launches.items():
        stages = [stage.name for member in members for stage in nests.functions[member].stages]
        if known is None or any(nests.nests[stage] is not known.nests.get(stage) for stage in stages):
            check(builder.stages(nests.functions[root]), buffers)
    return nests


def _name_buffers(tensors: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Return a name for the buffer of each tensor. It has no dot: with one it would be that of a storage node."""
    names: dict[str, str] = {}
    for tensor in tensors:
        name = f"{tensor.replace('.', '_')}_buffer"
        while name in taken or name in names.values():
            name += "_"
        names[tensor] = name
    return names


def build_schedule_tree(schedule: Schedule, name: str) -> ScheduleTree:
    """Return the schedule tree of one launch."""
    return ScheduleTree(name, build_tree(schedule))


def tile_name(tensor: str) -> str:
    """Return the name of a tensor's storage node. Names of programs have no dots."""
    return f"{tensor}.tile"


@dataclass(frozen=True, slots=True)
class _TreeBuilder:
    nests: Nests
    types: Mapping[str, TensorType]
    buffers: Mapping[str, str] = field(default_factory=dict)  # names of tensors in memory that launches exchange

    @property
    def outputs(self) -> frozenset[str]:
        return self.nests.outputs

    def at_site(self, site: Site, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes of a site, after the functions computed there and inside the storage nodes of the site."""
        for function in reversed([*self.nests.functions.values()]):
            if function.computed == site:
                nodes = (*self.stages(function), *_after_barrier(function, nodes))
            if function.stored == site and function.name not in self.outputs:
                shape = tuple(part.extent for part in self.nests.buffers[function.name])
                dtype = self.types[function.name].dtype
                nodes = (Storage(tile_name(function.name), dtype, shape, function.scope, nodes),)
        if any(f.computed == site and self._is_rewritten(f) for f in self.nests.functions.values()):
            return (Barrier(), *nodes)
        return nodes

    def _is_rewritten(self, function: Function) -> bool:
        """Return whether threads write a shared tile again, which others may still read."""
        loops = self.nests.nests[function.stages[0].name].outer
        return function.scope is Scope.SHARED and any(x.kind not in CONCURRENT and x.extent > 1 for x in loops)

    def stages(self, function: Function) -> tuple[Node, ...]:
        """Return the nests of a function's stages. Those of a shared tile are ordered by barriers."""
        nodes: tuple[Node, ...] = ()
        for stage in reversed(function.stages):
            nest = self.nests.nests[stage.name]
            own = self._stage(function, nest)
            if function.scope is Scope.SHARED:
                own = _on_one_thread(nest, own)
            nodes = (*own, *_after_barrier(function, nodes))
        return nodes

    def _stage(self, function: Function, nest: Nest) -> tuple[Node, ...]:
        lets = {a: _let_name(nest, a) for a in nest.values if _wants_let(nest, a)}
        names = {a: ref(lets[a]) if a in lets else value for a, value in nest.values.items()}
        nodes: tuple[Node, ...] = (self._compute(function, nest, names),)
        meeting = self._deepest_meeting(nest)
        divergent = [g for g in nest.guards if _depth(nest, g.value) <= meeting and _depends_on_threads(nest, g)]
        for depth in range(len(nest.loops), -1, -1):
            loop = nest.loops[depth - 1] if depth else None
            if divergent and depth == meeting:
                nodes = _where(divergent, nodes)
            if loop is not None:
                nodes = self.at_site(At(nest.stage.name, loop.name), nodes)
            guards = [g for g in nest.guards if _depth(nest, g.value) == depth and g not in divergent]
            here = [(lets[a], v) for a, v in nest.values.items() if a in lets and _depth(nest, v) == depth]
            nodes = (
                _threaded(nest, loop, guards, here, nodes) if _shares_threads(nest, loop) else _looped(loop, guards, here, nodes)
            )
        return nodes

    def _deepest_meeting(self, nest: Nest) -> int:
        """Return the depth of the innermost loop at whose site threads meet at barriers, or 0.

        All threads run this loop and those around it: guards that threads see differently are inside of the site.
        """
        sites = [At(nest.stage.name, loop.name) for loop in nest.loops]
        return max((depth for depth, site in enumerate(sites, 1) if self._has_barriers(site)), default=0)

    def _has_barriers(self, site: Site) -> bool:
        """Return whether a shared tile is computed at a site, or in a loop of what is computed there."""
        computed = [function for function in self.nests.functions.values() if function.computed == site]
        inside = [At(stage.name, loop.name) for function in computed for stage in function.stages for loop in stage.loops]
        return any(f.scope is Scope.SHARED for f in computed) or any(self._has_barriers(each) for each in inside)

    # one point ------------------------------------------------------------------------------------------------------
    def _compute(self, function: Function, nest: Nest, names: Mapping[str, Expr]) -> Node:
        body = self.nests.bodies[function.name].expanded
        index, value, combine = _point(nest, body)
        tensor, place = self._element(function.name, index, nest, names)
        checked = body.bounds_checked if nest.stage.part is StagePart.UPDATE else ()
        write = Compute(tensor, place, self._substitute(value, nest, names), combine, bounds_checked=checked)
        if nest.stage.part is StagePart.UPDATE and body.predicate is not None:
            return Branch(self._substitute(body.predicate, nest, names), (write,))
        return write

    def _substitute(self, expr: Expr, nest: Nest, names: Mapping[str, Expr]) -> Expr:
        """Replace axes by `names`, and loads of stored functions by loads of their storage nodes."""
        if isinstance(expr, AxisRef):
            return names.get(expr.name, expr)
        if isinstance(expr, Load):
            tensor, index = self._element(expr.tensor, expr.index, nest, names)
            return replace(expr, tensor=tensor, index=index)
        if not (operands := children(expr)):
            return expr
        return with_children(expr, tuple(self._substitute(x, nest, names) for x in operands))

    def _element(self, tensor: str, index: tuple[Expr, ...], nest: Nest, names: Mapping[str, Expr]) -> tuple[str, tuple[Expr, ...]]:
        """Return the buffer or storage node of a tensor, and the index of an element in it."""
        if tensor not in self.nests.buffers or tensor in self.outputs:
            return tensor, tuple(self._substitute(i, nest, names) for i in index)
        offsets: list[Expr] = []
        for i, part in zip(index, self.nests.buffers[tensor], strict=True):
            if part.first == num(0):
                offsets.append(self._substitute(i, nest, names))
            else:  # over loop variables, so that common terms cancel
                offsets.append(expression(linear(sub(self._substitute(i, nest, nest.values), part.first))))
        return self.buffers.get(tensor, tile_name(tensor)), tuple(offsets)


def _after_barrier(function: Function, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes, after a barrier if they use a shared tile, which all threads write, before one of their own."""
    uses = function.scope is Scope.SHARED and tile_name(function.name) in tensors_of(_before_barrier(nodes)[0])
    return (Barrier(), *nodes) if uses else nodes


def _on_one_thread(nest: Nest, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes of a shared tile, on the first thread if no loop of the nest distributes them."""
    if any(loop.kind is LoopKind.THREAD for loop in nest.loops):
        return nodes
    first: Expr | None = None
    for loop in nest.outer:
        if loop.kind is LoopKind.THREAD and loop.extent > 1:
            first = logical_and(first, eq(ref(loop.var), num(0)))
    return nodes if first is None else (Branch(first, nodes),)


def _before_barrier(nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], bool]:
    """Return the nodes before the first barrier that is in no loop, and whether there is one."""
    before: tuple[Node, ...] = ()
    for node in nodes:
        if isinstance(node, Barrier):
            return before, True
        inside, ended = _before_barrier(node.body) if isinstance(node, Storage) else ((node,), False)
        before += inside
        if ended:
            return before, True
    return before, False


def _point(nest: Nest, body: TensorExpr) -> tuple[tuple[Expr, ...], Expr, Combine | None]:
    """Return (index, value, reduction operator) that a stage writes."""
    match nest.stage.part:
        case StagePart.VALUE:
            return body.index, convert_to_type(body.body, body), None
        case StagePart.UPDATE:
            value = body.body if body.kind is StatementKind.REDUCE else convert_to_type(body.body, body)
            return body.index, value, body.combine
        case StagePart.INIT if body.kind is StatementKind.SCATTER:
            place = tuple(ref(a.name) for a in nest.stage.axes)
            return place, Load(body.target or "", place, body.type.dtype), None
        case StagePart.INIT:
            return body.index, identity(body.combine or Combine.SUM, body.accumulator), None


# loops --------------------------------------------------------------------------------------------------------------
def _depth(nest: Nest, value: Expr) -> int:
    """Return how many of the nest's own loops determine the value."""
    used = axes_of(value)
    return max((d for d, loop in enumerate(nest.loops, 1) if loop.var in used), default=0)


def _wants_let(nest: Nest, axis: str) -> bool:
    """Return whether an axis gets a variable: it is neither a loop variable nor varies with a vector lane."""
    value = nest.values[axis]
    if not children(value):
        return False
    lanes = {loop.var for loop in nest.loops if loop.kind is LoopKind.VECTOR}
    return not axes_of(value) & lanes


def _let_name(nest: Nest, axis: str) -> str:
    """Return the axis's own name, unless a loop has it that starts at 0 where the axis starts elsewhere."""
    name = nest.prefix + axis
    return f"{name}.at" if any(loop.var == name for loop in nest.loops) else name


def _looped(
    loop: NestLoop | None, guards: Sequence[Guard], lets: Sequence[tuple[str, Expr]], nodes: tuple[Node, ...]
) -> tuple[Node, ...]:
    """Return the nodes in the loop (None: before all loops), below the lets, where the guards hold."""

    def inside(conditions: Expr | None, below: tuple[Node, ...]) -> tuple[Node, ...]:
        if conditions is not None:
            below = (Branch(conditions, below),)
        for name, value in reversed(lets):
            below = (Let(name, value, below),)
        return below

    if loop is None:
        return inside(_conditions(guards), nodes)
    if loop.kind is LoopKind.VECTOR and (whole := _holds_in_every_lane(loop, guards)) is not None:
        lanes: Node = Loop(loop.var, loop.extent, loop.kind, inside(None, nodes))
        serial = _looped(replace(loop, kind=LoopKind.SERIAL), guards, lets, nodes)
        return (Branch(whole, (lanes,), serial),)
    limits = [(g, _limit(loop, g)) for g in guards]
    if loop.kind is LoopKind.SERIAL:
        guards_left = [g if limit is None else replace(g, above=False) for g, limit in limits]
        limit = _minimum([limit for _, limit in limits if limit is not None])
        return (Loop(loop.var, loop.extent, loop.kind, inside(_conditions(guards_left), nodes), limit),)
    return (Loop(loop.var, loop.extent, loop.kind, inside(_conditions(guards), nodes)),)


def _shares_threads(nest: Nest, loop: NestLoop | None) -> bool:
    """Return whether the threads of a loop are those of loops around the nest."""
    return loop is not None and loop.kind is LoopKind.THREAD and any(x.kind is LoopKind.THREAD for x in nest.outer)


def _threaded(
    nest: Nest, loop: NestLoop | None, guards: Sequence[Guard], lets: Sequence[tuple[str, Expr]], nodes: tuple[Node, ...]
) -> tuple[Node, ...]:
    """Return the nodes of a thread loop in a shared tile: its variable is computed from the number of the thread.

    Threads are numbered as in the launch: the innermost loop varies fastest. Threads without an iteration do nothing.
    """
    if loop is None:
        raise InvariantError("only loops have threads")
    number: Expr = num(0)
    threads = 1
    for outer in nest.outer:
        if outer.kind is LoopKind.THREAD:
            number, threads = add(mul(number, num(outer.extent)), ref(outer.var)), threads * outer.extent
    own = [x for x in nest.loops if x.kind is LoopKind.THREAD]
    inside = math.prod(x.extent for x in own[own.index(loop) + 1 :])
    value = div(number, inside)
    if loop is not own[0]:
        value = mod(value, loop.extent)
    elif inside * loop.extent != threads:
        guards = (Guard(ref(loop.var), loop.extent, below=False, above=True), *guards)
    below = _where(guards, nodes)
    for name, let in reversed(lets):
        below = (Let(name, let, below),)
    return (Let(loop.var, value, below),)


def _depends_on_threads(nest: Nest, guard: Guard) -> bool:
    """Return whether threads of a block may see a guard differently."""
    return not axes_of(guard.value).isdisjoint(loop.var for loop in nest.scope if loop.kind is LoopKind.THREAD)


def _where(guards: Sequence[Guard], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes where the guards hold."""
    conditions = _conditions(guards)
    return nodes if conditions is None else (Branch(conditions, nodes),)


def _conditions(guards: Sequence[Guard]) -> Expr | None:
    cond: Expr | None = None
    for guard in guards:
        if guard.below:
            cond = logical_and(cond, le(num(0), guard.value))
        if guard.above:
            cond = logical_and(cond, lt(guard.value, num(guard.size)))
    return cond


def _limit(loop: NestLoop, guard: Guard) -> Expr | None:
    """Return the upper bound of the loop variable that follows from the guard, or None."""
    terms = linear(guard.value)
    step = terms.pop(ref(loop.var), 0)
    if not guard.above or step < 1 or any(loop.var in axes_of(t) for t in terms if t is not None):
        return None
    remaining = sub(num(guard.size), expression(terms))
    return remaining if step == 1 else div(add(remaining, num(step - 1)), step)


def _minimum(limits: Sequence[Expr]) -> Expr | None:
    found: Expr | None = None
    for limit in limits:
        found = limit if found is None else min_(found, limit)
    return found


def _holds_in_every_lane(loop: NestLoop, guards: Sequence[Guard]) -> Expr | None:
    """Return when the guards hold in every lane of a vector loop: where they hold in the first and the last."""
    found: Expr | None = None
    for guard in guards:
        terms = linear(guard.value)
        step = terms.pop(ref(loop.var), 0)
        if step < 1 or any(loop.var in axes_of(t) for t in terms if t is not None):
            return None
        if guard.below:
            found = logical_and(found, le(num(0), substitute(guard.value, {loop.var: num(0)})))
        if guard.above:
            last = expression(linear(substitute(guard.value, {loop.var: num(loop.extent - 1)})))
            found = logical_and(found, lt(last, num(guard.size)))
    return found
