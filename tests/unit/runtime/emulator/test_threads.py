"""Thread collectives in the emulator: late asynchronous copies, warp collectives, and reported faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator_support import INPUT, cuda, module, one_block, wrappers
from reference_kernels import tensor

from roller_svc.errors import WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role

pytestmark = pytest.mark.emulator

COPIES = wrappers("copy_async_4", "copy_async_8", "copy_async_16", "commit_copies", "await_copies")
ROWS = wrappers("load_matrix_1", "load_matrix_4")
PRODUCT = wrappers("mma_m16n8k16_f16")


def fault(body: str, top: str = "", threads: int = 32, shared_bytes: int = 0) -> str:
    """Return the fault that the emulator reports for this body, which must name the line of `@`."""
    line = body.partition("@")[0].count("\n") + 2 + top.count("\n")
    source = one_block(body.replace("@", ""), threads, shared_bytes, top)
    with pytest.raises(WrongAnswerError) as raised:
        module(source).run(INPUT)
    if "@" in body:
        assert f"line {line}" in raised.value.message
    return raised.value.message


# copies ---------------------------------------------------------------------------------------------------------------

SHARED = "__shared__ __align__(16) float s[64];\nconst int i = (int)threadIdx.x;\n"


def test_copies_land_when_they_are_awaited_and_never_earlier() -> None:
    body = (
        SHARED
        + """
    s[i] = 5.0f;
    copy_async_4(&s[i], &a[i], true);
    commit_copies();
    copy_async_4(&s[32 + i], &a[i], i % 2 == 0);
    commit_copies();
    commit_copies();  // an empty group counts too
    float sum = s[i] == s[i] ? 1000.0f : 0.0f;
    await_copies<2>();
    sum += s[i] + (s[32 + i] == s[32 + i] ? 1000.0f : 0.0f);
    await_copies<1>();
    c[i] = sum + 100 * s[32 + i];
    """
    )
    found = module(one_block(body, top=COPIES)).run(INPUT)["C"]
    i = np.arange(32)
    np.testing.assert_array_equal(found, i + 100 * i * (i % 2 == 0))


def test_copies_of_8_and_16_bytes() -> None:
    body = (
        SHARED
        + """
    if (i < 4) copy_async_16(&s[4 * i], &a[4 * i], i != 2);
    else if (i < 12) copy_async_8(&s[2 * i + 8], &a[2 * i + 8], true);
    commit_copies();
    await_copies<0>();
    __syncthreads();
    c[i] = s[i];
    """
    )
    found = module(one_block(body, top=COPIES)).run(INPUT)["C"]
    np.testing.assert_array_equal(found, np.where(np.arange(32) // 4 == 2, 0, np.arange(32)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (i < 4)@ copy_async_8(&s[i], &a[2 * i], true);", "to a shared address that is not a multiple of 8"),
        ("if (i < 4)@ copy_async_16(&s[4 * i], &a[i], true);", "from an address that is not a multiple of 16"),
        ("@copy_async_4(&s[i], &a[i + 1], true);", "copies 4 bytes at byte 128 of A, which has 128 bytes"),
        ("if (i < 9)@ copy_async_16(&s[4 * i], &a[4 * i], true);", "copies 16 bytes at byte 128 of A"),
        ("@copy_async_4(&s[i], &s[i + 1], true);", "from an address outside all buffers"),
        (
            "__shared__ float t[32];\n@copy_async_4(&t[i + 1], &a[i], true); c[i] = t[i];",
            "beyond the end of a shared array",
        ),
        ("@copy_async_4(&c[i], &a[i], true);", "outside the block's shared memory"),
        ("float local[1];\n@copy_async_4(local, &a[i], false);", "outside the block's shared memory"),
        ("extern __shared__ unsigned char d[];\n@copy_async_4(&d[4 * i], &a[i], true);", "outside the block's shared"),
    ],
)
def test_faults_of_async_copies_are_reported(body: str, message: str) -> None:
    assert message in fault(f"{SHARED}{body}\ncommit_copies(); await_copies<0>();", COPIES, shared_bytes=64)


@pytest.mark.parametrize("after", ["", "commit_copies();", "await_copies<0>();", "commit_copies(); await_copies<1>();"])
def test_copies_are_awaited_before_a_thread_ends(after: str) -> None:
    assert "without awaiting this copy" in fault(f"{SHARED}@copy_async_4(&s[i], &a[i], true);\n{after}", COPIES)


def test_an_address_that_nothing_is_read_from_may_be_any() -> None:
    body = SHARED + "copy_async_16(s, a + 1001, false);\ncommit_copies(); await_copies<0>();\nc[i] = s[0];"
    assert (module(one_block(body, threads=1, top=COPIES)).run(INPUT)["C"][:1] == 0).all()


# warps ----------------------------------------------------------------------------------------------------------------

MATRIX = "__shared__ __align__(16) unsigned short s[256 + 8];\nunsigned int w[4] = {}; const int i = (int)threadIdx.x;\n"
FRAGMENTS = "float d[4] = {}; unsigned int x[4] = {}; const int i = (int)threadIdx.x;\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@load_matrix_4(w, &s[8 * i + 4]);", "a row of ldmatrix at no multiple of 16"),
        ("@load_matrix_4(w, &s[8 * i + 16]); c[i] = (float)s[i];", "a row of ldmatrix leaves its shared array"),
        ("@load_matrix_4(w, a);", "lies outside the block's shared memory"),
        ("@load_matrix_1(w, i < 7 ? &s[8 * i] : nullptr);", "lies outside the block's shared memory"),
    ],
)
def test_rows_of_a_matrix_are_aligned_and_shared(body: str, message: str) -> None:
    assert message in fault(MATRIX + body, ROWS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (i < 31)@ mma_m16n8k16_f16(d, x, x);", "warp divergence"),
        ("if (i == 3) return;\n@mma_m16n8k16_f16(d, x, x);", "warp divergence"),
        ("@mma_m16n8k16_f16(d, x, x);\nif (i == 3) return;\n__syncwarp();", "warp divergence"),
        ("if (i < 5) mma_m16n8k16_f16(d, x, x);\nelse@ mma_m16n8k16_f16(d, x, x);", "warp divergence"),
        ("if (i < 5)@ __syncwarp();\nelse mma_m16n8k16_f16(d, x, x);", "mma_m16n8k16_f16.*in __syncwarp at line"),
        ("if (i < 5)@ __syncwarp();\nelse __syncthreads();", "5 of 32 threads of warp 0 wait in __syncwarp"),
        (
            "if (i < 5) c[i] = __shfl_xor_sync(0xffffffff, a[i], 1);\nelse@ c[i] = __shfl_xor_sync(0xffffffff, a[i], 1);",
            "warp divergence",
        ),
        ("@c[i] = __shfl_xor_sync(0x0000ffff, a[i], 1);", "mask 0xffff and width 32"),
        ("@c[i] = __shfl_xor_sync(0xffffffff, a[i], 1, 16);", "mask 0xffffffff and width 16"),
        ("@__syncwarp(1);", "mask 0x1"),
        ("if (i < 20) return;\n@__syncthreads();", "the others have ended: a deadlock"),
    ],
)
def test_threads_of_a_warp_go_together(body: str, message: str) -> None:
    if "@mma" in body and "return" in body.partition("@")[2]:
        body = body.replace("@", "")  # the report may name either place
    assert re.search(message, fault(FRAGMENTS + body, PRODUCT))


def test_a_part_of_a_warp_has_no_tensor_cores() -> None:
    assert "takes a whole warp, this one has 16 threads" in fault(FRAGMENTS + "@mma_m16n8k16_f16(d, x, x);", PRODUCT, 48)


def test_warps_converge_independently() -> None:
    """One warp runs a loop of shuffles, while the other waits in a barrier."""
    body = """
    const int i = (int)threadIdx.x;
    __shared__ float s[2];
    float sum = a[i % 32];
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(0xffffffff, sum, by);
    if (i < 32) for (int k = 0; k < 10; k++) __syncwarp();
    if (i % 32 == 0) s[i / 32] = sum;
    __syncthreads();
    if (i < 32) c[i] = s[0] + s[1];
    """
    for seed in range(4):
        assert (module(one_block(body, threads=64), seed).run(INPUT)["C"] == 2 * INPUT["A"].sum()).all()


def test_shuffles_and_votes_of_every_type() -> None:
    text = """
