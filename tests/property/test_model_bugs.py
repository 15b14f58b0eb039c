"""Small models that other compilers got wrong, from public reports: ours are right."""

from __future__ import annotations

import numpy as np
import pytest
from model_bugs import ONNX_CASES, TORCH_CASES, describe_difference
from sampling import every

import roller_svc


@pytest.mark.parametrize("name", every(6, ONNX_CASES))
def test_onnx_models_are_right(name: str) -> None:
    case = ONNX_CASES[name]()
    compiled = roller_svc.compile_model(case.model.SerializeToString(), select="model", top_k=1)
    results = compiled(**case.inputs)
    assert set(results) == set(case.expected)
    said = {name: describe_difference(results[name], np.asarray(right), case.tolerance) for name, right in case.expected.items()}
    assert not any(said.values()), said


# parts that torch runs faster on this machine, or alone
@pytest.mark.filterwarnings("ignore:.*(left to torch|with torch)")
@pytest.mark.parametrize("name", every(6, TORCH_CASES))
@pytest.mark.parametrize("door", ["compile_model", "torch.compile"])
def test_torch_modules_are_right(name: str, door: str) -> None:
    torch = pytest.importorskip("torch")
    function, inputs, expected, tolerance = TORCH_CASES[name](torch)

    class Module(torch.nn.Module):
        def forward(self, *values):
            return function(*values)

    module = (function if isinstance(function, torch.nn.Module) else Module()).eval()
    with torch.no_grad():
        right = [np.asarray(value) for value in expected or arrays(module(*inputs))]
        if door == "compile_model":
            model = roller_svc.compile_model((module, tuple(inputs)), select="model", top_k=1)
            named = {info.name: value.numpy() for info, value in zip(model.inputs, inputs, strict=True)}
            results = list(model(**named).values())
        else:
            options = {"select": "model", "top_k": 1}
            results = arrays(torch.compile(module, backend="roller", dynamic=False, options=options)(*inputs))
    assert len(results) == len(right)
    said = [describe_difference(result, value, tolerance) for result, value in zip(results, right, strict=True)]
    assert not any(said), said


def arrays(values) -> list[np.ndarray]:
    return [value.numpy() for value in (values if isinstance(values, tuple | list) else (values,))]
