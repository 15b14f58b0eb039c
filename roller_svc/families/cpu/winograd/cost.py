"""Cost of a Winograd convolution on a CPU: staging, transforms, products and outputs, all summed."""

from __future__ import annotations

import math
from functools import cache

from roller_svc.analysis.winograd import transforms
from roller_svc.families.common.cpu.memory import private_bandwidth, seconds_per_byte, transfer_s
from roller_svc.families.common.cpu.micro_kernel_cost import kernel_cycles, source_bandwidth
from roller_svc.families.common.cpu.task_costs import count_tasks_of_core, sum_task_costs
from roller_svc.families.cpu.winograd.transform_nodes import count_operations
from roller_svc.families.cpu.winograd.workload import WinogradSpace, WinogradTask, plan_task
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.workload import Workload

# Bytes that pass through the last-level cache between two calls, over those of the weights: a model has other layers.
OTHER_DATA_FACTOR = 4.0


def cpu_winograd(p: Workload[WinogradSpace], launch: Launch) -> Costs:
    """Return the cycles of the core with the most tasks, summed over what a task does."""
    mach, costs = p.machine, p.machine.costs.winograd
    task = plan_task(p, launch.block, launch.thread)
    product = _products(p, task)
    transform = _input_transforms(p, task) + _output_transforms(p, task)
    staging = _staging(p, task)
    results = _results(p, task)
    parts = {"compute": product, "transform": transform, "packing": staging, "task": results + mach.costs.task_cycles}
    moved = sum(t.transferred_bytes(p.extents) for t in p.footprint.reads if not t.access.constant)
    memory = moved * seconds_per_byte(mach, p.compulsory_bytes, launch.grid)
    memory += sum(transfer_s(p, t, launch.block, launch.grid) for t in p.footprint.writes)
    moved += sum(t.transferred_bytes(p.extents) for t in p.footprint.writes)
    tasks = count_tasks_of_core(p, launch)
    return sum_task_costs(p, launch, parts, tasks, memory, costs.memory_exposed_fraction, moved_bytes=moved)


def _products(p: Workload[WinogradSpace], task: WinogradTask) -> float:
    """Return the cycles of the micro-kernel, and those in which it waits for weights and inputs."""
    mach, costs, depth = p.machine, p.machine.costs.winograd, p.facts.depth
    calls = task.space.positions * task.panels * task.calls
    cycles = calls * (depth * kernel_cycles(mach, task.rows, task.vectors) + costs.call_cycles)
    weights = task.space.positions * depth * task.panels * task.wide * p.elem_bytes
    cores = _cores_at_work(p, task)
    swept = OTHER_DATA_FACTOR * max(p.facts.transformed_bytes, weights)
    weights_s = weights * cores * seconds_per_byte(mach, swept, cores)
    groups = -(-task.panels // task.group_panels)
    inputs_s = groups * task.inputs_bytes / private_bandwidth(mach, task.inputs_bytes + task.products_bytes(1))
    arriving = (weights_s + inputs_s) * mach.clock_hz
    stores = calls * task.rows * task.vectors * mach.store_cycles
    return max(cycles + costs.exposed_fraction * arriving, arriving) + stores


def _cores_at_work(p: Workload[WinogradSpace], task: WinogradTask) -> int:
    """Return the cores that share the caches' bandwidth."""
    blocks = -(-p.facts.tiles // task.tiles) * -(-p.facts.image.filters.extent // task.block_filters)
    return min(p.machine.cores, p.facts.batch * blocks)


@cache
def _operations(m: int) -> tuple[int, int]:
    """Return the operations of one application of the input transform, and of the output transform."""
    matrices = transforms(m)
    return count_operations(matrices.inputs), count_operations(matrices.outputs)


def _input_transforms(p: Workload[WinogradSpace], task: WinogradTask) -> float:
    space = task.space
    operations = _applications(space.transforms.size, space) * _operations(space.m)[0]
    return task.input_tiles * task.steps * _tile_cycles(p, space.positions, space.positions, operations)


def _output_transforms(p: Workload[WinogradSpace], task: WinogradTask) -> float:
    space = task.space
    operations = _applications(space.m, space) * _operations(space.m)[1]
    panels = task.panels * task.vectors
    return task.tiles * panels * _tile_cycles(p, space.positions, space.m ** len(space.tiled), operations)


def _applications(rows: int, space: WinogradSpace) -> int:
    """Return the vectors of a tile that a matrix of that many rows is applied to: its columns, and then rows of results."""
    return 1 if len(space.tiled) == 1 else space.transforms.size + rows


def _tile_cycles(p: Workload[WinogradSpace], loads: int, stores: int, operations: int) -> float:
    """Return the cycles to transform one tile for a vector of channels or filters."""
    costs = p.machine.costs.winograd
    moved = loads / p.machine.load_ports + stores * p.machine.store_cycles
    return costs.tile_cycles + costs.operation_cycles * operations + costs.access_factor * moved


def _staging(p: Workload[WinogradSpace], task: WinogradTask) -> float:
    """Return the cycles to stage the input patch, and to transpose it unless channels are innermost."""
    costs, image, lanes = p.machine.costs.convolution, task.padded, task.lanes
    extents = [slide.input_extent(n) for slide, n in zip(image.window_dims, task.pixels, strict=True)]
    source = source_bandwidth(p.machine, p.compulsory_bytes) / p.machine.cores / p.machine.clock_hz
    moved = math.prod(extents) * image.depth * p.elem_bytes / source
    if image.channels_last:
        return math.prod(extents) * task.steps * (costs.row_cycles / 2 + costs.copy_cycles) + moved
    lines = math.prod(extents[:-1]) * image.depth
    row = costs.row_cycles + costs.copy_cycles * (extents[-1] // lanes) + costs.element_cycles * (extents[-1] % lanes)
    blocks = -(-math.prod(extents) // lanes) * task.steps
    return lines * row + blocks * lanes * p.machine.costs.winograd.transpose_cycles + moved


def _results(p: Workload[WinogradSpace], task: WinogradTask) -> float:
    """Return the cycles of the epilogue, transposed unless filters are innermost in the output."""
    costs, image, lanes = p.machine.costs.convolution, task.space.image, task.lanes
    statements = max(1, len(p.epilogue.tensors))
    extents = [min(slide.pixel.extent, n) for slide, n in zip(image.window_dims, task.pixels, strict=True)]
    filters = min(task.block_filters, image.filters.extent)
    if image.filters_last:
        each = costs.row_cycles + costs.store_cycles * statements * -(-filters // lanes)
        return math.prod(extents) * each
    rows = math.prod(extents[:-1]) * filters
    vectors = extents[-1] // lanes + (extents[-1] % lanes > 0)
    transposed = math.prod(extents[:-1]) * vectors * filters * p.machine.costs.winograd.transpose_cycles
    return rows * (costs.row_cycles / 2 + vectors * costs.store_cycles * statements) + transposed
