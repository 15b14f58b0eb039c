"""Plan → kernel source: lower every group and emit one translation unit with all launches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from roller_svc.codegen.cuda.function import find_join_refusal
from roller_svc.codegen.cuda.persistent import page_use
from roller_svc.codegen.cuda.ring import PageUse
from roller_svc.codegen.kernel import (
    GroupLaunches,
    Program,
    Tasks,
    emit_task_functions,
    emit_together,
    tensors_in_memory,
    with_program_indices,
)
from roller_svc.codegen.symbols import name_symbols
from roller_svc.compiler.rank import rank
from roller_svc.errors import InvariantError, ScheduleError
from roller_svc.families import family_of, prepare
from roller_svc.families.family import Workspaces
from roller_svc.families.schedules import SCHEDULES
from roller_svc.fusion.partition import stored_types
from roller_svc.ir import printer
from roller_svc.ir.constraints import tile_value
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import Buffer, KernelSource, Role
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.schedule.legality import check
from roller_svc.schedule.prepack import prepack


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """Lower one group to its launches, in order; the reduction of `program` is not split any more."""
    buffers = {name for name, _ in (*group.inputs, *group.stored)}
    family, workload = prepare(group, hw, program.unit, program=program)
    trees = SCHEDULES[family.name](group, program, workload)
    return tuple(verify_tree(tree, buffers, hw.limits.warp_size) for tree in trees)


def verify_tree(tree: ScheduleTree, buffers: Collection[str], warp: int) -> ScheduleTree:
    """Return the tree if it is legal; an illegal tree from a family is a bug."""
    try:
        check(tree.body, buffers, warp)
        if tree.stream is not None:
            check(tree.stream.body, buffers, warp)
            check(tree.stream.fill, buffers, warp)
    except ScheduleError as error:
        raise InvariantError(f"the tree of {tree.name} is not legal: {error.message}") from error
    return tree


Groups = tuple[KernelGroup, ...]


def emit_plan(plan: Plan, program: TensorProgram, groups: Groups, hw: HardwareSpec) -> KernelSource:
    """Return the kernel source of a plan."""
    (source,) = emit_plans((plan,), program, groups, hw)
    return source


def emit_plans(plans: tuple[Plan, ...], program: TensorProgram, groups: Groups, hw: HardwareSpec) -> tuple[KernelSource, ...]:
    """Emit several plans as one translation unit.

    Each source has the whole text and the launches of its own plan. Kernels that plans share are emitted once. Only the
    source of a single plan, which may be delivered, gets the names that it exports.
    """
    programs, buffers = _lower_plans(plans, program, groups, hw)
    comment = "\n\n".join(_header(plan, program, hw) for plan in plans)
    constants = frozenset(program.constants) if program.programmatic else None
    whole = with_program_indices(emit_together(programs, buffers, hw, comment, constants), program)
    whole = replace(whole, constants=program.constants)
    if len(plans) > 1:
        return tuple(_select_launches(whole, each) for each in programs)
    return (name_symbols(whole, program.name),)


def emit_plan_tasks(
    plan: Plan, program: TensorProgram, groups: Groups, hw: HardwareSpec, first_check: int = 0
) -> tuple[tuple[Tasks, ...], tuple[Buffer, ...]]:
    """Return the launches of a plan as rTasks of a kernel with others, and the memory that they use.

    Raises InvariantError for a launch that cannot be rTasks. `first_check` is the number of their first run-time check.
    """
    (lowered,), buffers = _lower_plans((plan,), program, groups, hw)
    return emit_task_functions(lowered, buffers, hw, first_check), tuple(buffers.values())


def find_plan_refusal(plan: Plan, program: TensorProgram, groups: Groups, hw: HardwareSpec) -> str | None:
    """Return why a launch of a plan cannot be rTasks of a kernel with others; None if all can."""
    (lowered,), _ = _lower_plans((plan,), program, groups, hw)
    refusals = (find_join_refusal(tree, hw.arch) for part in lowered.groups for tree in part.trees)
    return next((reason for reason in refusals if reason is not None), None)


def find_page_uses(plan: Plan, program: TensorProgram, groups: Groups, hw: HardwareSpec) -> tuple[PageUse | None, ...]:
    """Return how each launch of a plan can use the pages of a ring; empty if no launch can."""
    uses: list[PageUse | None] = []
    for group, choice in zip(groups, plan.choices, strict=True):
        (lowered,), buffers = _lower_plans((Plan((choice,)),), program, (group,), hw)
        if all(tree.stream is None for part in lowered.groups for tree in part.trees):
            uses += [None for part in lowered.groups for _ in part.trees]
            continue
        others = (each.seconds for each in choice.estimate.stages if not each.name.startswith(hw.levels[0].name))
        busy_s = max(others, default=0.0)
        for tasks in emit_task_functions(lowered, buffers, hw):
            use = page_use(tasks.function)
            uses.append(None if use is None else replace(use, busy_s=busy_s))
    return tuple(uses) if any(uses) else ()


def _lower_plans(
    plans: tuple[Plan, ...], program: TensorProgram, groups: Groups, hw: HardwareSpec
) -> tuple[tuple[Program, ...], dict[str, Buffer]]:
    """Return the launches of each plan, and the memory of all."""
    types = stored_types(program)
    types |= {t: type_ for group in groups for t, type_ in group.stored if t not in types}  # operand copies
    # In the order of the groups, not of the plans: a function then takes its arguments in the same order in every
    # translation unit.
    workspaces: dict[str, list[tuple[str, TensorType]]] = {group.name: [] for group in groups}
    cached: dict[tuple[str, RProgram], tuple[GroupLaunches, ...]] = {}

    def parts(group: KernelGroup, tiles: RProgram) -> tuple[GroupLaunches, ...]:
        if (group.name, tiles) not in cached:
            named = group if len(plans) == 1 else replace(group, name=f"choice{len(cached)}_{group.name}")
            launches: list[GroupLaunches] = []
            for part, more in lower_launches(named, tiles, program, hw):
                launches.append(part)
                workspaces[group.name].extend((*((t, types[t]) for t, _ in part.views if t in types), *more))
            cached[group.name, tiles] = tuple(launches)
        return cached[group.name, tiles]

    programs = tuple(
        Program(
            "kernel" if len(plans) == 1 else f"plan{number}_kernel",
            tuple(p for group, choice in zip(groups, plan.choices, strict=True) for p in parts(group, choice.program)),
        )
        for number, plan in enumerate(plans)
    )
    buffers = tensors_in_memory(program, types, chain.from_iterable(workspaces.values()))
    return programs, buffers


def lower_launches(
    group: KernelGroup, tiles: RProgram, program: TensorProgram, hw: HardwareSpec
) -> Iterator[tuple[GroupLaunches, Workspaces]]:
    """Lower the launches that compute a group, each with the tensors that it accesses and the program does not name."""
    for piece, its_tiles, extra in split_launches(group, tiles, hw):
        part, buffers = _lower_with_prepacking(_with_constants(piece, group, program), its_tiles, program, hw)
        yield part, (*extra, *buffers)


def _with_constants(piece: KernelGroup, whole: KernelGroup, program: TensorProgram) -> KernelGroup:
    """Mark the constants of a part of a group: all its inputs where the whole group is constant."""
    if whole.is_constant(program.outputs):
        return replace(piece, constants=frozenset(name for name, _ in piece.inputs))
    return replace(piece, constants=whole.constants & {name for name, _ in piece.inputs})


def _lower_with_prepacking(
    group: KernelGroup, tiles: RProgram, program: TensorProgram, hw: HardwareSpec
) -> tuple[GroupLaunches, Workspaces]:
    """Return a group's launches, prepacking in launches of its own, and the buffers of packed constants."""
    trees, views = lower(group, tiles, hw), (*group.inputs, *group.stored)
    if group.is_constant(program.outputs):
        return GroupLaunches((), views, prepack_trees=trees), ()
    if hw.family is not TargetKind.CPU or not group.constants:
        return GroupLaunches(trees, views), ()
    prepacked = [prepack(tree, group.constants) for tree in trees]
    buffers = tuple(buffer for each in prepacked for buffer in each.workspaces)
    launches = tuple(launch for each in prepacked for launch in each.launches)
    return GroupLaunches(tuple(each.tree for each in prepacked), (*views, *buffers), prepack_trees=launches), buffers


