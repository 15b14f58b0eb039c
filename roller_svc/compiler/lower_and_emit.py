"""A plan → kernel text: every group lowered, reductions that are split taken apart, one source for all launches.

RProgram → schedule tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from roller_svc.codegen.kernel import GroupLaunches, Program, emit_together, tensors_in_memory, with_program_indices
from roller_svc.compiler.rank import rank
from roller_svc.errors import InvariantError, ScheduleError
from roller_svc.families import family_of
from roller_svc.families.family import Workspaces
from roller_svc.families.schedules import SCHEDULES
from roller_svc.fusion.partition import stored_types
from roller_svc.ir import printer
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import KernelSource, Role
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.schedule.legality import check
from roller_svc.schedule.prepack import prepack


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """The launches of one group, in order. `program` has no split reduction left (construct.split took it apart)."""
    buffers = {name for name, _ in (*group.inputs, *group.stored)}
    trees = SCHEDULES[family_of(group, program, hw).name](group, program, hw)
    return tuple(verified(tree, buffers, hw.limits.warp_size) for tree in trees)


def verified(tree: ScheduleTree, buffers: Collection[str], warp: int) -> ScheduleTree:
    """The tree, once it has been found to obey the rules; a tree of our own making that does not is a bug."""
    try:
        check(tree.body, buffers, warp)
    except ScheduleError as error:
        raise InvariantError(f"the tree of {tree.name} is not legal: {error.message}") from error
    return tree


Groups = tuple[KernelGroup, ...]


def generate(plan: Plan, program: TensorProgram, groups: Groups, hw: HardwareSpec) -> KernelSource:
    """Kernel text of a plan."""
    (source,) = generate_together((plan,), program, groups, hw)
    return source


def generate_together(
    plans: tuple[Plan, ...], program: TensorProgram, groups: Groups, hw: HardwareSpec
) -> tuple[KernelSource, ...]:
    """The plans in one text, for one run of the compiler: each source has the whole text and its own plan's launches.

    What plans have in common, the same tiles of a group among it, stands in the text once.
    """
    types = stored_types(program)
    types |= {t: type_ for group in groups for t, type_ in group.stored if t not in types}  # aligned copies
    # In the order of the groups, not of the plans that first choose a tile: so a function takes its arguments in the
    # same order in every text.
    workspaces: dict[str, list[tuple[str, TensorType]]] = {group.name: [] for group in groups}
    made: dict[tuple[str, RProgram], tuple[GroupLaunches, ...]] = {}

    def parts(group: KernelGroup, tiles: RProgram) -> tuple[GroupLaunches, ...]:
        if (group.name, tiles) not in made:
            named = group if len(plans) == 1 else replace(group, name=f"choice{len(made)}_{group.name}")
            found: list[GroupLaunches] = []
            for piece, its_tiles, extra in _launches(named, tiles, hw):
                part, rooms = _part(_with_constants(piece, named, program), its_tiles, program, hw)
                found.append(part)
                seen = ((t, types[t]) for t, _ in part.views if t in types)
                workspaces[group.name].extend((*seen, *extra, *rooms))
            made[group.name, tiles] = tuple(found)
        return made[group.name, tiles]

    programs = tuple(
        Program(
            "kernel" if len(plans) == 1 else f"plan{number}_kernel",
            tuple(p for group, choice in zip(groups, plan.choices, strict=True) for p in parts(group, choice.program)),
        )
        for number, plan in enumerate(plans)
    )
    buffers = tensors_in_memory(program, types, chain.from_iterable(workspaces.values()))
    comment = "\n\n".join(_header(plan, program, hw) for plan in plans)
    whole = with_program_indices(emit_together(programs, buffers, hw, comment), program)
    whole = replace(whole, constants=program.constants)
    return tuple(_only(whole, each) for each in programs) if len(plans) > 1 else (whole,)


def _with_constants(piece: KernelGroup, whole: KernelGroup, program: TensorProgram) -> KernelGroup:
    """A piece of a group told what stays the same: all that it reads, where the group as a whole does."""
    if whole.is_constant(program.outputs):
        return replace(piece, constants=frozenset(name for name, _ in piece.inputs))
    return replace(piece, constants=whole.constants & {name for name, _ in piece.inputs})


def _part(
    group: KernelGroup, tiles: RProgram, program: TensorProgram, hw: HardwareSpec
) -> tuple[GroupLaunches, Workspaces]:
    """A group's launches, what it makes of constants alone in launches of their own, and room for that."""
    trees, views = lower(group, tiles, hw), (*group.inputs, *group.stored)
    if hw.family is not TargetKind.CPU or not group.constants:
        return GroupLaunches(trees, views), ()
    if group.is_constant(program.outputs):
        return GroupLaunches((), views, prepack_trees=trees), ()
    found = [prepack(tree, group.constants) for tree in trees]
    rooms = tuple(room for each in found for room in each.workspaces)
    launches = tuple(launch for each in found for launch in each.launches)
    return GroupLaunches(tuple(each.tree for each in found), (*views, *rooms), prepack_trees=launches), rooms


def _only(source: KernelSource, program: Program) -> KernelSource:
    """The source with the launches of one program, in its order, and the workspace that they touch."""
    named = {launch.name: launch for launch in source.launches}
    names = (program.name,) if program.name in named else tuple(tree.name for tree in program.trees)
    launches = tuple(named[name] for name in (*(tree.name for tree in program.prepack_trees), *names))
    touched = {symbol for launch in launches for symbol in (*launch.args, *(m.buffer for m in launch.tensor_maps))}
    private = (Role.WORKSPACE, Role.STATUS)
    buffers = tuple(b for b in source.buffers if b.role not in private or b.symbol in touched)
    return replace(source, launches=launches, buffers=buffers)


def _launches(
    group: KernelGroup, program: RProgram, hw: HardwareSpec
) -> Iterable[tuple[KernelGroup, RProgram, Workspaces]]:
    """Return the launches that compute a group, each with tiles: its own, or the best of a group of its own."""
    for launch in family_of(group, program, hw).launches(group, program, hw):
        yield launch.group, launch.program or _best(launch.group, hw), launch.workspace


def _best(group: KernelGroup, hw: HardwareSpec) -> RProgram:
    candidates, _ = rank(group, hw, hw.unit_for(group.space.compute_dtype), 1)
    return candidates[0].program


def _header(plan: Plan, program: TensorProgram, hw: HardwareSpec) -> str:
    """What the kernel is, for whoever reads its text: nothing that a spec says in words of its own."""
    estimate = plan.estimate
    lines = [printer.text(program), f"target: {hw.id} ({hw.arch})"]
    for i, choice in enumerate(plan.choices):
        tiles = choice.program
        block = ", ".join(f"{name}={extent}" for name, extent in tiles.block.extents)
        thread = ", ".join(f"{name}={extent}" for name, extent in tiles.thread.extents)
        lines.append(
            f"kernel{i}: {hw.tile_levels[0]} tile [{block}], {hw.tile_levels[1]} tile [{thread}], "
            f"lanes {tiles.reduce_threads}, split_k {tiles.split_k}, stages {tiles.stages}, raster {tiles.raster}, "
            f"unit {tiles.unit.name}"
        )
    lines.append(f"estimate: {estimate.seconds * 1e6:.3g} us, bound by {estimate.bound}")
    return "\n".join(lines)
