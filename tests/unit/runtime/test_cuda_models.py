"""Models on a fake driver whose kernels run in the emulator: launches in order, and graphs in any order of their edges."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import types
from collections.abc import Callable, Iterator
from ctypes import memmove
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeArray, FakeCupy
from fake_libcuda import FakeLibcuda
from gpu_models import MODELS

from roller_svc import hardware
from roller_svc.cli import model as cli_model
from roller_svc.cli.command import main
from roller_svc.errors import InvariantError, KernelTimeoutError, LaunchError, RollerWarning
from roller_svc.graph.inputs import Sample
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.ir.event_state import ABORT, STATUS, STATUS_WORDS
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.model_plan import CopyStep, KernelStep, ModelPlan
from roller_svc.model import Model, compile_model
from roller_svc.runtime.binding import Array, Binding, NumpyArrays
from roller_svc.runtime.cuda import arrays as cuda_arrays
from roller_svc.runtime.cuda import graph as cuda_graph
from roller_svc.runtime.cuda import module as cuda_module
from roller_svc.runtime.cuda.driver import Driver
from roller_svc.runtime.emulator import EmulatorCall, EmulatorModule
from roller_svc.runtime.graphs import cuda
from roller_svc.runtime.graphs.cuda import MAX_ARENAS, MAX_PREPARED, CudaModel
from roller_svc.runtime.graphs.emulated import _BEFORE, isolate_launch
from roller_svc.settings import read_settings, use
from roller_svc.toolchain import compile_cxx

A100 = "nvidia-a100-sxm-80gb"
H200 = "nvidia-h200-sxm"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


def emulated(compiled: CompiledKernel, number: int) -> Callable[..., None]:
    """Return a launch as a function of the addresses of its arguments."""
    source = isolate_launch(compiled.source, number)
    module = EmulatorModule(types.SimpleNamespace(source=source), compile_cxx)
    args = source.launches[0].args

    def run(*addresses: int) -> None:
        places = dict(zip(args, addresses, strict=True))
        memory: dict[str, Array] = {}
        for buffer in source.buffers:
            raw = (ctypes.c_uint8 * buffer.bytes).from_address(places[buffer.symbol.removesuffix(_BEFORE)])
            memory[buffer.symbol] = np.ctypeslib.as_array(raw)
        EmulatorCall(module, Binding(NumpyArrays(), memory, {}, {}))()

    return run


class Device:
    """A fake device with a model's kernels."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, seed: int = 0, capability: str = "80") -> None:
        self.plan: ModelPlan = model._variants[0].plan
        self.compiled = [bundle.compiled for bundle in model._kernel_bundles]
        self.handles: dict[str, list[int]] = {}  # of the launches of a name
        self.loaded: set[int] = set()  # numbers of kernels
        kernels: dict[int, Callable[..., None]] = {}
        counts: dict[int, int] = {}
        for compiled in self.compiled:
            for number, launch in enumerate(compiled.source.launches):
                handle = 1000 + len(kernels)
                self.handles.setdefault(launch.name, []).append(handle)
                kernels[handle] = emulated(compiled, number)
                counts[handle] = len(launch.args)
        self.library = FakeLibcuda(kernels, counts, seed)
        self.cupy = FakeCupy({}, capability)
        self.cupy.cuda.Module = self._module
        self.copies = 0
        self.cupy.cuda.runtime.memcpyAsync = self._copy
        for module in (cuda_module, cuda_arrays, cuda):
            monkeypatch.setattr(module, "import_cupy", lambda: self.cupy)
        monkeypatch.setattr(cuda, "device_present", lambda: True)
        monkeypatch.setattr(cuda, "driver", lambda: Driver(self.library, fix_small_maps=False))
        self.weights = model._variants[0].loaded.weights

    def _module(self) -> types.SimpleNamespace:
        """Return a module whose launches of one name have their handles in order."""
        left = {name: iter(handles) for name, handles in self.handles.items()}

        def load(binary: bytes) -> None:
            self.loaded.add([each.binary for each in self.compiled].index(binary))

        return types.SimpleNamespace(load=load, get_function=lambda name: types.SimpleNamespace(ptr=next(left[name])))

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert stream == 77
        assert kind in (2, 3)  # to the host, on the device
        ctypes.memmove(target, source, size)
        self.copies += 1

    def load(self, *, as_graph: bool) -> CudaModel:
        return CudaModel(self.plan, self.compiled, self.weights, as_graph=as_graph)


