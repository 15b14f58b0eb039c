"""KernelGroup, HardwareSpec, ComputeUnit → aligned rPrograms: ROLLER's construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import NamedTuple

from roller_svc.analysis.operand import all_operands
from roller_svc.compiler.constraints import Demanded, demanded, overruns, tile_text, unmet
from roller_svc.construct.align import EPSILONS
from roller_svc.construct.rules import PLAIN, Base, Pipeline, Rules, spatial_grid, spread
from roller_svc.construct.scale_out import shrink, splits
from roller_svc.construct.scale_up import Log, Look, scale_up
from roller_svc.errors import NoCandidateError
from roller_svc.families.common.cpu.op_counts import passes, spared
from roller_svc.families.common.gpu.matrix.terms import LEAST_STAGES
from roller_svc.families.common.gpu.matrix.wave_quantization import evened, fills_few_waves
from roller_svc.families.cpu.contraction.rules import CpuContraction
from roller_svc.families.cpu.convolution.convolution_view import convolution_spaces
from roller_svc.families.cpu.convolution.rules import CpuConvolution
from roller_svc.families.cpu.loops.rules import cpu_nest
from roller_svc.families.cpu.transpose.rules import cpu_layout
from roller_svc.families.cpu.transpose.workload import layout_space
from roller_svc.families.cpu.window.rules import cpu_window
from roller_svc.families.cpu.window.workload import plane_space
from roller_svc.families.gpu.elementwise.rules import SimtMap
from roller_svc.families.gpu.mma_attention.cost import attention_problem
from roller_svc.families.gpu.mma_attention.rules import MmaAttention
from roller_svc.families.gpu.mma_contraction.rules import MmaContraction
from roller_svc.families.gpu.reduction.rules import SimtReduction
from roller_svc.families.gpu.scatter.rules import SimtNest
from roller_svc.families.gpu.simt_contraction.rules import SimtContraction
from roller_svc.families.gpu.wgmma_attention.rules import WgmmaAttention
from roller_svc.families.gpu.wgmma_contraction.rules import WgmmaContraction
from roller_svc.families.gpu.window.rules import SimtWindow
from roller_svc.families.gpu.window.workload import is_windowed
from roller_svc.families.matching import Units, units_for
from roller_svc.fusion.split.reduction import may_split
from roller_svc.ir.constraints import NO_DEMANDS, Demands
from roller_svc.ir.estimate import Candidate, Construction, Roof
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, Family, HardwareSpec, UnitKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.common import launching_s
from roller_svc.perf.footprint import Footprints, Tile
from roller_svc.perf.model import Model, Timed
from roller_svc.perf.roofline import roofline
from roller_svc.perf.workload import Problem, problem

LIMIT = 64
MAX_VISITS = 2000
VISITS_PER_STAGE = 40
ENOUGH = 8  # tiles after which padding need not grow
EVENED = 6  # tiles of a matrix unit whose sides are evened
FASTEST = 2 / 3  # of the tiles of a matrix unit that are priced: the others are there in case the promise is wrong
SHRUNK = 3  # tiles that scale-out starts from
MATRIX_RULES = (MmaContraction, WgmmaContraction)
RANKED = 36  # rPrograms that `rank` puts before the model
RANKED_MATRIX = 40  # the same of a matrix unit, whose tiles differ in stages too
# Units that are so near each other by the model are a tie, which the one of the higher rate wins: of small contractions
# most of the time is launching and latency, and what is assumed of those moves estimates by more.
TIE = 0.05


class Shape(NamedTuple):
    """The tiles of an rProgram before they have names."""

    block: Tile
    base: Base
    split_k: int = 1
    pipeline: Pipeline = PLAIN


def construct(group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit, limit: int = LIMIT) -> Construction:
    """Aligned rPrograms of a group, unranked, and how they were found (ROLLER, OSDI 2022, §3)."""
    return _construct(group, prepared(group, hw, unit), limit)


def rank(
    group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit, top_k: int
) -> tuple[tuple[Candidate, ...], Construction]:
    """The `top_k` rPrograms that the performance model puts first, best first, and the construction they are from."""
    p = prepared(group, hw, unit)
    construction = _construct(group, p, _limit(unit))
    model = Model(p)
    none = Handicaps({unit.name: 1.0})
    timed = [model.timed(program) for program in construction.programs]
    return none.candidates(none.fastest(top_k, timed)), construction


def rank_units(
    group: KernelGroup, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS,
    footprints: Footprints | None = None,
) -> tuple[tuple[Candidate, ...], Construction]:  # fmt: skip
    """`rank` over all units that may compute the group, their constructions put together. Where there are several
    units, or readings of the group, more than `top_k` come: behind those the best of each that has none among them, as
    far as it was constructed. `footprints`: what is known of the program's spaces from other devices; grows."""
    footprints = {} if footprints is None else footprints
    units = units_for(group, hw, demands)
    handicaps = _handicaps(units)
    best: list[Timed] = []
    heads: list[Timed] = []
    found: list[Construction] = []
    wanted: list[Demanded] = []
    failures: list[NoCandidateError] = []
    roofs: list[tuple[Roof, ...]] = []
    for unit, view in readings(group, hw, units):
        p = prepared(view, hw, unit, footprints)
        roofs.append(roofline(p))
        least_s = p.floor_s + launching_s(p.machine, 1)
        if len(best) == top_k and handicaps.ranked_s(best[-1]) <= least_s * handicaps.of_unit[unit.name]:
            continue  # nothing that this unit computes can be among the best
        try:
            construction = _construct(view, p, _limit(unit), varied=bool(demands.tiles))
        except NoCandidateError as failure:
            failures.append(failure)
            continue
        found.append(construction)
        model = Model(p)
        wanted.append(demanded(view, model, construction.programs, demands))
        timed = [model.timed(program) for program in wanted[-1].programs]
        heads += handicaps.fastest(1, timed)
        best = handicaps.fastest(top_k, [*best, *timed])
    if not found:
        raise _with_another_unit(failures[0], group, hw, units)
    if not best:
        raise unmet(group, demands.tiles, wanted)
    candidates = handicaps.candidates([*best, *_absent(heads, best, handicaps)])
    return candidates, _together(found, units.refusals, _lowest(roofs))


