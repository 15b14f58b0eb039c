"""Schedule → its price by the performance model: operations, bytes and launches of its trees.

A statement of a tree is a tile space whose axes are its loops. The model's footprints then give the bytes that the
inner loops of each depth access, and a cache serves the outermost loops whose footprint it holds. Instructions are
those of loop nests: `LoopCosts` on CPUs, `simt_costs` on GPUs. docs/schedule.md says where prices mislead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.compiler.serialize import Json, estimate_json
from roller_svc.families.common.cpu.op_counts import OpCounts, count_ops, work_cycles
from roller_svc.families.common.gpu.serial_cost import (
    DEPENDENT_CYCLES,
    LOOP_OPS,
    SECTOR_BYTES,
    TREE_STEP_CYCLES,
    UNROLL,
    ThreadWork,
    Traffic,
    simt_costs,
)
from roller_svc.ir.affine import affine, dim_of
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import LAUNCH, Estimate, StageCost
from roller_svc.ir.expr import Expr, Load, Op, OpKind, axes_of, loads_of
from roller_svc.ir.group import AxisRole, TileAccess, TileAxis, TileSpace
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import Axis, AxisKind, Combine, TensorType, operators
from roller_svc.ir.schedule import Compute, LoopKind, Node, ScheduleTree, Scope, Storage, child_lists, shared_bytes
from roller_svc.ir.schedule_cost import LaunchCost, ScheduleCost, ScheduledEstimate
from roller_svc.perf.common import Launch, dram_bytes_with_reuse, launch_overhead_s
from roller_svc.perf.cpu_costs import LoopCosts
from roller_svc.perf.footprint import AccessFootprint, Tile, footprint
from roller_svc.perf.machine import Machine, prepare_machine, register_words
from roller_svc.perf.model import overlap_stages
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, overhead_registers
from roller_svc.perf.uncertainty import uncertainty
from roller_svc.perf.workload import find_data_level, lines_of
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.device_launches import DeviceLaunches, build_device_launches
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.tree_visits import TreeVisits, Visit, visit_tree

VECTOR_ACCESS_BYTES = 16  # of the widest load of a thread
REQUEST_SECTORS = 4  # that L1 serves in the cycles of one request


def schedule_cost_json(cost: ScheduleCost) -> Json:
    """Return a price as JSON: an estimate, with what each launch does."""
    launches = [
        {
            "name": launch.name,
            "operations": launch.operations,
            "stored_bytes": launch.stored_bytes,
            "moved_bytes": dict(launch.moved_bytes),
            "tile_bytes": launch.tile_bytes,
            "threads": launch.threads,
            "vector_fraction": launch.vector_fraction,
            "estimate": estimate_json(launch.estimate),
        }
        for launch in cost.launches
    ]
    return estimate_json(cost.estimate) | {"launches": launches}


def price_schedule(schedule: Schedule, hw: HardwareSpec) -> ScheduleCost:
    """Return the price of a schedule on a device. Raises ScheduleError if the device cannot run it."""
    return price_launches(schedule, build_device_launches(schedule, hw), hw)


def price_launches(schedule: Schedule, launches: DeviceLaunches, hw: HardwareSpec) -> ScheduleCost:
    """Return the price of a schedule's launches on a device."""
    trees, exchanged = launches
    return price_trees(trees, {**schedule.program.types, **dict(exchanged)}, hw)


def price_trees(trees: Sequence[ScheduleTree], memory: Mapping[str, TensorType], hw: HardwareSpec) -> ScheduleCost:
    """Return the price of launches over tensors in memory. Raises InvariantError for a node that has no price."""
    return ScheduleCost(tuple(_price(tree, memory, hw) for tree in trees))


def estimate_scheduled(
    cache: PartitionCache, spec: HardwareSpec, schedule: str, constraints: ScheduleConstraints
) -> ScheduledEstimate:
    """Estimate a program by its schedule. Raises ScheduleError for an illegal step, or for what the device cannot run."""
    cost = price_schedule(schedule_by_hand(cache.program, schedule), spec)
    constructed = estimate_program(cache, spec, 1, constraints)
    return ScheduledEstimate(spec, cost, constructed.roofline, constructed.floor)


