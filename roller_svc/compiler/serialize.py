"""JSON serialisation of estimates, plans, launches and build reports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from roller_svc import errors, toolchain
from roller_svc.errors import (
    BuildError,
    CompileError,
    InputError,
    NoCandidateError,
    RollerError,
    ScheduleError,
    UnsupportedModelError,
    UnsupportedNode,
    require,
)
from roller_svc.families.common.cpu.image_space import image_space, tiled_dims
from roller_svc.ir.canonical import to_json
from roller_svc.ir.constraints import TILE_FIELDS, tile_value
from roller_svc.ir.estimate import COMPUTE, Candidate, Estimate, ProgramFloor, RooflineBound, Sensitivity
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileSpace
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.symbol_names import named_digits

Json = dict[str, object]

LOG_CHARACTERS = 4000  # of a compiler's log in a report; the artifact has the whole log


def kernel_digest(compiled: CompiledKernel) -> str:
    """Hash a kernel's source, everything that determines its binary, and the binary, or the object of one without.

    The names of symbols are in all of these. The first digits are those of a name made of the source before: they hash
    the source without its names.
    """
    content = f"{compiled.source.key}\n{hashlib.sha256(compiled.binary or compiled.object_code).hexdigest()}\n"
    digits = hashlib.sha256(content.encode()).hexdigest()
    own = named_digits(compiled.source.name)
    return f"sha256:{own}{digits[len(own) :]}"


def estimate_json(estimate: Estimate) -> Json:
    return {"bound": estimate.bound, **to_json(estimate)}


def sensitivity_json(results: Iterable[Sensitivity]) -> list[Json]:
    """Return the fraction of the estimated seconds that 10 % more of each resource saves."""
    return [{"resource": sensitivity.resource, "saved": sensitivity.time_saved_fraction} for sensitivity in results]


def roofline_json(roofs: Iterable[RooflineBound]) -> list[Json]:
    """Return the lower bound of the time at each level, with its bytes or operations."""
    return [{"level": r.level, "seconds": r.seconds, "operations" if r.level == COMPUTE else "bytes": r.amount} for r in roofs]


def floor_json(floor: ProgramFloor) -> Json:
    """Return the least time of the program, and what it is spent on."""
    return {
        "seconds": floor.seconds,
        "level": floor.level,
        "bytes": floor.traffic_bytes,
        "traffic_seconds": floor.traffic_s,
        "unit": floor.unit,
        "operations": floor.operations,
        "arithmetic_seconds": floor.arithmetic_s,
        "launch_seconds": floor.launch_s,
    }


def tiles_json(program: RProgram, levels: tuple[str, str]) -> dict[str, dict[str, int]]:
    """Return {level: {axis: extent}} for the two levels of rTiles."""
    return {levels[0]: program.block.as_dict(), levels[1]: program.thread.as_dict()}


def program_json(program: RProgram, levels: tuple[str, str]) -> Json:
    return {
        "unit": program.unit.name,
        "tiles": tiles_json(program, levels),
        **{option: tile_value(program, option) for option in TILE_FIELDS},
        "grid": program.grid,
        "threads": program.threads,
        "padding": program.padding,
    }


def choice_json(candidate: Candidate, levels: tuple[str, str]) -> Json:
    return program_json(candidate.program, levels) | {"estimate": estimate_json(candidate.estimate)}


def plan_json(plan: Plan, hardware: HardwareSpec) -> Json:
    """Return a candidate of POST /v1/estimates: the plan's cost, the tiles of its slowest kernel, and all kernels."""
    levels = hardware.tile_levels
    return estimate_json(plan.estimate) | {
        "tiles": tiles_json(plan.dominant_choice.program, levels),
        "unit": plan.dominant_choice.program.unit.name,
        "kernels": [choice_json(choice, levels) for choice in plan.choices],
    }


