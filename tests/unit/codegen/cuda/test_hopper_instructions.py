"""Wrappers of sm_90a's instructions: they compile, and become the machine instructions that their names say."""

from __future__ import annotations

import re

import pytest
from emulator_support import wrappers
from reference_kernels import tensor
from sampling import every

from roller_svc import toolchain
from roller_svc.codegen.cuda.hopper_instructions import hopper_instruction, wgmma_shape, wgmma_wrapper
from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource, Language, LaunchSpec, Role
from roller_svc.toolchain.binaries import sass

SM_90A = Arch("sm_", 90, "a")
F16, BF16, F32 = DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32
E4M3, E5M2, I8, U8 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8, DType.UINT8
SETTING = """  __shared__ __align__(1024) unsigned char s[4096];
  __shared__ unsigned long long barrier[1];
  const int i = (int)threadIdx.x;
"""


def machine_code(names: tuple[str, ...], body: str, attributes: str = "__launch_bounds__(384, 1)") -> str:
    """The SASS of a kernel with that body; it has a tensor map, a barrier and 4096 bytes of shared memory."""
    top = wrappers("TensorMap", *names)
    text = f"""{top}
extern "C" __global__ void {attributes} one(const __grid_constant__ TensorMap map, float *c) {{
{SETTING}{body}
}}
"""
    buffers = (tensor("C", "c", Role.OUTPUT, shape=(4096,)),)
    launch = LaunchSpec("one", ("c",), (1, 1, 1), (384, 1, 1))
    compiled = toolchain.compile_source(KernelSource("one", Language.CUDA, SM_90A, text, buffers, (launch,)))
    assert "C75" not in compiled.log, compiled.log
    return sass.sass_text(compiled.binary)


def coordinates(count: int) -> str:
    return ", ".join(str(8 * k) for k in range(count))


LOADS = {
    **{f"tma_load_{d}d{m}": (d, 0, m) for d in range(1, 6) for m in ("", "_multicast")},
    **{f"tma_load_im2col_{d}d{m}": (d, d - 2, m) for d in (3, 4, 5) for m in ("", "_multicast")},
}


@pytest.mark.parametrize("name", every(3, LOADS))
def test_bulk_loads(name: str) -> None:
    rank, offsets, multicast = LOADS[name]
    more = "".join(f", (unsigned short){1 + k}" for k in range(offsets)) + (", (unsigned short)3" if multicast else "")
    code = machine_code((name,), f"  if (i == 0) {name}(s, &map, barrier, {coordinates(rank)}{more});")
    (found,) = re.findall(r"\bUTMALDG\S*", code)
    assert f".{rank}D" in found
    assert (".IM2COL" in found) == bool(offsets)
    assert (".MULTICAST" in found) == bool(multicast)


@pytest.mark.parametrize(("condition", "loops"), [("i == 0", 1), ("elect_one()", 0)])
def test_an_elected_lane_issues_tma_without_a_loop_over_lanes(condition: str, loops: int) -> None:
    code = machine_code(("tma_load_2d", "elect_one"), f"  if ({condition}) tma_load_2d(s, &map, barrier, 0, 8);")
    assert code.count("BRA.U.ANY") == loops


@pytest.mark.parametrize("rank", range(1, 6))
def test_bulk_stores(rank: int) -> None:
    names = (f"tma_store_{rank}d", "fence_async", "bulk_commit", "bulk_wait", "bulk_wait_read")
    body = f"""  s[i] = 1;
  fence_async();
  __syncthreads();
  if (i == 0) {{
    {names[0]}(&map, s, {coordinates(rank)});
    bulk_commit();
    bulk_wait_read<1>();
    bulk_wait<0>();
  }}"""
    code = machine_code(names, body)
    (found,) = re.findall(r"\bUTMASTG\S*", code)
    assert f".{rank}D" in found
    order = ["FENCE.VIEW.ASYNC", "UTMASTG", "UTMACMDFLUSH", "DEPBAR"]
    assert [code.index(one) for one in order] == sorted(code.index(one) for one in order)


def test_barriers() -> None:
    names = ("barrier_init", "fence_barrier_init", "barrier_arrive", "barrier_expect", "barrier_wait",
             "barrier_arrive_remote", "cluster_sync", "cluster_rank", "map_shared_rank", "named_barrier",
             "prefetch_map")  # fmt: skip
    body = """  if (i == 0) {
    prefetch_map(&map);
    barrier_init(barrier, 3);
    fence_barrier_init();
    barrier_expect(barrier, 128);
    barrier_arrive(barrier);
    barrier_arrive_remote(barrier, 1);
  }
  cluster_sync();
  barrier_wait(barrier, 0);
  named_barrier(3, 384);
  c[i] = (float)cluster_rank() + (float)map_shared_rank(s, 1)[i];"""
    code = machine_code(names, body, "__cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)")
    for expected in (
        "SYNCS.EXCH",
        "SYNCS.ARRIVE.TRANS64",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "UCGABAR_ARV",
        "UCGABAR_WAIT",
        "UTMACCTL.PF",
        "BAR.SYNC",
    ):
        assert expected in code, expected


