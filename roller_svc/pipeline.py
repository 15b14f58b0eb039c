"""READ FIRST. Text and a device in, the fastest kernel we can make out: all stages are strung together here.

    parse → partition → (construct → estimate) a group → plans → (lower → emit → compile → measure) a plan → report
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roller_svc import hardware
from roller_svc.backends import Backend, backend_for
from roller_svc.codegen.kernel import Part, emit, tensors_in_memory, with_program_indices
from roller_svc.construct import rank, rank_units
from roller_svc.construct.partition import partition, stored_types
from roller_svc.construct.row_reduction import column_tiles, joined_after, stored_first
from roller_svc.construct.split import may_split, split_group
from roller_svc.errors import BuildError, ToolchainMissingError
from roller_svc.front import parse
from roller_svc.ir import printer
from roller_svc.ir.demands import NO_DEMANDS, Demands
from roller_svc.ir.estimate import Candidate, Construction
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Attempt, BuildReport, BuildRequest, Plan, RuntimeChoice, Select
from roller_svc.ir.rprogram import RProgram
from roller_svc.lang.inputs import random_inputs
from roller_svc.lower import lower
from roller_svc.perf.stream_k import partial_tiles
from roller_svc.runtime.measure import measure
from roller_svc.toolchain import availability, compile_source

T = TypeVar("T")
Trace = Callable[[str, Any], Any]
Inputs = tuple[tuple[str, TensorType], ...]

# Plans beyond top_k that are built only where the ones before them fail to compile or spill registers.
SPARE_PLANS = 3
# One candidate's share of measuring; the first few samples already reject what is far behind.
MEASURE_BUDGET_S = 0.1


def silent(_: str, value: T) -> T:
    """A trace that watches nothing."""
    return value


def build_kernel(request: BuildRequest, trace: Trace = silent) -> BuildReport:
    """The whole way. Raises InputError for what the caller did wrong, BuildError where no plan could be built."""
    clock = _Clock()
    program: TensorProgram = trace("parse", parse(request.expression, dict(request.inputs), request.outputs))
    clock.lap("parse")
    hw: HardwareSpec = trace("hardware", request.hardware or hardware.load(request.target))
    clock.lap("hardware")
    groups, ranked, constructions = ranked_groups(program, hw, request.top_k + SPARE_PLANS, request.demands)
    trace("construct", constructions)
    plans = best_plans(ranked, request.top_k + SPARE_PLANS)
    shortlist: tuple[Plan, ...] = trace("shortlist", plans[: request.top_k])
    clock.lap("construct")
    backend = _available_backend(request, hw)
    measuring, notes = _may_measure(request, hw, backend)
    if measuring:
        attempts = _built_together(shortlist, program, groups, hw)
    else:
        attempts = _first_built(plans, program, groups, hw)
    clock.lap("compile")
    if measuring:
        attempts = _measured(attempts, program, backend)
        clock.lap("measure")
    attempts = _best_first(attempts, shortlist)
    if attempts[0].error is not None:
        raise attempts[0].error
    notes = (*notes, *_unit_notes(groups, constructions))
    report = BuildReport(request, program, hw, groups, constructions, attempts, notes, clock.laps)
    trace("report", report)
    return report


def estimate_program(
    expression: str, inputs: Inputs, spec: HardwareSpec, outputs: tuple[str, ...] | None = None, top_k: int = 1,
    demands: Demands = NO_DEMANDS,
) -> tuple[Plan, ...]:  # fmt: skip
    """What the model says of the best plans, best first. Builds nothing, opens no device."""
    return estimate_checked(parse(expression, dict(inputs), outputs), spec, top_k, demands)


def estimate_checked(
    program: TensorProgram, spec: HardwareSpec, top_k: int = 1, demands: Demands = NO_DEMANDS
) -> tuple[Plan, ...]:
    """The same for a program that is parsed already."""
    _, ranked, _ = ranked_groups(program, spec, top_k, demands)
    return best_plans(ranked, top_k)


def ranked_groups(
    program: TensorProgram, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS
) -> tuple[tuple[KernelGroup, ...], tuple[tuple[Candidate, ...], ...], tuple[Construction, ...]]:
    """Kernel groups, for each its candidates best first, and how they were constructed."""
    groups = partition(program, hw)
    addressed = [g for g in groups if g.kind is GroupKind.CONTRACTION] or groups
    others = Demands(demands.allow_tf32)
    found = [rank_units(group, hw, top_k, demands if group in addressed else others) for group in groups]
    return groups, tuple(candidates for candidates, _ in found), tuple(construction for _, construction in found)


def _unit_notes(groups: tuple[KernelGroup, ...], constructions: tuple[Construction, ...]) -> tuple[str, ...]:
    """Of each contraction that none of the device's matrix units takes, why."""
    return tuple(
        f"{group.name} is not on a matrix unit: {'; '.join(construction.refusals)}"
        for group, construction in zip(groups, constructions, strict=True)
        if construction.refusals and all(p.unit.kind is not UnitKind.MMA for p in construction.programs)
    )


