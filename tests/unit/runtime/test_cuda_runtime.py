"""The CUDA runtime against a fake CuPy: numpy arrays as memory, Python functions as kernels."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeArray, FakeCupy, FakeStream, floats_at
from reference_kernels import tensor

from roller_svc.errors import ArgumentError, InvariantError, LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language, LaunchSpec, Resources, Role
from roller_svc.ir.tensor_map import MapMode, TensorMap
from roller_svc.runtime.binding import aligned_empty, numpy_dtype
from roller_svc.runtime.cuda import arrays as cuda_arrays
from roller_svc.runtime.cuda import module as cuda
from roller_svc.runtime.cuda.arrays import ByteArrays, DeviceArray, DeviceBytes, TorchArrays, copy_to_device
from roller_svc.runtime.cuda.module import CudaModule, Replay, runs_on
from roller_svc.runtime.measure import measure

BUFFERS = (
    tensor("A", "a", Role.INPUT, shape=(8,)),
    tensor("w", "w", Role.WORKSPACE, shape=(8,)),
    tensor("C", "c", Role.OUTPUT, shape=(8,)),
)
LAUNCHES = (
    LaunchSpec("accumulate", ("a", "w"), (1, 1, 1), (8, 1, 1), shared_bytes=60_000, zeroed=("w",)),
    LaunchSpec("twice", ("w", "c"), (2, 1, 1), (4, 1, 1)),
)
COMPILED = CompiledKernel(
    KernelSource("k", Language.CUDA, Arch("sm_", 80), "", BUFFERS, LAUNCHES),
    b"cubin",
    "",
    (Resources(8, 60_000, 0), Resources(8, 0, 0)),
)


def accumulate(source: int, target: int) -> None:
    values = floats_at(target, 8)
    values += floats_at(source, 8)


def twice(source: int, target: int) -> None:
    floats_at(target, 8)[...] = 2 * floats_at(source, 8)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy({"accumulate": accumulate, "twice": twice})
    for module in (cuda, cuda_arrays):
        monkeypatch.setattr(module, "import_cupy", lambda: fake)
    monkeypatch.setattr(cuda, "device_present", lambda: True)
    return fake


def floats(aligned: bool = True) -> np.ndarray:
    array = aligned_empty((9,), np.dtype(np.float32))[0 if aligned else 1 :][:8]
    array[...] = np.arange(8)
    return array


def test_launches_run_in_order_on_the_current_stream(cupy: FakeCupy) -> None:
    module = CudaModule(COMPILED)
    for _ in range(2):
        result = module.run({"A": FakeArray(floats())})["C"]
        assert isinstance(result, FakeArray)
        assert np.array_equal(result.numpy, 2 * floats())
    once = [
        ("memset", 32, 77),
        ("accumulate", (1, 1, 1), (8, 1, 1), 60_000, 77),
        ("twice", (2, 1, 1), (4, 1, 1), 0, 77),
    ]
    # More than 48 KiB of shared memory is asked for, once, when the module is loaded.
    assert cupy.calls == [("attribute", "accumulate", 8, 60_000), *once, *once]


def test_launches_with_tensor_maps_go_through_the_driver(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same stream, in order, with the addresses of this call's arrays and workspace."""
    given: list[dict[str, int]] = []

    class Driver:
        def parameters(self, launch: LaunchSpec, memory: dict[str, int]) -> tuple[str, ...]:
            given.append(dict(memory))
            return tuple(view.symbol for view in launch.tensor_maps)

        def launch(self, function: str, launch: LaunchSpec, parameters: tuple[str, ...], stream: int) -> None:
            cupy.calls.append((function, launch.grid, launch.cluster, parameters, stream))
            twice(given[-1]["w"], given[-1]["c"])

    monkeypatch.setattr(cuda, "driver", Driver)
    view = TensorMap("view", "w", DType.FLOAT32, MapMode.TILED, (8,), (), (8,), (1,))
    last = dataclasses.replace(LAUNCHES[1], tensor_maps=(view,), cluster=2)
    compiled = dataclasses.replace(COMPILED, source=dataclasses.replace(COMPILED.source, launches=(LAUNCHES[0], last)))
    call = CudaModule(compiled).bind({"A": FakeArray(floats())})
    for _ in range(2):
        call()
    assert np.array_equal(call.results()["C"].numpy, 2 * floats())
    assert len(given) == 1  # encoded once for all calls
    assert set(given[0]) == {"a", "w", "c"}
    once = [("memset", 32, 77), ("accumulate", (1, 1, 1), (8, 1, 1), 60_000, 77),
            ("twice", (2, 1, 1), 2, ("view",), 77)]  # fmt: skip
    assert cupy.calls[1:] == [*once, *once]