template <class T> __device__ T all(T x, int lane) {
  T idx = __shfl_sync(0xffffffff, x, lane + 3), across = __shfl_xor_sync(0xffffffff, x, 5);
  T down = __shfl_down_sync(0xffffffff, x, 4), up = __shfl_up_sync(0xffffffff, x, 2);
  return idx + 64 * across + 4096 * down + 262144 * up;
}
extern "C" __global__ void one(double *c, unsigned int *v) {
  const int i = (int)threadIdx.x;
  c[i] = (double)all(i, i);
  c[32 + i] = (double)all((unsigned int)i, i);
  c[64 + i] = (double)all((long long)i << 33, i) / (1ll << 33);
  c[96 + i] = (double)all((unsigned long long)i, i);
  c[128 + i] = (double)all(0.5f * (float)i, i) * 2;
  c[160 + i] = all(0.25 * i, i) * 4;
  v[i] = __ballot_sync(0xffffffff, i % 3 == 0);
  v[32 + i] = __any_sync(0xffffffff, i == 7) + 2 * __any_sync(0xffffffff, i == 32)
      + 4 * __all_sync(0xffffffff, i < 32) + 8 * __all_sync(0xffffffff, i != 7);
}
"""
    buffers = (
        tensor("C", "c", Role.OUTPUT, DType.FLOAT64, (6, 32)),
        tensor("V", "v", Role.OUTPUT, DType.UINT32, (2, 32)),
    )
    source = cuda(text, buffers, LaunchSpec("one", ("c", "v"), (1, 1, 1), (32, 1, 1)))
    found = module(source, seed=3).run({})
    i = np.arange(32)
    down, up = np.where(i + 4 < 32, i + 4, i), np.where(i >= 2, i - 2, i)
    expected = (i + 3) % 32 + 64 * (i ^ 5) + 4096 * down + 262144 * up
    np.testing.assert_array_equal(found["C"], np.tile(expected, (6, 1)).astype(np.float64))
    assert (found["V"][0] == sum(1 << j for j in range(0, 32, 3))).all()
    assert (found["V"][1] == 1 + 4).all()


def test_lanes_that_a_block_does_not_have_give_nothing_useful() -> None:
    body = "const int i = (int)threadIdx.x; c[i] = __shfl_xor_sync(0xffffffff, a[i], 16);"
    found = module(one_block(body, threads=20)).run(INPUT)["C"]
    np.testing.assert_array_equal(found[:20], [*range(16, 20), *[np.nan] * 12, *range(4)])


# memory ---------------------------------------------------------------------------------------------------------------


def test_arrays_are_read_as_vectors() -> None:
    body = """
    __shared__ __align__(16) float s[32];
    __align__(16) float local[4];
    const int i = (int)threadIdx.x;
    if (i < 8) {
      *(float4 *)local = __ldg((const float4 *)a + i);
      *(uint4 *)&s[4 * i] = *(uint4 *)local;
    }
    __syncthreads();
    float2 pair = *(float2 *)&s[i / 2 * 2];
    c[i] = i % 2 ? pair.x : pair.y;
    """
    np.testing.assert_array_equal(module(one_block(body)).run(INPUT)["C"], np.arange(32) ^ 1)


@pytest.mark.parametrize("place", ["&s[i + 1]", "&local[1]", "&c[i + 1]"])
def test_vectors_are_aligned(place: str) -> None:
    body = SHARED + "__align__(16) float local[8];\nif (i == 0)@ *(float4 *)PLACE = make_float4(1, 2, 3, 4);\nc[i] = local[2];"
    assert "not aligned" in fault(body.replace("PLACE", place))
    assert "null pointer" in fault("float *p = nullptr;\n@*p = a[0];")


def test_alignments_are_cuda_s() -> None:
    sizes = {
        2: "char2 uchar2", 4: "char4 uchar4 short2 ushort2", 8: "short4 ushort4 int2 uint2 float2",
        16: "int4 uint4 float4 longlong2 ulonglong2 double2",
    }  # fmt: skip
    lines = [
        f"static_assert(sizeof({name}) == {size} && alignof({name}) == {size});"
        for size, names in sizes.items()
        for name in names.split()
    ]
    body = "uchar4 b = make_uchar4(1, 2, 3, 250); c[threadIdx.x] = (float)(b.x + b.w) + (float)make_double2(1, 2).y;"
    found = module(one_block(body, top="\n".join(lines) + "\n")).run(INPUT)["C"]
    assert (found == 253).all()


def test_functions_of_bits_and_order() -> None:
    text = """
