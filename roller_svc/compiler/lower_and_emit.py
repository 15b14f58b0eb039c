"""A plan → kernel text: every group lowered, reductions that are split taken apart, one source for all launches.

RProgram → schedule tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from roller_svc.codegen.kernel import Part, Program, emit_together, tensors_in_memory, with_program_indices
from roller_svc.construct.construct import rank
from roller_svc.errors import InvariantError, ScheduleError
from roller_svc.families.common.gpu.attention.tile import attended, attention_tile, partial_results
from roller_svc.families.common.gpu.matrix.stream_k import partial_tiles
from roller_svc.families.common.scatter import lower_scatter
from roller_svc.families.cpu.contraction.schedule import lower_contraction_cpu
from roller_svc.families.cpu.convolution.schedule import lower_convolution_cpu
from roller_svc.families.cpu.loops.schedule import lower_nest_cpu, past_caches
from roller_svc.families.cpu.transpose.schedule import lower_layout_cpu
from roller_svc.families.cpu.transpose.workload import layout_space
from roller_svc.families.cpu.window.schedule import lower_window_cpu
from roller_svc.families.cpu.window.workload import plane_space
from roller_svc.families.gpu.loop_nest import lower_nest_gpu
from roller_svc.families.gpu.mma_attention.schedule import lower_attention_mma
from roller_svc.families.gpu.mma_contraction.schedule import lower_contraction_mma
from roller_svc.families.gpu.simt_contraction.schedule import lower_contraction_gpu
from roller_svc.families.gpu.wgmma_attention.schedule import lower_attention_wgmma
from roller_svc.families.gpu.wgmma_contraction.schedule import lower_contraction_wgmma
from roller_svc.fusion.partition import stored_types
from roller_svc.fusion.split.attention import split_attention
from roller_svc.fusion.split.reduction import may_split, split_group
from roller_svc.fusion.split.row_reduction import column_tiles, joined_after, stored_first
from roller_svc.ir import printer
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import Family, HardwareSpec, UnitKind
from roller_svc.ir.kernel import KernelSource, Role
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.schedule.legality import check
from roller_svc.schedule.prepack import prepared


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """The launches of one group, in order. `program` has no split reduction left (construct.split took it apart)."""
    buffers = {name for name, _ in (*group.inputs, *group.stored)}
    return tuple(verified(tree, buffers, hw.limits.warp_size) for tree in _lowered(group, program, hw))


def verified(tree: ScheduleTree, buffers: Collection[str], warp: int) -> ScheduleTree:
    """The tree, once it has been found to obey the rules; a tree of our own making that does not is a bug."""
    try:
        check(tree.body, buffers, warp)
    except ScheduleError as error:
        raise InvariantError(f"the tree of {tree.name} is not legal: {error.message}") from error
    return tree


def _lowered(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    family = hw.family
    if group.kind is GroupKind.SCATTER:
        return lower_scatter(group, family)
    if group.kind is GroupKind.ATTENTION:
        by_groups = program.unit.kind is UnitKind.WGMMA
        return (lower_attention_wgmma if by_groups else lower_attention_mma)(group, program, hw.arch)
    if program.unit.takes_fragments:
        return lower_contraction_mma(group, program, hw)
    if program.unit.kind is UnitKind.WGMMA:
        return lower_contraction_wgmma(group, program, hw.arch)
    if group.kind is GroupKind.CONTRACTION:
        if program.space.role(AxisRole.PIXEL):
            return lower_convolution_cpu(group, program, hw)
        if family is Family.CPU:
            return lower_contraction_cpu(replace(group, space=program.space), program, hw)
        return lower_contraction_gpu(group, program, hw)
    if family is Family.CPU:
        if (planes := plane_space(group)) is not None:
            return lower_window_cpu(group, program, planes, hw)
        if (layout := layout_space(group, hw)) is not None:
            return lower_layout_cpu(group, program, layout, hw)
        trees = lower_nest_cpu(group, program, hw)
        return tuple(past_caches(tree, group) for tree in trees) if program.streamed else trees
    return lower_nest_gpu(group, program, hw)


Groups = tuple[KernelGroup, ...]
# A kernel group as it is lowered, with its tiles and the workspace that the program does not name.
Workspaces = tuple[tuple[str, TensorType], ...]
Piece = tuple[KernelGroup, RProgram, Workspaces]


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
    made: dict[tuple[str, RProgram], tuple[Part, ...]] = {}

    def parts(group: KernelGroup, tiles: RProgram) -> tuple[Part, ...]:
        if (group.name, tiles) not in made:
            named = group if len(plans) == 1 else replace(group, name=f"choice{len(made)}_{group.name}")
            found: list[Part] = []
            for piece, its_tiles, extra in _pieces(named, tiles, hw):
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
    if whole.stays(program.outputs):
        return replace(piece, constants=frozenset(name for name, _ in piece.inputs))
    return replace(piece, constants=whole.constants & {name for name, _ in piece.inputs})


def _part(group: KernelGroup, tiles: RProgram, program: TensorProgram, hw: HardwareSpec) -> tuple[Part, Workspaces]:
    """A group's launches, what it makes of constants alone in launches of their own, and room for that."""
    trees, views = lower(group, tiles, hw), (*group.inputs, *group.stored)
    if hw.family is not Family.CPU or not group.constants:
        return Part(trees, views), ()
    if group.stays(program.outputs):
        return Part((), views, prepares=trees), ()
    found = [prepared(tree, group.constants) for tree in trees]
    rooms = tuple(room for each in found for room in each.workspaces)
    launches = tuple(launch for each in found for launch in each.launches)
    return Part(tuple(each.tree for each in found), (*views, *rooms), prepares=launches), rooms