UPDATING = CompiledKernel(
    KernelSource(
        "k",
        Language.CUDA,
        Arch("sm_", 80),
        "",
        (
            dataclasses.replace(tensor("C", "a", Role.INPUT, shape=(8,)), donated=True),
            tensor("B", "b", Role.INPUT, shape=(8,)),
            BUFFERS[2],
        ),
        (LaunchSpec("accumulate", ("b", "c"), (1, 1, 1), (8, 1, 1)),),
    ),
    b"cubin",
    "",
    (Resources(8, 0, 0),),
)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_donated_array_is_updated_in_place_if_it_can_be(cupy: FakeCupy, aligned: bool) -> None:
    given = FakeArray(floats(aligned))
    result = CudaModule(UPDATING).run({"C": given, "B": FakeArray(floats())})["C"]
    assert (result is given) is aligned
    assert np.array_equal(result.numpy, 2 * floats())
    assert np.array_equal(given.numpy, (2 if aligned else 1) * floats())


def test_out_gets_a_copy_of_a_donated_array_unless_it_is_the_array(cupy: FakeCupy) -> None:
    given, other = FakeArray(floats()), FakeArray(floats())
    assert CudaModule(UPDATING).run({"C": given, "B": FakeArray(floats())}, {"C": other})["C"] is other
    assert np.array_equal(other.numpy, 2 * floats())
    assert CudaModule(UPDATING).run({"C": given, "B": FakeArray(floats())}, {"C": given})["C"] is given
    assert np.array_equal(given.numpy, 3 * floats())


def test_a_donated_array_that_another_input_shares_is_refused(cupy: FakeCupy) -> None:
    given = FakeArray(floats())
    with pytest.raises(ArgumentError, match="'C' is donated and may be overwritten, but shares memory with B"):
        CudaModule(UPDATING).run({"C": given, "B": given})


@pytest.mark.parametrize("kind", ["in place", "strided", "unaligned", "same as the input"])
def test_out_is_written_and_returned(cupy: FakeCupy, kind: str) -> None:
    a = FakeArray(floats())
    target = {
        "in place": FakeArray(floats()),
        "strided": FakeArray(np.zeros(16, np.float32)[::2]),
        "unaligned": FakeArray(floats(aligned=False)),
        "same as the input": a,
    }[kind]
    call = CudaModule(COMPILED).bind({"A": a}, {"C": target})
    call()
    assert np.array_equal(target.numpy, 2 * floats())
    assert call.results()["C"] is target
    assert np.array_equal(target.numpy, 2 * floats())


@pytest.mark.parametrize("array", [floats(aligned=False), np.repeat(floats(), 2)[::2], floats()[::-1].copy()[::-1]], ids=str)
def test_other_inputs_are_copied(cupy: FakeCupy, array: np.ndarray) -> None:
    assert np.array_equal(CudaModule(COMPILED).run({"A": FakeArray(array)})["C"].numpy, 2 * array)