def best_plans(ranked: tuple[tuple[Candidate, ...], ...], top_k: int) -> tuple[Plan, ...]:
    """The `top_k` least sums of one candidate a group, best first."""

    def seconds(at: tuple[int, ...]) -> float:
        return sum(candidates[i].estimate.seconds for candidates, i in zip(ranked, at, strict=True))

    first = (0,) * len(ranked)
    heap, seen = [(seconds(first), first)], {first}
    plans: list[Plan] = []
    while heap and len(plans) < top_k:
        _, at = heapq.heappop(heap)
        plans.append(Plan(tuple(candidates[i] for candidates, i in zip(ranked, at, strict=True))))
        for g, candidates in enumerate(ranked):
            following = (*at[:g], at[g] + 1, *at[g + 1 :])
            if following[g] < len(candidates) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (seconds(following), following))
    return tuple(plans)


def generate(plan: Plan, program: TensorProgram, groups: tuple[KernelGroup, ...], hw: HardwareSpec) -> KernelSource:
    """Kernel text of a plan: every group lowered, split reductions taken apart, one source for all launches."""
    parts: list[Part] = []
    workspace: list[tuple[str, TensorType]] = []
    types = stored_types(program)
    for group, choice in zip(groups, plan.choices, strict=True):
        for piece, tiles, extra in _pieces(group, choice.program, hw):
            views = (*piece.inputs, *piece.stored)
            parts.append(Part(lower(piece, tiles, hw), views))
            workspace += [*((t, types[t]) for t, _ in views if t in types), *extra]
    buffers = tensors_in_memory(program, types, workspace)
    source = emit("kernel", tuple(parts), buffers, hw, _header(plan, program, hw))
    return with_program_indices(source, program)


# A kernel group as it is lowered, with its tiles and the workspace that the program does not name.
Piece = tuple[KernelGroup, RProgram, tuple[tuple[str, TensorType], ...]]


