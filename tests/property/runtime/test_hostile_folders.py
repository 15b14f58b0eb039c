"""Folders of strangers: whatever their metadata says, loading gives a kernel or ArgumentError, soon and in bounds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

import roller_svc
from roller_svc.errors import ArgumentError
from roller_svc.ir.quoting import require_identifier

EXAMPLES = settings(max_examples=examples(150))
MANY = settings(max_examples=3_000)

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            0,
            -1,
            1 << 31,
            1 << 63,
            1 << 200,
            "",
            "a b",
            "../../etc/passwd",
            "system",
            "\0",
            "c",
            "cuda",
            "hip",
            "float64",
            "int64",
            "workspace",
            "status",
            "input",
            "output",
            "tensor_map",
            "sm_90a",
        ]
    ),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module", params=["local", "nvidia-h200-sxm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = request.param
    kernel = roller_svc.compile(
        "s[m] +=! t[i[m], k] * x[k]; y[m] = s[m] / 2.0",
        {"t": ("float32", (16, 64)), "i": ("int32", (8,)), "x": ("float32", (64,))},
        target=target,
        select="model",
        top_k=2,
    )
    return Path(kernel.save(tmp_path_factory.mktemp("saved") / "kernel"))


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value of a document."""
    found = [path] if path else []
    for step in steps_of(document):
        found += places(document[step], (*path, step))
    return found


def steps_of(value: Any) -> list[Any]:
    """Keys of a mapping, places in a list, nothing of anything else."""
    if isinstance(value, list):
        return list(range(len(value)))
    return list(value) if isinstance(value, dict) else []


def mutated(document: Any, data: st.DataObject) -> Any:
    """The document with one to three of its values replaced, removed, doubled, or exchanged for others of its own."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        ways = places(document)
        *path, last = data.draw(st.sampled_from(ways))
        inner = document
        for step in path:
            inner = inner[step]
        match data.draw(st.sampled_from(["replace", "replace", "remove", "double", "exchange"])):
            case "replace":
                inner[last] = data.draw(_VALUES)
            case "remove":
                del inner[last]
            case "double" if isinstance(inner, list):
                inner.append(copy.deepcopy(inner[last]))
            case _:
                other = document
                for step in data.draw(st.sampled_from(ways)):
                    other = other[step] if step in steps_of(other) else other
                inner[last] = copy.deepcopy(other)
    return document


def loaded(folder: Path) -> roller_svc.Kernel | ArgumentError:
    try:
        return roller_svc.load(folder)
    except ArgumentError as refused:
        return refused


def check_loads_or_refuses(document: Any, folder: Path, scratch: Path) -> None:
    for file in folder.iterdir():
        (scratch / file.name).write_bytes(file.read_bytes())
    (scratch / "metadata.json").write_text(json.dumps(document), encoding="utf-8")
    kernel = loaded(scratch)
    if isinstance(kernel, ArgumentError):
        assert kernel.code == "damaged-kernel"
        return
    source = kernel.parts.compiled.source
    assert kernel.binary == (folder / ("kernel.so" if kernel.language == "c" else "kernel.cubin")).read_bytes()
    for launch in source.launches:
        for name in (launch.name, *launch.args, *launch.zeroed):
            require_identifier(name)
    assert source.workspace_bytes < 1 << 52


@EXAMPLES
@given(st.data())
def test_mutated_metadata(folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    document = mutated(json.loads((folder / "metadata.json").read_text()), data)
    check_loads_or_refuses(document, folder, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@MANY
@given(st.data())
def test_very_many_mutations(folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    document = mutated(json.loads((folder / "metadata.json").read_text()), data)
    check_loads_or_refuses(document, folder, tmp_path_factory.getbasetemp())


def test_what_was_saved_loads(folder: Path, tmp_path: Path) -> None:
    document = json.loads((folder / "metadata.json").read_text())
    check_loads_or_refuses(document, folder, tmp_path)
    assert roller_svc.load(tmp_path).digest == document["digest"]