@dataclass(frozen=True, slots=True)
class _Access:
    """One load or store of a statement in memory or a tile."""

    element: Load  # over loop variables
    scope: Scope | None  # of its tile; None: in memory
    row_major: tuple[int, ...]  # elements between neighbours of each dimension
    is_store: bool

    @property
    def is_free(self) -> bool:
        """Whether it is in a register."""
        return self.scope is Scope.REGISTER

    def stride(self, var: str) -> int | None:
        """Return the elements between neighbours along a loop; None where they are not evenly apart."""
        total = 0
        for index, step in zip(self.element.index, self.row_major, strict=True):
            if var in axes_of(index):
                form = affine(index)
                if form is None:
                    return None
                total += form.coeff(var) * step
        return total

    def times(self, visit: Visit, vector_groups: int | None = None) -> float:
        """Return how often it runs: inner and unrolled loops that its index does not depend on reuse its value.

        Args:
            visit: the statement.
            vector_groups: instructions of a vector loop's lanes; None: one for each lane.
        """
        axes = frozenset().union(*map(axes_of, self.element.index))
        loops = [loop for loop in visit.loops if loop.kind is not LoopKind.UNROLL or loop.var in axes]
        while loops and loops[-1].var not in axes:
            loops.pop()
        each = [vector_groups if loop.kind is LoopKind.VECTOR and vector_groups is not None else loop.extent for loop in loops]
        return visit.fraction * math.prod(each)


@dataclass(frozen=True, slots=True)
class _Statement:
    """One computation with its accesses; `footprints` are those of memory, over its loops as axes."""

    visit: Visit
    compute: Compute
    value: Expr  # over loop variables
    accesses: tuple[_Access, ...]
    footprints: tuple[AccessFootprint, ...]

    @property
    def extents(self) -> Tile:
        return tuple(loop.extent for loop in self.visit.loops)

    @property
    def operations(self) -> float:
        return self.visit.times * (operators(self.value) + (self.compute.combine is not None))

    def tile_at(self, depth: int) -> Tile:
        """Return the tile of the loops from a depth on."""
        return tuple(1 if place < depth else loop.extent for place, loop in enumerate(self.visit.loops))

    def moved_bytes(self, depth: int) -> float:
        """Return the bytes that all iterations move if each access keeps the data of the loops from a depth on."""
        return sum(self._moved_bytes(access, depth) for access in self.footprints)

    def _moved_bytes(self, access: AccessFootprint, depth: int) -> float:
        outer = [loop.extent for loop in self.visit.loops[:depth]]
        while outer and len(outer) - 1 not in access.axes:
            outer.pop()
        return math.prod(outer) * access.transferred_bytes(self.tile_at(depth))

    def depth_within(self, capacity_bytes: float) -> int:
        """Return the number of outer loops around those whose data fits."""
        depths = range(len(self.visit.loops) + 1)
        return next((d for d in depths if sum(a.bytes(self.tile_at(d)) for a in self.footprints) <= capacity_bytes), depths[-1])


def _price(tree: ScheduleTree, memory: Mapping[str, TensorType], hw: HardwareSpec) -> LaunchCost:
    visits = visit_tree(tree)
    tiles = {storage.tensor: storage for storage in _spill(tree, visits.storages, hw)}
    statements = tuple(_statement(visit, compute, tiles, memory, hw) for visit, compute in visits.computes)
    compute_types = {load.dtype.compute for each in statements for load in loads_of(each.value)}
    widest = max(compute_types or {DType.FLOAT32}, key=lambda dtype: (dtype.is_float, dtype.bits))
    mach = prepare_machine(hw, hw.unit_for(widest))
    operations = sum(each.operations for each in statements)
    in_vectors = sum(each.operations for each in statements if each.visit.extent(LoopKind.VECTOR) > 1)
    parts = _gpu_parts(visits, statements, mach) if mach.is_gpu else _cpu_parts(visits, statements, mach)
    return LaunchCost(
        name=tree.name,
        operations=round(operations),
        stored_bytes=round(sum(e.visit.times * _stored(e).dtype.bytes for e in statements)),
        moved_bytes=parts.moved_bytes,
        tile_bytes=_tile_bytes(tree, visits.storages, mach),
        threads=parts.threads,
        vector_fraction=in_vectors / operations if operations else 0.0,
        estimate=parts.estimate,
    )