@pytest.mark.parametrize(("name", "expected"), [("named_barrier", "barrier.sync"), ("named_any", "barrier.red.or.pred")])
def test_lanes_of_a_warp_may_have_parted_before_they_meet(name: str, expected: str) -> None:
    """No `bar`, which is `barrier.aligned` (PTX ISA): ptxas 13.0 makes the same of both, which it need not."""
    found = hopper_instruction(name)
    assert found is not None
    assert re.findall(r"\bbar(?:rier)?\.[\w.]+", found.text) == [expected]


def test_registers_are_moved_between_warpgroups() -> None:
    body = """  if (i >= 256) {
    registers_decrease<40>();
    c[i] = 1.0f;
  } else {
    registers_increase<232>();
    c[i] = 2.0f;
  }"""
    code = machine_code(("registers_decrease", "registers_increase"), body)
    assert "USETMAXREG.DEALLOC" in code
    assert "USETMAXREG.TRY_ALLOC" in code


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("suffix", ["", "_transposed"])
def test_matrix_stores(count: int, suffix: str) -> None:
    name = f"store_matrix_{count}{suffix}"
    body = f"  const unsigned int w[4] = {{1u + i, 2, 3, 4}};\n  {name}(&s[i % 32 * 16], w);\n  c[i] = s[i];"
    (found,) = re.findall(r"\bSTSM\S*", machine_code((name,), body))
    assert re.findall(r"\.([24])\b", found) == ([str(count)] if count > 1 else [])
    assert (".MT88" in found) == bool(suffix)


WGMMA = (
    [wgmma_wrapper(n, F16, F16, a, b) for n in (8, 120, 256) for a in "kmr" for b in "km"]
    + [wgmma_wrapper(64, BF16, BF16, a, b) for a in "kmr" for b in "km"]
    + [wgmma_wrapper(n, F32, F32, a) for n in (24, 128, 256) for a in "kr"]
    + [wgmma_wrapper(128, a, b, place) for a in (E4M3, E5M2) for b in (E4M3, E5M2) for place in "kr"]
    + [wgmma_wrapper(n, a, b, place) for n in (24, 128) for a in (I8, U8) for b in (I8, U8) for place in "kr"]
)
OPCODES = {"f16": "HGMMA", "bf16": "HGMMA", "tf32": "HGMMA", "e4m3": "QGMMA", "e5m2": "QGMMA", "s8": "IGMMA",
           "u8": "IGMMA"}  # fmt: skip


@pytest.mark.parametrize("name", every(7, WGMMA))
def test_products_of_warpgroups(name: str) -> None:
    product = wgmma_shape(name)
    assert product is not None
    kind, suffix = ("float", "") if product.is_float else ("int", "_s32")
    hold = f"hold_results_{product.registers}{suffix}"
    names = (name, "wgmma_fence", "wgmma_commit", "wgmma_wait", "fence_async", hold, "matrix_descriptor_128")
    a = "words" if product.a_layout == "r" else "matrix_descriptor_128(s, 16, 1024)"
    body = f"""  {kind} d[{product.registers}];
  unsigned int words[4] = {{1u + i, 2, 3, 4}};
  s[i] = (unsigned char)i;
  fence_async();
  __syncthreads();
  wgmma_fence();
  {name}(d, {a}, matrix_descriptor_128(s + 2048, 16, 1024), 0);
  wgmma_commit();
  wgmma_wait<0>();
  {hold}(d);
  for (int r = 0; r < {product.registers}; r++) c[r * 384 + i] = (float)d[r];"""
    code = machine_code(names, body)
    (found,) = re.findall(r"\b[HIQ]GMMA\S*", code)
    assert found.startswith(OPCODES[product.a])
    assert f"64x{product.n}x{product.k}" in found
    for word, type_ in (("BF16", "bf16"), ("TF32", "tf32")):
        assert (word in found) == (product.a == type_)
    operands = re.search(rf"{re.escape(found)} (.*?);", code)
    assert operands is not None
    turned = operands[1].count(".tnspA"), operands[1].count(".tnspB")
    assert turned == (product.a_layout == "m", product.b_layout == "m")
    if not (product.is_float or product.k == 16):
        assert f".{product.a.upper()}.{product.b.upper()}" in found


@pytest.mark.parametrize(
    ("n", "a", "b", "a_place", "b_place"),
    [
        (264, F16, F16, "k", "k"),
        (4, F16, F16, "k", "k"),
        (12, BF16, BF16, "k", "k"),
        (40, I8, I8, "k", "k"),
        (64, F32, F32, "m", "k"),
        (64, I8, U8, "k", "m"),
        (64, E4M3, E5M2, "k", "m"),
        (64, F16, BF16, "k", "k"),
        (64, F16, F16, "k", "r"),
    ],
)
def test_products_that_no_instruction_makes(n: int, a: DType, b: DType, a_place: str, b_place: str) -> None:
    with pytest.raises(InvariantError):
        wgmma_wrapper(n, a, b, a_place, b_place)


def test_descriptors_have_their_fields_where_the_manual_has_them() -> None:
    """PTX ISA, "Matrix Descriptor Format": the swizzling mode in bits 62 and 63; 16 bytes are the unit."""
    for swizzle, mode in ((32, 3), (64, 2), (128, 1)):
        found = instruction(f"matrix_descriptor_{swizzle}")
        assert found is not None
        shifts = dict(re.findall(r"\(unsigned long long\)(\(?\w+)[^|;]*?<< (\d+)", found.text))
        assert shifts == {"(leading_bytes": "16", "(stride_bytes": "32", str(mode): "62"}
