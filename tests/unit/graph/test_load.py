"""Models from files: external data, damaged files, refused sources."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import mlp, model

from roller_svc.errors import ArgumentError, InputError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType


def values(source: object) -> np.ndarray:
    weights = Weights()
    graph = load_graph(source, weights)
    (name, type_), *_ = graph.inputs
    x = np.linspace(-1, 1, type_.elements, dtype=np.float32).reshape(type_.shape)
    return interpret(graph, weights, {name: x})["y"]


def external(folder: Path, location: str = "w.bin", *, offset: str | None = None, length: str | None = None) -> Path:
    """Write y = x + w with w in another file, which has the numbers 0..7, and return the model's path."""
    (folder / "w.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            weight.external_data.add(key=key, value=value)
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (4,)}, {"y": (4,)}, [weight])
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_path_bytes_and_proto_give_one_graph(tmp_path: Path) -> None:
    proto = mlp()
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    expected = values(proto)
    for source in (path, str(path), path.read_bytes()):
        np.testing.assert_array_equal(values(source), expected)


def test_external_data_is_read_from_the_models_folder(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    np.testing.assert_array_equal(values(external(tmp_path, offset="16", length="16")), x + np.arange(4, 8, dtype="f4"))
    np.testing.assert_array_equal(values(external(tmp_path)), x + np.arange(4, dtype="f4"))


@pytest.mark.parametrize(
    ("location", "offset", "length"),
    [
        ("../outside.bin", None, None),
        ("/etc/passwd", None, None),
        ("link.bin", None, None),
        ("folder/inner.bin", None, None),
        ("fifo", None, None),
        (".", None, None),
        ("absent.bin", None, None),
        ("w\0.bin", None, None),
        ("", None, None),
        ("w.bin", "20", None),
        ("w.bin", "-4", None),
        ("w.bin", "99999999999999999999", None),
        ("w.bin", "1e1", None),
        ("w.bin", "0", "12"),
        ("w.bin", "0", "9999999999"),
    ],
)
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str, offset: str | None, length: str | None) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside.bin"
    folder.mkdir()
    outside.write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(outside)
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "inner.bin").write_bytes(bytes(64))
    (folder / "folder").symlink_to(tmp_path / "away")
    os.mkfifo(folder / "fifo")
    with pytest.raises(ArgumentError) as refusal:
        values(external(folder, location, offset=offset, length=length))
    assert refusal.value.code in ("external-data", "unreadable-file")


def test_external_data_of_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = external(tmp_path)
    monkeypatch.chdir(tmp_path)
    for source in (path.read_bytes(), onnx.load(path, load_external_data=False)):
        with pytest.raises(ArgumentError, match=r"w\.bin"):
            values(source)


def test_a_model_given_as_object_is_not_changed() -> None:
    proto = mlp()
    before = proto.SerializeToString()
    values(proto)
    assert proto.SerializeToString() == before


def test_damaged_files_give_input_errors() -> None:
    content = mlp().SerializeToString()
    random_ = random.Random(5)
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(random_.choice((1, 2, 4))):
            at = random_.randrange(len(damaged))
            if random_.random() < 0.5:
                damaged[at] = random_.randrange(256)
            else:
                del damaged[at : at + random_.randrange(1, 6)]
        with contextlib.suppress(InputError):  # any other exception fails the test
            load_graph(bytes(damaged), Weights())


@pytest.mark.parametrize("source", [b"", b"\x00\x01", 7, None, (1, 2), ("a",), [], "absent.onnx"])
def test_what_is_no_model_is_refused(source: object) -> None:
    with pytest.raises(ArgumentError):
        load_graph(source, Weights())


def test_old_operator_sets_are_upgraded() -> None:
    node = helper.make_node("Add", ["x", "w"], ["y"], broadcast=1, axis=0)  # attributes of operator set 6
    weight = helper.make_tensor("w", TensorProto.FLOAT, (2,), [10, 20])
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    expected = x + np.array([[10], [20]], np.float32)
    np.testing.assert_array_equal(values(model([node], {"x": (2, 3)}, {"y": (2, 3)}, [weight], opset=6)), expected)


@pytest.mark.parametrize(
    ("given", "dims", "code"),
    [
        (TensorType(DType.FLOAT64, (2, 16)), {}, "dtype-mismatch"),
        (TensorType(DType.FLOAT32, (2, 17)), {}, "shape-mismatch"),
        (TensorType(DType.FLOAT32, (2, 16, 1)), {}, "shape-mismatch"),
        (TensorType(DType.FLOAT32, (2, 16)), {"batch": 3}, "shape-mismatch"),
    ],
)
def test_given_types_that_contradict_the_model_are_refused(given: TensorType, dims: dict[str, int], code: str) -> None:
    source = model([helper.make_node("Relu", ["x"], ["y"])], {"x": ("batch", 16)}, {"y": ("batch", 16)})
    assert load_graph(source, Weights(), inputs={"x": TensorType(DType.FLOAT32, (2, 16))}, dims={"batch": 2}).inputs
    with pytest.raises(ArgumentError, match="the model declares") as refusal:
        load_graph(source, Weights(), inputs={"x": given}, dims=dims)
    assert refusal.value.code == code


def test_open_extents_are_named_and_bound() -> None:
    with pytest.raises(ArgumentError, match="batch") as refusal:
        load_graph(mlp("batch"), Weights())
    assert refusal.value.code == "open-shape"
    assert load_graph(mlp("batch"), Weights(), dims={"batch": 3}).inputs[0][1].shape == (3, 8)


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02"])
def test_files_of_torch_are_named(start: bytes) -> None:
    with pytest.raises(ArgumentError, match=r"a torch pickle, not an ONNX file: export it, or pass \(module, inputs\)"):
        load_graph(start + b"...", Weights())
