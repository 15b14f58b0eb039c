"""Files that launch saved kernels: values on a CPU; for GPUs the driver's calls, compared with those of our runtime."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from onnx import TensorProto, helper, numpy_helper
from onnx_models import mlp
from onnx_models import model as onnx_model

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions
from roller_svc.errors import ArgumentError
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.kernel import CompiledKernel, Resources, Role, align_blocks
from roller_svc.ir.program import TensorType
from roller_svc.runtime.cuda.driver import Driver
from roller_svc.runtime.saved.serialization import KernelBundle, save

FAKE_CUDA = Path(__file__).parents[2] / "support" / "fake_cuda"
H200, A100, MI250X = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"
GEMM = ("y[m, n]: float32 +=! a[m, k] * b[n, k]", {"a": ("float16", (512, 256)), "b": ("float16", (256, 256))})
PROGRAMS = {
    "wgmma": (*GEMM, H200),
    "im2col": (
        "y[b, h, w, o]: float32 +=! x[b, h + r - 1, w + s - 1, c].when([0 <= h + r - 1, h + r - 1 < 14, 0 <= w + s - 1, "
        "w + s - 1 < 14], 0.0) * f[o, r, s, c] where h in 14, w in 14",
        {"x": ("float16", (8, 14, 14, 64)), "f": ("float16", (64, 3, 3, 64))},
        H200,
    ),
    "attention": (
        "o = attention(q, k, v, causal=true)",
        dict.fromkeys(("q", "k", "v"), ("float16", (1, 4, 256, 64))),
        H200,
    ),
    "rows": ("y = softmax(x)", {"x": ("float32", (64, 1000))}, A100),
    "split": ("y[m] +=! x[m, k]", {"x": ("float32", (4, 1 << 20))}, A100),
    "histogram": ("y[i] = 0.0 where i in 10; y[a[j]] +=. x[j]", {"a": ("int32", (4096,)), "x": ("float32", (4096,))}, A100),
    "elementwise": ("y[i] = exp(x[i])", {"x": ("float32", (1000,))}, A100),
    "hip": (*GEMM, MI250X),
}  # fmt: skip
STREAM, WORKSPACE = 7, 0x7000_0000_0000


def emit(name: str) -> CompiledKernel:
    """Return a kernel of PROGRAMS with another binary."""
    text, inputs, target = PROGRAMS[name]
    types = {n: TensorType(dtype_named(dtype), shape) for n, (dtype, shape) in inputs.items()}
    program = parse(text, types)
    hw = hardware.load(target)
    plans = merge_ranked_plans(rank_partitions(PartitionCache(program), hw, 1, ScheduleConstraints()), 1)
    source = emit_plan(plans[0].plan, program, plans[0].groups, hw)
    return CompiledKernel(source, b"image", "", tuple(Resources(shared_bytes=each.shared_bytes) for each in source.launches))


def saved(folder: Path, compiled: CompiledKernel, *launchers: str) -> ModuleType | None:
    """Save the kernel with launchers and return launch.py as a module."""
    save(KernelBundle(compiled, "text", "target", "sha256:0"), folder, launchers)
    return imported(folder) if (folder / "launch.py").exists() else None


def imported(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"launch_{folder.name}", folder / "launch.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def addresses_of(compiled: CompiledKernel) -> tuple[dict[str, int], dict[str, int]]:
    """Return addresses of the arrays, and of the workspaces in their block."""
    arrays = {b.symbol: 0x1000_0000 * (i + 1) for i, b in enumerate(compiled.source.run_buffers)}
    offsets, _ = align_blocks(compiled.source.buffers_of(Role.WORKSPACE))
    return arrays, {symbol: WORKSPACE + offset for symbol, offset in offsets.items()}


def calls_of_runtime(compiled: CompiledKernel) -> list[Any]:
    """Return the calls that our own runtime makes to launch a kernel."""
    fake = FakeDriver(compiled.source.launches)
    driver = Driver(fake, fix_small_maps=True)
    arrays, workspaces = addresses_of(compiled)
    memory = arrays | workspaces
    sizes = {b.symbol: b.bytes for b in compiled.source.buffers}
    for number, launch in enumerate(compiled.source.launches, 1):
        for symbol in launch.zeroed:
            fake.cuMemsetD8Async(memory[symbol], 0, sizes[symbol], STREAM)
        driver.launch(number, launch, driver.parameters(launch, memory), STREAM)
    return fake.calls


def split_loading(calls: list[Any]) -> tuple[list[Any], list[Any]]:
    loading = [call for call in calls if call[0] in ("load", "function", "attribute")]
    return loading, [call for call in calls if call not in loading]


def check_calls(compiled: CompiledKernel, calls: list[Any]) -> None:
    loading, launching = split_loading(calls)
    assert launching == calls_of_runtime(compiled)
    launches = compiled.source.launches
    assert [call[1] for call in loading if call[0] == "function"] == [launch.name for launch in launches]
    large = [[n, 8, each.shared_bytes] for n, each in enumerate(launches, 1) if each.shared_bytes > 48 << 10]
    is_cuda = compiled.source.language.value == "cuda"
    assert [call[1:] for call in loading if call[0] == "attribute"] == (large if is_cuda else [])
    assert loading[0] == ["load", "image"]


@pytest.fixture(scope="module")
def kernels() -> dict[str, CompiledKernel]:
    compiled = {name: emit(name) for name in PROGRAMS}
    source = compiled["rows"].source  # no family asks for zeroed memory now
    zeroed = replace(source, launches=tuple(replace(launch, zeroed=launch.args[:1]) for launch in source.launches))
    return compiled | {"rows": replace(compiled["rows"], source=zeroed)}


def test_programs_have_what_launchers_must_do(kernels: dict[str, CompiledKernel]) -> None:
    launches = [launch for compiled in kernels.values() for launch in compiled.source.launches]
    modes = {view.mode.value for launch in launches for view in launch.tensor_maps}
    assert modes == {"tiled", "im2col"}
    assert any(launch.cluster > 1 for launch in launches)
    assert any(launch.zeroed for launch in launches)
    assert any(launch.shared_bytes > 48 << 10 for launch in launches)
    assert any(compiled.source.workspace_bytes for compiled in kernels.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_launch_py_calls_the_driver_as_our_runtime(
    name: str, kernels: dict[str, CompiledKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = kernels[name]
    fake = FakeDriver(compiled.source.launches)
    module = saved(tmp_path, compiled, "cupy")
    assert module is not None
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: fake)
    arrays, _ = addresses_of(compiled)
    module.Kernel(tmp_path).launch(arrays, WORKSPACE, STREAM)
    check_calls(compiled, fake.calls)


def test_a_thread_without_a_context_uses_that_of_the_arrays(
    kernels: dict[str, CompiledKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = kernels["elementwise"]
    fake = FakeDriver(compiled.source.launches)
    fake.has_context = False
    module = saved(tmp_path, compiled, "torch")
    assert module is not None
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: fake)
    module.Kernel(tmp_path).launch(addresses_of(compiled)[0], WORKSPACE, STREAM, 3)
    assert fake.calls.pop(0) == ["current", 103]
    check_calls(compiled, fake.calls)


def test_arrays_of_a_gpu_are_aligned(kernels: dict[str, CompiledKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = kernels["elementwise"]
    module = saved(tmp_path, compiled, "cupy")
    assert module is not None
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: FakeDriver(compiled.source.launches))
    library = replace(module._numpy(), address=lambda a: a.address)
    monkeypatch.setattr(module, "_library_of", lambda *_, **__: library)
    array = np.zeros(1000, np.float32).view(type("Array", (np.ndarray,), {"address": 0x1004}))
    with pytest.raises(ValueError, match="x: expected an address that is a multiple of 64 bytes"):
        module.Kernel(tmp_path).run({"x": array})


@pytest.mark.needs("g++")
@pytest.mark.parametrize("name", [name for name, (_, _, target) in PROGRAMS.items() if target != MI250X])
def test_launch_hpp_calls_the_driver_as_our_runtime(name: str, kernels: dict[str, CompiledKernel], tmp_path: Path) -> None:
    compiled = kernels[name]
    source = compiled.source
    saved(tmp_path, compiled, "cpp")
    assert not (tmp_path / "launch.py").exists()
    arrays, _ = addresses_of(compiled)
    arguments = [*(f"{arrays[b.symbol]}ull" for b in source.run_buffers)]
    arguments += [f"{WORKSPACE}ull"] * bool(source.workspace_bytes)
    sizes = [[8] * len(each.args) + [128] * len(each.tensor_maps) for each in source.launches]
    text = ", ".join("{" + ", ".join(map(str, each)) + "}" for each in sizes)
    (tmp_path / "main.cpp").write_text(f"""
