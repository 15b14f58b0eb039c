"""Estimates of models: the same seconds as those of compiled ones, loops included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx_models import mlp

from roller_svc.errors import InputError
from roller_svc.graph.serialize import FORMAT
from roller_svc.model import compile_model, estimate_model
from roller_svc.settings import settings, use

STEPS = 7


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    before = settings()
    use(before.model_copy(update={"cache": tmp_path}))
    yield
    use(before)


def loop(steps: int, expression: str = "C[i] = A[i] * 2 + 1") -> dict[str, Any]:
    """Return a graph that runs one node in a loop, and an equal one after it."""
    inputs = {"x": {"dtype": "float32", "shape": [64]}}
    node = {"expression": expression, "inputs": {"A": "x"}, "outputs": {"C": "y"}}
    body = {
        "format": FORMAT, "name": "body", "inputs": inputs, "constants": {}, "nodes": [node | {"name": "step"}],
        "outputs": {"o": "y"},
    }  # fmt: skip
    repeated = {"steps": steps, "carried": 1, "scanned": [], "stacked": [], "body": body}
    nodes = [
        {"name": "repeat", "loop": repeated, "inputs": ["x"], "outputs": ["last"]},
        node | {"name": "after", "inputs": {"A": "last"}},
    ]
    return {"format": FORMAT, "name": "g", "inputs": inputs, "constants": {}, "nodes": nodes, "outputs": {"y": "y"}}


@pytest.mark.parametrize("source", [mlp().SerializeToString(), loop(STEPS)], ids=["mlp", "loop"])
def test_an_estimate_is_that_of_the_compiled_model(source: object) -> None:
    model = compile_model(source, threads=1, select="model", top_k=1)
    assert estimate_model(source, threads=1)["seconds"] == pytest.approx(model.estimate.seconds)


def test_a_loop_counts_each_of_its_steps() -> None:
    (once,) = estimate_model(loop(1), "cpu-x86-avx2")["kernels"]
    (often,) = estimate_model(loop(STEPS), "cpu-x86-avx2")["kernels"]
    assert once["uses"] == often["uses"] == 2
    assert often["seconds"] == pytest.approx(once["seconds"] * (STEPS + 1) / 2)


def test_a_target_that_is_neither_cpu_nor_gpu_is_rejected() -> None:
    with pytest.raises(InputError) as raised:
        estimate_model(loop(1), "graphcore-mk2")
    assert raised.value.code == "unsupported-target"