@dataclass(frozen=True, slots=True)
class Handicaps:
    """Who wins a tie. `of_unit`: the factor by which each unit's plans have to be the fastest, by its name."""

    of_unit: Mapping[str, float]

    def ranked_s(self, timed: Timed) -> float:
        return timed.seconds * self.of_unit[timed.program.unit.name]

    def fastest(self, count: int, timed: list[Timed]) -> list[Timed]:
        """Of those that the floor makes equal, what the model has below it decides."""
        return nsmallest(count, timed, key=lambda one: (self.ranked_s(one), one.costs.core_s))

    def candidates(self, timed: list[Timed]) -> tuple[Candidate, ...]:
        return tuple(Candidate(t.program, t.estimate(), self.of_unit[t.program.unit.name]) for t in timed)


def _handicaps(units: Units) -> Handicaps:
    highest = max(unit.flops_per_s for unit in units.taken)
    return Handicaps({unit.name: 1.0 if unit.flops_per_s == highest else 1 + TIE for unit in units.taken})


def _absent(heads: list[Timed], best: list[Timed], handicaps: Handicaps) -> list[Timed]:
    """The heads that are not among the best, best first; none where no more than the one best was asked for."""
    known = {id(t) for t in best}
    return handicaps.fastest(len(heads), [t for t in heads if id(t) not in known]) if len(best) > 1 else []


def readings(group: KernelGroup, hw: HardwareSpec, units: Units) -> Iterator[tuple[ComputeUnit, KernelGroup]]:
    """Each unit with the views that it computes: dot products are packed contractions'."""
    for unit in units.taken:
        for view in (group,) if unit.kind is UnitKind.DOT else views(group, hw):
            yield unit, view


def views(group: KernelGroup, hw: HardwareSpec) -> tuple[KernelGroup, ...]:
    """The group, and on a CPU its readings as a convolution."""
    if hw.family is not Family.CPU:
        return (group,)
    return (group, *(replace(group, space=space) for space in convolution_spaces(group)))


def _with_another_unit(
    failure: NoCandidateError, group: KernelGroup, hw: HardwareSpec, units: Units
) -> NoCandidateError:
    """The failure, with what the device's plain unit could do that was not asked for."""
    plain = hw.unit_for(group.space.compute_dtype)
    if plain in units.taken or group.attention is not None:
        return failure
    try:
        (candidate,), _ = rank(group, hw, plain, 1)
    except NoCandidateError:
        return failure
    hint = f"what fits: {tile_text(candidate.program)} on {plain.name}"
    return NoCandidateError(failure.message, rejections=failure.rejections, hint=hint)


def _lowest(rooflines: list[tuple[Roof, ...]]) -> tuple[Roof, ...]:
    """Of several units the arithmetic of the fastest; what memory moves is the same for all."""
    return min(rooflines, key=lambda roofs: roofs[0].seconds)


def _together(found: list[Construction], refusals: tuple[str, ...], roofline: tuple[Roof, ...]) -> Construction:
    rejections: Counter[str] = Counter()
    for construction in found:
        rejections.update(dict(construction.rejections))
    return Construction(
        tuple(p for c in found for p in c.programs), tuple(step for c in found for step in c.trace),
        sum(c.tiles_visited for c in found), tuple(sorted(rejections.items())), refusals, roofline,
    )  # fmt: skip


