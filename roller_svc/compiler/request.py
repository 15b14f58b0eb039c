"""Validate compile options: JSON-compatible values → BuildRequest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Never, TypeVar

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import is_array, kind_of, short_repr, tensor_types, whole_number
from roller_svc.frontend.lang.names import did_you_mean
from roller_svc.ir.constraints import TILE_FIELDS
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.options import (
    CommonOptions,
    InputNames,
    KernelOptions,
    Option,
    RuntimeChoice,
    ScheduleText,
    SearchOptions,
    SelectionMode,
    Tiles,
    chosen_options_json,
    deciding_options_json,
    options_of,
)
from roller_svc.ir.report import BuildRequest
from roller_svc.ir.symbol_names import suggest_symbol, symbol_fault
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc import hardware
    from roller_svc.compiler.scheduled import check_schedule
    from roller_svc.schedule.by_hand import schedule_text
else:
    hardware = OnUse("roller_svc.hardware")
    check_schedule = OnUse("roller_svc.compiler.scheduled:check_schedule")
    schedule_text = OnUse("roller_svc.schedule.by_hand:schedule_text")

LOCAL = "local"  # needs no catalog of devices
E = TypeVar("E", bound=Enum)
F = TypeVar("F", bound=Callable[..., Any])


def build_request(expression: object, inputs: object, **named: object) -> BuildRequest:
    """Validate a request, with the arguments of `read_request`, and the steps of its schedule."""
    request = read_request(expression, inputs, **named)
    if request.schedule is not None:
        check_schedule(request)
    return request


def read_request(
    expression: object,
    inputs: object,
    *,
    target: object = "local",
    outputs: object = None,
    hardware: object = None,
    programmatic: object = False,
    **options: object,
) -> BuildRequest:
    """Validate a request but for its schedule, whose steps are read and not applied.

    So it takes milliseconds whatever a client sends. Raises InputError that names the invalid option, TypeError for one
    that does not exist.
    """
    text, types = validate_expression(expression), tensor_types(inputs)
    request = BuildRequest(
        text,
        types,
        validate_target(target),
        validate_outputs(outputs),
        validate_hardware(hardware),
        _read_flag("programmatic", programmatic),
        **read_options(KernelOptions, options, types),
    )
    if request.runtime is RuntimeChoice.EMULATOR:
        check_emulable(resolve_spec(request))
        return replace(request, select=SelectionMode.MODEL)  # emulator times say nothing about a GPU
    return request


def request_json(request: BuildRequest) -> dict[str, object]:
    """Encode a request as JSON-compatible values: build_request(**request_json(r)) == r."""
    return {
        "expression": request.expression,
        "inputs": {name: {"dtype": t.dtype.value, "shape": list(t.shape)} for name, t in request.inputs},
        "target": request.target,
        "outputs": None if request.outputs is None else list(request.outputs),
        "hardware": None if request.hardware is None else hardware.to_mapping(request.hardware),
        **deciding_json(request),
    }


def deciding_json(request: BuildRequest) -> dict[str, object]:
    """Encode what decides the result of a build besides the program and the device."""
    return deciding_options_json(request) | ({"programmatic": True} if request.programmatic else {})


def request_body(request: BuildRequest) -> dict[str, object]:
    """Encode a request as the body of `kernels:compile`, with the options that the caller chose."""
    fields = request_json(request)
    outputs = {} if request.outputs is None else {"outputs": fields["outputs"]}
    device = "target" if request.hardware is None else "hardware"
    program = {name: fields[name] for name in ("expression", "inputs", device)}
    return {**program, **outputs, "options": chosen_options_json(request)}


def read_options(
    record: type[CommonOptions], given: Mapping[str, object], inputs: Iterable[tuple[str, object]] = ()
) -> dict[str, Any]:
    """Return the validated values of the options that are given.

    Raises ArgumentError that names an invalid option, and TypeError for one that the record does not have.
    """
    known = options_of(record)
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"unknown option {unknown[0]!r}")
    return {name: _read(known[name], value, inputs) for name, value in given.items()}


def reject_unknown(record: type[CommonOptions], given: Iterable[str], function: str, parameters: Iterable[str] = ()) -> None:
    """Raise ArgumentError for an option that the record does not have. Other `parameters` of the function are hints, too."""
    known = dict.fromkeys((*parameters, *options_of(record)))
    for name in given:
        if name not in options_of(record):
            hint = did_you_mean(name, known) or f"its options are {', '.join(known)}"
            raise ArgumentError(f"unknown option of {function}: {name!r}", code="invalid-option", hint=hint)


def split_arguments(named: Mapping[str, object], reserved: Iterable[str]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the inputs and the options among keyword arguments. Arrays, and pairs of dtype and shape, are inputs.

    Raises ArgumentError for an array with the name of an option, or with one of the `reserved` names of parameters.
    """
    known = options_of(KernelOptions)
    inputs = {name: value for name, value in named.items() if name not in known and _is_input(value)}
    for name in (*known, *reserved):
        if name in named and is_array(named[name]):
            raise ArgumentError(
                f"`{name}` is an option, and an array is given", code="invalid-option", hint=f'an input: inputs={{"{name}": array}}'
            )
    return inputs, {name: value for name, value in named.items() if name not in inputs}


