"""BuildRequest with a schedule by hand → KernelBundle: nothing is constructed, ranked or measured."""

from __future__ import annotations

from roller_svc import hardware, toolchain
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory, with_program_indices
from roller_svc.codegen.symbols import name_symbols
from roller_svc.compiler.explain import parse_request
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.request import request_body, resolve_spec
from roller_svc.compiler.serialize import kernel_digest
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.options import KernelOptions, options_of
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.schedule.by_hand import read_steps, schedule_by_hand
from roller_svc.schedule.device_launches import DeviceLaunches, build_device_launches, schedule_for_device
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.step_json import format_document

EXCLUDED = ("family", "tiles", "candidate", "constants", "donate", "max_workspace_bytes")  # options of construction


def check_schedule(request: BuildRequest) -> None:
    """Check the schedule of a request, which may take minutes: a service does so in a process with a time limit.

    Raises ArgumentError for options that a schedule excludes, or another device than a CPU or GPU, ScheduleError for an
    illegal schedule, also on the device.
    """
    for name in EXCLUDED:
        if getattr(request, name) != options_of(KernelOptions)[name].default:
            raise ArgumentError(
                f"{name} and schedule exclude each other: it is an option of construction, which a schedule replaces",
                code="invalid-option",
            )
    spec = resolve_spec(request)
    if request.schedule is None:
        raise InvariantError("the request has no schedule")
    schedule_for_device(parse_once(request.expression, request.inputs, request.outputs)[0], request.schedule.written, spec)


def build_scheduled(request: BuildRequest) -> KernelBundle:
    """Compile a program by its schedule.

    Raises ScheduleError for an illegal step, other InputErrors for an invalid request, BuildError if it does not compile.
    """
    if request.schedule is None:
        raise InvariantError("the request has no schedule")
    program = parse_request(request)[0]
    hw = request.hardware or hardware.load(request.target)
    schedule = schedule_by_hand(program, request.schedule)
    source = name_symbols(emit_schedule(schedule, hw), program.name)
    compiled = toolchain.compile_source(source)
    document = format_document(read_steps(request.schedule).steps, program)
    extra = {"schedule": document, "request": request_body(request)}
    return KernelBundle(compiled, text(program), hw.id, kernel_digest(compiled), extra=extra)


def emit_schedule(schedule: Schedule, hw: HardwareSpec) -> KernelSource:
    """Return the source of a schedule: a launch for each function that is computed at root. Raises ScheduleError."""
    return emit_launches(schedule, build_device_launches(schedule, hw), hw)


def emit_launches(schedule: Schedule, launches: DeviceLaunches, hw: HardwareSpec) -> KernelSource:
    """Return the source of a schedule's launches on a device."""
    program = schedule.program
    trees, exchanged = launches
    outputs = tuple((output.tensor, program.types[output.tensor]) for output in program.outputs)
    part = GroupLaunches(trees, (*program.inputs, *outputs, *exchanged))
    buffers = tensors_in_memory(program, program.types, exchanged)
    source = emit("kernel", (part,), buffers, hw, _header(program, hw))
    return with_program_indices(source, program)


def _header(program: TensorProgram, hw: HardwareSpec) -> str:
    """Return the comment at the top of the source."""
    return f"{text(program)}\ntarget: {hw.id} ({hw.arch})\nscheduled by hand"