def _pieces(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[Piece]:
    """The group as it is, with room for partial tiles where its steps are streamed, or its halves where its reduction
    is split."""
    if group.row_reduction is not None:
        yield from _row_pieces(group, program, hw)
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


def _row_pieces(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[Piece]:
    """A contraction whose rows are reduced: at once, where one tile has all of a row; else in two launches."""
    tiles, on_matrix_unit = column_tiles(program), program.unit.kind is UnitKind.MMA
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
    """What the kernel is, for whoever reads its text."""
    estimate = plan.estimate
    lines = [printer.text(program), f"target: {hw.id} ({hw.name}, {hw.arch})"]
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


def _available_backend(request: BuildRequest, hw: HardwareSpec) -> Backend:
    """The device's back end, once something compiles for it here; else an error that says what is missing.

    The emulator takes the text: it does without.
    """
    backend = backend_for(hw)
    found = availability(hw)
    if not found.ok and request.runtime is not RuntimeChoice.EMULATOR:
        raise ToolchainMissingError(found.reason)
    return backend


def _may_measure(request: BuildRequest, hw: HardwareSpec, backend: Backend) -> tuple[bool, tuple[str, ...]]:
    """Whether candidates can be timed; where they were to be and cannot, a note that says why."""
    if request.select is Select.MODEL:
        return False, ()
    if not backend.present(hw):
        return False, (f"nothing was measured: there is no {hw.id} here, the model chose",)
    return True, ()


def _built(plan: Plan, program: TensorProgram, groups: tuple[KernelGroup, ...], hw: HardwareSpec) -> Attempt:
    source = generate(plan, program, groups, hw)
    found = availability(hw)
    if not found.ok:
        unknown = tuple(Resources() for _ in source.launches)
        return Attempt(plan, source, CompiledKernel(source, b"", f"not compiled: {found.reason}", unknown), None, None)
    try:
        return Attempt(plan, source, compile_source(source), None, None)
    except BuildError as failure:
        return Attempt(plan, source, None, None, failure)


def _built_together(
    plans: tuple[Plan, ...], program: TensorProgram, groups: tuple[KernelGroup, ...], hw: HardwareSpec
) -> tuple[Attempt, ...]:
    """All plans; compilers are processes, so that threads suffice to keep the cores busy."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return tuple(pool.map(lambda plan: _built(plan, program, groups, hw), plans))


def _first_built(
    plans: tuple[Plan, ...], program: TensorProgram, groups: tuple[KernelGroup, ...], hw: HardwareSpec
) -> tuple[Attempt, ...]:
    """The first plan that builds without spilling registers, and the ones before it that did not."""
    attempts: list[Attempt] = []
    for plan in plans:
        attempts.append(_built(plan, program, groups, hw))
        if attempts[-1].error is None and not _spills(attempts[-1]):
            break
    return tuple(attempts)


def _spills(attempt: Attempt) -> int:
    """Bytes of registers that its launches keep in memory: a reason to prefer the next plan."""
    return sum(r.spill_bytes for r in attempt.compiled.resources) if attempt.compiled else 0


def _measured(attempts: tuple[Attempt, ...], program: TensorProgram, backend: Backend) -> tuple[Attempt, ...]:
    """Every plan that built, timed on the same random inputs; the best time so far cuts the slower ones short."""
    arrays = backend.place(random_inputs(program, seed=0))
    best_s: float | None = None
    timed: list[Attempt] = []
    for attempt in attempts:
        if attempt.compiled is None:
            timed.append(attempt)
            continue
        try:
            found = measure(backend.load(attempt.compiled).bound(arrays), MEASURE_BUDGET_S, best_s=best_s)
        except BuildError as failure:
            timed.append(Attempt(attempt.plan, attempt.source, attempt.compiled, None, failure))
            continue
        best_s = found.min_s if best_s is None else min(best_s, found.min_s)
        timed.append(Attempt(attempt.plan, attempt.source, attempt.compiled, found, None))
    return tuple(timed)


def _best_first(attempts: tuple[Attempt, ...], plans: tuple[Plan, ...]) -> tuple[Attempt, ...]:
    """By measured time, then by estimate, spilling and failed ones last; unbuilt plans stand behind built ones."""

    def order(attempt: Attempt) -> tuple[bool, bool, bool, float]:
        timed = attempt.measurement
        seconds = timed.min_s if timed else attempt.plan.estimate.seconds
        spilled = timed is None and _spills(attempt) > 0
        return attempt.error is not None, attempt.compiled is None, spilled, seconds

    tried = {id(a.plan) for a in attempts}
    rest = (Attempt(plan, None, None, None, None) for plan in plans if id(plan) not in tried)
    return tuple(sorted((*attempts, *rest), key=order))


@dataclass(slots=True)
class _Clock:
    """Seconds of each stage."""

    last: float = field(default_factory=time.perf_counter)
    laps: tuple[tuple[str, float], ...] = ()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps = (*self.laps, (stage, now - self.last))
        self.last = now

