"""TMA copies of the emulator against numpy, and the swizzles against the manual's tables."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from emulator_support import module
from hopper import hopper, tiled
from reference_kernels import tensor

from roller_svc.errors import WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec, Role
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap

pytestmark = pytest.mark.emulator

RNG = np.random.default_rng(17)
ROOM = 8192  # bytes of shared memory that boxes go to


def kernel(body: str, a: Buffer, view: TensorMap, cluster: int = 1, blocks: int = 1) -> KernelSource:
    """Return a kernel of one warp that copies the map's boxes to `s`, and `s` to memory at the end."""
    text = f"""
extern "C" __global__ void __cluster_dims__({cluster}, 1, 1) __launch_bounds__(32, 1)
one(const unsigned int *a, unsigned int *c, const __grid_constant__ TensorMap map) {{
  extern __shared__ __align__(1024) unsigned char s[];
  unsigned long long *const barrier = (unsigned long long *)(s + {ROOM});
  const int i = (int)threadIdx.x;
  if (i == 0) {{ barrier_init(barrier, 1); fence_barrier_init(); }}
  {"cluster_sync" if cluster > 1 else "__syncthreads"}();
{body}
  for (int k = i; k < {ROOM // 4}; k += 32) c[(int)blockIdx.x * {ROOM // 4} + k] = ((unsigned int *)s)[k];
  {"cluster_sync();" if cluster > 1 else ""}
}}
"""
    c = tensor("C", "c", Role.OUTPUT, DType.UINT32, (blocks, ROOM // 4))
    launch = LaunchSpec("one", ("a", "c"), (blocks, 1, 1), (32, 1, 1), ROOM + 16, tensor_maps=(view,), cluster=cluster)
    return hopper(text, (a, c), launch)


def load(view: TensorMap, at: tuple[int, ...], skips: tuple[int, ...] = (), offset: int = 0) -> str:
    name = f"tma_load_{'im2col_' if skips else ''}{view.rank}d"
    places = ", ".join(str(x) for x in (*at, *skips))
    return (
        f"  if (i == 0) {{ barrier_expect(barrier, {view.bytes}); {name}(s + {offset}, &map, barrier, {places}); }}\n"
        "  barrier_wait(barrier, 0);"
    )


def loaded(a: np.ndarray, view: TensorMap, at: tuple[int, ...], skips: tuple[int, ...] = (), offset: int = 0) -> bytes:
    """Return shared memory after the load."""
    buffer = tensor("A", "a", Role.INPUT, DType(a.dtype.name), a.shape)
    source = kernel(load(view, at, skips, offset), buffer, view)
    results = [module(source, seed).run({"A": a})["C"].tobytes() for seed in (0, 5)]
    assert results[0] == results[1]
    return results[0]


def box_of(a: np.ndarray, at: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """Return the elements of a box in C order, with zeros outside of the tensor."""
    found = np.zeros(tuple(-(-b // s) for b, s in zip(box, steps, strict=True)), a.dtype)
    for index in np.ndindex(*found.shape):
        place = tuple(p + i * s for p, i, s in zip(at, index, steps, strict=True))
        if all(0 <= p < extent for p, extent in zip(place, a.shape, strict=True)):
            found[index] = a[place]
    return found


def shared(data: bytes, offset: int = 0) -> bytes:
    """Return the expected contents of shared memory around a copied box."""
    return b"\xff" * offset + data + b"\xff" * (ROOM - len(data) - offset)


def some(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return RNG.integers(1, 100, shape).astype(dtype)


TILED = [
    ("float32", (40,), (8,), (1,), [(0,), (36,), (-4,), (40,), (-8,)]),
    ("float16", (5, 24), (3, 16), (1, 1), [(0, 0), (3, 16), (-1, 8), (4, -8), (9, 0)]),
    ("uint8", (7, 48), (4, 32), (2, 1), [(0, 0), (3, 17), (-1, 0), (1, -5)]),
    ("float32", (3, 4, 8), (2, 3, 4), (1, 1, 1), [(0, 0, 0), (2, -1, 6), (-1, 3, -2)]),
    ("float16", (2, 3, 5, 8), (2, 2, 4, 8), (1, 1, 3, 1), [(0, 0, 0, 0), (1, 2, -1, 3)]),
    ("float64", (2, 2, 3, 2, 4), (2, 1, 2, 2, 2), (1, 1, 2, 1, 1), [(0, 0, 0, 0, 0), (1, 1, -1, 1, 3)]),
]


@pytest.mark.parametrize(("dtype", "shape", "box", "steps", "places"), TILED)
def test_boxes_are_what_numpy_cuts_out_and_zeros_outside(
    dtype: str, shape: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...], places: list[tuple[int, ...]]
) -> None:
    a = some(shape, dtype)
    strides = tuple(reversed(a.strides[:-1]))
    view = TensorMap("map", "a", DType(dtype), MapMode.TILED, shape[::-1], strides, box[::-1], steps[::-1])
    for at in places:
        assert loaded(a, view, at[::-1]) == shared(box_of(a, at, box, steps).tobytes()), at


def swizzled(data: bytes, span: int, offset: int) -> bytes:
    """CUDA programming guide, "Tensor Map Swizzle Modes": chunks of 16 bytes in rows of `span`, by the row's number."""
    rows_at_once = 128 // span  # rows that share a pattern
    memory = bytearray(b"\xff" * ROOM)
    for place in range(0, len(data), 16):
        row, chunk = divmod((offset + place) // 16, span // 16)
        to = row * span + (chunk ^ row // rows_at_once % (span // 16)) * 16
        memory[to : to + 16] = data[place : place + 16]
    return bytes(memory)


@pytest.mark.parametrize("swizzle", [Swizzle.B32, Swizzle.B64, Swizzle.B128])
@pytest.mark.parametrize("offset", [0, 1024, 384])
@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_swizzles_are_the_manual_s(swizzle: Swizzle, offset: int, dtype: str) -> None:
    a = some((24, 2 * swizzle.value), dtype)
    row = swizzle.value // a.itemsize
    view = tiled("map", tensor("A", "a", Role.INPUT, DType(dtype), a.shape), (row, 20), swizzle)
    data = box_of(a, (2, row // 2), (20, row), (1, 1)).tobytes()
    assert loaded(a, view, (row // 2, 2), offset=offset) == swizzled(data, swizzle.value, offset)


def pixels_of(a: np.ndarray, view: TensorMap, at: tuple[int, ...], skips: tuple[int, ...]) -> np.ndarray:
    """Return rows of channels by brute force: all pixels between the corners, from the first one of the copy."""
    channels, count = view.box
    spatial = [
        range(low, extent + up, step)
        for low, extent, up, step in zip(view.lower, view.extents[1:-1], view.upper, view.element_strides[1:-1], strict=True)
    ]
    order = [
        (n, *reversed(place))
        for n in range(at[-1], a.shape[0] + 2)
        for place in (tuple(reversed(p)) for p in itertools.product(*reversed(spatial)))
    ]
    first = order.index((at[-1], *reversed(at[1:-1])))
    found = np.zeros((count, channels), a.dtype)
    for row, (n, *outward) in enumerate(order[first : first + count]):
        place = (n, *(p + s for p, s in zip(outward, reversed(skips), strict=True)))
        if all(0 <= p < extent for p, extent in zip(place, a.shape[:-1], strict=True)):
            for c in range(channels):
                if 0 <= at[0] + c < a.shape[-1]:
                    found[row, c] = a[(*place, at[0] + c)]
    return found


IM2COL = [
    # shape (n, [d, [h,]] w, c), (channels, pixels), steps, lower, upper, [(at, skips)]
    ((2, 9, 8), (4, 7), (1,), (-1,), (-1,), [((0, -1, 0), (0,)), ((4, 3, 1), (2,)), ((0, 5, 1), (1,))]),
    ((2, 6, 5, 8), (8, 20), (1, 1), (-1, -1), (-1, -1), [((0, -1, -1, 0), (0, 0)), ((0, 2, 3, 0), (2, 1)),
                                                       ((4, 3, 4, 1), (1, 2))]),
    ((2, 7, 9, 8), (4, 11), (2, 3), (-1, 0), (-2, -3), [((0, -1, 0, 0), (0, 0)), ((4, 3, 3, 0), (4, 2))]),
    ((2, 3, 4, 5, 4), (4, 30), (1, 2, 1), (-1, -1, 0), (0, -1, -1), [((0, -1, -1, 0, 0), (0, 0, 0)),
                                                                     ((0, 2, 1, 1, 0), (1, 1, 1))]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "box", "steps", "lower", "upper", "places"), IM2COL)
def test_columns_of_pixels_are_those_between_the_corners(
    shape: tuple[int, ...],
    box: tuple[int, int],
    steps: tuple[int, ...],
    lower: tuple[int, ...],
    upper: tuple[int, ...],
    places: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    a = some(shape, "float32")
    view = TensorMap(
        "map", "a", DType.FLOAT32, MapMode.IM2COL, shape[::-1], tuple(reversed(a.strides[:-1])), box, (1, *steps, 1), lower, upper
    )
    for at, skips in places:
        assert loaded(a, view, at, skips) == shared(pixels_of(a, view, at, skips).tobytes()), (at, skips)


def test_views_begin_where_they_say_and_words_are_rounded_to_tf32() -> None:
    a = RNG.standard_normal((6, 12)).astype(np.float32)
    view = TensorMap("map", "a", DType.FLOAT32, MapMode.TILED, (8, 4), (48,), (8, 4), (1, 1), offset_bytes=112, tf32=True)
    bits = a[2:6, 4:12].copy().view(np.uint32)
    rounded = (bits + 0x1000) & ~np.uint32(0x1FFF)  # to nearest, ties away from zero
    assert loaded(a, view, (0, 0)) == shared(rounded.tobytes())


STORES = [
    ((40,), (8,), Swizzle.NONE, [(0,), (36,), (-4,), (50,)]),
    ((9, 40), (4, 8), Swizzle.NONE, [(0, 0), (7, 36), (-2, 20), (3, -4)]),
    ((12, 40), (10, 32), Swizzle.B128, [(0, 0), (5, 20)]),
    ((12, 40), (10, 16), Swizzle.B64, [(0, 0), (5, 32)]),
    ((3, 4, 8), (2, 3, 4), Swizzle.NONE, [(0, 0, 0), (2, -1, 6)]),
    ((2, 3, 4, 8), (1, 2, 3, 4), Swizzle.NONE, [(1, 2, 3, 4)]),
    ((2, 2, 3, 4, 8), (2, 1, 2, 3, 4), Swizzle.NONE, [(0, 1, -1, 3, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "box", "swizzle", "places"), STORES)
def test_stores_write_only_inside_the_tensor(
    shape: tuple[int, ...], box: tuple[int, ...], swizzle: Swizzle, places: list[tuple[int, ...]]
) -> None:
    d = tensor("D", "d", Role.OUTPUT, DType.FLOAT32, shape)
    view = tiled("map", d, box[::-1], swizzle)
    values = np.arange(1, math.prod(box) + 1, dtype=np.float32).reshape(box)
    data = np.frombuffer(swizzled(values.tobytes(), swizzle.value or 16, 0)[: values.nbytes], np.uint32)
    for at in places:
        coordinates = ", ".join(str(x) for x in reversed(at))
        text = f"""
extern "C" __global__ void one(const unsigned int *a, float *d, const __grid_constant__ TensorMap map) {{
  extern __shared__ __align__(1024) unsigned char s[];
  for (int k = (int)threadIdx.x; k < {data.size}; k += 32) ((unsigned int *)s)[k] = a[k];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    tma_store_{len(shape)}d(&map, s, {coordinates});
    bulk_commit();
    bulk_wait<0>();
  }}
}}
"""
        a = tensor("A", "a", Role.INPUT, DType.UINT32, data.shape)
        source = hopper(text, (a, d), LaunchSpec("one", ("a", "d"), (1, 1, 1), (32, 1, 1), ROOM, tensor_maps=(view,)))
        expected = np.full(shape, np.nan, np.float32)
        for index in np.ndindex(*box):
            place = tuple(p + i for p, i in zip(at, index, strict=True))
            if all(0 <= p < extent for p, extent in zip(place, shape, strict=True)):
                expected[place] = values[index]
        np.testing.assert_array_equal(module(source, races=True).run({"A": data})["D"], expected)


def test_a_copy_is_poison_until_it_completes_as_late_as_possible() -> None:
    a = some((4, 8), "float32")
    view = tiled("map", tensor("A", "a", Role.INPUT, DType.FLOAT32, a.shape), (8, 4))
    body = """
  ((unsigned int *)s)[i] = 7;
  __syncthreads();
  if (i == 0) { barrier_expect(barrier, 128); tma_load_2d(s, &map, barrier, 0, 0); }
  __syncthreads();
  c[1000 + i] = ((unsigned int *)s)[i];
  barrier_wait(barrier, 0);
"""
    buffer = tensor("A", "a", Role.INPUT, DType.FLOAT32, a.shape)
    source = kernel(body.replace("c[1000", "((unsigned int *)s)[1000"), buffer, view)
    found = module(source).run({"A": a})["C"][0]
    assert (found[1000:1032] == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(found[:32].view(np.float32), a.reshape(-1))


@pytest.mark.parametrize("mask", [1, 2, 3])
def test_a_copy_to_several_blocks_is_there_for_each(mask: int) -> None:
    a = some((4, 8), "float32")
    view = tiled("map", tensor("A", "a", Role.INPUT, DType.FLOAT32, a.shape), (8, 4))
    body = f"""
  const unsigned int rank = cluster_rank();
  if (i == 0 && ({mask} >> rank & 1)) barrier_expect(barrier, 128);
  if (i == 0 && rank == 1) tma_load_2d_multicast(s + 1024, &map, barrier, 0, 0, (unsigned short){mask});
  if ({mask} >> rank & 1) barrier_wait(barrier, 0);
"""
    source = kernel(body, tensor("A", "a", Role.INPUT, DType.FLOAT32, a.shape), view, cluster=2, blocks=4)
    for seed, races in ((0, False), (1, False), (2, True)):
        found = module(source, seed, races=races).run({"A": a})["C"]
        for block in range(4):
            expected = shared(a.tobytes(), 1024) if mask >> block % 2 & 1 else shared(b"")
            assert found[block].tobytes() == expected


EXPECT = "if (i == 0) barrier_expect(barrier, 128);\n"
LOAD = "if (i == 0)@ tma_load_2d(s, &map, barrier, 0, 0);\n"
FAULTS = {
    "another rank": ("if (i == 0)@ tma_load_3d(s, &map, barrier, 0, 0, 0);", "is a map of 2 dimensions"),
    "another mode": ("if (i == 0)@ tma_load_im2col_3d(s, &map, barrier, 0, 0, 0, 0);", "is a map of 2 dimensions"),
    "no alignment": (EXPECT + LOAD.replace("s,", "s + 64,"), "not a multiple of 128"),
    "outside": (EXPECT + LOAD.replace("s,", f"s + {ROOM},"), "leaves the block's shared memory"),
    "no shared memory": (LOAD.replace("s,", "c,"), "leaves the block's shared memory"),
    "no barrier": (LOAD.replace("barrier", "barrier + 1"), "was not initialised"),
    "no fence": ("if (i == 0) { barrier_init(barrier + 1, 1);\n@tma_load_2d(s, &map, barrier + 1, 0, 0); }",
                 "copies before fence_barrier_init"),
    "nobody waits": (EXPECT + LOAD + "return;", "under way when the block ends"),
    "bytes that do not come": (EXPECT.replace("128", "144") + LOAD + "@barrier_wait(barrier, 0);",
                               "lacks 0 of 1 arrivals and 16 bytes"),
    "bytes that nobody expects": ("if (i == 0) barrier_arrive(barrier);\n" + LOAD + "@barrier_wait(barrier, 1);",
                                  "lacks 1 of 1 arrivals and -128 bytes"),
    "a store to an input": ("fence_async();\nif (i == 0)@ tma_store_2d(&map, s, 0, 0);", "stores to an input"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_tma_copies_are_reported(name: str) -> None:
    body, message = FAULTS[name]
    a = some((4, 8), "float32")
    buffer = tensor("A", "a", Role.INPUT, DType.FLOAT32, a.shape)
    source = kernel(body.replace("@", ""), buffer, tiled("map", buffer, (8, 4)))
    with pytest.raises(WrongAnswerError) as raised:
        module(source).run({"A": a})
    assert message in raised.value.message
    start = source.text.index(body.replace("@", ""))
    line = source.text.count("\n", 0, start) + body[: body.rindex("@")].count("\n") + 1
    assert f"line {line}" in raised.value.message


@pytest.mark.parametrize(("declared", "message"), [(16, "not a multiple of 128"), (256, ""), (1024, "")])
def test_dynamic_shared_memory_is_aligned_as_it_is_declared(declared: int, message: str) -> None:
    """A swizzle depends on addresses: misaligned memory has another order of chunks."""
    a = some((20, 64), "float16")
    buffer = tensor("A", "a", Role.INPUT, DType.FLOAT16, a.shape)
    view = tiled("map", buffer, (64, 20), Swizzle.B128)
    source = kernel(load(view, (0, 0)), buffer, view)
    text = source.text.replace("__align__(1024) unsigned", f"__align__({declared}) unsigned")
    source = dataclasses.replace(source, text=text)
    if message:
        with pytest.raises(WrongAnswerError, match=message):
            module(source).run({"A": a})
        return
    expected = swizzled(a.tobytes(), 128, declared % 1024)[declared % 1024 :]
    assert module(source).run({"A": a})["C"].tobytes()[: a.nbytes] == expected[: a.nbytes]


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_written_under_a_store(when: str) -> None:
    """A thread that writes after its own store must wait until the store has read."""
    d = tensor("D", "d", Role.OUTPUT, DType.FLOAT32, (4, 8))
    awaits = "bulk_wait_read<0>();"
    text = f"""
extern "C" __global__ void one(float *d, const __grid_constant__ TensorMap map) {{
  __shared__ __align__(128) float s[32];
  s[threadIdx.x] = (float)threadIdx.x;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    tma_store_2d(&map, s, 0, 0);
    bulk_commit();
    {awaits if when == "before" else ""}
    s[5] = 7.0f;
    {awaits if when == "after" else ""}
  }}
}}
"""
    launch = LaunchSpec("one", ("d",), (1, 1, 1), (32, 1, 1), tensor_maps=(tiled("map", d, (8, 4)),))
    source = hopper(text, (d,), launch)
    if when == "before":
        assert (module(source).run({})["D"].reshape(-1) == np.arange(32)).all()
    else:
        with pytest.raises(WrongAnswerError, match="shared memory was written before this store was awaited"):
            module(source).run({})
