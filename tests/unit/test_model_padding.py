"""Models with ranges of extents: buckets, padded calls, saved models, refusals."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import numpy as np
import torch
from torch import nn
from torch.export import Dim

import roller_svc
from roller_svc import model as model_module
from roller_svc.errors import ArgumentError
from roller_svc.modes import loading

FAST = {"select": "model", "top_k": 1}
MODULE = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path / "cache"))


def check(model, rows):
    x = torch.randn(rows, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(input=x)["output0"], MODULE(x))


@pytest.mark.slow
def test_the_range_of_an_exported_program_becomes_buckets(tmp_path):
    program = torch.export.export(MODULE, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch", max=5)},))
    model = roller_svc.compile_model(program, **FAST)
    assert [bucket["batch"] for bucket in model.buckets] == [1, 2, 4, 5]
    loaded = roller_svc.load_model(model.save(tmp_path / "saved"))
    for rows in range(1, 6):
        check(model, rows)
        check(loaded, rows)
    x, out = torch.randn(3, 4), torch.zeros(3, 3)
    assert model(input=x, out={"output0": out})["output0"] is out
    with torch.no_grad():
        torch.testing.assert_close(out, MODULE(x))
    assert model.profile({"input": x})
    with pytest.raises(ArgumentError, match=r"no bucket has the shapes input\[6, 4\]"):
        check(model, 6)


def test_a_bucket_that_no_call_uses_is_not_loaded(monkeypatch):
    loaded, load = [], loading.CpuModel
    monkeypatch.setattr(loading, "CpuModel", lambda plan, *rest: loaded.append(plan.inputs[0][1].shape) or load(plan, *rest))
    model = roller_svc.compile_model((MODULE, (torch.randn(3, 4),), ({0: Dim("batch", max=64)},)), dims={"batch": [2, 4]}, **FAST)
    for rows in (4, 3):
        check(model, rows)
        x = np.ones((rows, 4), np.float32)
        assert model(input=x)["output0"].shape == (rows, 3)
    assert loaded == [(4, 4)]
    check(model, 1)
    assert loaded == [(4, 4), (2, 4)]


def test_lists_of_extents_are_buckets_of_a_module_with_dynamic_shapes():
    model = roller_svc.compile_model((MODULE, (torch.randn(3, 4),), ({0: Dim("batch", max=64)},)), dims={"batch": [2, 4]}, **FAST)
    for rows in (1, 2, 3):
        check(model, rows)


def test_a_range_that_cannot_be_padded_is_refused_and_a_list_says_why():
    def source():
        return nn.Softmax(0), (torch.randn(3, 4),), ({0: Dim("batch", max=4)},)

    with pytest.raises(ArgumentError, match=r"'batch' cannot be padded: node 'softmax': it reduces over the dimension"):
        roller_svc.compile_model(source(), **FAST)
    model = roller_svc.compile_model(source(), dims={"batch": [2, 4]}, **FAST)
    with pytest.raises(ArgumentError, match="no bucket") as caught:
        model(input=torch.randn(3, 4))
    assert "reduces over the dimension" in caught.value.hint


class SelfAttention(nn.Module):
    """Attention of torch, which puts the batch second."""

    def __init__(self, *, batch_first, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x):
        results = self.attention(x, x, x, need_weights=self.need_weights)
        return results if self.need_weights else results[0]


@pytest.mark.parametrize(
    ("module", "batch_first"),
    [
        (SelfAttention(batch_first=True, need_weights=False), True),
        (SelfAttention(batch_first=False, need_weights=True), False),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=False), False),
    ],
)
def test_a_batch_that_attention_puts_inside_of_another_dimension_may_vary(module, batch_first):
    module = module.eval()
    axis = 0 if batch_first else 1

    def example(batch):
        return torch.randn((batch, 3, 8) if batch_first else (3, batch, 8))

    model = roller_svc.compile_model((module, (example(3),), ({axis: Dim("batch", max=64)},)), dims={"batch": "3..5"}, **FAST)
    for batch in (3, 4, 5):
        x = example(batch)
        with torch.no_grad():
            expected = module(x)
        found = tuple(model.run({model.inputs[0].name: x}).values())
        torch.testing.assert_close(found, expected if isinstance(expected, tuple) else (expected,))


@pytest.mark.parametrize(
    ("source", "dims", "message"),
    [
        ((MODULE, (torch.zeros(3, 4),)), {"batch": 2}, "dynamic shapes"),
        ((MODULE, (torch.zeros(3, 4),), ({0: Dim("batch")},)), None, "leaves the dimension batch open"),
        ((MODULE, (torch.zeros(3, 4),), ({0: Dim("batch")},)), {"n": 2}, "no dimension 'n'; its symbolic dimensions are batch"),
        ((MODULE, (torch.zeros(3, 4),), ({0: Dim("batch")},)), {"batch": "4..2"}, "a range as '1..64'"),
        (
            (MODULE, (torch.zeros(3, 4),), ({0: Dim("batch", max=4)},)),
            {"batch": "1..8"},
            "batch is 8, and the program's torch.export.Dim ends at 4",
        ),
    ],
)
def test_dims_are_checked(source, dims, message):
    with pytest.raises(ArgumentError, match=message):
        roller_svc.compile_model(source, dims=dims, **FAST)


def test_the_range_of_an_onnx_dimension_becomes_buckets():
    onnx = pytest.importorskip("onnx")
    kind = onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Relu", ["x"], ["r"]), onnx.helper.make_node("Reshape", ["r", "shape"], ["y"])]
    shape = onnx.numpy_helper.from_array(np.array([-1], np.int64), "shape")
    x, y = (onnx.helper.make_tensor_value_info(n, kind, dims) for n, dims in (("x", ["batch", 3]), ("y", ["all"])))
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], [shape]))
    compiled = roller_svc.compile_model(model, dims={"batch": "1..4"}, **FAST)
    array = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    assert (compiled(x=array)["y"] == np.maximum(array, 0).reshape(-1)).all()
    with pytest.raises(ArgumentError, match="dtype float64, expected float32"):
        compiled(x=array.astype(np.float64))


def test_a_bucket_whose_neighbours_the_model_does_not_take_is_exact(monkeypatch):
    real = model_module.load_graph

    def load(source, weights, types, extents, constants, **options):
        if extents["batch"] == 7:
            raise ArgumentError("seven is odd", code="invalid-option")
        return real(source, weights, types, extents, constants, **options)

    monkeypatch.setattr(model_module, "load_graph", load)
    model = roller_svc.compile_model((MODULE, (torch.zeros(3, 4),), ({0: Dim("batch", max=64)},)), dims={"batch": [1, 8]}, **FAST)
    check(model, 8)
    with pytest.raises(ArgumentError, match="no bucket") as caught:
        check(model, 5)
    assert "does not take 7 of it: seven is odd" in caught.value.hint


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 + x.shape[0] % 2),
        lambda x: torch.nn.functional.pad(x, (0, 0, 0, x.shape[0] % 2)),
        lambda x: x[:1] * torch.ones(x.shape[0] + x.shape[0] % 2)[:, None],
    ],
)
def test_extents_between_buckets_are_compared_too(function):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(ArgumentError, match="'batch' cannot be padded"):
        roller_svc.compile_model(
            (Module(), (torch.zeros(3, 4),), ({0: Dim("batch", min=2, max=8)},)), dims={"batch": "2..8"}, **FAST
        )
