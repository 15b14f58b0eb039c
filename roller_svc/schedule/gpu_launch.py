"""Rules of launches: blocks and threads on GPUs, and what only CPUs have."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roller_svc.errors import ScheduleError
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.program import StatementKind
from roller_svc.ir.schedule import LoopKind, Node, ScheduleTree, Scope, Storage, child_lists, iter_nodes, shared_bytes
from roller_svc.schedule.bounds import Nest, NestLoop, Nests, check_copies, infer_bounds
from roller_svc.schedule.schedule import Function, Schedule

LAUNCH_CODE = "schedule-launch"
MAX_GRID_BLOCKS = (1 << 31) - 1
# Local memory of a thread: of CUDA's technical specifications; on AMD the largest scratch of a wave of 64.
THREAD_BYTES = {TargetKind.CUDA: 512 << 10, TargetKind.AMD: ((1 << 13) - 1) * (1 << 10) // 64}


def check_device_loops(schedule: Schedule, hw: HardwareSpec) -> None:
    """Check that a device has the loops and tiles of a schedule. Raises ScheduleError (schedule-launch)."""
    nests = infer_bounds(schedule)
    if hw.family is TargetKind.CPU:
        _check_cpu(nests, hw)
        return
    for root in nests.functions.values():
        if root.name in nests.launches:
            _check_launch(nests, root, [nests.functions[name] for name in nests.launches[root.name]], hw)


def check_tile_bytes(trees: tuple[ScheduleTree, ...], hw: HardwareSpec) -> None:
    """Check that blocks and threads have memory for the tiles of each launch. Raises ScheduleError (schedule-memory)."""
    for tree in trees:
        tiles = [node for node in iter_nodes(tree.body) if isinstance(node, Storage)]
        shared = [tile for tile in tiles if tile.scope is Scope.SHARED]
        private = [tile for tile in tiles if tile.scope is not Scope.SHARED]
        _check_bytes("shared tiles of a block", shared, shared_bytes(shared), hw.limits.shared_bytes_per_block)
        needed = max(_private_bytes(node) for node in tree.body)
        _check_bytes("tiles of a thread on the stack and in registers", private, needed, THREAD_BYTES[hw.family])


def _private_bytes(node: Node) -> int:
    """Return the memory of a thread's own tiles in a node: those that are not one inside the other may share it."""
    inside = max((_private_bytes(each) for body in child_lists(node) for each in body), default=0)
    return inside + (node.bytes if isinstance(node, Storage) and node.scope is not Scope.SHARED else 0)


def _check_bytes(what: str, tiles: list[Storage], needed: int, limit: int) -> None:
    if needed > limit:
        sizes = ", ".join(f"{tile.tensor}: {tile.bytes}" for tile in tiles)
        raise ScheduleError(
            f"the {what} are too large: expected at most {limit} bytes, got {needed} ({sizes})",
            code="schedule-memory",
            hint="split by smaller factors",
        )


def _check_cpu(nests: Nests, hw: HardwareSpec) -> None:
    for function in nests.functions.values():
        if function.scope is Scope.SHARED:
            raise ScheduleError(
                f"{function.name} is in shared memory, and {hw.id} has none",
                code=LAUNCH_CODE,
                hint=f"{function.name}: store_in stack",
            )
    for nest in nests.nests.values():
        for loop in _loops_of(nest.loops, LoopKind.BLOCK, LoopKind.THREAD):
            raise ScheduleError(
                f"{loop.name} of {loop.stage} is marked {loop.kind.value}, and {hw.id} has no blocks of threads",
                code=LAUNCH_CODE,
                hint="mark it parallel",
            )


def _check_launch(nests: Nests, root: Function, members: list[Function], hw: HardwareSpec) -> None:
    """Check the blocks and threads of the launch that computes a function."""
    if len(root.stages) > 1:
        loops = root.stages[0].loops if root.statement.kind is StatementKind.REDUCE else ()
        raise ScheduleError(
            f"{root.name} has two stages, which would not share blocks and threads: expected one",
            code=LAUNCH_CODE,
            hint=f"{root.name}: accumulate_at {loops[-1].name}" if loops else "compile the program without a schedule",
        )
    nest = nests.nests[root.stages[0].name]
    blocks, threads = (tuple(_loops_of(nest.loops, kind)) for kind in (LoopKind.BLOCK, LoopKind.THREAD))
    if not blocks:
        raise ScheduleError(
            f"{root.name} is a launch of {hw.id} without blocks",
            code=LAUNCH_CODE,
            hint=f"{root.name}: block {nest.loops[0].name}"
            if nest.loops
            else "it has no loop to run on blocks: compile the program without a schedule",
        )
    if (grid := _extent(blocks)) > MAX_GRID_BLOCKS:
        raise ScheduleError(f"{root.name} has too many blocks: expected at most {MAX_GRID_BLOCKS}, got {grid}", code=LAUNCH_CODE)
    if _extent(threads) > (most := hw.limits.max_threads_per_block):
        raise ScheduleError(
            f"{root.name} has too many threads: expected at most {most} in a block, got {_extent(threads)}",
            code=LAUNCH_CODE,
            hint="split a thread loop, and mark the inner one",
        )
    for member in members:
        for each in (nests.nests[stage.name] for stage in member.stages):
            _check_nest(each, member, threads)


def _check_nest(nest: Nest, function: Function, threads: tuple[NestLoop, ...]) -> None:
    """Check a nest of a launch with these threads."""
    for loop in _loops_of(nest.loops, LoopKind.PARALLEL):
        raise ScheduleError(
            f"{loop.name} of {loop.stage} is parallel: GPUs run loops on blocks and threads",
            code=LAUNCH_CODE,
            hint="mark it block or thread",
        )
    check_copies(nest, lanes_per_copy=1)  # a thread has no vectors to compute in
    if not nest.outer:
        return
    around = tuple(_loops_of(nest.outer, LoopKind.THREAD))
    own = tuple(_loops_of(nest.loops, LoopKind.THREAD))
    if around != threads and (own or function.scope is Scope.SHARED):
        raise ScheduleError(
            f"{nest.stage.name} is shared by threads, and is not inside of the loops that make them: "
            f"expected {_names_of(threads)}, got {_names_of(around)}",
            code=LAUNCH_CODE,
            hint=f"compute {function.name} in {threads[-1].name} of {threads[-1].stage}, or in a loop inside of it"
            if threads
            else f"mark a thread loop of {nest.outer[0].stage}",
        )
    if _extent(own) > _extent(threads):
        raise ScheduleError(
            f"{nest.stage.name} has more threads than its launch: expected at most {_extent(threads)}, got {_extent(own)}",
            code=LAUNCH_CODE,
            hint="split its thread loop, and mark the inner one",
        )


def _loops_of(loops: tuple[NestLoop, ...], *kinds: LoopKind) -> Iterator[NestLoop]:
    return (loop for loop in loops if loop.kind in kinds)


def _names_of(loops: tuple[NestLoop, ...]) -> str:
    return ", ".join(loop.var for loop in loops) or "none"


def _extent(loops: tuple[NestLoop, ...]) -> int:
    return math.prod(loop.extent for loop in loops)
