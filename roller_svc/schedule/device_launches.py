"""Steps or a schedule → what a device launches, with its rules checked."""

from __future__ import annotations

from roller_svc.errors import ArgumentError
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.schedule.build_tree import build_launches
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.combine_lanes import combine_lanes
from roller_svc.schedule.gpu_launch import check_device_loops, check_tile_bytes
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.whole_tiles import separate_whole_tiles

# Trees, and the buffers that they exchange.
DeviceLaunches = tuple[tuple[ScheduleTree, ...], tuple[tuple[str, TensorType], ...]]


def check_device(spec: HardwareSpec) -> None:
    """Raise ArgumentError for a device for which no schedule by hand is compiled."""
    if spec.family not in (TargetKind.CPU, TargetKind.CUDA, TargetKind.AMD):
        raise ArgumentError(
            f"a schedule by hand is compiled for CPUs and GPUs, and {spec.id} is neither",
            code="invalid-option",
            hint="name such a device, or leave out the schedule",
        )


def schedule_for_device(program: TensorProgram, source: object, spec: HardwareSpec | None) -> Schedule:
    """Return the default schedule of a program after the steps.

    Raises ScheduleError for the first illegal step, or for what the device, if one is given, cannot run. Raises
    ArgumentError for a device that is neither a CPU nor a GPU.
    """
    schedule = schedule_by_hand(program, source)
    if spec is not None:
        build_device_launches(schedule, spec)
    return schedule


def build_device_launches(schedule: Schedule, hw: HardwareSpec) -> DeviceLaunches:
    """Return the launches of a schedule and the buffers that they exchange.

    Raises ScheduleError (schedule-launch, schedule-memory) if the device cannot run them. Raises ArgumentError if it is
    neither a CPU nor a GPU.
    """
    check_device(hw)
    check_device_loops(schedule, hw)
    trees, exchanged = build_launches(schedule, "kernel")
    if hw.family is TargetKind.CPU:
        return tuple(separate_whole_tiles(combine_lanes(tree, hw)) for tree in trees), exchanged
    check_tile_bytes(trees, hw)
    return trees, exchanged
