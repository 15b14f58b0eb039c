"""Validate compile options: JSON-compatible values → BuildRequest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from roller_svc import hardware
from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import kind_of, short_repr, tensor_types, whole_number
from roller_svc.ir.constraints import TILE_FIELDS, OpClass, WinogradMode
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.report import BuildRequest, RuntimeChoice, SelectionMode
from roller_svc.ir.symbol_names import suggest_symbol, symbol_fault

MAX_TOP_K = 100

E = TypeVar("E", bound=Enum)


def build_request(  # the options of a build, spelled out as docs/api.md has them
    expression: object,
    inputs: object,
    *,
    target: object = "local",
    outputs: object = None,
    top_k: object = 10,
    select: object = "measure",
    runtime: object = "auto",
    allow_tf32: object = False,
    hardware: object = None,
    family: object = None,
    tiles: object = None,
    constants: object = None,
    winograd: object = "auto",
    donate: object = None,
    name: object = None,
) -> BuildRequest:
    """Validate the options of a build. Raises InputError that names the invalid option."""
    request = BuildRequest(
        expression=validate_expression(expression),
        inputs=tensor_types(inputs),
        target=validate_target(target),
        outputs=validate_outputs(outputs),
        top_k=validate_top_k(top_k),
        select=parse_enum(SelectionMode, "select", select),
        runtime=parse_enum(RuntimeChoice, "runtime", runtime),
        allow_tf32=validate_flag("allow_tf32", allow_tf32),
        hardware=validate_hardware(hardware),
        op_class=None if family is None else parse_enum(OpClass, "family", family),
        tiles=validate_tiles(tiles),
        constants=validate_input_names("constants", constants, tensor_types(inputs)),
        winograd=parse_enum(WinogradMode, "winograd", winograd),
        donate=validate_input_names("donate", donate, tensor_types(inputs)),
        name=validate_name(name),
    )
    if request.runtime is RuntimeChoice.EMULATOR:
        _check_emulable(resolve_spec(request))
        return replace(request, select=SelectionMode.MODEL)  # emulator times say nothing about a GPU
    return request


def request_json(request: BuildRequest) -> dict[str, object]:
    """Encode a request as JSON-compatible values: build_request(**request_json(r)) == r."""
    return {
        "expression": request.expression,
        "inputs": {name: {"dtype": t.dtype.value, "shape": list(t.shape)} for name, t in request.inputs},
        "target": request.target,
        "outputs": None if request.outputs is None else list(request.outputs),
        "top_k": request.top_k,
        "select": request.select.value,
        "runtime": request.runtime.value,
        "allow_tf32": request.allow_tf32,
        "hardware": None if request.hardware is None else hardware.to_mapping(request.hardware),
        "family": None if request.op_class is None else request.op_class.value,
        "tiles": dict(request.tiles),
        "constants": list(request.constants),
        "winograd": request.winograd.value,
        "donate": list(request.donate),
        "name": request.name,
    }


def resolve_spec(request: BuildRequest) -> HardwareSpec:
    """Return the hardware spec of a request."""
    return request.hardware or hardware.load(request.target)


def validate_expression(value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"expression must be text, got {kind_of(value)}", code="invalid-expression")
    return value


def validate_target(value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"target must be a device's id, got {kind_of(value)}", code="invalid-option")
    return value


def validate_top_k(value: object) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number <= MAX_TOP_K:
        raise ArgumentError(
            f"top_k must be a whole number from 1 to {MAX_TOP_K}, got {short_repr(value)}", code="invalid-option"
        )
    return number


def validate_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be true or false, got {short_repr(value)}", code="invalid-option")
    return value


def validate_name(value: object) -> str | None:
    """Return the name of a kernel or model, which begins the names of its symbols; None for its default name."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ArgumentError(f"name must be text, got {kind_of(value)}", code="invalid-option")
    if fault := symbol_fault(value):
        raise ArgumentError(
            f"name must be a C identifier, got {short_repr(value)}: {fault}", code="invalid-option",
            hint=f"the functions of the saved code begin with it; write a name such as {suggest_symbol(value)!r}",
        )  # fmt: skip
    return value


def validate_input_names(option: str, value: object, inputs: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Return the names of an option's inputs, in the inputs' order."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError(f"{option} must be a list of inputs' names, got {short_repr(value)}", code="invalid-option")
    inputs_in_order, names = [name for name, _ in inputs], list(value)
    for name in names:
        if name not in inputs_in_order:
            raise ArgumentError(
                f"{option}: there is no input {short_repr(name)}; inputs are {', '.join(inputs_in_order) or 'none'}",
                code="invalid-option",
            )
    return tuple(name for name in inputs_in_order if name in names)


def validate_tiles(value: object) -> tuple[tuple[str, int], ...]:
    """Return tile constraints sorted by name: {'split_k': 4} → (('split_k', 4),)."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or not all(field in TILE_FIELDS for field in value):
        raise ArgumentError(
            f"tiles must give numbers for some of {', '.join(TILE_FIELDS)}, got {short_repr(value)}",
            code="invalid-option",
        )
    numbers = {field: whole_number(number) for field, number in value.items()}
    for field, number in numbers.items():
        if number is None or number < 0:
            raise ArgumentError(
                f"tiles: {field} must be a whole number, got {short_repr(value[field])}", code="invalid-option"
            )
    return tuple(sorted((field, number) for field, number in numbers.items() if number is not None))


def validate_outputs(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError(f"outputs must be a list of names, got {short_repr(value)}", code="invalid-option")
    names = tuple(value)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError("outputs must be one or more names", code="invalid-option")
    if len(set(names)) < len(names):
        raise ArgumentError("outputs names one tensor twice", code="invalid-option")
    return names


def validate_hardware(value: object) -> HardwareSpec | None:
    """Return the spec given as a HardwareSpec, as YAML text or as a mapping."""
    match value:
        case None | HardwareSpec():
            return value
        case str():
            return hardware.load_yaml(value, "hardware")
        case Mapping():
            return hardware.from_mapping(dict(value), "hardware")
    raise ArgumentError(f"hardware must be a HardwareSpec or YAML text, got {kind_of(value)}", code="invalid-option")


def parse_enum(kind: type[E], name: str, value: object) -> E:
    """Return the enum member with a given value."""
    for member in kind:
        if value is member or (isinstance(value, str) and value == member.value):
            return member
    choices = ", ".join(repr(member.value) for member in kind)
    raise ArgumentError(f"{name} must be one of {choices}, got {short_repr(value)}", code="invalid-option")


def _check_emulable(spec: HardwareSpec) -> None:
    if spec.family not in (TargetKind.CUDA, TargetKind.AMD):
        raise ArgumentError(
            f"runtime='emulator' runs CUDA and HIP kernels only: {spec.id} is not a GPU target",
            code="emulator-unavailable",
        )  # fmt: skip