@pytest.mark.parametrize(
    ("arrays", "out", "code"),
    [
        ({"A": np.zeros(8, np.float32)}, None, "not-an-array"),
        ({"A": [0.0] * 8}, None, "not-an-array"),
        ({"A": FakeArray(np.zeros(8))}, None, "dtype-mismatch"),
        ({"A": FakeArray(np.zeros(7, np.float32))}, None, "shape-mismatch"),
        ({}, None, "missing-argument"),
        ({"A": FakeArray(floats()), "B": FakeArray(floats())}, None, "unknown-argument"),
        ({"A": FakeArray(floats())}, {"D": FakeArray(floats())}, "unknown-output"),
        ({"A": FakeArray(floats())}, {"C": FakeArray(floats(), device=1)}, "mixed-arrays"),
        ({"A": FakeArray(floats())}, {"C": np.zeros(8, np.float32)}, "not-an-array"),
    ],
)
def test_arrays_that_do_not_fit(cupy: FakeCupy, arrays: Any, out: Any, code: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        CudaModule(COMPILED).run(arrays, out)
    assert raised.value.code == code
    assert cupy.calls == []


def test_an_output_on_another_device_than_the_input_of_its_name(cupy: FakeCupy) -> None:
    donated = (tensor("T", "t0", Role.INPUT, shape=(8,)), tensor("T", "t1", Role.OUTPUT, shape=(8,)))
    launch = LaunchSpec("accumulate", ("t0", "t1"), (1, 1, 1), (8, 1, 1))
    source = KernelSource("k", Language.CUDA, Arch("sm_", 80), "", donated, (launch,))
    module = CudaModule(CompiledKernel(source, b"cubin", "", (Resources(8, 0, 0),)))
    with pytest.raises(ArgumentError, match="on several devices: T on 0, T on 1"):
        module.run({"T": FakeArray(floats())}, {"T": FakeArray(floats(), device=1)})


def test_a_driver_error_is_a_launch_error(cupy: FakeCupy) -> None:
    cupy.refuse = True
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        CudaModule(COMPILED).run({"A": FakeArray(floats())})


def test_arrays_that_do_not_fit_into_memory_are_a_launch_error(cupy: FakeCupy) -> None:
    cupy.full = True
    with pytest.raises(LaunchError) as raised:
        CudaModule(COMPILED).run({"A": FakeArray(floats())})
    assert raised.value.code == "out-of-memory"
    with pytest.raises(LaunchError) as raised:
        copy_to_device({"A": floats()})
    assert raised.value.code == "out-of-memory"


def test_placed_arrays_have_every_type_and_come_back(cupy: FakeCupy) -> None:
    result = CudaModule(COMPILED).run(copy_to_device({"A": floats()}))["C"]
    assert isinstance(result, DeviceBytes)
    assert np.array_equal(result.numpy(), 2 * floats())
    for dtype in DType:
        values = np.arange(6).reshape(3, 2).astype(numpy_dtype(dtype))
        one = copy_to_device({"x": values, "y": values.T})["y"]
        back = one.numpy()
        assert back.dtype == values.dtype
        assert np.array_equal(back, values.T)
        view = ByteArrays(cupy).view(one)
        assert (view.shape, view.strides) == ((2, 3), (3 * dtype.bytes, dtype.bytes))
        made = ByteArrays(cupy).empty((4, 5), dtype, 0)
        assert made.array.raw.shape == (20 * dtype.bytes,)


def test_placed_outputs_that_overlap_an_input_are_written_afterwards(cupy: FakeCupy) -> None:
    a = copy_to_device({"A": floats()})["A"]
    result = CudaModule(COMPILED).run({"A": a}, {"C": a})["C"]
    assert result is a
    assert np.array_equal(a.numpy(), 2 * floats())


def test_times_are_of_calls_that_the_device_replays(cupy: FakeCupy) -> None:
    call = CudaModule(COMPILED).bind({"A": FakeArray(floats())})
    cupy.calls.clear()
    assert call.stopwatch(call, 2) == pytest.approx(2 * 3e-3)  # a memset and two launches, of 1 ms each
    assert len(cupy.calls) == 2 * 2 * 3  # all of them once before, to warm up
    assert {entry[-1] for entry in cupy.calls} == {FakeStream.ptr}
    call.stopwatch(call, 2)
    assert len(cupy.streams) == 1  # recorded once for as many calls
    measured = measure(call, device_name="a stand-in")
    assert measured.min_s == pytest.approx(3e-3)
    assert np.array_equal(call.results()["C"].numpy, 2 * floats())


def test_replayed_calls_take_turns(cupy: FakeCupy) -> None:
    module = CudaModule(COMPILED)
    calls = [module.bind({"A": FakeArray(floats() + i)}) for i in range(2)]
    assert Replay(cupy, calls, 3).seconds() == pytest.approx(9e-3)
    for i, call in enumerate(calls):
        assert np.array_equal(call.results()["C"].numpy, 2 * (floats() + i))


def test_a_failed_launch_ends_the_stream_capture(cupy: FakeCupy) -> None:
    call = CudaModule(COMPILED).bind({"A": FakeArray(floats())})
    cupy.refuse = True
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        call.stopwatch(call, 1)
    assert [stream.recorded for stream in cupy.streams] == [None]


def test_another_device_is_rejected_before_loading(cupy: FakeCupy) -> None:
    cupy._capability = "90"
    with pytest.raises(LaunchError, match="is compiled for sm_80, device 0 is sm_90") as raised:
        CudaModule(COMPILED).run({"A": FakeArray(floats())})
    assert raised.value.code == "wrong-device"


def test_without_a_device_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_present", lambda: False)
    with pytest.raises(LaunchError, match="no NVIDIA device") as raised:
        CudaModule(COMPILED).run({"A": FakeArray(floats())})
    assert raised.value.code == "no-device"


def test_a_driver_that_is_missing_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    assert cuda.device_count() == 0


def test_only_cuda_is_loaded() -> None:
    source = KernelSource("k", Language.C, Arch("x86-64-v", 3), "", (), ())
    with pytest.raises(InvariantError, match="not CUDA"):
        CudaModule(CompiledKernel(source, b"", "", ()))


def test_results_reach_other_libraries_by_dlpack_after_the_launch(cupy: FakeCupy) -> None:
    handed: list[np.ndarray] = []

    class Foreign:
        def __init__(self, array: np.ndarray) -> None:
            self.inner = FakeArray(array)

        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __array_namespace__(self) -> Any:
            return types.SimpleNamespace(from_dlpack=lambda array: handed.append(array.numpy.copy()) or "foreign")

    Foreign.__module__ = "jaxlike"
    cupy.from_dlpack = lambda array: array.inner  # the part of CuPy that it stands for
    assert CudaModule(COMPILED).run({"A": Foreign(floats())}) == {"C": "foreign"}
    assert np.array_equal(handed[0], 2 * floats())
    with pytest.raises(ArgumentError, match="cannot be written in place"):
        CudaModule(COMPILED).run({"A": Foreign(floats())}, {"C": Foreign(floats())})
    with pytest.raises(ArgumentError, match="from one library, got cupy, jaxlike"):
        CudaModule(COMPILED).run({"A": Foreign(floats())}, {"C": FakeArray(floats())})


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Return a function that takes a tensor of this machine's memory for one of a device."""
    pytest.importorskip("torch")
    import torch

    class DeviceTensor(torch.Tensor):
        device = types.SimpleNamespace(type="cuda", index=0)

    DeviceTensor.__module__ = "torch"

    def empty(self: TorchArrays, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray | None:
        array = aligned_empty(shape, numpy_dtype(dtype))
        return self.view(torch.from_numpy(array).as_subclass(DeviceTensor))

    monkeypatch.setattr(TorchArrays, "empty", empty)
    monkeypatch.setattr(TorchArrays, "stream", lambda self, device: 77)
    return lambda tensor: tensor.as_subclass(DeviceTensor)


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("case", ["out", "donated", "copied"])
def test_torch_is_told_of_writes(cupy: FakeCupy, on_device: Callable[[Any], Any], case: str, refuse: bool) -> None:
    """A call that fails may have written."""
    import torch

    c, other = on_device(torch.from_numpy(floats(case != "copied"))), on_device(torch.from_numpy(floats()))
    product = (c * torch.ones(8, requires_grad=True)).sum()  # its gradient reads c
    before = c._version, other._version
    out = {"C": other} if case == "out" else None
    call = CudaModule(UPDATING).bind({"C": c, "B": on_device(torch.from_numpy(floats()))}, out)
    assert (c._version, other._version) == before
    cupy.refuse = refuse
    with pytest.raises(LaunchError) if refuse else nullcontext():
        call()
    assert (c._version > before[0], other._version > before[1]) == (case != "copied", case == "out")
    with nullcontext() if case == "copied" else pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_tensors_that_require_a_gradient_are_refused(cupy: FakeCupy, on_device: Callable[[Any], Any]) -> None:
    import torch

    b, c = (torch.from_numpy(floats()) for _ in range(2))
    arrays = {"B": on_device(b.requires_grad_()), "C": on_device(c)}
    with pytest.raises(ArgumentError, match="argument 'B' requires a gradient") as caught:
        CudaModule(UPDATING).run(arrays)
    assert caught.value.code == "needs-gradient"
    with torch.no_grad():
        assert CudaModule(UPDATING).run(arrays)["C"].tolist() == (2 * b).tolist()


def test_views_of_negated_numbers_are_copied_or_refused(cupy: FakeCupy, on_device: Callable[[Any], Any]) -> None:
    import torch

    plain, b = torch.from_numpy(floats()), on_device(torch.from_numpy(floats()))
    negated = on_device(torch._neg_view(plain))
    assert CudaModule(UPDATING).run({"C": negated, "B": b})["C"].tolist() == [0] * 8
    assert plain.tolist() == list(range(8))
    with pytest.raises(ArgumentError, match="output 'C' cannot be written in place"):
        CudaModule(UPDATING).run({"C": b.clone(), "B": b}, {"C": negated})


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        (Arch("sm_", 80), (8, 0), True),
        (Arch("sm_", 80), (8, 6), True),
        (Arch("sm_", 86), (8, 0), False),
        (Arch("sm_", 80), (9, 0), False),
        (Arch("sm_", 90, "a"), (9, 0), True),
        (Arch("sm_", 100, "a"), (10, 3), False),
        (Arch("sm_", 120), (12, 1), True),
    ],
)
def test_where_a_cubin_runs(arch: Arch, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch, capability) is runs


@pytest.mark.parametrize("array", [np.zeros((3, 4)), np.zeros((3, 4))[::-1, ::2], np.zeros((1, 4)).T, np.zeros(())])
def test_spans_cover_the_accessed_bytes(array: np.ndarray) -> None:
    address = array.__array_interface__["data"][0]
    view = DeviceArray(array, address, "float64", array.shape, array.strides, 0)
    touched = [address + sum(i * s for i, s in zip(index, array.strides, strict=True)) for index in np.ndindex(array.shape)]
    assert view.span == (min(touched), max(touched) + 8)
