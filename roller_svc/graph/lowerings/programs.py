"""Programs of vEUs on a GPU: the rows of persistent kernels, read back from their tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.codegen.cuda.persistent import EXECUTE, ROWS, STARTS, WAIT, TabledRow, read_rows
from roller_svc.codegen.cuda.task_kernel import Table
from roller_svc.errors import require
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec
from roller_svc.ir.model_plan import Address, CopyStep, KernelStep, ModelPlan, unroll_steps

Program = list[dict[str, list[Any]]]


def read_programs(plan: ModelPlan, weights: NDArray[Any]) -> list[list[Program]]:
    """Return `prog[vEU][order]` of each launch of a persistent kernel.

    An instruction is {"execute": [node, first rTask, rTasks]} or {"wait": [node]}. Operators that no vEU waits for
    have the names of their functions if their nodes have several operators. `weights` has all weights of the plan, as bytes.
    """
    return [_read_launch(plan, step, launch, weights) for step, launch in _cooperative(plan)]


def _cooperative(plan: ModelPlan) -> Iterator[tuple[KernelStep, LaunchSpec]]:
    for step in unroll_steps(plan.steps):
        if isinstance(step, KernelStep):
            launch = plan.kernels[step.kernel].source.launches[step.launch]
            if launch.cooperative:
                yield step, launch


def _read_launch(plan: ModelPlan, step: KernelStep, launch: LaunchSpec, weights: NDArray[Any]) -> list[Program]:
    """Return the program of each vEU of a launch. Its first arguments are its own tables."""
    buffers = {buffer.symbol: buffer for buffer in plan.kernels[step.kernel].source.buffers}
    copies = {copy.target: copy for copy in unroll_steps(plan.prepack) if isinstance(copy, CopyStep)}
    tables: dict[str, Table] = {}
    for name, symbol, place in zip((ROWS, STARTS), launch.operands, step.arguments, strict=False):
        source = copies[require(place, f"address of {symbol}")].source
        tables[name] = _table_at(weights, source, buffers[symbol].shape)
    veus = read_rows(tables[ROWS], tables[STARTS])
    names = {
        row.arguments: step.events[row.event] for rows in veus for row in rows if row.opcode == EXECUTE and row.event is not None
    }
    executed = [row for rows in veus for row in rows if row.opcode == EXECUTE]
    unnamed = {row.arguments: f"rtask_{row.function}" for row in executed if row.arguments not in names}
    silent = [node for node in _split_nodes(step.node, plan) if node not in step.events]
    # Nodes are in the order of their operators. As many of both means that each of these nodes has one operator.
    names |= dict(zip(sorted(unnamed), silent, strict=True)) if len(unnamed) == len(silent) else unnamed
    return [[_instruction(row, step.events, names) for row in rows] for rows in veus]


def _split_nodes(text: str, plan: ModelPlan) -> list[str]:
    """Return the nodes of a launch, whose names may have commas themselves. Nothing if its text has several meanings."""
    pieces = text.split(", ")
    known = {each.node for each in unroll_steps(plan.fallback)}
    if known.issuperset(pieces) and all(", " not in name for name in known):
        return pieces
    longest = 1 + max((name.count(", ") for name in known), default=0)
    ways, ends = [*([0] * len(pieces)), 1], [0] * len(pieces)  # of what begins at a piece, and where its first name ends
    for start in reversed(range(len(pieces))):
        for end in range(start + 1, min(start + longest, len(pieces)) + 1):
            if ways[end] and ", ".join(pieces[start:end]) in known:
                ways[start], ends[start] = ways[start] + ways[end], end
    nodes: list[str] = []
    start = 0
    while ways[0] == 1 and start < len(pieces):
        nodes.append(", ".join(pieces[start : ends[start]]))
        start = ends[start]
    return nodes


def _table_at(weights: NDArray[Any], place: Address, shape: Sequence[int]) -> Table:
    words = math.prod(shape)
    part = weights.reshape(-1).view(np.uint8)[place.offset_bytes : place.offset_bytes + words * DType.UINT32.bytes]
    return part.view(np.uint32).reshape(tuple(shape))


def _instruction(row: TabledRow, events: Sequence[str], names: Mapping[int, str]) -> dict[str, list[Any]]:
    if row.opcode == WAIT:
        return {"wait": [events[require(row.event, "event of a wait")]]}
    return {"execute": [names[row.arguments], row.first, row.tasks]}
