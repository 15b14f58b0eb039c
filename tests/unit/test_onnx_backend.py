"""The backend for the onnx package: calls, values that determine shapes, refusals, the package's own runner."""

from __future__ import annotations

import unittest
from collections.abc import Iterator

import numpy as np
import onnx.backend.base
import onnx.backend.test
import pytest
from onnx import TensorProto, helper
from onnx_models import model

from roller_svc import onnx_backend
from roller_svc.errors import InputError
from roller_svc.onnx_backend import RollerBackend
from roller_svc.settings import read_settings, use

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use(read_settings(cache=tmp_path_factory.mktemp("cache")))
    yield
    use(read_settings())


def relu(shape: tuple[object, ...]) -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"])], {"x": shape}, {"y": shape})


def test_only_cpus_are_supported() -> None:
    assert [onnx_backend.supports_device(name) for name in ("CPU", "CPU:0", "CUDA", "CUDA:1", "TPU", "")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    with pytest.raises(InputError, match="CUDA"):
        onnx_backend.prepare(relu((2, 3)), "CUDA")
    assert issubclass(RollerBackend, onnx.backend.base.Backend)


def test_a_prepared_model_takes_lists_and_names() -> None:
    prepared = onnx_backend.prepare(relu((2, 3)), device="CPU")
    for inputs in ([X], (X,), {"x": X}, X):
        result = prepared.run(inputs)
        np.testing.assert_array_equal(result[0], np.maximum(X, 0))
        assert result.y is result[0]
    with pytest.raises(InputError):
        prepared.run([X[:1]])
    with pytest.raises(InputError):
        prepared.run([X, X])


def test_open_extents_come_from_the_arrays() -> None:
    prepared = onnx_backend.prepare(relu(("n", 3)))
    for x in (X, X[:1]):
        np.testing.assert_array_equal(prepared.run([x])[0], np.maximum(x, 0))


def test_values_that_determine_shapes_are_specialized() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "reshape",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3)),
            helper.make_tensor_value_info("shape", TensorProto.INT64, (2,)),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("a", "b"))],
    )
    prepared = onnx_backend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    for shape in ((3, 2), (1, 6), (3, 2)):
        np.testing.assert_array_equal(prepared.run([X, np.array(shape)])[0], X.reshape(shape))
    assert len(prepared._compiled) == 2


@pytest.mark.parametrize("extent", [0, "n"])
def test_inputs_without_elements_are_left_out(extent: object) -> None:
    source = model([helper.make_node("CastLike", ["x", "like"], ["y"])], {"x": (2, 3), "like": (extent,)}, {"y": (2, 3)})
    (result,) = onnx_backend.run_model(source, [X, np.zeros(0, np.float32)])
    np.testing.assert_array_equal(result, X)


def test_a_node_runs_alone() -> None:
    node = helper.make_node("Add", ["a", "b"], ["c"])
    (result,) = onnx_backend.run_node(node, [X, X], opset_version=14)
    np.testing.assert_array_equal(result, X + X)


def test_an_unsupported_model_is_skipped() -> None:
    source = model([helper.make_node("RandomNormalLike", ["x"], ["y"])], {"x": (2, 3)}, {"y": (2, 3)})
    with pytest.raises(InputError, match="RandomNormalLike") as refusal:
        onnx_backend.run_model(source, [X])
    assert isinstance(refusal.value, unittest.SkipTest)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the package's own test cases overflow in casts
def test_the_runner_of_onnx_accepts_the_backend() -> None:
    backend_test = onnx.backend.test.BackendTest(onnx_backend, __name__)
    backend_test.include(
        r"test_(relu|strnormalizer_export_monday_casesensintive_lower|sequence_insert_at_back|reshape_extended_dims)_cpu"
    )
    result = unittest.TestResult()
    case = backend_test.test_cases["OnnxBackendNodeModelTest"]
    names = [
        "test_relu_cpu",
        "test_reshape_extended_dims_cpu",
        "test_strnormalizer_export_monday_casesensintive_lower_cpu",
        "test_relu_cuda",
    ]
    for name in [*names, "test_sequence_insert_at_back_cpu"]:
        case(name).run(result)
    assert (result.failures, result.errors) == ([], [])
    skipped = {test.id().rpartition(".")[2] for test, _ in result.skipped}
    assert skipped == {
        "test_strnormalizer_export_monday_casesensintive_lower_cpu",
        "test_relu_cuda",
        "test_sequence_insert_at_back_cpu",
    }
