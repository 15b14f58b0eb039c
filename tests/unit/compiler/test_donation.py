"""Donated inputs: scatters that update their targets in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roller_svc
from roller_svc.client.schemas import CompileRequest
from roller_svc.errors import ArgumentError
from roller_svc.runtime.binding import aligned_empty
from roller_svc.service.mapping import build_request_from_body

ADD = "grid[at[n]] +=. x[n]"
INPUTS = {"grid": ("float32", (5000,)), "at": ("int32", (700,)), "x": ("float32", (700,))}
GPU = "nvidia-h200-sxm"


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "grid": rng.integers(0, 9, 5000).astype(np.float32),
        "at": rng.integers(0, 5000, 700).astype(np.int32),
        "x": rng.integers(0, 9, 700).astype(np.float32),
    }


def expected(given: dict[str, np.ndarray]) -> np.ndarray:
    result = given["grid"].copy()
    np.add.at(result, given["at"], given["x"])
    return result


@pytest.fixture(scope="module")
def kernel() -> roller_svc.Kernel:
    return roller_svc.compile(ADD, INPUTS, select="model", donate=["grid"])


def test_the_array_is_the_result(kernel: roller_svc.Kernel) -> None:
    given = arrays()
    wanted = expected(given)
    assert "_copy" not in kernel.source
    assert kernel(**given)["grid"] is given["grid"]
    np.testing.assert_array_equal(given["grid"], wanted)


def test_without_the_option_the_array_stays() -> None:
    given = arrays()
    before = given["grid"].copy()
    assert roller_svc.compile(ADD, INPUTS, select="model")(**given)["grid"] is not given["grid"]
    np.testing.assert_array_equal(given["grid"], before)


def test_an_array_that_cannot_be_written_is_copied(kernel: roller_svc.Kernel) -> None:
    given = arrays()
    given["grid"].flags.writeable = False
    before = given["grid"].copy()
    np.testing.assert_array_equal(kernel(**given)["grid"], expected(given))
    np.testing.assert_array_equal(given["grid"], before)


def test_an_output_array_gets_a_copy_or_is_the_input(kernel: roller_svc.Kernel) -> None:
    given, out = arrays(), np.zeros(5000, np.float32)
    wanted = expected(given)
    assert kernel(**given, out={"grid": out})["grid"] is out
    np.testing.assert_array_equal(out, wanted)
    given = arrays()
    assert kernel(**given, out={"grid": given["grid"]})["grid"] is given["grid"]
    np.testing.assert_array_equal(given["grid"], wanted)


def test_an_array_that_another_input_shares_is_refused(kernel: roller_svc.Kernel) -> None:
    given = arrays()
    with pytest.raises(ArgumentError, match="'grid' is donated and may be overwritten, but shares memory with x") as refused:
        kernel(**(given | {"x": given["grid"][:700]}))
    assert refused.value.code == "donated-alias"


def test_a_saved_kernel_still_updates_in_place(kernel: roller_svc.Kernel, tmp_path: Path) -> None:
    kernel.save(tmp_path / "kernel")
    loaded, given = roller_svc.load(tmp_path / "kernel"), arrays()
    wanted = expected(given)
    assert loaded(**given)["grid"] is given["grid"]
    np.testing.assert_array_equal(given["grid"], wanted)


@pytest.mark.parametrize(
    ("expression", "donate", "reason"),
    [
        ("y[i] = grid[i]; grid[at[n]] +=. x[n]", ["grid"], "is also read"),
        ("grid[at[n]] +=. x[n] * grid[n + 1]", ["grid"], "is also read"),
        ("grid[at[n]] +=. x[n]; grid[at[n]] +=. 1.0", ["grid"], "is updated again"),
        ("grid[at[n]] +=. x[n]; y[i] = grid[i]", ["grid"], "is updated again, or is not an output"),
        (ADD, ["x"], "must be the target of one scatter, got 0"),
        (ADD, ["other"], "there is no input 'other'"),
        (ADD, "grid", "must be a list of inputs' names"),
    ],
)
def test_what_cannot_be_donated(expression: str, donate: Any, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason) as refused:
        roller_svc.compile(expression, INPUTS, select="model", donate=donate)
    assert refused.value.code == "invalid-option"


def test_a_constant_cannot_be_donated() -> None:
    with pytest.raises(ArgumentError, match="is a constant"):
        roller_svc.compile(ADD, INPUTS, select="model", donate=["grid"], constants=["grid"])


def test_a_request_to_the_service_donates() -> None:
    inputs = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in INPUTS.items()}
    body = {"expression": ADD, "inputs": inputs, "target": GPU, "options": {"donate": ["grid"]}}
    assert build_request_from_body(CompileRequest.model_validate(body)).donate == ("grid",)


@pytest.mark.emulator
@pytest.mark.parametrize("rows", [5000, 50])
def test_a_gpu_updates_in_place(rows: int) -> None:
    """Update a large target, and one that blocks reduce in shared memory."""
    inputs = INPUTS | {"grid": ("float32", (rows,))}
    copying = roller_svc.compile(ADD, inputs, target=GPU, runtime="emulator")
    kernel = roller_svc.compile(ADD, inputs, target=GPU, runtime="emulator", donate=["grid"])
    given = arrays()
    given |= {"grid": aligned_empty((rows,), np.dtype(np.float32)), "at": given["at"] % rows}
    given["grid"][...] = np.arange(rows)
    wanted = expected(given)
    np.testing.assert_array_equal(kernel(**given)["grid"], wanted)
    np.testing.assert_array_equal(given["grid"], wanted)
    assert len(kernel.launches) == len(copying.launches) - 1
    stages = {stage.name for stage in kernel.estimate.stages}
    assert "copy" in {stage.name for stage in copying.estimate.stages} - stages
