"""Hand-written kernels of sm_90a for the tests of the emulator: one block, or one cluster, that have tensor maps."""

from __future__ import annotations

from emulator_support import wrappers
from reference_kernels import tensor

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap

SM_90A = Arch("sm_", 90, "a")
NAMES = (
    "TensorMap", "barrier_init", "fence_barrier_init", "barrier_arrive", "barrier_expect", "barrier_wait",
    "barrier_arrive_remote", "named_barrier", "fence_async", "bulk_commit", "bulk_wait", "bulk_wait_read",
    *(f"tma_load_{d}d{m}" for d in range(1, 6) for m in ("", "_multicast")), "wgmma_fence",
    *(f"tma_load_im2col_{d}d" for d in (3, 4, 5)), *(f"tma_store_{d}d" for d in range(1, 6)), "prefetch_map",
    "elect_one",
    "cluster_sync", "cluster_rank", "map_shared_rank",
    "registers_decrease", "registers_increase", "store_matrix_4",
    "matrix_descriptor_32", "matrix_descriptor_64", "matrix_descriptor_128", "copy_async_16", "commit_copies",
    "await_copies", "wgmma_commit", "wgmma_wait",
)  # fmt: skip
TOP = wrappers(*NAMES)


def hopper(text: str, buffers: tuple[Buffer, ...], launch: LaunchSpec, more: tuple[str, ...] = ()) -> KernelSource:
    """A kernel with all wrappers of sm_90a above it, and `more`."""
    return KernelSource("kernel", Language.CUDA, SM_90A, f"{TOP}{wrappers(*more)}{text}", buffers, (launch,))


def tiled(symbol: str, buffer: Buffer, box: tuple[int, ...], swizzle: Swizzle = Swizzle.NONE) -> TensorMap:
    """The map of a whole buffer, which is row-major: its last dimension is the innermost."""
    extents = tuple(reversed(buffer.shape))
    strides: list[int] = []
    for extent in extents[:-1]:
        strides.append(extent * (strides[-1] if strides else buffer.dtype.bytes))
    return TensorMap(
        symbol, buffer.symbol, buffer.dtype, MapMode.TILED, extents, tuple(strides), box, (1,) * len(extents), swizzle=swizzle
    )


def vector(name: str, role: Role, count: int, dtype: DType = DType.FLOAT32) -> Buffer:
    return tensor(name, name.lower(), role, dtype, (count,))
