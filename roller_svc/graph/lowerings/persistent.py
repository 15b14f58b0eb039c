"""Persistent kernels: cooperative launches whose blocks execute many operators and wait for events in between.

Steps that cannot be rTasks are launches of their own. Those between them are executed by launches of one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from roller_svc.codegen.cuda.persistent import PersistentRun, build_launches, prefetches_rows
from roller_svc.codegen.cuda.ring import PageUse, Ring
from roller_svc.codegen.cuda.task_kernel import TaskKernel
from roller_svc.errors import InvariantError, require
from roller_svc.graph.lowerings.joined import (
    NOT_JOINABLE_CODE,
    TOO_LARGE_CODE,
    find_hungriest,
    find_refusal,
    find_step_refusal,
    join_steps,
    occupancy_factors,
    page_use_of,
    refuse_device,
    refuse_number,
    ring_of,
    run_kernel,
    table_seconds,
)
from roller_svc.graph.lowerings.lowering import (
    LoadTasks,
    Lowering,
    LoweringEstimate,
    Refusal,
    RingEstimate,
    UnrolledPlan,
    count_operations,
    kernel_seconds,
    launch_seconds,
    moved_bytes,
    step_seconds,
)
from roller_svc.graph.lowerings.segments import cut_into_segments
from roller_svc.graph.memory import align
from roller_svc.graph.rammer.ranges import add_streams, schedule_by_ranges
from roller_svc.graph.rammer.wavefront import find_waves
from roller_svc.graph.weights import Weights
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.model_plan import ARENA, Address, KernelStep, ModelPlan, Step
from roller_svc.ir.vdevice import VDevicePlan, executes

KIND = "persistent"
BLOCKS_PER_CORE = 1
TOO_HUNGRY = "its block has too many registers with those of others"
OPERATIONS = 2  # of a launch: the fill of its events with zeros comes before it


@dataclass(frozen=True, slots=True)
class _Segment:
    """Steps with the seconds of a call that they take."""

    part: UnrolledPlan
    steps: tuple[int, ...]
    is_joined: bool
    seconds: float
    streamed: frozenset[int] = frozenset()  # those whose weights stream, by their number in the part
    ring: RingEstimate | None = None


def refuse(hw: HardwareSpec) -> Refusal | None:
    """Return why a device cannot run persistent kernels; None if it can."""
    limits = hw.limits
    if limits.cooperative_launch_s is None or limits.signal_s is None or limits.wait_s is None:
        return refuse_device(hw) or Refusal(f"limits of {hw.id} have no cooperative_launch_s, signal_s or wait_s")
    return refuse_device(hw)


def estimate(unrolled: UnrolledPlan, hw: HardwareSpec) -> LoweringEstimate | Refusal:
    """Return the seconds of a call: of the launches of the kernel, and of the steps that cannot join.

    Operators of a wave count one after the other: how well they share a device is not modelled.
    """
    segments = _cut(unrolled, hw)
    if isinstance(segments, Refusal):
        return segments
    operations = sum(OPERATIONS if each.is_joined else count_operations(each.part) for each in segments)
    rings = [each.ring for each in segments if each.ring is not None]
    ring = None
    if rings:
        streamed, hidden_s = sum(each.streamed_bytes for each in rings), sum(each.hidden_s for each in rings)
        ring = replace(rings[0], streamed_bytes=streamed, hidden_s=hidden_s)
    return LoweringEstimate(sum(each.seconds for each in segments), operations, ring)


def find_joined_steps(unrolled: UnrolledPlan, hw: HardwareSpec) -> list[int]:
    """Return the steps that launches of the kernel execute; none if it cannot run the plan."""
    segments = _cut(unrolled, hw)
    return [] if isinstance(segments, Refusal) else [step for each in segments if each.is_joined for step in each.steps]


def _cut(unrolled: UnrolledPlan, hw: HardwareSpec) -> tuple[_Segment, ...] | Refusal:
    """Return the segments of a call, of which at least one is joined, or why none can be.

    Where no core holds a block with the registers of all, the kernels that need most of them are launches, too.
    A segment whose launches cost less than joining it stays launches. If that holds for all, all are joined: the seconds
    of this lowering then tell that another one is better.
    """
    refusals = [find_step_refusal(unrolled, step) for step in unrolled.steps]
    segments = _cut_at(unrolled, refusals, hw)
    too_large = segments
    while isinstance(segments, Refusal) and segments.code == TOO_LARGE_CODE:
        hungriest = find_hungriest(unrolled.select([number for number, refused in enumerate(refusals) if refused is None]))
        if hungriest is None:
            return too_large
        for number, step in enumerate(unrolled.steps):
            if isinstance(step, KernelStep) and step.kernel == hungriest:
                refusals[number] = TOO_HUNGRY
        segments = _cut_at(unrolled, refusals, hw)
    return too_large if isinstance(segments, Refusal) else segments


def _cut_at(unrolled: UnrolledPlan, refusals: Sequence[str | None], hw: HardwareSpec) -> tuple[_Segment, ...] | Refusal:
    """Return the segments of a call around the steps that are refused."""
    joins = [refused is None for refused in refusals]
    too_many = refuse_number(sum(joins)) if any(joins) else None  # before the work that grows with them
    if too_many is not None:
        return too_many
    cut = cut_into_segments(unrolled.predecessors, joins)
    joined = [number for segment in cut if segment.is_joined for number in segment.steps]
    if not joined:
        alone = [f", and {step.node!r} cannot: {why}" for step, why in zip(unrolled.steps, refusals, strict=True) if why]
        reason = "no two operations of a call can join in one kernel before or behind the same launches"
        return Refusal(reason + "".join(alone[:1]), NOT_JOINABLE_CODE)
    selected = unrolled.select(joined)
    refused = find_refusal(selected, hw)
    if refused is not None:
        return refused
    ring = ring_of(selected, hw)
    factors = dict(zip(joined, occupancy_factors(selected, hw, BLOCKS_PER_CORE, ring), strict=True))
    segments: list[_Segment] = []
    for each in cut:
        part = unrolled.select(each.steps)
        if each.is_joined:
            segments.append(_join(part, each.steps, [factors[step] for step in each.steps], ring, hw))
        else:
            segments.append(_Segment(part, each.steps, each.is_joined, launch_seconds(part, hw)))
    better = [
        replace(each, is_joined=False, ring=None, seconds=min(each.seconds, launch_seconds(each.part, hw))) for each in segments
    ]
    chosen = [one if one.seconds <= other.seconds else other for one, other in zip(segments, better, strict=True)]
    return tuple(chosen if any(each.is_joined for each in chosen) else segments)


def _join(part: UnrolledPlan, steps: tuple[int, ...], factors: Sequence[float], ring: Ring | None, hw: HardwareSpec) -> _Segment:
    """Return a segment that is one launch with one block a core: its work, and what comes before each wave."""
    cooperative_s = require(hw.limits.cooperative_launch_s, "limits.cooperative_launch_s")
    waves = find_waves(part.predecessors)
    waits = [table_seconds(1, hw), *(len(waves) - 1) * [gap_seconds(hw)]]
    seconds = kernel_seconds(part, hw, factors) + sum(waits)
    seconds += cooperative_s + hw.limits.launch_overhead_s  # the fill of the events with zeros
    if ring is None:
        return _Segment(part, steps, is_joined=True, seconds=seconds)
    uses = {number: use for number, step in enumerate(part.steps) if (use := page_use_of(part, step)) is not None}
    streams = [_wave_stream(part, wave, uses, hw) for wave in waves]
    hidden_s = hidden_seconds(streams, waits, ring.bytes * hw.num_cores, hw.levels[0].bandwidth_bytes_per_s)
    gained = RingEstimate(ring.pages, ring.page_bytes, sum(use.bytes for use in uses.values()), hidden_s) if uses else None
    return _Segment(part, steps, is_joined=True, seconds=seconds - hidden_s, streamed=frozenset(uses), ring=gained)


def gap_seconds(hw: HardwareSpec) -> float:
    """Return the seconds from the end of a wave to the start of the next one.

    The row of its first rTask is in shared memory, and its arguments arrive meanwhile. A device that cannot copy ahead
    then waits for both.
    """
    limits = hw.limits
    signal_s, wait_s = (require(each, "time in the limits of a device") for each in (limits.signal_s, limits.wait_s))
    if prefetches_rows(hw.arch):
        return max(signal_s + wait_s, hw.levels[0].latency_s)
    return signal_s + wait_s + table_seconds(1, hw)


class WaveStream(NamedTuple):
    """The bytes that a wave streams, and how long it leaves memory idle."""

    bytes: int
    saved_s: float  # that it takes less if they are there when it begins
    idle_s: float = 0.0  # of memory, if nothing is there when the wave begins


def _wave_stream(part: UnrolledPlan, wave: Sequence[int], uses: Mapping[int, PageUse], hw: HardwareSpec) -> WaveStream:
    seconds = {number: step_seconds(part, part.steps[number], hw) for number in wave}
    streamed = [number for number in wave if number in uses]
    saved_s = sum(max(0.0, seconds[number] - uses[number].busy_s) for number in streamed)
    moved = sum(moved_bytes(part, part.steps[number]) for number in wave)
    idle_s = max(0.0, sum(seconds.values()) - moved / hw.levels[0].bandwidth_bytes_per_s)
    return WaveStream(sum(uses[number].bytes for number in streamed), saved_s, idle_s)


def hidden_seconds(streams: Sequence[WaveStream], waits: Sequence[float], ring_bytes: float, bytes_per_s: float) -> float:
    """Return the seconds that waves take less because weights have arrived before them.

    The warp that fills a ring never waits for a wave: it fetches whenever memory moves nothing else, and a page is free.

    Args:
        streams: what each wave streams.
        waits: the seconds before each wave.
        ring_bytes: what the rings of all cores hold.
        bytes_per_s: the rate of memory.
    """
    fetched = hidden_s = 0.0
    coming = sum(each.bytes for each in streams)
    for own, wait_s in zip(streams, waits, strict=True):
        fetched = min(fetched + wait_s * bytes_per_s, ring_bytes, coming)
        gained_s = min(min(fetched, own.bytes) / bytes_per_s, own.saved_s)
        hidden_s += gained_s
        coming -= own.bytes
        fetched = min(fetched + (own.idle_s - gained_s) * bytes_per_s, ring_bytes, coming)
    return hidden_s


def build(unrolled: UnrolledPlan, hw: HardwareSpec, load_tasks: LoadTasks, weights: Weights, _: float) -> ModelPlan:
    """Return the plan with a launch of the kernel for each joined segment.

    The events of the launches lie behind the arena, and are zero before each call. The steps as they were are the
    fallback of a device that holds fewer blocks at once.
    """
    segments = _cut(unrolled, hw)
    if isinstance(segments, Refusal):
        raise InvariantError(f"a plan that is refused is built: {segments.reason}")
    joined = [each for each in segments if each.is_joined]
    operators = join_steps(unrolled.select([step for each in joined for step in each.steps]), load_tasks)
    runs: list[PersistentRun] = []
    first = 0
    for each in joined:
        own = operators.operators[first : first + len(each.steps)]
        device = _schedule(each.part, [operator.function.tasks for operator in own], hw)
        device = add_streams(device, each.streamed)
        runs.append(PersistentRun(own, each.part.predecessors, device))
        first += len(own)
    kernel = _with_zeroed_states(build_launches("roller_persistent", runs, operators.slots, hw))
    events: dict[str, Address] = {}
    end = align(unrolled.plan.arena_bytes)
    for state in kernel.states:
        events[state.symbol] = Address(ARENA, end)
        end += align(state.bytes)
    nodes = [", ".join(dict.fromkeys(step.node for step in each.part.steps)) for each in joined]
    joined_s = sum(each.seconds for each in joined)
    plan = run_kernel(unrolled.plan, kernel, operators, nodes, joined_s, weights, events)
    steps: list[Step] = []
    launches = iter(zip(plan.steps, kernel.states, runs, strict=True))
    for each in segments:
        if not each.is_joined:
            steps += each.part.steps
            continue
        step, state, run = next(launches)
        if not isinstance(step, KernelStep):
            raise InvariantError(f"{step.node} is not a launch of the kernel")
        arrivals = _nodes_of_events(each.part, run.plan)
        steps.append(replace(step, zeroed=((events[state.symbol], state.bytes),), events=arrivals))
    return replace(plan, steps=tuple(steps), fallback=unrolled.plan.steps, arena_bytes=end)


def _with_zeroed_states(kernel: TaskKernel) -> TaskKernel:
    """Return the kernel whose events are zero before each launch."""
    launches = kernel.source.launches
    zeroed = tuple(replace(launch, zeroed=(state.symbol,)) for launch, state in zip(launches, kernel.states, strict=True))
    return replace(kernel, source=replace(kernel.source, launches=zeroed))


def _schedule(part: UnrolledPlan, tasks: Sequence[int], hw: HardwareSpec) -> VDevicePlan:
    task_s = [step_seconds(part, step, hw) / count for step, count in zip(part.steps, tasks, strict=True)]
    return schedule_by_ranges(tasks, part.predecessors, BLOCKS_PER_CORE * hw.num_cores, task_s)


def _nodes_of_events(part: UnrolledPlan, device: VDevicePlan) -> tuple[str, ...]:
    """Return the node whose rTasks arrive at each event."""
    found = {each.arrives: each.operator for _, _, each in executes(device) if each.arrives is not None}
    return tuple(part.steps[found[event]].node for event in range(len(device.events)))


PERSISTENT = Lowering(KIND, refuse, estimate, build, is_partial=True)
