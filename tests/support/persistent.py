"""Small graphs as one persistent kernel, for the tests of it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from emulator_support import module

from roller_svc import hardware
from roller_svc.codegen.cuda.instructions import HOPPER
from roller_svc.codegen.cuda.persistent import BLOCK_BARRIER, build_persistent
from roller_svc.codegen.cuda.task_kernel import TaskKernel, TaskOperator
from roller_svc.compiler.lower_and_emit import emit_plan_tasks
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.compiler.rank import MAX_PROGRAMS
from roller_svc.errors import InvariantError
from roller_svc.frontend.parse import parse
from roller_svc.graph.rammer.ranges import add_streams, schedule_by_ranges
from roller_svc.ir.constraints import NO_CONSTRAINTS, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.event_state import EVENT_WORDS
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Role
from roller_svc.ir.model_plan import Address
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import VDevicePlan
from roller_svc.semantics.interpreter import reference
from roller_svc.toolchain.binaries import sass

ALIGNMENT_BYTES = 256
ARENA = 0
STREAMED = "ring_claim(ring_page_"  # in the text of a product whose matrix streams, once
TOP_K = 20  # candidates, of which the first one is taken that can be rTasks
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Node:
    """One expression. Its inputs are inputs of the graph, or outputs of earlier nodes."""

    expression: str
    inputs: Mapping[str, str]  # the expression's name → the graph's name
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Built:
    """A graph as operators, and all that its kernel is made of."""

    operators: tuple[TaskOperator, ...]
    predecessors: tuple[tuple[int, ...], ...]
    slots: tuple[Buffer, ...]
    hw: HardwareSpec
    name: str = "model"

    def plan(self, num_veus: int | None = None) -> VDevicePlan:
        tasks = [each.function.tasks for each in self.operators]
        return schedule_by_ranges(tasks, self.predecessors, num_veus or self.hw.num_cores)

    def streamed_plan(self, num_veus: int | None = None) -> VDevicePlan:
        """Return the plan whose rTasks stream, where they can."""
        return add_streams(self.plan(num_veus), [i for i, each in enumerate(self.operators) if each.function.stream is not None])

    def kernel(self, plan: VDevicePlan | None = None) -> TaskKernel:
        return build_persistent(self.name, self.operators, self.predecessors, plan or self.plan(), self.slots, self.hw)


def spec(target: str, cores: int = 8) -> HardwareSpec:
    """Return a device with few cores: the emulator runs all blocks of a launch together."""
    return dataclasses.replace(hardware.load(target), num_cores=cores)


def build_graph(
    nodes: Sequence[Node],
    inputs: Mapping[str, TensorType],
    outputs: Sequence[str],
    hw: HardwareSpec,
    top_k: int = TOP_K,
    *,
    streams: bool = False,
) -> Built:
    """Return the operators of a graph. Tensors between nodes and workspaces have memory of their own in an arena.

    `streams`: products of few rows stream their matrix in small pages, by at most one rTask a core.
    """
    types = dict(inputs)
    slots = [Buffer("arena", "arena", Role.WORKSPACE, DType.UINT8, (0,))]
    at: dict[str, Address] = {}
    for name, type_ in inputs.items():
        at[name] = Address(len(slots))
        slots.append(Buffer(name, f"input_{name}", Role.INPUT, type_.dtype, type_.shape))
    operators: list[TaskOperator] = []
    predecessors: list[tuple[int, ...]] = []
    last: dict[str, int] = {}  # tensor → the last operator that writes it
    end = 0
    for number, node in enumerate(nodes):
        program = parse(node.expression, {key: types[name] for key, name in node.inputs.items()}, list(node.outputs))
        tasks, buffers = tasks_of(program, hw, sum(len(each.function.checks) for each in operators), top_k, streams=streams)
        names = {}
        for buffer in buffers:
            key = {Role.INPUT: node.inputs, Role.OUTPUT: node.outputs}.get(buffer.role, {}).get(buffer.name)
            name = key or f"{number}.{buffer.name}"
            names[buffer.symbol] = name
            if name in at:
                continue
            types[name] = TensorType(buffer.dtype, buffer.shape)
            if name in outputs:
                at[name] = Address(len(slots))
                slots.append(Buffer(name, f"output_{name}", Role.OUTPUT, buffer.dtype, buffer.shape))
            else:
                at[name] = Address(ARENA, end)
                end += -(-buffer.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for launch in tasks:
            used = [names[buffer.symbol] for buffer in launch.args]
            predecessors.append(tuple(sorted({last[name] for name in used if name in last})))
            for buffer, name in zip(launch.args, used, strict=True):
                if buffer.role is not Role.INPUT:
                    last[name] = len(operators)
            operators.append(TaskOperator(launch.function, tuple(at[name] for name in used)))
    slots[ARENA] = dataclasses.replace(slots[ARENA], shape=(max(end, ALIGNMENT_BYTES),))
    return Built(tuple(operators), tuple(predecessors), tuple(slots), hw)


def tasks_of(program: Any, hw: HardwareSpec, first_check: int = 0, top_k: int = TOP_K, *, streams: bool = False) -> Any:
    """Return the launches of the best plan whose launches can all be rTasks."""
    constraints = ScheduleConstraints(joinable=True, streams=True) if streams else NO_CONSTRAINTS
    groups, ranked, _ = rank_best_partition(program, hw, MAX_PROGRAMS if streams else top_k, constraints)
    if streams:
        fitting = ([each for each in own if each.program.pipeline.persistent_blocks <= hw.num_cores] for own in ranked)
        smallest = (sorted(own, key=lambda each: math.prod(extent for _, extent in each.program.block.extents)) for own in fitting)
        ranked = tuple(tuple(own[:1]) or all_ for own, all_ in zip(smallest, ranked, strict=True))
    for plan in best_plans(ranked, top_k):
        try:
            return emit_plan_tasks(plan, program, groups, hw, first_check)
        except InvariantError as error:
            refused = error
    raise refused


def run(kernel: TaskKernel, arrays: Arrays, seed: int = 0, *, races: bool = False, sync: np.ndarray | None = None) -> Arrays:
    """Run a kernel in the emulator. `sync` is the state that earlier runs left."""
    (buffer,) = (each for each in kernel.source.buffers if each.name == "sync" and each.role is Role.INPUT)
    state = np.zeros(buffer.shape, np.uint32) if sync is None else sync
    return module(kernel.source, seed, races=races).run({**kernel.tables, **arrays, "sync": state})


def expected(nodes: Sequence[Node], types: Mapping[str, TensorType], arrays: Arrays) -> Arrays:
    """Return all tensors by the interpreter."""
    known, known_types = dict(arrays), dict(types)
    for node in nodes:
        program = parse(node.expression, {key: known_types[name] for key, name in node.inputs.items()}, list(node.outputs))
        results = reference(program, {key: known[name] for key, name in node.inputs.items()})
        for key, name in node.outputs.items():
            known[name] = results[key]
            known_types[name] = TensorType(DType(str(results[key].dtype)), results[key].shape)
    return known


def with_text(kernel: TaskKernel, old: str, new: str, occurrence: int = 0) -> TaskKernel:
    """Return the kernel with one occurrence of a text replaced."""
    parts = kernel.source.text.split(old)
    assert len(parts) > occurrence + 1, old
    text = old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])
    source: KernelSource = dataclasses.replace(kernel.source, text=text)
    return dataclasses.replace(kernel, source=source)


def find_faults(compiled: CompiledKernel) -> list[str]:
    """Return what a persistent kernel and its machine code have that they should not, or lack."""
    code, text = sass.sass_text(compiled.binary), compiled.source.text
    faults = [f"{used.spill_bytes} bytes spilled" for used in compiled.resources if used.spill_bytes]
    # Operators write what later ones read: no cache that is not coherent may be between them.
    faults += [f"{load}, which is not coherent" for load in sorted(set(re.findall(r"LD\w*\.[\w.]*CONSTANT[\w.]*", code)))]
    # One before the first row and one after each rTask; a vote after each wait. The compiler may copy the loop of rTasks.
    meets = len(re.findall(rf"__syncthreads\(\)|named_barrier\({BLOCK_BARRIER},", text))
    votes = len(re.findall(rf"__syncthreads_or\(|named_any\({BLOCK_BARRIER},", text))
    if (meets, votes) != (2, 1):
        faults.append(f"{meets} barriers and {votes} votes of the block, expected 2 and 1")
    if STREAMED in text:
        copies = "UBLKCP" if compiled.source.arch >= HOPPER else "LDGSTS.E.BYPASS.128"
        functions, found = text.count(STREAMED), code.count(copies)
        faults += [f"{found} {copies} of {functions} products that stream"] if found < functions else []
    return faults


def events(kernel: TaskKernel, sync: np.ndarray) -> list[int]:
    """Return the counts of all events, the last of which counts the vEUs that have ended."""
    return [int(count) for count in sync[EVENT_WORDS::EVENT_WORDS]]
