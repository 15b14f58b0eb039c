"""wgmma of the emulator: operand and result layouts of the PTX ISA manual, and reported faults of warpgroups."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from emulator_support import INPUT, module, one_block, words, wrappers
from hopper import TOP, hopper
from reference_kernels import tensor

from roller_svc.codegen.cuda.hopper_instructions import WgmmaShape, wgmma_shape
from roller_svc.errors import WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role
from tests.unit.runtime.emulator.test_layouts import m16n8k8_tf32_a, m16n8k16_a, m16n8k32_a
from tests.unit.runtime.emulator.test_threads import fault

pytestmark = pytest.mark.emulator

RNG = np.random.default_rng(23)
TYPES = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype(np.float32),
    "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
ROOM = 49152  # bytes of an operand, enough for 256 rows of 128 bytes and more between groups of eight


def chunk_of(chunk: int, row: int, span: int) -> int:
    """Return the position of a 16-byte chunk in a row of `span` bytes, as in the figures of the swizzling modes."""
    return chunk ^ {16: 0, 32: row // 4 % 2, 64: row // 2 % 4, 128: row % 8}[span]


def k_major(row: int, byte: int, span: int, leading: int, stride: int) -> int:
    """Return the offset of a byte of a row along k. Without a swizzle (span 16) chunks are `leading` bytes apart."""
    if span == 16:
        return row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
    return row // 8 * stride + row % 8 * span + chunk_of(byte // 16, row % 8, span) * 16 + byte % 16


def mn_major(row: int, k: int, span: int, leading: int, stride: int) -> int:
    """Return the offset of the 16 bits of a row (of m or n) at one k; rows of memory run along m or n."""
    if span == 16:
        return row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    in_row = row % (span // 2) * 2
    return row // (span // 2) * leading + k // 8 * stride + k % 8 * span + (chunk_of(in_row // 16, k % 8, span) * 16 + in_row % 16)


def laid_out(matrix: np.ndarray, place: str, span: int, leading: int, stride: int, first_byte: int) -> np.ndarray:
    """Return shared memory with the matrix [rows, k] in it and poison around it."""
    room = np.full(ROOM, 0xFF, np.uint8)
    data = np.ascontiguousarray(matrix).view(np.uint8)
    for row in range(matrix.shape[0]):
        if place == "k":
            for byte in range(32):
                room[k_major(row, byte + first_byte, span, leading, stride)] = data[row, byte]
        else:
            for k in range(16):
                at = mn_major(row, k, span, leading, stride)
                room[at : at + 2] = data[row, 2 * k : 2 * k + 2]
    return room


def in_registers(matrix: np.ndarray) -> np.ndarray:
    """Return four words per thread, [128, 4], in the layout of mma with 16 rows per warp."""
    count, layout = {4: (4, m16n8k8_tf32_a), 2: (8, m16n8k16_a), 1: (16, m16n8k32_a)}[matrix.itemsize]
    held = [
        [matrix[thread // 32 * 16 + row, k] for row, k in (layout(thread % 32 // 4, thread % 4, i) for i in range(count))]
        for thread in range(128)
    ]
    return words(np.array(held, matrix.dtype))


def results(d: np.ndarray) -> np.ndarray:
    """Return the registers of d[64, n], [128, n / 2]: "Register Fragments", matrix D."""
    found = np.empty((64, d.shape[1] * 2), d.dtype)
    for thread in range(128):
        for i in range(d.shape[1]):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            found[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = d[thread, i]
    return found


def numbers(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return RNG.integers(-4, 5, shape).astype(dtype)


@functools.cache
def strides(rows: int, place: str, span: int) -> tuple[int, int]:
    """Return leading and stride bytes that leave gaps between the parts of an operand."""
    atom = 8 * span
    if span == 16:
        return (rows // 8 + 1) * 128, 128
    if place == "k":
        return 16, atom
    return 2 * atom, (-(-rows // (span // 2)) * 2 + 1) * atom


CASES = [
    *((f"wgmma_m64n{n}k16_{t}_{a}{b}", span) for t, n in (("f16", 24), ("bf16", 128)) for a in "kmr" for b in "km"
      for span in (32, 64, 128)),
    *((f"wgmma_m64n{n}k16_f16_{a}{b}", 16) for n in (8, 64) for a in "km" for b in "km"),
    *((f"wgmma_m64n{n}k8_tf32_{a}k", span) for n, span in ((256, 128), (40, 32)) for a in "kr"),
    *((f"wgmma_m64n{n}k32_{x}{y}_{a}k", span) for n, span in ((96, 128), (16, 64)) for x in ("s8", "u8")
      for y in ("s8", "u8") for a in "kr"),
    *((f"wgmma_m64n72k32_{x}{y}_{a}k", 128) for x in ("e4m3", "e5m2") for y in ("e4m3", "e5m2") for a in "kr"),
]  # fmt: skip


def text_of(name: str, product: WgmmaShape, span: int, first_byte: int) -> str:
    kind, hold = ("float", "") if product.is_float else ("int", "_s32")
    swizzle = {16: "& 0x3fffffffffffffffull"}.get(span, "")
    describe = f"matrix_descriptor_{span if span > 16 else 128}"

    def operand(room: str, place: str, rows: int) -> str:
        leading, stride = strides(rows, place, span)
        begin = first_byte if place == "k" else 0
        return f"{describe}(s + {room} + {begin}, {leading}, {stride}) {swizzle}"

    a = "a_words" if product.a_layout == "r" else operand("0", product.a_layout, 64)
    return f"""
