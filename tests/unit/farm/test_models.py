"""Requests for models and their records."""

from __future__ import annotations

import pytest

from roller_svc.compiler.request import build_request
from roller_svc.errors import InputError
from roller_svc.farm.models import ModelRequest, parse_record, request_record

REQUEST = ModelRequest("0" * 64, "onnx", "cpu-x86-avx2", {"select": "model"})


def test_a_record_holds_the_whole_request() -> None:
    kernel = build_request("y[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model")
    for request in (REQUEST, kernel):
        assert parse_record(request_record(request)) == request


@pytest.mark.parametrize("model", [{"blob": "0"}, {**request_record(REQUEST), "more": 1}, [], "onnx"])
def test_a_record_of_another_version_is_not_read(model: object) -> None:
    with pytest.raises(InputError) as raised:
        parse_record({"model": model})
    assert raised.value.code == "unreadable-record"