def error_json(error: RollerError) -> Json:
    """Encode an error: its class in errors.py, code, message, and the class's own fields."""
    name = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
    facts: Json = {"class": name, "code": error.code, "message": error.message}
    match error:
        case InputError():
            facts |= {"line": error.line, "column": error.column, "end_column": error.end_column, "hint": error.hint}
            if isinstance(error, ScheduleError):
                facts["step"] = error.step
            if isinstance(error, NoCandidateError):
                facts["rejections"] = dict(error.rejections)
            if isinstance(error, UnsupportedModelError):
                facts["nodes"] = [{"operator": node.operator, "name": node.name, "reason": node.reason} for node in error.nodes]
        case CompileError():
            facts["log"] = error.log[:LOG_CHARACTERS]
        case BuildError():
            pass
    return facts


def parse_error(facts: Mapping[str, Any]) -> RollerError:
    """Decode an error from error_json. Raises ValueError, KeyError or TypeError if it is malformed."""
    kind = getattr(errors, str(facts["class"]), None)
    if not (isinstance(kind, type) and issubclass(kind, RollerError)):
        raise ValueError(f"unknown error class: {facts['class']!r}")
    message, code = str(facts["message"]), str(facts["code"])
    if issubclass(kind, NoCandidateError):
        rejections = {str(rule): int(count) for rule, count in facts["rejections"].items()}
        error: RollerError = kind(message, rejections=rejections, hint=facts["hint"])
    elif issubclass(kind, UnsupportedModelError):
        nodes = [UnsupportedNode(str(n["operator"]), str(n["name"]), str(n["reason"])) for n in facts["nodes"]]
        error = kind(tuple(nodes), hint=facts["hint"])
    elif issubclass(kind, InputError):
        error = kind(message, **{name: facts[name] for name in ("line", "column", "end_column", "hint")})
        if isinstance(error, ScheduleError) and facts["step"] is not None:
            error.step = int(facts["step"])
    elif issubclass(kind, CompileError):
        error = kind(message, log=str(facts["log"]))
    else:
        error = kind(message)
    error.code = code
    return error


def interpret_space(group: KernelGroup, space: TileSpace) -> str:
    """Return how a kernel interprets its group, by the space of its tiles.

    That is the group's kind, except for contractions: dual GEMM, Winograd or direct convolution, one GEMM for each
    image, a GEMM with the second operand's columns as rows, or one of all k-tiles in spite of a guard.
    """
    if group.is_dual_gemm:
        return "paired contraction"
    if space.transposed:
        return "transposed contraction"
    if m := space.winograd_tile:
        dims = len(tiled_dims(require(image_space(space), "tile space of a convolution")))
        return f"Winograd F({' x '.join([str(m)] * dims)}, {' x '.join(['3'] * dims)})"
    if space.role(AxisRole.PIXEL):
        along = "filters" if space.axis(space.vector_axis).role is AxisRole.N else "pixels"
        return f"convolution along {along}"
    if group.kind is GroupKind.CONTRACTION and space.role(AxisRole.INNER):
        return "streamed rows"
    if space.axes != group.space.axes:
        return "contraction by image"
    return group.kind.value if space.k_bounds == group.space.k_bounds else "contraction of all k-tiles"


def device_json(spec: HardwareSpec) -> Json:
    """Return a summary of a device, and whether this machine can compile for it."""
    available = toolchain.availability(spec)
    return {
        "id": spec.id,
        "name": spec.name,
        "vendor": spec.vendor,
        "family": spec.family.value,
        "arch": str(spec.arch),
        "cores": spec.num_cores,
        "dram_bytes_per_s": spec.dram.bandwidth_bytes_per_s,
        "compiles": available.ok,
        "toolchain": available.reason,
        "install": available.install,
    }


def kernel_json(compiled: CompiledKernel, facts: Mapping[str, object]) -> Json:
    """Return a kernel as in an Operation's response, without links."""
    return {
        "digest": kernel_digest(compiled),
        **facts,
        "language": compiled.source.language.value,
        "launches": [
            {"name": each.name, "grid": list(each.grid), "block": list(each.block), "shared_bytes": each.shared_bytes}
            for each in compiled.source.launches
        ],
        "resources": list(map(to_json, compiled.resources)),
    }