extern "C" __global__ void one(const unsigned int *x, unsigned int *y, float *f) {
  const unsigned int u = x[threadIdx.x], *const v = x;
  unsigned int *const out = y + 8 * threadIdx.x;
  out[0] = (unsigned int)__popc(u);
  out[1] = (unsigned int)__ffs((int)u);
  out[2] = (unsigned int)__clz((int)u);
  out[3] = __brev(u);
  out[4] = __byte_perm(u, 0x44332211, 0x7250);
  out[5] = min(u, 1000u);
  out[6] = (unsigned int)max((int)u, -5);
  out[7] = __ldg(v);
  __threadfence();
  f[threadIdx.x] = min(max(__uint_as_float(u), -1.0f), 1.0f);
}
"""
    x = np.array([0, 1, 0x80000000, 0xDEADBEEF, 0x3F000000, 0x7FC00000], np.uint32)
    buffers = (
        tensor("X", "x", Role.INPUT, DType.UINT32, x.shape), tensor("Y", "y", Role.OUTPUT, DType.UINT32, (len(x), 8)),
        tensor("F", "f", Role.OUTPUT, DType.FLOAT32, x.shape),
    )  # fmt: skip
    found = module(cuda(text, buffers, LaunchSpec("one", ("x", "y", "f"), (1, 1, 1), (len(x), 1, 1)))).run({"X": x})
    expected = []
    for u in x.tolist():
        bits = f"{u:032b}"
        signed = u - (u >> 31 << 32)
        expected.append(
            [
                bits.count("1"),
                bits[::-1].find("1") + 1,
                32 if not u else bits.find("1"),
                int(bits[::-1], 2),
                u & 255 | (0x22 << 8) | (u >> 16 & 255) << 16 | 0x44 << 24,
                min(u, 1000),
                max(signed, -5) & 0xFFFFFFFF,
                0,
            ]
        )
    np.testing.assert_array_equal(found["Y"], np.array(expected, np.uint32))
    np.testing.assert_array_equal(found["F"], np.float32([0, 2**-149, 0, -1, 0.5, -1]))


@pytest.mark.parametrize("declared", ["float", "__align__(16) float", "double"])
def test_variables_without_a_value_are_not_a_number(declared: str) -> None:
    """A sum reveals any large number; a maximum only NaN or a larger number."""
    body = f"  {declared} best[2];\n  const int i = (int)threadIdx.x;\n"
    body += "  c[i] = a[i] > best[1] || a[i] != a[i] ? a[i] : best[1];"
    assert np.isnan(module(one_block(body)).run(INPUT)["C"]).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tries", ["seen != before", "false"])
def test_another_thread_may_win_a_compare_and_swap(tries: str, seed: int) -> None:
    """A thread that does not retry loses its update; two of four threads suffice to reveal it."""
    text = f"""
