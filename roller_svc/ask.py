"""What a caller says in plain values → BuildRequest, every option checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from enum import Enum
from typing import TypeVar

from roller_svc import hardware
from roller_svc.errors import ArgumentError, ShapeError
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.hardware import Family, HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import BuildRequest, RuntimeChoice, Select

TOP_K_MOST = 100
RANK_MOST = 16

TypeLike = TensorType | Mapping[str, object] | Sequence[object]
E = TypeVar("E", bound=Enum)


def build_request(  # noqa: PLR0913 - the options of a build, spelled out as interface.md has them
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
) -> BuildRequest:
    """The request, or an InputError that names the option at fault."""
    request = BuildRequest(
        expression=checked_expression(expression),
        inputs=tensor_types(inputs),
        target=checked_target(target),
        outputs=checked_outputs(outputs),
        top_k=checked_top_k(top_k),
        select=one_of(Select, "select", select),
        runtime=one_of(RuntimeChoice, "runtime", runtime),
        allow_tf32=checked_flag("allow_tf32", allow_tf32),
        hardware=checked_hardware(hardware),
    )
    if request.runtime is RuntimeChoice.EMULATOR:
        _check_emulable(spec_of(request))
        return replace(request, select=Select.MODEL)  # its times say nothing of a GPU's
    return request


def request_json(request: BuildRequest) -> dict[str, object]:
    """The request in plain values: build_request(**request_json(r)) == r."""
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
    }


def spec_of(request: BuildRequest) -> HardwareSpec:
    """The device a request means."""
    return request.hardware or hardware.load(request.target)


def checked_expression(value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"expression must be text, not {_kind(value)}", code="invalid-expression")
    return value


def checked_target(value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentError(f"target must be a device's id, not {_kind(value)}", code="invalid-option")
    return value


def checked_top_k(value: object) -> int:
    number = _integer(value)
    if number is None or not 1 <= number <= TOP_K_MOST:
        raise ArgumentError(
            f"top_k must be a whole number from 1 to {TOP_K_MOST}, not {_shown(value)}", code="invalid-option"
        )
    return number


def checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be true or false, not {_shown(value)}", code="invalid-option")
    return value


def checked_outputs(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError(f"outputs must be a list of names, not {_shown(value)}", code="invalid-option")
    names = tuple(value)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError("outputs must be one or more names", code="invalid-option")
    if len(set(names)) < len(names):
        raise ArgumentError("outputs names one tensor twice", code="invalid-option")
    return names


def checked_hardware(value: object) -> HardwareSpec | None:
    """A spec itself, YAML text, or the spec as plain values."""
    match value:
        case None | HardwareSpec():
            return value
        case str():
            return hardware.load_yaml(value, "hardware")
        case Mapping():
            return hardware.from_mapping(dict(value), "hardware")
    raise ArgumentError(f"hardware must be a HardwareSpec or YAML text, not {_kind(value)}", code="invalid-option")


def one_of(kind: type[E], name: str, value: object) -> E:
    """The member of an enum by its text."""
    for member in kind:
        if value is member or (isinstance(value, str) and value == member.value):
            return member
    known = ", ".join(repr(member.value) for member in kind)
    raise ArgumentError(f"{name} must be one of {known}, not {_shown(value)}", code="invalid-option")


def tensor_types(inputs: object) -> tuple[tuple[str, TensorType], ...]:
    """{"A": ("float32", (4, 4))} or {"A": {"dtype": "float32", "shape": [4, 4]}} → types by name, in order."""
    if not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs must map names to (dtype, shape), not {_kind(inputs)}", code="invalid-inputs")
    for name in inputs:
        if not isinstance(name, str):
            raise ArgumentError(f"an input's name must be text, not {_shown(name)}", code="invalid-inputs")
    return tuple((name, tensor_type(name, value)) for name, value in inputs.items())


def tensor_type(name: str, value: object) -> TensorType:
    """One input's type."""
    if isinstance(value, TensorType):
        return value
    if isinstance(value, Mapping):
        if set(value) != {"dtype", "shape"}:
            raise ArgumentError(
                f"input {name!r} must have dtype and shape, has {sorted(map(str, value))}", code="invalid-inputs"
            )
        dtype, shape = value["dtype"], value["shape"]
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        dtype, shape = value
    else:
        raise ArgumentError(f"input {name!r} must be (dtype, shape), not {_shown(value)}", code="invalid-inputs")
    return TensorType(_dtype(name, dtype), _shape(name, shape))


def _dtype(name: str, value: object) -> DType:
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        text = value
    else:
        # numpy's and ml_dtypes' own type objects: numpy.float32, numpy.dtype("float32")
        named = getattr(value, "name", None) or getattr(value, "__name__", None)
        text = named if isinstance(named, str) else _shown(value)
    dtype = dtype_named(text)
    if dtype is None:
        near = get_close_matches(text[:40], [d.value for d in DType], n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(d.value for d in DType)
        raise ArgumentError(
            f"input {name!r}: unknown dtype {text[:40]!r}{guess}", code="unknown-dtype", hint=f"dtypes are {known}"
        )
    return dtype


def _shape(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ShapeError(f"input {name!r}: shape must be a list of extents, not {_shown(value)}", code="invalid-shape")
    extents = tuple(_integer(extent) for extent in value)
    if len(extents) > RANK_MOST:
        raise ShapeError(
            f"input {name!r} has {len(extents)} dimensions; {RANK_MOST} are the most", code="invalid-shape"
        )
    good = tuple(extent for extent in extents if extent is not None and extent > 0)
    if len(good) < len(extents):
        raise ShapeError(
            f"input {name!r}: every extent must be a positive whole number, not {_shown(value)}", code="invalid-shape"
        )
    return good


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # not an integer is what the except is for
    except TypeError:
        return None


def _check_emulable(spec: HardwareSpec) -> None:
    if spec.family is not Family.CUDA:
        raise ArgumentError(
            f"runtime='emulator' is for CUDA kernels; {spec.id} is no CUDA target", code="emulator-unavailable"
        )


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__qualname__


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