def _select_launches(source: KernelSource, program: Program) -> KernelSource:
    """Return the source with the launches of one program, in order, and the workspaces that they access."""
    named = {launch.name: launch for launch in source.launches}
    names = (program.name,) if program.name in named else tuple(tree.name for tree in program.trees)
    launches = tuple(named[name] for name in (*(tree.name for tree in program.prepack_trees), *names))
    accessed = {symbol for launch in launches for symbol in (*launch.args, *(m.buffer for m in launch.tensor_maps))}
    private = (Role.WORKSPACE, Role.STATUS)
    buffers = tuple(b for b in source.buffers if b.role not in private or b.symbol in accessed)
    return replace(source, launches=launches, buffers=buffers)


def split_launches(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[tuple[KernelGroup, RProgram, Workspaces]]:
    """Return the launches that compute a group, each with tiles: its own, or the best of a group of its own."""
    for launch in family_of(group, program, hw).launches(group, program, hw):
        yield launch.group, launch.program or _best(launch.group, hw), launch.workspace


def _best(group: KernelGroup, hw: HardwareSpec) -> RProgram:
    candidates, _ = rank(group, hw, hw.unit_for(group.product_sum_dtype), 1)
    return candidates[0].program


def _block_text(program: RProgram) -> str:
    """Return the fields of persistent blocks and clusters as text; '' for an rTask in each block."""
    names = ("blocks", "cluster_m", "cluster_n", "cluster_k", "pingpong")
    is_plain = not program.pipeline.persistent_blocks and program.pipeline.cluster_size == 1
    return "" if is_plain else "".join(f", {name} {tile_value(program, name)}" for name in names)


def _header(plan: Plan, program: TensorProgram, hw: HardwareSpec) -> str:
    """Return the comment at the top of the source; it repeats no field of the hardware spec."""
    estimate = plan.estimate
    lines = [printer.text(program), f"target: {hw.id} ({hw.arch})"]
    for i, choice in enumerate(plan.choices):
        tiles = choice.program
        block = ", ".join(f"{name}={extent}" for name, extent in tiles.block.extents)
        thread = ", ".join(f"{name}={extent}" for name, extent in tiles.thread.extents)
        lines.append(
            f"kernel{i}: {hw.tile_levels[0]} tile [{block}], {hw.tile_levels[1]} tile [{thread}], "
            f"lanes {tiles.reduce_threads}, split_k {tiles.split_k}, stages {tiles.pipeline.stages}, "
            f"raster {tiles.pipeline.raster}, "
            f"unit {tiles.unit.name}{_block_text(tiles)}"
        )
    lines.append(f"estimate: {estimate.seconds * 1e6:.3g} us, bound by {estimate.bound}")
    return "\n".join(lines)