#include "launch.hpp"
int main() {{
    {source.name}_launcher kernel;
    parameter_bytes = {{{text}}};
    if (kernel.load("image")) return 1;
    return kernel.launch({", ".join(arguments)}, (CUstream){STREAM}) + kernel.unload();
}}""")
    command = ("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{FAKE_CUDA}", "main.cpp", "-o", "main")
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run((tmp_path / "main",), check=True, capture_output=True, text=True).stdout
    check_calls(compiled, [json.loads(line) for line in printed.splitlines()])


@pytest.mark.needs("g++")
def test_launch_hpp_of_hip_compiles(kernels: dict[str, CompiledKernel], tmp_path: Path) -> None:
    saved(tmp_path, kernels["hip"], "cpp")
    (tmp_path / "main.cpp").write_text('#include "launch.hpp"\n')
    command = ("g++", "-std=c++17", "-Wall", "-Werror", "-Wno-unused-result", "-D__HIP_PLATFORM_AMD__", "-fsyntax-only", "main.cpp")
    subprocess.run(command, cwd=tmp_path, check=True)


def test_launch_py_runs_a_cpu_kernel(tmp_path: Path) -> None:
    kernel = roller_svc.compile(
        "y[i, j] = x[a[i], j] * 2.0; t[a[i]] +=. y[i, 0]",
        {"x": ("float32", (8, 4)), "a": ("int32", (5,)), "t": ("float32", (8,))},
        select="model", top_k=1, donate=["t"], outputs=["y", "t"],
    )  # fmt: skip
    kernel.save(tmp_path, launcher="ctypes")
    launcher = imported(tmp_path).Kernel()
    rng = np.random.default_rng(0)
    x, a, t = rng.random((8, 4), np.float32), np.array([1, 3, 1, 7, 0], np.int32), rng.random(8, np.float32)
    before = t.copy()
    results = launcher(x=x, a=a, t=t)
    wanted = kernel(x=x, a=a, t=t.copy())
    assert {name: array.tolist() for name, array in results.items()} == {name: array.tolist() for name, array in wanted.items()}
    assert (t == before).all()
    out = np.empty((5, 4), np.float32)
    assert launcher.run({"x": x, "a": a, "t": t}, out={"y": out})["y"] is out
    assert (out == wanted["y"]).all()
    with pytest.raises(TypeError, match="expected outputs among y, t, got z"):
        launcher.run({"x": x, "a": a, "t": t}, out={"z": out})
    with pytest.raises(IndexError, match="out of range: 8"):
        launcher(x=x, a=np.array([1, 3, 8, 7, 0], np.int32), t=t)
    with pytest.raises(TypeError, match="expected the inputs x, a, t, got x"):
        launcher(x=x)
    with pytest.raises(ValueError, match=r"x: expected float32\[8, 4\], got float64\[8, 4\]"):
        launcher(x=x.astype(np.float64), a=a, t=t)
    with pytest.raises(ValueError, match="x: expected a dense"):
        launcher(x=np.asfortranarray(x), a=a, t=t)
    read_only = out.view()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="y: expected an output that can be written"):
        launcher.run({"x": x, "a": a, "t": t}, out={"y": read_only})
    with pytest.raises(ValueError, match="y shares memory with x; give an output of its own"):
        launcher.run({"x": x, "a": a, "t": t}, out={"y": x[:5]})
    assert launcher.run({"x": x, "a": a, "t": t}, out={"t": t})["t"] is t
    assert (t == wanted["t"]).all()
    with pytest.raises(TypeError, match="expected arrays of numpy or torch on the CPU, got list"):
        launcher(x=[1.0], a=a, t=t)


def test_launch_py_runs_what_was_saved_last(tmp_path: Path) -> None:
    for factor in (2, 5):
        kernel = roller_svc.compile(f"y[i] = x[i] * {factor}", {"x": ("float32", (4,))}, select="model", top_k=1, name="k")
        kernel.save(tmp_path / "saved", launcher="ctypes")
        assert imported(tmp_path / "saved").Kernel()(x=np.ones(4, np.float32))["y"].tolist() == [factor] * 4


def test_launch_py_packs_constants_and_takes_raw_bfloat16(tmp_path: Path) -> None:
    inputs = {"x": ("bfloat16", (64, 96)), "w": ("bfloat16", (80, 96))}
    kernel = roller_svc.compile("y[m, n] +=! x[m, k] * w[n, k]", inputs, select="model", top_k=1, constants=["w"])
    kernel.save(tmp_path, launcher=["torch", "cpp"])
    launcher = imported(tmp_path).Kernel()
    x, w = (
        np.random.default_rng(i).integers(0x3F00, 0x3F80, shape).astype(np.uint16) for i, (_, shape) in enumerate(inputs.values())
    )
    (result,) = launcher(x=x, w=w).values()
    wide = [(each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (x, w, result)]
    np.testing.assert_allclose(wide[2], wide[0] @ wide[1].T, rtol=1e-2)


def test_torch_operator_is_what_torch_expects(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kernel = roller_svc.compile(
        "y[i] = x[i] + z[i]; t[i] = x[i] * z[i]", {"x": ("float32", (16,)), "z": ("float32", (16,))},
        select="model", top_k=1, name="launched_add",
    )  # fmt: skip
    kernel.save(tmp_path, launcher="torch")
    module = imported(tmp_path)
    operator = module.torch_operator(module.Kernel())
    x, z = torch.randn(16), torch.randn(16)
    total, product = operator(x, z)
    assert torch.equal(total, x + z)
    assert torch.equal(product, x * z)
    checked = torch.library.opcheck(operator, (x, z), test_utils=("test_schema", "test_faketensor"))
    assert set(checked.values()) == {"SUCCESS"}
    negated, out = torch._neg_view(x), torch.zeros(16)
    assert torch.equal(operator(negated, z)[0], z - x)
    launcher, version = module.Kernel(), out._version
    with pytest.raises(ValueError, match="x: expected a dense, row-major array"):
        launcher(x=negated, z=z)
    assert launcher.run({"x": x, "z": z}, out={"y": out})["y"] is out
    assert out._version > version


def test_launch_py_runs_a_model_with_buckets(tmp_path: Path) -> None:
    model = roller_svc.compile_model(mlp("batch"), dims={"batch": [2, 5]}, select="model", top_k=1, threads=1)
    model.save(tmp_path, launcher=["ctypes", "cpp"])
    launcher = imported(tmp_path).Model()
    rng = np.random.default_rng(0)
    for batch in (5, 2):
        x = rng.random((batch, 8), np.float32)
        wanted = model(x=x)["y"]
        assert (launcher(x=x)["y"] == wanted).all()
        out = np.zeros((batch, 4), np.float32)
        assert launcher.run({"x": x}, out={"y": out})["y"] is out
        assert (out == wanted).all()
    with pytest.raises(ValueError, match=r"no variant for the shapes x\[3, 8\]; there are x\[2, 8\]; x\[5, 8\]"):
        launcher(x=np.zeros((3, 8), np.float32))
    with pytest.raises(TypeError, match="expected the inputs x, got z"):
        launcher(z=x)
    with pytest.raises(ValueError, match=r"x: expected float32\[2, 8\], got float64\[2, 8\]"):
        launcher(x=np.zeros((2, 8)))
    memory = np.zeros(20, np.float32)
    with pytest.raises(ValueError, match="y shares memory with x"):
        launcher.run({"x": memory[:16].reshape(2, 8)}, out={"y": memory[12:].reshape(2, 4)})
    torch = pytest.importorskip("torch")
    given = torch.from_numpy(x)
    assert torch.equal(launcher(x=given)["y"], torch.from_numpy(wanted))
    result = torch.zeros(2, 4)
    version = result._version
    launcher.run({"x": given}, out={"y": result})
    assert torch.equal(result, torch.from_numpy(wanted))
    assert result._version > version


def test_launch_py_of_a_model_needs_nothing_else_and_checks_indices(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "i"], ["y"])]
    table = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "table")
    source = onnx_model(nodes, {"i": (2,)}, {"y": (2, 3)}, [table], dtype=TensorProto.INT32)
    source.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    roller_svc.compile_model(source, select="model", top_k=1, threads=1).save(tmp_path, launcher="ctypes")
    program = """