extern "C" __global__ void one(unsigned int *sum) {{
  unsigned int seen = *(volatile unsigned int *)sum, before;
  do {{
    before = seen;
    seen = atomicCAS(sum, before, before + 1);
  }} while ({tries});
}}
"""
    buffers = (tensor("S", "sum", Role.OUTPUT, DType.UINT32, (1,)),)
    source = cuda(text, buffers, LaunchSpec("one", ("sum",), (1, 1, 1), (4, 1, 1), zeroed=("sum",)))
    total = module(source, seed).run({})["S"][0]
    assert (total == 4) == (tries != "false")


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint64", "float32", "float64"])
def test_atomic_sums(dtype: str) -> None:
    kind = DType(dtype)
    name = {"int32": "int", "uint32": "unsigned int", "uint64": "unsigned long long", "float32": "float"}.get(dtype, "double")
    text = f"""
extern "C" __global__ void one({name} *sum, {name} *before) {{
  __shared__ {name} s;
  const int i = (int)threadIdx.x;
  if (i == 0) s = 0;
  __syncthreads();
  atomicAdd(&s, ({name})i);
  __syncthreads();
  before[i] = i == 0 ? atomicAdd(sum, s) : s;
}}
"""
    buffers = (tensor("S", "sum", Role.WORKSPACE, kind, (1,)), tensor("B", "before", Role.OUTPUT, kind, (64,)))
    source = cuda(text, buffers, LaunchSpec("one", ("sum", "before"), (1, 1, 1), (64, 1, 1), zeroed=("sum",)))
    found = module(source, seed=1).run({})["B"]
    assert found[0] == 0
    assert (found[1:] == 2016).all()