extern "C" __global__ void __launch_bounds__(128, 1)
one(const unsigned int *rooms, const unsigned int *held, {kind} *d) {{
  extern __shared__ __align__(1024) unsigned char s[];
  const int i = (int)threadIdx.x;
  {kind} sums[{product.registers}];
  unsigned int a_words[4];
  for (int k = i; k < {ROOM // 2}; k += 128) ((unsigned int *)s)[k] = rooms[k];
  for (int k = 0; k < 4; k++) a_words[k] = held[4 * i + k];
  for (int k = 0; k < {product.registers}; k++) sums[k] = ({kind})(3 * i + k);
  fence_async();
  __syncthreads();
  wgmma_fence();
  {name}(sums, {a}, {operand(str(ROOM), product.b_layout, product.n)}, (int)held[512]);
  wgmma_commit();
  wgmma_wait<0>();
  hold_results_{product.registers}{hold}(sums);
  for (int k = 0; k < {product.registers}; k++) d[i * {product.registers} + k] = sums[k];
}}
"""


@pytest.mark.parametrize(
    ("name", "span"),
    [pytest.param(*case, marks=pytest.mark.slow) if i % 4 else case for i, case in enumerate(CASES)],
)
def test_products_read_and_write_what_the_manual_says(name: str, span: int) -> None:
    product = wgmma_shape(name)
    assert product is not None
    a, b = numbers(TYPES[product.a], (64, product.k)), numbers(TYPES[product.b], (product.n, product.k))
    first_byte = 32 if span >= 64 and "m" not in product.a_layout + product.b_layout else 0
    rooms = np.concatenate(
        [
            np.zeros(ROOM, np.uint8)
            if product.a_layout == "r"
            else laid_out(a, product.a_layout, span, *strides(64, product.a_layout, span), first_byte),
            laid_out(b, product.b_layout, span, *strides(product.n, product.b_layout, span), first_byte),
        ]
    )
    held = np.append(in_registers(a).reshape(-1), np.uint32(0)).astype(np.uint32)
    sum_type = DType.FLOAT32 if product.is_float else DType.INT32
    buffers = (
        tensor("R", "rooms", Role.INPUT, DType.UINT32, (ROOM // 2,)),
        tensor("H", "held", Role.INPUT, DType.UINT32, (513,)),
        tensor("D", "d", Role.OUTPUT, sum_type, (128, product.registers)),
    )
    hold = f"hold_results_{product.registers}{'' if product.is_float else '_s32'}"
    launch = LaunchSpec("one", ("rooms", "held", "d"), (1, 1, 1), (128, 1, 1), 2 * ROOM)
    source = hopper(text_of(name, product, span, first_byte), buffers, launch, (name, hold))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    before = results(3 * np.arange(128)[:, None] + np.arange(product.registers))
    for add in (0, 1):
        held[512] = add
        found = results(module(source, add).run({"R": words(rooms), "H": held})["D"])
        np.testing.assert_array_equal(found, expected + add * before)


# what warpgroups must not do ------------------------------------------------------------------------------------------

START = """  __shared__ __align__(1024) unsigned char s[16384];
  const int i = (int)threadIdx.x;
  float d[32], e[32];
  unsigned int w[4] = {0, 0, 0, 0};
  for (int k = 0; k < 4096; k++) if (k % 128 == i % 128) ((unsigned int *)s)[k] = 0;
  fence_async();
  __syncthreads();
  const unsigned long long x = matrix_descriptor_128(s, 16, 1024), y = matrix_descriptor_128(s + 8192, 16, 1024);
"""
MULTIPLY = "wgmma_m64n64k16_f16_kk(d, x, y, 0);\n"
END = "wgmma_commit();\nwgmma_wait<0>();\nhold_results_32(d);\nif (i < 32) c[i] = d[0];"
MORE = wrappers("wgmma_m64n64k16_f16_kk", "wgmma_m64n64k16_f16_rk", "wgmma_m64n32k16_f16_kk", "hold_results_32")
FAULTS = {
    "three warps": ("if (i < 96)@ wgmma_fence();", "warp divergence", 128),
    "a thread less": ("if (i == 77) return;\nwgmma_fence();", "warp divergence", 128),
    "no warpgroup": ("@wgmma_fence();", "takes a whole warpgroup, this one has 96 threads", 96),
    "two places": ("if (i < 32)@ wgmma_fence();\nelse wgmma_fence();", "warp divergence", 128),
    "no fence": ("@" + MULTIPLY + END, "without wgmma_fence", 128),
    "no second fence": ("wgmma_fence();\n" + MULTIPLY + END + "\n@" + MULTIPLY + END, "without wgmma_fence", 128),
    "never awaited": ("wgmma_fence();\n@" + MULTIPLY + "wgmma_commit();", "the thread ends without awaiting", 128),
    "never committed": ("wgmma_fence();\n" + MULTIPLY + "wgmma_wait<0>();\n@hold_results_32(d);",
                        "32 results of products that were not awaited", 128),
    "awaited but for one": ("wgmma_fence();\n" + MULTIPLY + "wgmma_commit();\nwgmma_wait<1>();\n@hold_results_32(d);",
                            "results of products that were not awaited", 128),
    "different descriptors": ("wgmma_fence();\n@wgmma_m64n64k16_f16_kk(d, x + (i == 9), y, 0);\n" + END,
                              "different operands", 128),
    "different sums": ("wgmma_fence();\n@wgmma_m64n64k16_f16_kk(d, x, y, i != 9);\n" + END, "different operands",
                       128),
    "a part of other sums": ("wgmma_fence();\n" + MULTIPLY + "@wgmma_m64n32k16_f16_kk(d + 8, x, y, 0);\n" + END,
                             "registers that overlap those of another product", 128),
    "beyond shared memory": ("wgmma_fence();\n@wgmma_m64n64k16_f16_kk(d, x, y + 64, 0);\n" + END,
                             "leaves the block's shared memory", 128),
    "between rows": ("wgmma_fence();\n@wgmma_m64n64k16_f16_kk(d, x + 8, y, 0);\n" + END, "begin at multiples", 128),
    "over the end of rows": ("wgmma_fence();\n@wgmma_m64n64k16_f16_kk(d, x + 7, y, 0);\n" + END,
                             "a leaves its rows of 128 bytes", 128),
    "registers of a written": ("wgmma_fence();\n@wgmma_m64n64k16_f16_rk(d, w, y, 0);\nw[1] = 5;\n" + END,
                               "registers of a of wgmma_m64n64k16_f16_rk changed before", 128),
    "a written": ("wgmma_fence();\n@" + MULTIPLY + "s[2] = 1;\n" + END, ": a of wgmma_m64n64k16_f16_kk changed", 128),
    "b written": ("wgmma_fence();\n@" + MULTIPLY + "s[8192 + 146] = 1;\n" + END, ": b of wgmma", 128),
    "too far apart": ("wgmma_fence();\n@wgmma_m64n64k16_f16_kk(d, x | 1ull << 46, y, 0);\n" + END,
                      "a has a descriptor of distances too large", 128),
    "more registers from more": ("@registers_increase<104>();", "from 255 registers to 104, which are not more", 128),
    "fewer registers from fewer": ("registers_decrease<40>();\n@registers_decrease<48>();", "not fewer", 256),
    "registers of nobody": ("if (i < 128)@ registers_increase<256>();", "a deadlock", 256),
    "registers of some warps": ("if (i < 64)@ registers_decrease<40>();", "warp divergence", 128),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_warpgroups_are_reported(name: str) -> None:
    body, message, threads = FAULTS[name]
    assert message in fault(START + body, TOP + MORE, threads)


def test_results_are_poison_while_they_are_under_way() -> None:
    body = START + "wgmma_fence();\n" + MULTIPLY + "wgmma_commit();\nif (i < 32) c[i] = d[3];\n"
    body += "wgmma_wait<0>();\nif (i < 16) c[i] = d[3];"
    found = module(one_block(body, 128, top=TOP + MORE)).run(INPUT)["C"]
    assert (found[:16] == 0).all()
    assert np.isnan(found[16:]).all()


def test_registers_that_one_warpgroup_gives_another_takes() -> None:
    """A block of 384 threads starts with 168 registers each: 65536 in multiples of 8."""
    body = START + "if (i < 256) registers_increase<240>();\nelse registers_decrease<24>();\nif (i < 32) c[i] = i;"
    for seed in range(3):
        np.testing.assert_array_equal(module(one_block(body, 384, top=TOP), seed).run(INPUT)["C"], np.arange(32))
    with pytest.raises(WrongAnswerError, match="waits for registers: 128 threads of 384 have all but 8192"):
        module(one_block(body.replace("<24>", "<32>"), 384, top=TOP)).run(INPUT)