import sys
import numpy as np
import launch
model = launch.Model()
print(model(i=np.array([2, 0], np.int32))["y"].tolist())
try:
    model(i=np.array([2, 7], np.int32))
except IndexError as error:
    print(error)
assert "roller_svc" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["[[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]", "an index from data is out of range: 7"]


def test_launchers_that_a_model_cannot_have(tmp_path: Path) -> None:
    model = roller_svc.compile_model(mlp(), select="model", top_k=1, threads=1)
    for launcher, message in (("rust", "unknown launcher 'rust'"), ("cupy", "CuPy has arrays of GPUs")):
        with pytest.raises(ArgumentError, match=message):
            model.save(tmp_path / "a", launcher=launcher)
    assert not (tmp_path / "a").exists()


def test_launchers_that_a_kernel_cannot_have(tmp_path: Path, kernels: dict[str, CompiledKernel]) -> None:
    with pytest.raises(ArgumentError, match="expected one of ctypes, cupy, torch, cpp"):
        saved(tmp_path / "a", kernels["rows"], "rust")
    kernel = roller_svc.compile("y[i] = exp(x[i])", {"x": ("float32", (8,))}, select="model", top_k=1)
    with pytest.raises(ArgumentError, match="CuPy has arrays of GPUs"):
        kernel.save(tmp_path / "b", launcher="cupy")
    assert not (tmp_path / "b").exists()
