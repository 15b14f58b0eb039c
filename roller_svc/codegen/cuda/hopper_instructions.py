"""Wrappers of mbarriers, and of what sm_90 and sm_90a add: TMA and bulk copies, wgmma.

Syntax and operands are those of the PTX ISA: "mbarrier", "cp.async.bulk", "cp.async.bulk.tensor", "wgmma", "Asynchronous
Warpgroup Level Matrix Shared Memory Layout", "setmaxnreg", "stmatrix", "barrier.cluster", "mapa", "griddepcontrol". A `map`
is a parameter of the kernel, `const __grid_constant__ TensorMap`. Pointers to shared memory are generic. docs/emulator.md
describes each wrapper.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roller_svc.codegen.dialect import SHORT
from roller_svc.codegen.helpers import Helper
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType

_F = "__device__ __forceinline__"
_U64 = "unsigned long long"
_NEEDS = ("shared_address",)
_MAP_NEEDS = ("shared_address", "TensorMap")

_TENSOR_MAP = f"struct __align__(128) TensorMap {{\n  {_U64} opaque[16];\n}};"


def _plain(declared: str, template: str, operands: str = "") -> str:
    return f'{_F} {declared} {{\n  asm volatile("{template}" :: {operands}: "memory");\n}}'


def _counted(name: str, template: str) -> str:
    return f'template <int COUNT> {_F} void {name}() {{\n  asm volatile("{template}" :: "n"(COUNT) : "memory");\n}}'


_BARRIER = '"r"(shared_address(barrier))'
_BARRIERS = {
    "barrier_init": _plain(f"void barrier_init({_U64} *barrier, unsigned int arrivals)",
                           "mbarrier.init.shared::cta.b64 [%0], %1;", f'{_BARRIER}, "r"(arrivals) '),
    "barrier_arrive": _plain(f"void barrier_arrive({_U64} *barrier)",
                             "mbarrier.arrive.shared::cta.b64 _, [%0];", f"{_BARRIER} "),
    "barrier_expect": _plain(f"void barrier_expect({_U64} *barrier, unsigned int bytes)",
                             "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", f'{_BARRIER}, "r"(bytes) '),
    # .release.cluster would add a fence of all memory (MEMBAR.ALL.GPU), which releasing a buffer that was only read
    # does not need; CUTLASS arrives in the same way (cutlass/arch/barrier.h, ClusterBarrier::arrive)
    "barrier_arrive_remote": f"""{_F} void barrier_arrive_remote({_U64} *barrier, unsigned int rank) {{
  asm volatile("{{\\n.reg .b32 remote;\\n"
               "mapa.shared::cluster.u32 remote, %0, %1;\\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\\n}}"
               :: {_BARRIER}, "r"(rank) : "memory");
}}""",
    "barrier_wait": f"""{_F} void barrier_wait({_U64} *barrier, unsigned int parity) {{
  asm volatile("{{\\n.reg .pred done;\\n"
               "WAIT_%=:\\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
               "@!done bra WAIT_%=;\\n}}"
               :: {_BARRIER}, "r"(parity) : "memory");
}}""",
    # before sm_90, which has a wait that suspends the thread
    "barrier_test_wait": f"""{_F} void barrier_test_wait({_U64} *barrier, unsigned int parity) {{
  asm volatile("{{\\n.reg .pred done;\\n"
               "WAIT_%=:\\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
               "@!done bra WAIT_%=;\\n}}"
               :: {_BARRIER}, "r"(parity) : "memory");
}}""",
    # arrives once this thread's cp.async until here have completed; the barrier expects the arrival
    "arrive_after_copies": _plain(f"void arrive_after_copies({_U64} *barrier)",
                                  "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];", f"{_BARRIER} "),
    # the barrier's phase then lasts until the bytes are there, too
    "copy_bulk": f"""{_F} void copy_bulk(void *shared, const void *memory, unsigned int bytes, {_U64} *barrier) {{
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: {_BARRIER}, "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(shared)), "l"(memory), "r"(bytes), {_BARRIER} : "memory");
}}""",
}  # fmt: skip
_PLAIN = {
    "fence_barrier_init": _plain("void fence_barrier_init()", "fence.mbarrier_init.release.cluster;"),
    "fence_async": _plain("void fence_async()", "fence.proxy.async.shared::cta;"),
    "bulk_commit": _plain("void bulk_commit()", "cp.async.bulk.commit_group;"),
    # the launches behind programmatic edges may start once all blocks have been here
    "grid_launch_dependents": _plain("void grid_launch_dependents()", "griddepcontrol.launch_dependents;"),
    # until the launches before programmatic edges have ended, and what they wrote is there
    "grid_wait": _plain("void grid_wait()", "griddepcontrol.wait;"),
    "bulk_wait": _counted("bulk_wait", "cp.async.bulk.wait_group %0;"),
    "bulk_wait_read": _counted("bulk_wait_read", "cp.async.bulk.wait_group.read %0;"),
    "wgmma_fence": _plain("void wgmma_fence()", "wgmma.fence.sync.aligned;"),
    "wgmma_commit": _plain("void wgmma_commit()", "wgmma.commit_group.sync.aligned;"),
    "wgmma_wait": _counted("wgmma_wait", "wgmma.wait_group.sync.aligned %0;"),
    "registers_decrease": _counted("registers_decrease", "setmaxnreg.dec.sync.aligned.u32 %0;"),
    "registers_increase": _counted("registers_increase", "setmaxnreg.inc.sync.aligned.u32 %0;"),
    "named_barrier": _plain("void named_barrier(unsigned int id, unsigned int threads)", "barrier.sync %0, %1;",
                            '"r"(id), "r"(threads) '),
    # whether it is so in any of the threads that meet. `bar` is `barrier.aligned`, for warps that are known not to have
    # parted (PTX ISA, "barrier"): those of a role come here from loops and from what one of their lanes did alone
    "named_any": f"""{_F} int named_any(unsigned int id, unsigned int threads, int cond) {{
  int any;
  asm volatile("{{\\n.reg .pred own, found;\\nsetp.ne.b32 own, %1, 0;\\n"
               "barrier.red.or.pred found, %2, %3, own;\\nselp.b32 %0, 1, 0, found;\\n}}"
               : "=r"(any) : "r"(cond), "r"(id), "r"(threads) : "memory");
  return any;
}}""",
    # not .aligned: warps of a role come here from what one of their lanes did alone
    "cluster_sync": f"""{_F} void cluster_sync() {{
  asm volatile("barrier.cluster.arrive.release;\\n"
               "barrier.cluster.wait.acquire;" ::: "memory");
}}""",
    # whether this is the one lane that the warp elects, always the same; the compiler then knows that a single thread
    # issues TMA, and needs no loop over the active ones
    "elect_one": f"""{_F} int elect_one() {{
  int elected;
  asm volatile("{{\\n.reg .pred is_elected;\\nelect.sync _|is_elected, 0xffffffff;\\n"
               "selp.b32 %0, 1, 0, is_elected;\\n}}" : "=r"(elected) :: "memory");
  return elected;
}}""",
    "cluster_rank": f"""{_F} unsigned int cluster_rank() {{
  unsigned int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank) :: "memory");
  return rank;
}}""",
    # a generic address in the shared memory of the cluster's block of that rank
    "map_shared_rank": f"""template <class T> {_F} T *map_shared_rank(T *shared, unsigned int rank) {{
  T *remote;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank) : "memory");
  return remote;
}}""",
}  # fmt: skip

_SWIZZLES = {32: 3, 64: 2, 128: 1}  # bytes of a row → swizzling mode, bits 62-63 of a descriptor
# what a product reads of each operand in one instruction, in k: 32 bytes
_K = {"f16": 16, "bf16": 16, "tf32": 8, "s8": 32, "u8": 32, "e4m3": 32, "e5m2": 32}
_NAMES = {"i8": "s8"}  # PTX's own names for types
_WGMMA = re.compile(r"wgmma_m64n(\d+)k(\d+)_(f16|bf16|tf32|(?:s8|u8){2}|(?:e4m3|e5m2){2})_([kmr])([km])")


@dataclass(frozen=True, slots=True)
class WgmmaShape:
    """The shape of a wgmma wrapper: d[64, n] (+)= a[64, k] b[k, n], with PTX names of types."""

    n: int
    k: int
    a: str
    b: str
    a_layout: str  # k: K-major in shared memory, m: MN-major, r: registers, four words a thread
    b_layout: str

    @property
    def is_float(self) -> bool:
        return self.a[0] not in "su"

    @property
    def registers(self) -> int:
        """Return the registers of d in one thread."""
        return self.n // 2


def wgmma_wrapper(n: int, a: DType, b: DType, a_layout: str = "k", b_layout: str = "k") -> str:
    """Return the name of the wrapper that multiplies 64 x 32 bytes by 32 bytes x n; float32 operands are tf32."""
    a_name, b_name = (_NAMES.get(SHORT[d], SHORT[d]).replace("f32", "tf32") for d in (a, b))
    types = a_name if a_name in ("f16", "bf16", "tf32") and a_name == b_name else a_name + b_name
    name = f"wgmma_m64n{n}k{_K[a_name]}_{types}_{a_layout}{b_layout}"
    if wgmma_shape(name) is None:
        raise InvariantError(f"wgmma does not support {name}")
    return name


def wgmma_shape(name: str) -> WgmmaShape | None:
    """Parse the name of a wgmma wrapper; None for other names."""
    if not (found := _WGMMA.fullmatch(name)):
        return None
    n, k, types = int(found[1]), int(found[2]), found[3]
    pair = re.fullmatch(r"(s8|u8|e4m3|e5m2)(s8|u8|e4m3|e5m2)", types)
    a, b = (pair[1], pair[2]) if pair else (types, types)
    product = WgmmaShape(n, k, a, b, found[4], found[5])
    # PTX ISA, "wgmma.mma_async", tables of .shape: integers have no odd multiples of 8 from 40 on
    sizes = n % 8 == 0 and 8 <= n <= 256 and (product.is_float or n <= 32 or n % 16 == 0)
    is_mn_major = "m" in found[4] + found[5]
    return product if sizes and k == _K[a] and not (is_mn_major and k != 16) else None


def hopper_instruction(name: str) -> Helper | None:
    """Return the source of a wrapper, or None if the name is not one of a wrapper."""
    if name == "TensorMap":
        return Helper(_TENSOR_MAP)
    if text := _PLAIN.get(name):
        return Helper(text)
    if text := _BARRIERS.get(name):
        return Helper(text, _NEEDS)
    if name == "prefetch_map":
        return Helper(_plain("void prefetch_map(const TensorMap *map)", "prefetch.tensormap [%0];", '"l"(map) '), ("TensorMap",))
    if found := re.fullmatch(r"tma_load_([1-5])d(_multicast)?", name):
        return Helper(_load(name, int(found[1]), 0, multicast=found[2] is not None), _MAP_NEEDS)
    if found := re.fullmatch(r"tma_load_im2col_([3-5])d(_multicast)?", name):
        return Helper(_load(name, int(found[1]), int(found[1]) - 2, multicast=found[2] is not None), _MAP_NEEDS)
    if found := re.fullmatch(r"tma_store_([1-5])d", name):
        return Helper(_store(name, int(found[1])), _MAP_NEEDS)
    if found := re.fullmatch(r"matrix_descriptor_(32|64|128)", name):
        return Helper(_descriptor(name, _SWIZZLES[int(found[1])]), _NEEDS)
    if found := re.fullmatch(r"store_matrix_([124])(_transposed)?", name):
        return Helper(_store_matrix(name, int(found[1]), ".trans" if found[2] else ""), _NEEDS)
    if found := re.fullmatch(r"hold_results_(\d+)(_s32)?", name):
        return Helper(_hold(name, int(found[1]), is_float=found[2] is None))
    if product := wgmma_shape(name):
        return Helper(_wgmma(name, product))
    return None


_COORDINATES = {3: ("c", "w", "n"), 4: ("c", "w", "h", "n"), 5: ("c", "w", "h", "d", "n")}  # of im2col, innermost first
_OFFSETS = ("offset_w", "offset_h", "offset_d")


def _load(name: str, rank: int, offset_count: int, *, multicast: bool) -> str:
    coordinates = _COORDINATES[rank] if offset_count else tuple(f"c{i}" for i in range(rank))
    offsets = _OFFSETS[:offset_count]
    parameters = ["void *shared", "const TensorMap *map", f"{_U64} *barrier", *(f"int {c}" for c in coordinates)]
    parameters += [f"unsigned short {offset}" for offset in offsets]
    operands = ['"r"(shared_address(shared))', '"l"(map)', *(f'"r"({c})' for c in coordinates), _BARRIER]
    operands += [f'"h"({offset})' for offset in offsets]
    places = ", ".join(f"%{2 + i}" for i in range(rank))
    template = f"[%0], [%1, {{{places}}}], [%{2 + rank}]"
    if offsets:
        template += f", {{{', '.join(f'%{3 + rank + i}' for i in range(offset_count))}}}"
    if multicast:
        parameters.append("unsigned short mask")
        operands.append('"h"(mask)')
        template += f", %{3 + rank + offset_count}"
    mode = "im2col" if offsets else "tile"
    cluster = ".multicast::cluster" if multicast else ""
    return (
        f"{_F} void {name}({', '.join(parameters)}) {{\n"
        f'  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.{mode}'
        f'.mbarrier::complete_tx::bytes{cluster} "\n'
        f'               "{template};"\n'
        f'               :: {", ".join(operands)} : "memory");\n}}'
    )


def _store(name: str, rank: int) -> str:
    parameters = ["const TensorMap *map", "const void *shared", *(f"int c{i}" for i in range(rank))]
    operands = ['"l"(map)', *(f'"r"(c{i})' for i in range(rank)), '"r"(shared_address(shared))']
    places = ", ".join(f"%{1 + i}" for i in range(rank))
    return (
        f"{_F} void {name}({', '.join(parameters)}) {{\n"
        f'  asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group "\n'
        f'               "[%0, {{{places}}}], [%{1 + rank}];"\n'
        f'               :: {", ".join(operands)} : "memory");\n}}'
    )


def _descriptor(name: str, mode: int) -> str:
    """Return the helper that builds a matrix descriptor. Addresses and strides are in units of 16 bytes."""
    return (
        f"{_F} {_U64} {name}(const void *shared, unsigned int leading_bytes, unsigned int stride_bytes) {{\n"
        f"  return ({_U64})((shared_address(shared) & 0x3ffff) >> 4) | ({_U64})(leading_bytes >> 4) << 16\n"
        f"      | ({_U64})(stride_bytes >> 4) << 32 | ({_U64}){mode} << 62;\n}}"
    )


def _store_matrix(name: str, count: int, trans: str) -> str:
    words = ", ".join(f"%{1 + i}" for i in range(count))
    inputs = ", ".join(f'"r"(words[{i}])' for i in range(count))
    return (
        f"{_F} void {name}(void *row, const unsigned int *words) {{\n"
        f'  asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%0], {{{words}}};"\n'
        f'               :: "r"(shared_address(row)), {inputs} : "memory");\n}}'
    )


def _results(count: int, *, is_float: bool) -> str:
    letter = "f" if is_float else "r"
    return ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))


def _hold(name: str, count: int, *, is_float: bool) -> str:
    """Return an empty `asm` on the registers of d, which the compiler must not move their uses across."""
    kind = "float" if is_float else "int"
    return f'{_F} void {name}({kind} *d) {{\n  asm volatile("" : {_results(count, is_float=is_float)} :: "memory");\n}}'


def _wgmma(name: str, product: WgmmaShape) -> str:
    kind, short = ("float", "f32") if product.is_float else ("int", "s32")
    count = product.registers
    d_list = ", ".join(f"%{i}" for i in range(count))
    in_registers = product.a_layout == "r"
    a_words = 4 if in_registers else 1
    a_list = f"{{{', '.join(f'%{count + i}' for i in range(4))}}}" if in_registers else f"%{count}"
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if in_registers else '"l"(a)'
    a_parameter = "const unsigned int *a" if in_registers else f"{_U64} a"
    b, p = count + a_words, count + a_words + 1
    immediates = ", 1, 1" if product.is_float else ""
    if product.k == 16:  # only 16-bit types can be K-major or MN-major
        places = product.b_layout if in_registers else product.a_layout + product.b_layout
        immediates += "".join(f", {int(place == 'm')}" for place in places)
    return (
        f"{_F} void {name}({kind} *d, {a_parameter}, {_U64} b, int accumulate) {{\n"
        f'  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{p}, 0;\\n"\n'
        f'               "wgmma.mma_async.sync.aligned.m64n{product.n}k{product.k}.{short}.{product.a}.{product.b} "\n'
        f'               "{{{d_list}}}, {a_list}, %{b}, add{immediates};\\n}}"\n'
        f"               : {_results(count, is_float=product.is_float)}\n"
        f'               : {a_inputs}, "l"(b), "r"(accumulate) : "memory");\n}}'
    )