def _spill(tree: ScheduleTree, storages: Sequence[Storage], hw: HardwareSpec) -> tuple[Storage, ...]:
    """Return the storage of a tree: tiles in registers are on the stack if a thread's registers do not hold them all."""
    if _bytes_at_once(tree.body, (Scope.REGISTER,)) <= hw.thread_level.capacity_bytes:
        return tuple(storages)
    return tuple(replace(each, scope=Scope.STACK) if each.scope is Scope.REGISTER else each for each in storages)


def _bytes_at_once(nodes: tuple[Node, ...], scopes: Collection[Scope]) -> int:
    """Return the bytes of the tiles in some scopes that are there at one time: one inside the other."""
    return max((_node_bytes(node, scopes) for node in nodes), default=0)


def _node_bytes(node: Node, scopes: Collection[Scope]) -> int:
    inside = max((_bytes_at_once(body, scopes) for body in child_lists(node)), default=0)
    return inside + (node.bytes if isinstance(node, Storage) and node.scope in scopes else 0)


def _tile_bytes(tree: ScheduleTree, storages: Sequence[Storage], mach: Machine) -> int:
    return shared_bytes(_shared(storages)) if mach.is_gpu else _bytes_at_once(tree.body, tuple(Scope))


def _stored(statement: _Statement) -> Load:
    return next(access.element for access in statement.accesses if access.is_store)


def _statement(
    visit: Visit, compute: Compute, tiles: Mapping[str, Storage], memory: Mapping[str, TensorType], hw: HardwareSpec
) -> _Statement:
    value = visit.over_loops(compute.value)
    dtype = (tiles.get(compute.tensor) or memory[compute.tensor]).dtype
    target = Load(compute.tensor, tuple(map(visit.over_loops, compute.index)), dtype)
    reads = dict.fromkeys((*loads_of(value), *((target,) if compute.combine is not None else ())))
    accesses = tuple(_access(load, tiles, memory, is_store=False) for load in reads)
    accesses += (_access(target, tiles, memory, is_store=True),)
    axes = tuple(TileAxis(x.var, AxisRole.OUTER, (Axis(x.var, x.extent, AxisKind.SPATIAL),)) for x in visit.loops)
    space = TileSpace(axes, _tile_accesses(accesses, memory), 0, dtype.compute, axes[-1].name if axes else "")
    return _Statement(visit, compute, value, accesses, footprint(space, lines_of(hw)).accesses)


def _access(load: Load, tiles: Mapping[str, Storage], memory: Mapping[str, TensorType], *, is_store: bool) -> _Access:
    tile = tiles.get(load.tensor)
    shape = (tile or memory[load.tensor]).shape
    steps = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return _Access(load, None if tile is None else tile.scope, steps, is_store)


def _tile_accesses(accesses: Sequence[_Access], memory: Mapping[str, TensorType]) -> tuple[TileAccess, ...]:
    """Return the accesses of tensors in memory. Loads that differ in constants are one, with several offsets."""
    merged: dict[tuple[object, ...], TileAccess] = {}
    for access in accesses:
        if access.scope is not None:
            continue
        load = access.element
        dims = tuple(dim_of(index, size) for index, size in zip(load.index, memory[load.tensor].shape, strict=True))
        key = (load.tensor, access.is_store, tuple((dim.coeffs, dim.is_affine) for dim in dims))
        known = merged.get(key)
        if known is not None:
            pairs = zip(known.dims, dims, strict=True)
            dims = tuple(replace(old, offsets=tuple(sorted({*old.offsets, *new.offsets}))) for old, new in pairs)
        loads = 1 if known is None else known.num_loads + 1
        merged[key] = TileAccess(load.tensor, memory[load.tensor].dtype, dims, access.is_store, num_loads=loads)
    return tuple(merged.values())