def _only(source: KernelSource, program: Program) -> KernelSource:
    """The source with the launches of one program, in its order, and the workspace that they touch."""
    named = {launch.name: launch for launch in source.launches}
    names = (program.name,) if program.name in named else tuple(tree.name for tree in program.trees)
    launches = tuple(named[name] for name in (*(tree.name for tree in program.prepares), *names))
    touched = {symbol for launch in launches for symbol in (*launch.args, *(m.buffer for m in launch.maps))}
    private = (Role.WORKSPACE, Role.STATUS)
    buffers = tuple(b for b in source.buffers if b.role not in private or b.symbol in touched)
    return replace(source, launches=launches, buffers=buffers)


def _pieces(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[Piece]:
    """The group as it is, with room for partial tiles where its steps are streamed, or its halves where its reduction
    is split."""
    if group.row_reduction is not None:
        yield from _row_pieces(group, program, hw)
        return
    if group.attention is not None:
        yield from _attention_pieces(group, program, hw)
        return
    if program.stream_k:
        workspace = partial_tiles(group.name, program)
        yield replace(group, stored=(*group.stored, workspace)), program, (workspace,)
        return
    if program.split_k == 1 or not may_split(group):
        yield group, program, ()
        return
    halves = split_group(group, program)
    yield halves.partial, halves.partial_program, halves.workspaces
    yield halves.combining, _best(halves.combining, hw), ()


def _attention_pieces(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[Piece]:
    """One launch, or two where the keys are shared out."""
    if program.unit.kind is UnitKind.WGMMA:
        yield group, program, ()
        return
    tile = attention_tile(program, attended(group, program.unit, hw.arch))
    if tile.pieces == 1:
        yield group, program, ()
        return
    halves = split_attention(group, program, partial_results(group, tile))
    yield halves.partial, halves.partial_program, halves.workspaces
    yield halves.combining, _best(halves.combining, hw), ()


def _row_pieces(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[Piece]:
    """A contraction whose rows are reduced: at once, where one tile has all of a row; else in two launches."""
    tiles, on_matrix_unit = column_tiles(program), program.unit.takes_fragments
    if on_matrix_unit and tiles == 1:
        yield group, program, ()
        return
    launches = joined_after(group, program, tiles) if on_matrix_unit else stored_first(group, program)
    yield launches.contraction, launches.program, launches.workspace
    yield launches.rest, _best(launches.rest, hw), ()


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
            f"lanes {tiles.lanes}, split_k {tiles.split_k}, stages {tiles.stages}, raster {tiles.raster}, "
            f"unit {tiles.unit.name}"
        )
    lines.append(f"estimate: {estimate.seconds * 1e6:.3g} us, bound by {estimate.bound}")
    return "\n".join(lines)
