"""What callers say, checked: every option, and the error that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.compiler.action import PARTS, action_digest, action_key
from roller_svc.compiler.request import build_request, request_body, request_json
from roller_svc.errors import InputError
from roller_svc.frontend.lang.input_types import tensor_type, tensor_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

COPY = "y[i] = x[i]"
INPUTS = {"x": ("float32", (4,))}


class TorchDType:
    def __repr__(self) -> str:
        return "torch.float32"


class TorchLike:
    """An array as torch has it, whose dtype has no name."""

    dtype, shape = TorchDType(), (2, 3)


@pytest.mark.parametrize(
    "value",
    [
        ("float32", (2, 3)),
        ["float32", [2, 3]],
        {"dtype": "float32", "shape": [2, 3]},
        {"dtype": "fp32", "shape": (np.int64(2), 3)},
        (np.float32, (2, 3)),
        (np.dtype("float32"), np.zeros((2, 3)).shape),
        (DType.FLOAT32, range(2, 4)),
        TensorType(DType.FLOAT32, (2, 3)),
        np.zeros((2, 3), np.float32),
        TorchLike(),
    ],
)
def test_ways_to_give_a_type(value: Any) -> None:
    assert tensor_type("x", value) == TensorType(DType.FLOAT32, (2, 3))


def test_types_of_ml_dtypes_and_scalars() -> None:
    types = dict(tensor_types({"a": (ml_dtypes.bfloat16, ()), "b": ("bool", (1,))}))
    assert types == {"a": TensorType(DType.BFLOAT16, ()), "b": TensorType(DType.BOOL, (1,))}


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        (None, "invalid-inputs"),
        ([("x", "float32")], "invalid-inputs"),
        ({1: ("float32", (4,))}, "invalid-inputs"),
        ({"x": "float32"}, "invalid-inputs"),
        ({"x": ("float32",)}, "invalid-inputs"),
        ({"x": {"dtype": "float32"}}, "invalid-inputs"),
        ({"x": {"dtype": "float32", "shape": [1], "strides": [1]}}, "invalid-inputs"),
        ({"x": ("float33", (4,))}, "unknown-dtype"),
        ({"x": (None, (4,))}, "unknown-dtype"),
        ({"x": ("complex64", (4,))}, "unknown-dtype"),
        ({"x": ("float32", 4)}, "invalid-shape"),
        ({"x": ("float32", "44")}, "invalid-shape"),
        ({"x": ("float32", (0,))}, "invalid-shape"),
        ({"x": ("float32", (-1,))}, "invalid-shape"),
        ({"x": ("float32", (2.0,))}, "invalid-shape"),
        ({"x": ("float32", (True,))}, "invalid-shape"),
        ({"x": ("float32", (1,) * 17)}, "invalid-shape"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, code: str) -> None:
    with pytest.raises(InputError) as refused:
        tensor_types(inputs)
    assert refused.value.code == code
    assert refused.value.line is None


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"top_k": 0}, "invalid-option"),
        ({"top_k": 101}, "invalid-option"),
        ({"top_k": 2.0}, "invalid-option"),
        ({"top_k": True}, "invalid-option"),
        ({"top_k": None}, "invalid-option"),
        ({"select": "fastest"}, "invalid-option"),
        ({"select": None}, "invalid-option"),
        ({"runtime": "gpu"}, "invalid-option"),
        ({"runtime": "emulator"}, "emulator-unavailable"),
        ({"allow_tf32": 1}, "invalid-option"),
        ({"winograd": "sometimes"}, "invalid-option"),
        ({"max_workspace_bytes": -1}, "invalid-option"),
        ({"max_workspace_bytes": 10**5000}, "invalid-option"),
        ({"max_workspace_bytes": 1.5}, "invalid-option"),
        ({"max_workspace_bytes": True}, "invalid-option"),
        ({"family": "tcgen05"}, "invalid-option"),
        ({"family": 1}, "invalid-option"),
        ({"tiles": "split_k=4"}, "invalid-option"),
        ({"tiles": {"block": 4}}, "invalid-option"),
        ({"tiles": {"split_k": -1}}, "invalid-option"),
        ({"tiles": {"split_k": 2.5}}, "invalid-option"),
        ({"target": None}, "invalid-option"),
        ({"target": 5}, "invalid-option"),
        ({"outputs": "y"}, "invalid-option"),
        ({"outputs": ()}, "invalid-option"),
        ({"outputs": ["y", "y"]}, "invalid-option"),
        ({"outputs": [1]}, "invalid-option"),
        ({"hardware": 5}, "invalid-option"),
        ({"hardware": "id: x"}, "invalid-spec"),
        ({"hardware": {"id": "x"}}, "invalid-spec"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as refused:
        build_request(COPY, INPUTS, **options)
    assert refused.value.code == code


@pytest.mark.parametrize("expression", [None, 5, b"y[i] = x[i]", ["y[i] = x[i]"]])
def test_an_expression_is_text(expression: Any) -> None:
    with pytest.raises(InputError) as refused:
        build_request(expression, INPUTS)
    assert refused.value.code == "invalid-expression"


def test_a_request_survives_its_plain_form() -> None:
    spec = hardware.load("cpu-x86-avx2")
    for request in (
        build_request(COPY, INPUTS),
        build_request(COPY, INPUTS, target="nvidia-t4", outputs=["y"], top_k=3, select="model", allow_tf32=True, winograd="never"),
        build_request(COPY, INPUTS, hardware=spec),
        build_request(COPY, INPUTS, donate=list(INPUTS), max_workspace_bytes=0),
        build_request(COPY, INPUTS, target="nvidia-t4", family="mma", tiles={"stages": 2, "split_k": 4}),
    ):
        assert build_request(**request_json(request)) == request
        early = replace(request, programmatic=True)
        assert build_request(**request_json(early)) == early
        assert action_digest(early) != action_digest(request)
        assert {part for part in PARTS if action_key(early).parts[part] != action_key(request).parts[part]} == {"options"}
        body = request_body(request)
        given = {name: body[name] for name in body.keys() - {"options"}}
        usual = {"select": "model"}  # the service's own choice
        assert build_request(**given, **(usual | body["options"])) == request