@dataclass(frozen=True, slots=True)
class _Parts:
    moved_bytes: tuple[tuple[str, int], ...]
    threads: int
    estimate: Estimate


# CPUs ---------------------------------------------------------------------------------------------------------------
def _cpu_parts(visits: TreeVisits, statements: Sequence[_Statement], mach: Machine) -> _Parts:
    """Return the longest of the busiest core's instructions and of each cache's traffic, which overlap imperfectly.

    Threads meet for each run of a parallel loop: it costs as much as their start.
    """
    tasks = max((each.visit.extent(LoopKind.PARALLEL) for each in statements), default=1)
    threads = min(tasks, mach.cores)
    regions = [
        (visit.times, loop.extent)
        for visit, loop in visits.loops
        if loop.kind is LoopKind.PARALLEL and loop.extent > 1 and visit.extent(LoopKind.PARALLEL) == 1
    ]
    share = -(-tasks // mach.cores) / tasks  # of all work, that of the busiest core
    cycles = sum(_cpu_cycles(each, mach) for each in statements)
    loops = sum(visit.times * loop.extent for visit, loop in visits.loops if loop.kind in (LoopKind.SERIAL, LoopKind.PARALLEL))
    cycles += mach.costs.loops.loop_cycles * (loops + sum(branch.times for branch in visits.branches))
    compute_s = mach.seconds(share * cycles + mach.costs.task_cycles * sum(times * extent for times, extent in regions) / threads)
    moved = _cpu_traffic(statements, mach)
    rates = {level: _cpu_rate(mach, level, threads) for level in moved}
    stages = tuple((level, each / rates[level]) for level, each in moved.items())
    times = [compute_s, *(seconds for _, seconds in stages)]
    body = max(times) + mach.costs.loops.imperfect_overlap * (sum(times) - max(times))
    starting_s = sum(times * launch_overhead_s(mach, extent) for times, extent in regions or [(1, 1)])
    estimate = _estimate(body, (("compute", compute_s), *stages), starting_s, mach, threads / mach.cores, 1)
    return _Parts(tuple((level, round(each)) for level, each in moved.items()), threads, estimate)


def _cpu_cycles(statement: _Statement, mach: Machine) -> float:
    """Return the cycles of a statement's instructions, or of the chain of its reduction where that is longer."""
    visit, costs = statement.visit, mach.costs.loops
    vector = next((loop for loop in visit.loops if loop.kind is LoopKind.VECTOR), None)
    width = max(load.dtype.compute.bytes for load in (*loads_of(statement.value), _stored(statement)))
    groups = 1 if vector is None else -(-vector.extent // max(1, mach.hw.vector_bytes // width))
    instructions = visit.times * groups / (1 if vector is None else vector.extent)
    counts = count_ops(statement.value, {loop.var for loop in visit.loops}) + _joining(statement)
    busy = instructions * work_cycles(mach, counts)
    for access in statement.accesses:
        if not access.is_free:
            times, step = access.times(visit, groups), 0 if vector is None else access.stride(vector.var)
            if step in (0, 1):
                busy += times * costs.load_cycles
            else:
                busy += access.times(visit) * costs.gather_cycles
    return max(busy, _chain_cycles(statement, groups, costs))


def _joining(statement: _Statement) -> OpCounts:
    """Return the operations that join a value to its accumulator; a product and its sum are one instruction."""
    match statement.compute.combine, statement.value:
        case None, _:
            return OpCounts()
        case ((Combine.MAX | Combine.MIN), _):
            return OpCounts(minmax=1)
        case Combine.SUM, Op(kind=OpKind.MUL, dtype=dtype) if dtype.is_float:
            return OpCounts()
        case _:
            return OpCounts(alu=1)


def _chain_cycles(statement: _Statement, groups: int, costs: LoopCosts) -> float:
    """Return the latency of updates of one element after another; those of other elements in between overlap."""
    if statement.compute.combine is None:
        return 0.0
    written = frozenset().union(*map(axes_of, _stored(statement).index))
    between = 1
    for loop in reversed(statement.visit.loops):
        if loop.var not in written and loop.extent > 1:
            break
        between *= groups if loop.kind is LoopKind.VECTOR else loop.extent
    else:
        return 0.0
    latency = costs.accumulate_latency_cycles
    if statement.compute.combine in (Combine.MAX, Combine.MIN):
        latency = costs.minmax_latency_cycles
    lanes = next((loop.extent for loop in statement.visit.loops if loop.kind is LoopKind.VECTOR), 1)
    return statement.visit.times * groups / lanes / between * latency


def _cpu_traffic(statements: Sequence[_Statement], mach: Machine) -> dict[str, float]:
    """Return the bytes that each level outside of the innermost cache delivers or takes, the outermost first.

    Repeated calls find what a cache holds between them: levels outside of that cache move nothing.
    """
    whole = sum(access.bytes(each.extents) for each in statements for access in each.footprints)
    data_level = find_data_level(mach, whole)
    levels = [mach.dram.name, *(cache.name for cache in mach.caches)]
    traffic: dict[str, float] = {}
    for outer, cache in zip(levels, mach.caches, strict=False):
        if levels.index(outer) >= levels.index(data_level):
            capacity = mach.costs.memory.private_hit_fraction * cache.bytes_per_core
            traffic[outer] = sum(each.visit.fraction * each.moved_bytes(each.depth_within(capacity)) for each in statements)
    return traffic


def _cpu_rate(mach: Machine, level: str, threads: int) -> float:
    """Return the bytes per second that a level delivers to some of the cores."""
    share = threads / mach.cores
    if level == mach.dram.name:
        return mach.dram.bandwidth_bytes_per_s * max(share, mach.costs.memory.single_core_bandwidth_fraction)
    return next(cache.bytes_per_s for cache in mach.caches if cache.name == level) * share


# GPUs ---------------------------------------------------------------------------------------------------------------
def _gpu_parts(visits: TreeVisits, statements: Sequence[_Statement], mach: Machine) -> _Parts:
    """Return the cost of threads that run the tree, as of any kernel with one thread for a point."""
    hw = mach.hw
    around = [visit for visit, _ in visits.computes]
    grid = max((visit.extent(LoopKind.BLOCK) for visit in around), default=1)
    threads = max((visit.extent(LoopKind.THREAD) for visit in around), default=1)
    inside = (LoopKind.BLOCK, LoopKind.THREAD)
    loops = sum(visit.iterations(*inside) * loop.extent * LOOP_OPS for visit, loop in visits.loops if loop.kind is LoopKind.SERIAL)
    work = [_thread_work(each, mach) for each in statements]
    barriers = sum(visit.iterations(*inside) for visit in visits.barriers)
    latency = mach.dram_latency_cycles
    batches = max((-(-_rounds(each) // UNROLL) for each in statements), default=1)
    chain = latency * (1 + (batches - 1) / 2) + barriers * TREE_STEP_CYCLES
    chain += sum(e.visit.iterations(*inside) for e in statements) * DEPENDENT_CYCLES
    per_block = [(each, sum(loop.kind is LoopKind.BLOCK for loop in each.visit.loops)) for each in statements]
    requested = sum(each.moved_bytes(depth) for each, depth in per_block)
    whole = sum(access.transferred_bytes(each.extents) for each in statements for access in each.footprints)
    delivered = dram_bytes_with_reuse(mach, round(whole), max(1.0, requested / whole)) if whole else 0.0
    needs = BlockResources(threads, _registers(visits.storages, mach), shared_bytes(_shared(visits.storages)))
    resident = blocks_per_core(needs, hw)
    busy = min(grid, resident * mach.cores) * threads
    in_flight = busy * sum(map(_bytes_in_flight, statements))
    launch = Launch((), (), 1, 1, grid, threads, 0)
    operations = sum(each.operations for each in statements)
    costs = simt_costs(
        mach,
        launch,
        needs,
        ThreadWork(loops + sum(instructions for instructions, _ in work), sum(requests for _, requests in work), chain),
        Traffic(requested, delivered, in_flight),
        operations / mach.unit.flops_per_s,
    )
    stages = costs.stage_seconds if costs.core_stage is None else (*costs.stage_seconds, (costs.core_stage, costs.core_s))
    starting = launch_overhead_s(mach, grid)
    estimate = _estimate(overlap_stages(costs), stages, starting, mach, costs.occupancy, costs.waves)
    cache = mach.llc.name if mach.llc is not None else "cache"
    return _Parts(((mach.dram.name, round(delivered)), (cache, round(requested))), min(busy, grid * threads), estimate)


def _thread_work(statement: _Statement, mach: Machine) -> tuple[float, float]:
    """Return the instructions of a thread, and the L1 cycles of a warp's accesses as requests."""
    visit = statement.visit
    spread = visit.extent(LoopKind.BLOCK) * visit.extent(LoopKind.THREAD)
    vector = next((loop for loop in visit.loops if loop.kind is LoopKind.VECTOR), None)
    times = visit.iterations() / spread
    instructions = times * (1.0 + operators(statement.value))
    requests = 0.0
    for access in statement.accesses:
        if access.is_free:
            continue
        step = None if vector is None else access.stride(vector.var)
        groups = None
        if vector is not None and step == 1:
            groups = -(-vector.extent * access.element.dtype.bytes // VECTOR_ACCESS_BYTES)
        runs = access.times(replace(visit, fraction=1.0), groups)
        runs /= math.prod(loop.extent for loop in visit.loops if loop.kind in (LoopKind.BLOCK, LoopKind.THREAD))
        runs = max(runs, 1.0)
        instructions += runs * (1.0 + LOOP_OPS / 2)
        requests += runs * _sectors(access, visit, mach) / REQUEST_SECTORS
    return instructions, requests


def _sectors(access: _Access, visit: Visit, mach: Machine) -> float:
    """Return the sectors of a warp's access: threads along the innermost thread loop follow one another."""
    thread = next((loop for loop in reversed(visit.loops) if loop.kind is LoopKind.THREAD), None)
    if thread is None or access.scope is not None:
        return REQUEST_SECTORS
    warp, step = mach.hw.limits.warp_size, access.stride(thread.var)
    if step is None:
        return warp
    along = min(thread.extent, warp)
    return min(float(warp), warp / along * max(1.0, along * abs(step) * access.element.dtype.bytes / SECTOR_BYTES))


def _bytes_in_flight(statement: _Statement) -> int:
    """Return the bytes of memory that a thread asks for before it waits: of its lanes, and some rounds of its loops."""
    copies = statement.visit.extent(LoopKind.VECTOR) * statement.visit.extent(LoopKind.UNROLL)
    loaded = sum(access.element.dtype.bytes for access in statement.accesses if access.scope is None)
    return loaded * copies * min(UNROLL, _rounds(statement))


def _rounds(statement: _Statement) -> int:
    """Return how often a thread waits for memory: iterations of serial loops around its loads."""
    if all(access.scope is not None or access.is_store for access in statement.accesses):
        return 1
    return math.prod(loop.extent for loop in statement.visit.loops if loop.kind is LoopKind.SERIAL)


def _shared(storages: Sequence[Storage]) -> list[Storage]:
    return [storage for storage in storages if storage.scope is Scope.SHARED]


def _registers(storages: Sequence[Storage], mach: Machine) -> int:
    """Return a thread's registers: its tiles, and addresses."""
    limits = mach.hw.limits
    words = sum(s.elements * register_words(s.dtype) for s in storages if s.scope is not Scope.SHARED)
    return min(limits.max_registers_per_thread, overhead_registers(limits) + words)


def _estimate(
    body_s: float, stages: Sequence[tuple[str, float]], launch_s: float, mach: Machine, occupancy: float, waves: int
) -> Estimate:
    costs = tuple(StageCost(name, seconds) for name, seconds in (*stages, (LAUNCH, launch_s)))
    seconds = body_s + launch_s
    return Estimate(seconds, costs, occupancy, waves, uncertainty(costs, seconds, mach.assumed_stages))
