"""Calls of the CUDA driver against a fake library: the arguments byte by byte."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from roller_svc.errors import LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.cuda import driver as cuda_driver
from roller_svc.runtime.cuda.driver import Driver

TILED = TensorMap(
    "map_a",
    "a",
    DType.FLOAT16,
    MapMode.TILED,
    (100, 300, 7),
    (208, 62400),
    (64, 128, 1),
    (1, 2, 1),
    swizzle=Swizzle.B128,
    offset_bytes=32,
)
IM2COL = TensorMap(
    "map_x",
    "x",
    DType.FLOAT32,
    MapMode.IM2COL,
    (64, 28, 30, 8),
    (256, 7168, 215040),
    (32, 128),
    (1, 2, 3, 1),
    (-1, -2),
    (-3, -4),
    Swizzle.B128,
    tf32=True,
)
ROW = TensorMap("map_r", "a", DType.INT8, MapMode.TILED, (256,), (), (64,), (1,))
MEMORY = {"a": 0x7000_0000_1000, "x": 0x7000_0000_2000}


def numbers(array: Any) -> tuple[int, ...]:
    return tuple(x.value if hasattr(x, "value") else x for x in array)


class Library:
    """Fake libcuda: records arguments, and encodes maps as 128 bytes of 1, 2, 3, ... in call order."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.encoded: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def cuTensorMapEncodeTiled(self, place: Any, *rest: Any) -> int:
        return self._encode("tiled", place, rest)

    def cuTensorMapEncodeIm2col(self, place: Any, *rest: Any) -> int:
        return self._encode("im2col", place, rest)

    def _encode(self, how: str, place: Any, rest: tuple[Any, ...]) -> int:
        assert place.value % 64 == 0
        self.encoded.append((how, *(x.value if hasattr(x, "value") else numbers(x) for x in rest)))
        ctypes.memset(place.value, len(self.encoded), 128)
        return self.status

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *sizes, stream, addresses, extra = rest
        assert extra is None
        self.launched.append((function.value, numbers(sizes), stream.value))
        self.values = [ctypes.string_at(a, 8 if i < 2 else 128) for i, a in enumerate(addresses)]
        return self.status

    def cuGetErrorName(self, status: Any, name: Any) -> int:
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE"}.get(status.value)
        return 0


class FullLibrary(Library):
    """Encodes maps with all bits set."""

    def _encode(self, how: str, place: Any, rest: tuple[Any, ...]) -> int:
        super()._encode(how, place, rest)
        ctypes.memset(place.value, 0xFF, 128)
        return self.status


LAUNCH = LaunchSpec("k", ("a", "x"), (4, 2, 1), (384, 1, 1), 200_000, tensor_maps=(TILED, IM2COL, ROW), cluster=2)


def test_maps_are_encoded_as_they_are_described() -> None:
    library = Library()
    Driver(library, fix_small_maps=False).parameters(LAUNCH, MEMORY)
    tiled, pixels, row = library.encoded
    # data type (UINT16), rank, address, extents, strides, box, steps; no interleave, 128 B swizzle, 256 B of L2, zeros
    assert tiled == (
        "tiled",
        1,
        3,
        0x7000_0000_1020,
        (100, 300, 7),
        (208, 62400),
        (64, 128, 1),
        (1, 2, 1),
        0,
        3,
        3,
        0,
    )
    # TFLOAT32; corners, channels and pixels before the steps
    assert pixels == (
        "im2col",
        11,
        4,
        0x7000_0000_2000,
        (64, 28, 30, 8),
        (256, 7168, 215040),
        (-1, -2),
        (-3, -4),
        32,
        128,
        (1, 2, 3, 1),
        0,
        3,
        3,
        0,
    )
    assert row == ("tiled", 0, 1, 0x7000_0000_1000, (256,), (0,), (64,), (1,), 0, 0, 3, 0)


def test_parameters_are_addresses_and_then_maps_by_value() -> None:
    library = Library()
    driver = Driver(library, fix_small_maps=False)
    driver.launch(0x5000, LAUNCH, driver.parameters(LAUNCH, MEMORY), 77)
    assert library.launched == [(0x5000, (4, 2, 1, 384, 1, 1, 200_000), 77)]
    first, second, *maps = library.values
    assert [int.from_bytes(p, "little") for p in (first, second)] == [MEMORY["a"], MEMORY["x"]]
    assert maps == [bytes([n]) * 128 for n in (1, 2, 3)]


def test_only_bit_85_is_cleared_in_maps_below_128_kib() -> None:
    """As CUTLASS does for drivers up to CUDA 13.1: bit 21 of the second word. LAUNCH's last map is small."""
    library = FullLibrary()
    driver = Driver(library, fix_small_maps=True)
    driver.launch(1, LAUNCH, driver.parameters(LAUNCH, MEMORY), 0)
    *_, tiled, pixels, row = library.values
    assert tiled == pixels == b"\xff" * 128
    words = [int.from_bytes(row[at : at + 8], "little") for at in range(0, 128, 8)]
    assert words.pop(1) == 2**64 - 1 - 2**21
    assert set(words) == {2**64 - 1}


@pytest.mark.parametrize(("rows", "cleared"), [(1023, True), (1024, False)])
def test_the_span_of_a_map_decides_not_its_offset(rows: int, cleared: bool) -> None:
    view = TensorMap("m", "a", DType.FLOAT16, MapMode.TILED, (64, rows), (128,), (64, 8), (1, 1), offset_bytes=1 << 20)
    launch = LaunchSpec("k", ("a", "x"), tensor_maps=(view,))
    library = FullLibrary()
    driver = Driver(library, fix_small_maps=True)
    driver.launch(1, launch, driver.parameters(launch, MEMORY), 0)
    assert (library.values[-1] != b"\xff" * 128) == cleared


@pytest.mark.parametrize(("version", "mended"), [(13000, True), (13010, True), (13020, False)])
def test_the_drivers_version_decides(monkeypatch: pytest.MonkeyPatch, version: int, mended: bool) -> None:
    library = FullLibrary()

    def told(place: Any) -> int:
        place._obj.value = version
        return 0

    library.cuDriverGetVersion = told
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _: library)
    cuda_driver.driver.cache_clear()
    driver = cuda_driver.driver()
    cuda_driver.driver.cache_clear()
    driver.launch(1, LAUNCH, driver.parameters(LAUNCH, MEMORY), 0)
    assert (library.values[-1] != b"\xff" * 128) == mended


@pytest.mark.parametrize(("status", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (4711, "error 4711")])
def test_a_driver_error_is_a_launch_error(status: int, name: str) -> None:
    with pytest.raises(LaunchError, match=f"map_a: {name}"):
        Driver(Library(status), fix_small_maps=True).parameters(LAUNCH, MEMORY)
    parameters = Driver(Library(), fix_small_maps=True).parameters(LAUNCH, MEMORY)
    with pytest.raises(LaunchError, match=f"k failed: {name}"):
        Driver(Library(status), fix_small_maps=True).launch(1, LAUNCH, parameters, 0)


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no libcuda.so.1")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    cuda_driver.driver.cache_clear()
    with pytest.raises(LaunchError, match="cannot be opened") as raised:
        cuda_driver.driver()
    assert raised.value.code == "no-device"