def _is_input(value: object) -> bool:
    return is_array(value) or (isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], str))


def shows_options(record: type[CommonOptions]) -> Callable[[F], F]:
    """Return a decorator of functions with `**options`: their signature and docstring list the record's options."""

    def show(function: F) -> F:
        signature = inspect.signature(function)
        listed = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.argument_default,
                annotation=option.argument_type,
            )
            for option in options_of(record).values()
        ]
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]  # inspect reads it; Callable has none
        texts = "\n".join(f"    {name}: {option.help}" for name, option in options_of(record).items())
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{texts}"
        return function

    return show


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
    return value if value == LOCAL else hardware.find_id(value)


def read_top_k(value: object) -> int:
    """Return a number of candidates. Raises ArgumentError."""
    return _read_number(options_of(SearchOptions)["top_k"], value)


def _read(option: Option, value: object, inputs: Iterable[tuple[str, object]]) -> Any:
    """Return the value of an option, as its type says."""
    if value is None and option.is_optional:
        return None
    if option.choices:
        return parse_enum(option.type, option.name, value)
    if option.type is bool:
        return _read_flag(option.name, value)
    if option.type is int:
        return _read_number(option, value)
    if option.type == InputNames:
        return _read_input_names(option.name, value, inputs)
    if option.type == ScheduleText:
        return schedule_text(value)
    return validate_tiles(value) if option.type == Tiles else validate_name(value)


def _read_number(option: Option, value: object) -> int:
    number, least, most = whole_number(value), option.least, option.most
    if number is None or number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ArgumentError(f"{option.name} must be a whole number {bounds}, got {short_repr(value)}", code="invalid-option")
    return number


def _read_flag(name: str, value: object) -> bool:
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
            f"name must be a C identifier, got {short_repr(value)}: {fault}",
            code="invalid-option",
            hint=f"the functions of the saved code begin with it; write a name such as {suggest_symbol(value)!r}",
        )
    return value


def _read_input_names(option: str, value: object, inputs: Iterable[tuple[str, object]]) -> tuple[str, ...]:
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
            raise ArgumentError(f"tiles: {field} must be a whole number, got {short_repr(value[field])}", code="invalid-option")
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


def check_emulable(spec: HardwareSpec) -> None:
    """Raise ArgumentError (emulator-unavailable) for a device whose code the emulator does not run."""
    if spec.family not in (TargetKind.CUDA, TargetKind.AMD):
        reject_emulation(spec.id)


def reject_emulation(target: str) -> Never:
    """Raise ArgumentError (emulator-unavailable)."""
    raise ArgumentError(
        f"runtime='emulator' runs CUDA and HIP kernels only: {target} is not a GPU target", code="emulator-unavailable"
    )