def compiled(name: str, plan: str = "launches") -> Model:
    return compile_model(copy.deepcopy(MODELS[name]), A100, select="model", top_k=1, plan=plan)


def inputs_of(name: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, rng = Weights(), np.random.default_rng(seed)
    graph = load_graph(copy.deepcopy(MODELS[name]), weights)
    arrays = {
        tensor: rng.integers(0, 7, type_.shape).astype(type_.dtype.value)
        if type_.dtype.value == "int32"
        else rng.standard_normal(type_.shape).astype(type_.dtype.value)
        for tensor, type_ in graph.inputs
    }
    return arrays, interpret(graph, weights, arrays)


def on_device(arrays: dict[str, Any]) -> dict[str, FakeArray]:
    cupy = FakeCupy({})
    return {name: cupy.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize("name", ["branches", "slices", "lookups", "views"])
def test_a_model_computes_what_the_interpreter_does(name: str, as_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled(name), monkeypatch, seed=3)
    model = device.load(as_graph=as_graph)
    for seed in range(2):
        arrays, want = inputs_of(name, seed)
        given, out = on_device(arrays), on_device(want)
        for _ in range(2):
            for each in out.values():
                each.numpy[...] = 99
            results = model.run(given, out)
            for output, value in want.items():
                np.testing.assert_allclose(results[output].numpy, value, rtol=1e-5, atol=1e-5)
    once, kernels = len(device.plan.prepack), sum(hasattr(step, "kernel") for step in model._steps)
    call = kernels * ["kernel"]
    assert device.library.launched == once * ["kernel"] + 2 * (call + (["graph"] if as_graph else call))


@pytest.mark.parametrize("as_graph", [False, True])
def test_a_prepared_call_starts_as_often_as_it_is_launched(as_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("branches"), monkeypatch)
    arrays, want = inputs_of("branches", 0)
    out = on_device(want)
    start = device.load(as_graph=as_graph).prepare(on_device(arrays), out)
    launched = list(device.library.launched)  # those that pack
    for _ in range(2):
        for each in out.values():
            each.numpy[...] = 99
        start(7)
        for output, value in want.items():
            np.testing.assert_allclose(out[output].numpy, value, rtol=1e-5, atol=1e-5)
    kernels = sum(isinstance(step, KernelStep) for step in device.plan.steps)
    assert device.library.launched == launched + 2 * (["graph"] if as_graph else kernels * ["kernel"])


@pytest.mark.parametrize("plan", ["launches", "graph"])
def test_the_command_copies_arrays_to_the_device_and_waits_for_calls(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setenv("ROLLER_CACHE", str(folder))
    device = Device(compiled("branches", plan), monkeypatch)
    monkeypatch.setattr(cli_model, "device_present", lambda: True)
    waits: list[int] = []
    device.cupy.cuda.runtime.deviceSynchronize = lambda: waits.append(len(device.library.launched))
    file = tmp_path / "branches.json"
    file.write_text(json.dumps(MODELS["branches"]))
    options = ("--target", A100, "--select", "model", "--top-k", "1", "--plan", plan, "--check", "--json")
    assert main(("model", "run", str(file), *options)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["max_abs_error"] < 1e-4
    assert len(waits) == facts["runs"]
    assert waits == sorted(set(waits))  # after each call


def test_states_on_a_device_get_their_values_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_arrays, "import_cupy", lambda: FakeCupy({}))
    initial = {"k": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    states = cuda_arrays.copy_to_device(initial)
    sample = Sample({}, states, initial, cuda_arrays.copy_into_device)
    states["k"].raw.numpy[...] = 7
    assert sample.restore() is states
    np.testing.assert_array_equal(cuda_arrays.copy_to_host(states)["k"], [[0, 3], [1, 4], [2, 5]])


def test_a_graph_has_an_edge_for_each_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("branches"), monkeypatch)
    arrays, want = inputs_of("branches", 0)
    model, given, out = device.load(as_graph=True), on_device(arrays), on_device(want)
    for _ in range(2):
        model.run(given, out)
    (graph,) = device.library.graphs
    nodes = [step.node for step in device.plan.steps]
    edges = {(nodes[before], nodes[i]) for i, (_, _, all_before) in enumerate(graph.nodes) for before in all_before}
    assert {("left", "soft"), ("soft", "joined"), ("right", "joined")} == edges


def test_kernels_behind_kernels_have_programmatic_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an H200; a driver without them gets plain edges."""
    arrays, want = inputs_of("branches", 0)
    model = compile_model(copy.deepcopy(MODELS["branches"]), H200, select="model", top_k=1, plan="graph")
    device = Device(model, monkeypatch, capability="90")
    given, out = on_device(arrays), on_device(want)
    for has_edges in (True, False):
        if not has_edges:
            monkeypatch.delattr(FakeLibcuda, "cuGraphAddDependencies_v2")
        loaded = device.load(as_graph=True)
        for _ in range(2):
            results = loaded.run(given, out)
        for name, value in want.items():
            np.testing.assert_allclose(results[name].numpy, value, rtol=1e-5, atol=1e-5)
    first, second = device.library.graphs
    edges = {(before, i) for i, (_, _, all_before) in enumerate(first.nodes) for before in all_before}
    assert len(edges) >= 3
    assert set(first.programmatic) == edges
    assert not second.programmatic
    assert {(before, i) for i, (_, _, all_before) in enumerate(second.nodes) for before in all_before} == edges


def test_a_call_with_known_addresses_launches_the_graph_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("views"), monkeypatch)
    model = device.load(as_graph=True)
    arrays, want = inputs_of("views", 0)
    given, out = on_device(arrays), on_device(want)
    for graphs in (0, 1, 1):  # the first call is made by launches
        results = model.run(given, out)
        assert results["total"] is out["total"]
        assert len(device.library.graphs) == graphs
    kept = [on_device(inputs_of("views", 0)[0]) for _ in range(MAX_PREPARED)]
    for each in kept:
        model.run(each, out)
    assert len(device.library.graphs) == 1
    for each in kept:
        model.run(each, out)
    assert len(device.library.graphs) == 1 + MAX_PREPARED
    for _ in range(2):
        model.run(given, out)  # the oldest is not kept
    assert len(device.library.graphs) == 2 + MAX_PREPARED
    assert device.library.destroyed > MAX_PREPARED


def test_a_copy_has_nodes_of_less_than_the_largest_pitch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_COPY_BYTES", 24)
    device = Device(compiled("views", "launches"), monkeypatch, seed=5)
    model, (arrays, want) = device.load(as_graph=True), inputs_of("views", 0)
    given, out = on_device(arrays), on_device(want)
    for _ in range(3):
        out["half"].numpy[...] = 99
        results = model.run(given, out)
        for output, value in want.items():
            np.testing.assert_allclose(results[output].numpy, value, rtol=1e-5, atol=1e-5)
    sizes = [-(-step.bytes // 24) for step in model._steps if isinstance(step, CopyStep)]
    (graph,) = device.library.graphs
    assert [kind for kind, _, _ in graph.nodes].count("copy") == sum(sizes) > len(sizes)


@pytest.mark.usefixtures("few_cores")
def test_a_graph_has_no_cooperative_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("branches", "persistent"), monkeypatch)
    model, (arrays, want) = device.load(as_graph=True), inputs_of("branches", 0)
    given, out = on_device(arrays), on_device(want)
    model.run(given, out)
    with pytest.raises(InvariantError, match="is a cooperative launch"):
        model.run(given, out)


def test_a_device_keeps_the_arenas_of_the_last_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("views"), monkeypatch)
    waits: list[int] = []
    current: list[int] = []
    monkeypatch.setattr(device.cupy.cuda.runtime, "memcpyAsync", lambda target, source, size, *_: memmove(target, source, size))
    monkeypatch.setattr(device.cupy.cuda.runtime, "deviceSynchronize", lambda: waits.append(current[-1]))
    monkeypatch.setattr(cuda_arrays.CupyArrays, "stream", lambda *_: current[-1])
    model = device.load(as_graph=False)
    arrays, want = inputs_of("views", 0)
    given = on_device(arrays)
    for stream in [0, *range(1, MAX_ARENAS), 0, 99, 0]:
        current.append(stream)
        results = model.run(given)
        np.testing.assert_allclose(results["total"].numpy, want["total"], rtol=1e-5)
    (loaded,) = model._loaded.values()
    assert list(loaded.arenas) == [*range(2, MAX_ARENAS), 99, 0]
    assert waits == [99]  # before the arena of stream 1 is freed


def test_errors_of_the_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("views"), monkeypatch)
    device.library.cuGraphAddMemcpyNode = lambda *_: 1
    device.library.cuGetErrorName = lambda status, name: None
    arrays, want = inputs_of("views", 0)
    model, given, out = device.load(as_graph=True), on_device(arrays), on_device(want)
    model.run(given, out)
    with pytest.raises(LaunchError, match="cannot add a node to a graph: copy: error 1"):
        model.run(given, out)


@pytest.fixture
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    load = hardware.load
    monkeypatch.setattr(hardware, "load", lambda target: dataclasses.replace(load(target), num_cores=8))


@pytest.mark.usefixtures("few_cores")
@pytest.mark.parametrize("name", ["branches", "lookups", "slices"])
def test_a_persistent_kernel_is_one_cooperative_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled(name, "persistent"), monkeypatch)
    model = device.load(as_graph=False)
    for seed in range(2):
        arrays, want = inputs_of(name, seed)
        results = model.run(on_device(arrays))
        for output, value in want.items():
            np.testing.assert_allclose(results[output].numpy, value, rtol=1e-5, atol=1e-5)
    packing = [step for step in device.plan.prepack if isinstance(step, KernelStep)]
    assert device.library.launched == len(packing) * ["kernel"] + 2 * ["cooperative"]
    assert device.loaded == {step.kernel for step in (*packing, *device.plan.steps) if isinstance(step, KernelStep)}


@pytest.mark.usefixtures("few_cores")
def test_row_15_a_device_that_holds_fewer_blocks_runs_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 4 of NNFusion: more blocks than are resident wait for blocks that never start."""
    device = Device(compiled("branches", "persistent"), monkeypatch)
    device.library.resident_blocks = 7
    model = device.load(as_graph=False)
    arrays, want = inputs_of("branches", 0)
    given, out = on_device(arrays), on_device(want)
    with pytest.warns(RollerWarning, match="has 8 blocks that run together, and the device holds 7: small runs as a CUDA graph"):
        model.run(given, out)
    for each in out.values():
        each.numpy[...] = 99
    results = model.run(given, out)
    for output, value in want.items():
        np.testing.assert_allclose(results[output].numpy, value, rtol=1e-5, atol=1e-5)
    assert "cooperative" not in device.library.launched
    assert device.library.launched[-1] == "graph"


@pytest.mark.usefixtures("few_cores")
def test_more_blocks_than_a_device_holds_are_refused_without_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("branches", "persistent"), monkeypatch)
    device.plan = dataclasses.replace(device.plan, fallback=())
    device.library.resident_blocks = 7
    device.library.cuGetErrorName = lambda status, name: None
    for message in ("8 blocks that run together, and the device holds 7", "with 8 blocks at once failed: error 720"):
        with pytest.raises(LaunchError, match=message) as raised:
            device.load(as_graph=False).run(on_device(inputs_of("branches", 0)[0]))
        assert raised.value.code == "persistent-too-large"
        monkeypatch.setattr(Driver, "count_resident", lambda *_: 8)  # the driver may still refuse the launch


@pytest.mark.usefixtures("few_cores")
def test_row_15_a_wait_that_reaches_the_deadline_names_node_and_veu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled("branches", "persistent")
    device = Device(model, monkeypatch)
    (step,) = device.plan.steps
    assert isinstance(step, KernelStep)
    launch = device.compiled[step.kernel].source.launches[0]
    at = launch.args.index("sync_state")

    def stuck(*addresses: int) -> None:
        """Write what a kernel writes whose wait in vEU 3, row 9, for the last event has seen one rTask of four."""
        state = np.ctypeslib.as_array((ctypes.c_uint32 * 32).from_address(addresses[at]))
        assert not state.any()  # the events of an earlier call that was stopped are zero again
        state[ABORT] = 1
        state[STATUS : STATUS + STATUS_WORDS] = (3, 9, len(step.events) - 1, 1, 4)

    device.library.kernels[device.handles[launch.name][0]] = stuck
    cuda_model = device.load(as_graph=False)
    for _ in range(2):
        with pytest.raises(KernelTimeoutError) as raised:
            cuda_model.run(on_device(inputs_of("branches", 0)[0]))
        assert f"vEU 3 waited too long for node {step.events[-1]!r} in row 9: 1 of 4 rTasks" in raised.value.message
        assert raised.value.code == "kernel-timeout"
    assert set(step.events) <= {"left", "soft", "right", "joined"}


def test_waves_are_launches_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(compiled("branches", "waves"), monkeypatch)
    arrays, want = inputs_of("branches", 0)
    results = device.load(as_graph=False).run(on_device(arrays))
    for output, value in want.items():
        np.testing.assert_allclose(results[output].numpy, value, rtol=1e-5, atol=1e-5)
    assert device.library.launched == len(device.plan.steps) * ["kernel"]
    assert len(device.plan.steps) == 3