def _limit(unit: ComputeUnit) -> int:
    return RANKED_MATRIX if unit.is_matrix else RANKED


def prepared(group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit, footprints: Footprints | None = None) -> Problem:
    """What construction and model know of a group on a unit before any tile is chosen."""
    if group.attention is not None:
        return attention_problem(group, hw, unit, footprints)
    is_staged = group.factors is not None and hw.family is not Family.CPU
    p = problem(group.space, hw, unit, all_operands(group) if is_staged else None, footprints)
    if hw.family is not Family.CPU:
        return p
    p = replace(p, planes=plane_space(group), layout=layout_space(group, hw))
    if p.is_contraction:
        return p
    lanes = p.machine.unit.shape[-1]
    return replace(p, passes=passes(group, lanes), operations=p.operations - spared(group, lanes))


def _construct(group: KernelGroup, p: Problem, limit: int, *, varied: bool = False) -> Construction:
    """`varied`: tiles of a matrix unit as different as may be, since those that promise most may not meet a demand."""
    if p.attention is not None:
        groups = p.attention_groups
        by_warps = MmaAttention(p, p.attention)
        return _construct_attention(by_warps if groups is None else WgmmaAttention(p, groups), limit)
    rules = rules_for(group, p, varied=varied)
    matrix = rules if isinstance(rules, MATRIX_RULES) and not varied else None
    log = Log(MAX_VISITS)
    shapes = _regular(rules, limit, log) or _fallback(rules, log)
    if not shapes:
        raise _unfit(group, rules, log)
    splittable = group.kind is not GroupKind.SCATTER and p.planes is None and may_split(group)
    split = [Shape(s.block, s.base, k) for s in shapes for k in splits(p, s.block)] if splittable else []
    if matrix is not None:
        shapes = _promising(matrix, [*shapes, *split], limit // 2)
    elif split:
        shapes = [*spread(shapes, limit - limit // 2), *spread(split, limit // 2)]
    shapes = [
        Shape(s.block, s.base, s.split_k, way) for s in shapes for way in rules.pipelines(s.block, s.base, s.split_k)
    ]
    if group.needs_whole_sums:
        shapes = [s for s in shapes if not s.pipeline.stream_k]
    chosen = shapes[:limit] if matrix is not None else spread(shapes, limit)
    programs = tuple(rprogram_of(p, shape) for shape in dict.fromkeys(chosen))
    return Construction(programs, tuple(log.steps), log.visited, tuple(sorted(log.rejections.items())))


def _construct_attention(rules: MmaAttention | WgmmaAttention, limit: int) -> Construction:
    log = Log(MAX_VISITS)
    programs = tuple(
        rprogram_of(rules.problem, Shape(s.block, s.base, s.parts, Pipeline(s.stages, blocks=s.blocks)))
        for s in rules.shapes(log, VISITS_PER_STAGE, limit)
    )
    if not programs:
        rejections = dict(log.rejections)
        hw = rules.problem.machine.hw
        raise NoCandidateError(
            f"no tile of attention fits {hw.id}: {', '.join(sorted(rejections))}", rejections=rejections
        )
    return Construction(programs, tuple(log.steps), log.visited, tuple(sorted(log.rejections.items())))


def rules_for(group: KernelGroup, p: Problem, *, varied: bool = False) -> Rules:
    """The rules of the group's family on the problem's unit, of a matrix unit perhaps `varied`. NoCandidateError where
    there are none."""
    unit = p.machine.unit
    if unit.takes_fragments and p.is_contraction:
        return MmaContraction(p, varied)
    if unit.kind is UnitKind.WGMMA and p.is_contraction:
        return WgmmaContraction(p, varied)
    if unit.is_matrix:
        raise NoCandidateError(
            f"{unit.name} of {p.machine.hw.id}: no rules for a {group.kind.value} on units of kind {unit.kind.value}",
            rejections={"unit kind": 1},
        )
    if p.machine.simt:
        if p.is_contraction:
            return SimtContraction(p)
        if p.map is not None:
            return SimtMap(p, p.map)
        if p.windows is not None and is_windowed(group):
            return SimtWindow(p, p.windows)
        if p.rows is not None:
            return SimtReduction(p, p.rows)
        return SimtNest(p)
    if p.image is not None:
        return CpuConvolution(p, p.image)
    if p.is_contraction:
        return CpuContraction(p)
    if p.planes is not None:
        return cpu_window(p, p.planes)
    if p.layout is not None:
        return cpu_layout(p, p.layout)
    return cpu_nest(p, serial=group.kind is GroupKind.SCATTER)


def _regular(rules: Rules, limit: int, log: Log) -> list[Shape]:
    """Scale-up, again with a looser bound on padding until there are enough tiles; then scale-out."""
    bases = _bases(rules, log)
    # of a matrix unit's tiles all: which of them are priced is chosen later
    share = VISITS_PER_STAGE if isinstance(rules, MATRIX_RULES) else max(4, limit * 3 // 4 // max(1, len(bases)))
    found: dict[Base, list[Tile]] = {}
    steps: dict[Base, tuple[Tile, ...]] = {}
    looks: dict[Base, dict[Tile, Look]] = {base: {} for base in bases}  # they do not depend on the bound
    for epsilon in EPSILONS:
        for base in bases:
            stage = rules.block_stage(base, epsilon)
            if steps.get(base) != stage.steps:
                steps[base] = stage.steps
                grown = scale_up(stage, log, VISITS_PER_STAGE, looks[base])
                found[base] = spread(grown.large or grown.border, share)
        if sum(map(len, found.values())) >= ENOUGH or log.visited >= log.budget:
            break
    shapes = [Shape(tile, base) for base, tiles in found.items() for tile in tiles]
    return list(dict.fromkeys([*shapes, *_smaller(rules, shapes, log)]))


def _promising(rules: MmaContraction | WgmmaContraction, shapes: list[Shape], most: int) -> list[Shape]:
    """The shapes that look fastest, those with evened sides among them, and some of the others, evenly."""
    p, granules = rules.problem, rules.granules()

    def cycles(shape: Shape) -> float:
        return rules.promised_cycles(shape.block, shape.base, shape.split_k)

    few = [s for s in shapes if s.split_k == 1 and fills_few_waves(p, s.block)]
    other = [tile for s in nsmallest(EVENED, few, key=cycles) for tile in evened(p, s.block, s.base, granules)]
    looks = [(Shape(block, base), rules.look(block, base)) for block, base in other]
    legal = [shape for shape, look in looks if not look.too_large and not look.misaligned]
    order = sorted(dict.fromkeys([*shapes, *legal]), key=cycles)
    first = round(FASTEST * most)
    return [*order[:first], *spread(order[first:], most - first)]


def _smaller(rules: Rules, shapes: list[Shape], log: Log) -> list[Shape]:
    """Scale-out of the tiles that leave cores without work. A CPU's steps are cuts of the axes and leave none."""
    if not rules.problem.machine.simt:
        return []
    cores = rules.problem.machine.cores
    idle = [s for s in shapes if spatial_grid(rules.problem, s.block) < cores]
    smaller = []
    for shape in spread(idle, SHRUNK):
        # the last that leaves cores idle, and the first that does not
        smaller += [Shape(block, base) for block, base in [*shrink(rules, shape.block, shape.base, log)][-2:]]
    return smaller


def _bases(rules: Rules, log: Log) -> list[Base]:
    bases = []
    for lanes in rules.lane_choices():
        grown = scale_up(rules.thread_stage(lanes), log, VISITS_PER_STAGE)
        bases += [Base(thread, lanes) for thread in rules.preferred(grown, lanes)]
    return bases


def _fallback(rules: Rules, log: Log) -> list[Shape]:
    shapes = []
    for block, base in rules.fallback():
        log.visited += 1
        if rule := rules.look(block, base).too_large:
            log.rejections[rule] = log.rejections.get(rule, 0) + 1
        else:
            shapes.append(Shape(block, base))
    return shapes


def _unfit(group: KernelGroup, rules: Rules, log: Log) -> NoCandidateError:
    """By how much the smallest tile is over which limits."""
    p = rules.problem
    said = ", ".join(sorted(log.rejections))
    least = LEAST_STAGES if p.machine.unit.is_matrix else PLAIN.stages
    for block, base in rules.fallback():
        smallest = rprogram_of(p, Shape(block, base, pipeline=Pipeline(least)))
        needs = Model(p).needs(smallest)
        if over := overruns(needs, p.machine.hw) if needs is not None else ():
            said = f"{tile_text(smallest)} on {p.machine.unit.name} takes {' and '.join(over)}"
    return NoCandidateError(
        f"no tile of {group.name} fits {p.machine.hw.id}: {said}", rejections=dict(log.rejections),
        hint="the device's limits leave no room for a single warp or vector of work",
    )  # fmt: skip


def rprogram_of(p: Problem, shape: Shape) -> RProgram:
    """The same tiles with names."""
    touched = p.touched
    block, thread = touched.rtile(shape.block), touched.rtile(shape.base.thread)
    way = shape.pipeline
    return RProgram(
        p.space, p.machine.unit, block, thread, shape.base.lanes, shape.split_k, way.stages, way.raster, way.stream_k,
        way.streamed, way.blocks, way.cluster,
    )  # fmt: skip
