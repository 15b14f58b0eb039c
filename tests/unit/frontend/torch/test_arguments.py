"""Tensors as arguments of kernels and models: shared memory, results that are tensors, refusals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

import roller_svc
from roller_svc.errors import ArgumentError, IndexRangeError
from roller_svc.frontend.torch.arguments import run_with_tensors, share_arrays
from roller_svc.frontend.torch.tensors import DTYPES

FAST = {"select": "model", "top_k": 1}


def unchanged(arrays, _):
    return dict(arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_arguments_and_results_share_memory(dtype, strided):
    whole = torch.arange(12).reshape(3, 4).to(dtype)
    x = whole.t()[::2] if strided else whole
    array = share_arrays("argument", {"x": x})["x"]
    assert (array.ctypes.data, array.shape) == (x.data_ptr(), tuple(x.shape))
    assert (array.astype(np.float64) == x.to(torch.float64).numpy()).all()
    result = run_with_tensors(unchanged, {"x": whole}, None)["x"]
    assert (result.dtype, result.data_ptr()) == (dtype, whole.data_ptr())


def test_scalars_and_views_of_negated_tensors():
    assert share_arrays("argument", {"x": torch.tensor(2.5, dtype=torch.bfloat16)})["x"].item() == 2.5
    negated = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    assert negated.is_neg()
    assert share_arrays("argument", {"x": negated})["x"].tolist() == [-1, -1]


def test_arrays_stay_arrays():
    arrays = {"x": np.ones(3)}
    assert share_arrays("argument", arrays) is arrays
    assert run_with_tensors(unchanged, arrays, None)["x"] is arrays["x"]
    mixed = run_with_tensors(unchanged, arrays | {"y": torch.ones(1)}, None)
    assert all(isinstance(result, torch.Tensor) for result in mixed.values())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.ones(2, requires_grad=True), "requires a gradient"),
        (lambda: torch.empty(2, device="meta"), "on meta"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, dtype=torch.complex64), "complex64"),
    ],
)
def test_refusals_name_the_argument(tensor, message):
    with pytest.raises(ArgumentError, match=f"argument 'x'.*{message}"):
        share_arrays("argument", {"x": tensor()})


def test_results_are_not_written_to_views_of_negated_numbers():
    y = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    with pytest.raises(ArgumentError, match="output 'y' is a view of negated numbers"):
        run_with_tensors(unchanged, {"x": torch.ones(2)}, {"y": y})


@pytest.mark.parametrize("negated", [False, True])
def test_donated_tensors_are_updated_with_a_new_version(tmp_path, monkeypatch, negated):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))
    types = {"grid": ("float32", (4,)), "at": ("int64", (2,)), "x": ("float32", (2,))}
    kernel = roller_svc.compile("grid[at[n]] +=. x[n]", types, donate=["grid"], **FAST)
    grid = torch.ones(4)
    argument, version = torch._neg_view(grid) if negated else grid, grid._version
    result = kernel(grid=argument, at=torch.tensor([1, 3]), x=torch.ones(2))["grid"]
    assert result.tolist() == ([-1, 0, -1, 0] if negated else [1, 2, 1, 2])
    assert (result is grid, grid._version > version) == (not negated, not negated)


def test_bound_kernels_tell_torch_of_each_write(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))
    types = {"grid": ("float32", (4,)), "at": ("int64", (2,)), "x": ("float32", (2,))}
    kernel = roller_svc.compile("grid[at[n]] +=. x[n]; y[n] = x[n] * 2", types, donate=["grid"], outputs=["grid", "y"], **FAST)
    grid, x, y = torch.ones(4), torch.ones(2), torch.zeros(4)[::2]
    call = kernel.bind({"grid": grid, "at": torch.tensor([1, 3]), "x": x}, {"y": y})
    scale = torch.ones(4, requires_grad=True)
    product = (grid * scale).sum()  # its gradient reads grid
    versions = grid._version, y._version
    for count in (1, 2):
        call()
        assert (grid.tolist(), y.tolist()) == ([1, 1 + count, 1, 1 + count], [2, 2])
        assert all(now > before for now, before in zip((grid._version, y._version), versions, strict=True))
        versions = grid._version, y._version
    results = call.results()
    assert (results["grid"] is grid, results["y"] is y, (grid._version, y._version)) == (True, True, versions)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("call", ["run", "bind", "prepare"])
@pytest.mark.parametrize("case", ["out", "index", "strided", "array"])
def test_all_writes_of_a_call_are_told_to_torch(tmp_path, monkeypatch, call, case):
    """A donated tensor is written where the result goes elsewhere, and where the call fails."""
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))
    types = {"grid": ("float32", (4,)), "at": ("int64", (2,)), "x": ("float32", (2,))}
    kernel = roller_svc.compile("grid[at[n]] +=. x[n]", types, donate=["grid"], constants=["x"], **FAST)
    whole = torch.ones(8)
    grid = whole[::2] if case == "strided" else whole[:4]
    x, other = torch.ones(2), torch.zeros(4)
    arguments = {"grid": grid.numpy() if case == "array" else grid, "at": torch.tensor([1, 9 if case == "index" else 3])}
    out = None if case == "strided" else {"grid": other}
    product = (grid * torch.ones(4, requires_grad=True)).sum()  # its gradient reads grid
    versions = grid._version, other._version

    def run():
        if call == "prepare":
            return kernel.prepare(x=x).run(arguments, out)
        if call == "run":
            return kernel.run(arguments | {"x": x}, out)
        bound = kernel.bind(arguments | {"x": x}, out)
        bound()
        return bound.results()

    if case == "index":
        with pytest.raises(IndexRangeError):
            run()
    else:
        result = run()["grid"]
        assert (result.tolist(), result is other) == ([1, 2, 1, 2], out is not None)
    is_written = case in ("out", "index")
    assert (grid._version > versions[0], other._version > versions[1]) == (is_written, out is not None)
    if is_written:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    else:
        product.backward()
    if case == "strided":
        assert whole.tolist() == [1] * 8


def test_bound_kernels_of_arrays_read_what_these_have(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))
    kernel = roller_svc.compile("y[i] = x[i] * 2", {"x": ("float32", (3,))}, **FAST)
    x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
    call = kernel.bind({"x": x}, {"y": y})
    for value in (1, 5):
        x[:] = value
        call()
        assert y.tolist() == [2 * value] * 3
    assert call.results()["y"] is y
    with pytest.raises(ArgumentError, match="missing argument: x"):
        kernel.bind({})


def test_fake_tensors_are_refused():
    with torch._subclasses.FakeTensorMode(), pytest.raises(ArgumentError, match="of a trace"):
        share_arrays("argument", {"x": torch.ones(2)})


def test_kernels_models_and_the_reference_take_tensors(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))
    text, x = "y[i] = x[i] * w[i]", torch.randn(6, dtype=torch.bfloat16)[::2]
    w = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    types = {"x": ("bfloat16", (3,)), "w": ("bfloat16", (3,))}
    kernel = roller_svc.compile(text, types, constants=["w"], **FAST)
    out = torch.zeros(3, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = x * w
        torch.testing.assert_close(kernel(x=x, w=w)["y"], expected)
        torch.testing.assert_close(kernel.prepare(w=w)(x=x)["y"], expected)
        torch.testing.assert_close(roller_svc.reference(text, types, {"x": x, "w": w})["y"], expected)
        version = out._version
        assert kernel(x=x, w=w, out={"y": out})["y"] is out
    torch.testing.assert_close(out, expected)
    assert out._version > version
    model = roller_svc.compile_model((torch.nn.Linear(3, 2).bfloat16(), (out[None],)), **FAST)
    assert model.run({model.inputs[0].name: out[None]})["output0"].dtype is torch.bfloat16
