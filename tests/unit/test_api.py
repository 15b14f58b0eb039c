"""The Python API as callers use it: compile, call, estimate, save, load."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roller_svc
from roller_svc import hardware, settings
from roller_svc.errors import ArgumentError, InputError, ToolchainMissingError, UnknownKernelError
from roller_svc.settings import Settings

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
TYPES = {"A": ("float32", (24, 40)), "B": ("float32", (40, 17))}


@pytest.fixture(scope="module")
def kernel() -> roller_svc.Kernel:
    return roller_svc.compile(MATMUL, inputs=TYPES, target="local", top_k=2)


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.uniform(-1, 1, shape).astype(dtype) for name, (dtype, shape) in TYPES.items()}


def test_importing_loads_nothing_heavy() -> None:
    program = "import roller_svc, sys; print([m for m in ('numpy', 'islpy', 'pydantic', 'lark') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_local_commands_load_no_http_client() -> None:
    program = "import roller_svc.cli.run, sys; print([m for m in ('httpx', 'roller_svc.client') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_ends_without_a_collection() -> None:
    program = """
import atexit, gc
from roller_svc.cli import main
atexit.register(lambda: print(gc.isenabled()))
assert (main(["--version"]), main(["--version"])) == (0, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("text", ["C[m] = A[m", "C[m] = Q[m]", "C[m] = A[m + 1]"])
def test_a_refused_program_loads_no_compiler(text: str) -> None:
    heavy = ("islpy", "pydantic", "yaml", "rich", "roller_svc.runtime", "roller_svc.codegen", "roller_svc.families")
    program = f"""
import sys
from roller_svc.cli import main
status = main(["compile", {text!r}, "--input", "A=float32[4]"])
print(status, [m for m in {heavy} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 []"


def test_a_kernel_computes(kernel: roller_svc.Kernel, arrays: dict[str, Any]) -> None:
    result = kernel(**arrays)
    assert set(result) == {"C"}
    assert result["C"].dtype == np.float32
    np.testing.assert_allclose(result["C"], arrays["A"] @ arrays["B"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(kernel.run(arrays)["C"], result["C"])


def test_out_is_written_in_place(kernel: roller_svc.Kernel, arrays: dict[str, Any]) -> None:
    given = np.full((24, 17), np.nan, np.float32)
    result = kernel(**arrays, out={"C": given})
    assert result["C"] is given
    np.testing.assert_allclose(given, arrays["A"] @ arrays["B"], rtol=1e-4, atol=1e-5)


def test_what_a_kernel_tells(kernel: roller_svc.Kernel) -> None:
    assert kernel.digest.startswith("sha256:")
    assert len(kernel.digest) == 71
    assert kernel.target == "local"
    assert kernel.expression.startswith("C[m, n] +=!")
    assert "kernel" in kernel.source
    assert kernel.binary.startswith(b"\x7fELF")
    assert kernel.language == "c"
    assert [launch.grid for launch in kernel.launches] == [(1, 1, 1)] * len(kernel.launches)
    assert len(kernel.resources) == len(kernel.launches)
    assert kernel.estimate is not None
    assert kernel.estimate.seconds > 0
    assert kernel.estimate.bound in [name for name, _ in kernel.estimate.stages]
    assert kernel.program == kernel.estimate.program
    assert json.loads(json.dumps(kernel.report, allow_nan=False)) == kernel.report


def test_candidates_are_best_first_and_measured(kernel: roller_svc.Kernel) -> None:
    assert len(kernel.candidates) == 2
    times = [one.measurement.min_s for one in kernel.candidates if one.measurement is not None]
    assert len(times) == 2
    assert times == sorted(times)
    assert all(one.error is None and one.estimate.seconds > 0 and one.program for one in kernel.candidates)


def test_the_model_chooses_where_no_device_is(kernel: roller_svc.Kernel) -> None:
    modelled = roller_svc.compile(MATMUL, inputs=TYPES, target="nvidia-h200-sxm", top_k=1, select="model")
    assert modelled.language == "cuda"
    assert modelled.candidates[0].measurement is None
    assert modelled.resources[0].spill_bytes == 0
    assert modelled.resources[0].registers_per_thread > 0


def test_saved_and_loaded_again(kernel: roller_svc.Kernel, arrays: dict[str, Any], tmp_path: Path) -> None:
    folder = kernel.save(tmp_path / "kernel")
    assert {path.name for path in folder.iterdir()} == {"kernel.c", "kernel.so", "kernel.h", "metadata.json", "report.json"}
    again = roller_svc.load(folder)
    for name in ("digest", "target", "expression", "source", "binary", "language", "launches", "resources", "report"):
        assert getattr(again, name) == getattr(kernel, name)
    assert again.estimate == kernel.estimate
    assert again.program == kernel.program
    np.testing.assert_array_equal(again(**arrays)["C"], kernel(**arrays)["C"])
    with pytest.raises(UnknownKernelError):
        roller_svc.load(tmp_path)


@pytest.mark.parametrize("change", ["missing", "unknown", "dtype", "shape", "list", "output", "positional"])
def test_calls_that_do_not_fit(kernel: roller_svc.Kernel, arrays: dict[str, Any], change: str) -> None:
    given: dict[str, Any] = dict(arrays)
    out = None
    match change:
        case "missing":
            del given["A"]
        case "unknown":
            given["Q"] = given["A"]
        case "dtype":
            given["A"] = given["A"].astype(np.float64)
        case "shape":
            given["A"] = given["A"][:-1]
        case "list":
            given["A"] = given["A"].tolist()
        case "output":
            out = {"Q": np.zeros((24, 17), np.float32)}
        case "positional":
            given = [arrays["A"], arrays["B"]]  # what is refused
    with pytest.raises(InputError):
        kernel.run(given, out)


def test_a_spec_stands_in_place_of_a_target() -> None:
    spec = hardware.load("cpu-x86-avx2")
    assert roller_svc.compile(MATMUL, TYPES, hardware=spec, select="model", top_k=1).target == "cpu-x86-avx2"


def test_estimates_for_devices_that_are_not_here() -> None:
    found = roller_svc.estimate(MATMUL, TYPES, targets=["nvidia-k80", "amd-mi300x", "local"], top_k=3)
    assert list(found) == ["nvidia-k80", "amd-mi300x", "local"]
    for estimates in found.values():
        seconds = [one.seconds for one in estimates]
        assert 1 <= len(seconds) <= 3
        assert seconds == sorted(seconds)
        assert all(one.program and one.waves >= 1 and 0 < one.occupancy <= 1 for one in estimates)
    assert list(roller_svc.estimate(MATMUL, TYPES, targets="t4,K80")) == ["nvidia-t4", "nvidia-k80"]
    with pytest.raises(ArgumentError):
        roller_svc.estimate(MATMUL, TYPES, targets=[])
    half = replace(hardware.load("nvidia-h200-sxm"), num_cores=66)
    with pytest.raises(ArgumentError, match="duplicate target 'nvidia-h200-sxm'"):
        roller_svc.estimate(MATMUL, TYPES, targets=["nvidia-h200-sxm", half])
    named = replace(half, id="half-an-h200")
    assert list(roller_svc.estimate(MATMUL, TYPES, ["nvidia-h200-sxm", named])) == ["nvidia-h200-sxm", "half-an-h200"]


def test_compiling_for_a_device_without_a_compiler_says_what_is_missing() -> None:
    with pytest.raises(ToolchainMissingError, match="sm_37"):
        roller_svc.compile(MATMUL, TYPES, target="nvidia-k80", select="model")


def test_targets_and_reference(arrays: dict[str, Any]) -> None:
    assert {"local", "nvidia-h200-sxm", "graphcore-mk2"} <= {spec.id for spec in roller_svc.targets()}
    result = roller_svc.reference(MATMUL, TYPES, arrays)
    np.testing.assert_allclose(result["C"], arrays["A"] @ arrays["B"], rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError):
        roller_svc.reference(MATMUL, TYPES, {"A": arrays["A"]})


def test_errors_point_into_the_text() -> None:
    with pytest.raises(roller_svc.errors.RollerError) as refused:
        roller_svc.compile("C[m, n] +=! A[m, k] * Q[k, n]", TYPES)
    assert isinstance(refused.value, InputError)
    assert (refused.value.code, refused.value.line, refused.value.column, refused.value.end_column) == (
        "unknown-name",
        1,
        23,
        24,
    )
    assert refused.value.hint


def test_what_no_signature_has_is_refused(kernel: roller_svc.Kernel, arrays: dict[str, Any]) -> None:
    calls: list[Callable[[], object]] = [
        lambda: roller_svc.compile(MATMUL, TYPES, tops=3),
        lambda: kernel(*arrays.values()),
        lambda: kernel.run(list(arrays)),
        lambda: kernel.save(3),
        lambda: roller_svc.load(3),
        lambda: roller_svc.reference(MATMUL, TYPES, 3),
    ]
    for call in calls:
        with pytest.raises(ArgumentError):
            call()


def test_unknown_attributes_are_errors() -> None:
    with pytest.raises(AttributeError):
        roller_svc.nothing  # noqa: B018 - looking it up is the test
    assert "compile" in dir(roller_svc)


@pytest.mark.parametrize("name", ["", ".client", ".frontend.ops", ".torch", ".torch_backend", ".tuning"])
def test_public_modules_list_nothing_internal(name: str) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    module = importlib.import_module(f"roller_svc{name}")
    shown = {each for each in dir(module) if isinstance(getattr(module, each), types.ModuleType)}
    assert shown <= {"errors", "ops", "onnx_nodes", "schemas"}
    assert set(module.__all__) <= set(dir(module))


def test_arrays_are_given_by_name_and_an_equal_call_returns_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((4, 8), np.float32)
    kernel = roller_svc.compile("y[i] +=! x[i, j] * name[j]", {"name": ("float32", (8,))}, x=x, select="model")
    assert [(b.name, b.shape) for b in kernel.parts.compiled.source.buffers[:2]] == [("name", (8,)), ("x", (4, 8))]
    again = roller_svc.compile("y[i] +=! x[i, j] * name[j]", {"name": x[0]}, x=("float32", (4, 8)), select="model")
    assert again is kernel
    assert roller_svc.compile("y[i] +=! x[i, j] * name[j]", {"name": x[0]}, x=x, select="model", cache=False) is not kernel
    for more, hint in (({"name": x}, "inputs="), ({"selct": "model"}, "`select`"), ({"x": x, "inputs": {"x": x}}, None)):
        with pytest.raises(ArgumentError) as caught:
            roller_svc.compile("y[i] +=! x[i, j]", **more)
        assert hint is None or hint in (caught.value.hint or "")


def test_kernels_are_found_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", [Settings(cache=tmp_path, calibrate=False, cache_kernels=True)])
    kernel = roller_svc.compile("y[i] = x[i] + 3.0", x=np.ones(8, np.float32), select="model")
    monkeypatch.setattr(roller_svc.api, "_cached", OrderedDict())  # as in another process
    found = roller_svc.compile("y[i] = x[i] + 3.0", x=np.ones(8, np.float32), select="model")
    assert found is not kernel
    assert (found.digest, found.candidates) == (kernel.digest, ())
    assert found(x=np.ones(8, np.float32))["y"][0] == 4.0


def test_a_kernel_tells_its_arrays_its_time_and_itself_and_travels() -> None:
    x = np.ones((4, 8), np.float32)
    kernel = roller_svc.compile("y[i] +=! x[i, j]", x=x, select="model")
    assert kernel.inputs == (("x", "float32", (4, 8)),)
    assert kernel.outputs == (("y", "float32", (4,)),)
    assert kernel.time(x=x).min_s > 0
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy.digest == kernel.digest
    np.testing.assert_array_equal(copy(x=x)["y"], kernel(x=x)["y"])
    assert all(len(repr(each)) < 200 for each in (kernel, kernel.estimate, *kernel.candidates))
    assert isinstance(roller_svc.targets()[0], roller_svc.HardwareSpec)
    assert pickle.loads(pickle.dumps(roller_svc.targets()[0])) == roller_svc.targets()[0]
