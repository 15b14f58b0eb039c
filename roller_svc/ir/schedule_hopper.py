"""Nodes of the schedule tree that sm_90 adds: barriers in shared memory, bulk copies (TMA), products of warpgroups.

Names and semantics are PTX ISA's: "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg", "stmatrix". A
warpgroup is four warps. What bulk copies and products do with shared memory happens in the *async proxy*: what threads
wrote there themselves, it sees behind a fence.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr

WARP_THREADS = 32  # of NVIDIA's devices (CUDA programming guide, "SIMT Architecture")

Index = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class MbarrierInit:
    """barrier[index] expects that many arrivals a phase, from phase 0 on. One thread does it, before all others."""

    barrier: str
    index: Index
    arrivals: int


@dataclass(frozen=True, slots=True)
class FenceMbarrierInit:
    """What this thread initialised is seen by other threads, blocks and bulk copies, once they have met."""


@dataclass(frozen=True, slots=True)
class MbarrierArrive:
    """One arrival at barrier[index]. `bytes`: that many more are to land before the phase ends. `rank`: the barrier is
    that of the cluster's block with this number."""

    barrier: str
    index: Index
    expect_tx_bytes: int | None = None
    rank: Expr | None = None


@dataclass(frozen=True, slots=True)
class MbarrierWait:
    """Until the phase of that parity has ended; the one before phase 0 has parity 1 and has ended."""

    barrier: str
    index: Index
    parity: Expr


@dataclass(frozen=True, slots=True)
class TmaLoad:
    """A box of memory into a shared room, from tensor[index] on; its bytes count on barrier[barrier_index] when there.

    `map`: symbol of the tree's tensor map. `coordinates` and, of im2col maps, `offsets`: the innermost dimension first.
    `mask`: the cluster's blocks that get it, one bit each, every one at the same place.
    """

    tensor: str
    index: Index
    tensor_map: str
    coordinates: Index
    offsets: Index
    barrier: str
    barrier_index: Index
    multicast_mask: Expr | None = None


@dataclass(frozen=True, slots=True)
class TmaStore:
    """A box of memory from a shared room, from tensor[index] on; what lies outside of the map's tensor is left out."""

    tensor_map: str
    coordinates: Index
    tensor: str
    index: Index


@dataclass(frozen=True, slots=True)
class TmaStoreCommitGroup:
    """The stores that this thread has begun since the last one become a group."""


@dataclass(frozen=True, slots=True)
class TmaStoreWaitGroup:
    """All of this thread's groups of stores but the `pending` youngest are done; `read`: have read their room, which
    may be written again."""

    pending: int
    read: bool


@dataclass(frozen=True, slots=True)
class FenceProxyAsync:
    """What this thread wrote to shared memory is seen by bulk stores and products that begin later."""


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """An operand of a product as it lies in a shared room, from tensor[index] on, a row of a whole swizzle pattern.

    `along_k`: K-major, else MN-major. `swizzle_bytes`: length of a row of the room, whose 16-byte chunks are permuted.
    `stride_bytes` lie between groups of eight rows, `leading_bytes` between such rows side by side (MN-major only).
    `advance_bytes`: the operand begins so far on, as if nothing were permuted.
    """

    tensor: str
    index: Index
    dtype: DType
    k_major: bool
    swizzle_bytes: int
    leading_bytes: int
    stride_bytes: int
    advance_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RegisterMatrix:
    """A left operand that the warpgroup holds: four words of a thread from tensor[index] on, those of 16 rows a warp in
    the layout of mma.sync m16n8k(32 bytes)."""

    tensor: str
    index: Index
    dtype: DType


@dataclass(frozen=True, slots=True)
class WarpgroupMma:
    """Begins: a warpgroup's 64 x `columns` results, tensor[index] being a thread's first, += a * b over 32 bytes of k;
    where `accumulate` is 0 they become a * b. Registers belong to it until it is awaited."""

    tensor: str
    index: Index
    columns: int
    a: SharedMatrix | RegisterMatrix
    b: SharedMatrix
    accumulate: Expr


@dataclass(frozen=True, slots=True)
class WgmmaFence:
    """Registers that products begun from here on use may have been touched before."""


@dataclass(frozen=True, slots=True)
class WgmmaCommitGroup:
    """The products begun since the last one become a group."""


@dataclass(frozen=True, slots=True)
class WgmmaWaitGroup:
    """All groups of the warpgroup's products but the `pending` youngest are done. `sums`: all on that tensor are, and
    what reads its registers stays behind this wait, which names no register that it waits for."""

    pending: int
    accumulator: str | None = None


@dataclass(frozen=True, slots=True)
class SetMaxNReg:
    """Threads of the warpgroup have that many registers from here on; `increase`: more than before, else fewer."""

    count: int
    increase: bool


@dataclass(frozen=True, slots=True)
class WarpBarrier:
    """All threads of a warp meet, and see what each other wrote."""


@dataclass(frozen=True, slots=True)
class ClusterBarrier:
    """All threads of a cluster meet, and see what each other wrote."""


@dataclass(frozen=True, slots=True)
class StoreMatrix:
    """`count` (1, 2, 4) matrices of 8 rows of 16 bytes from a warp's registers into a shared room (stmatrix).

    Lane 8i + r names row r of matrix i: tensor[at] is its first element, aligned to 16 bytes. Word lane % 4 of row
    lane / 4 of matrix i is the lane's i-th pair of elements from source[index] on, 16 bits each.
    """

    tensor: str
    index: Index
    count: int
    source: str
    source_index: Index


HopperNode = (
    MbarrierInit | FenceMbarrierInit | MbarrierArrive | MbarrierWait | TmaLoad | TmaStore | TmaStoreCommitGroup | TmaStoreWaitGroup
    | FenceProxyAsync | WarpgroupMma | WgmmaFence | WgmmaCommitGroup | WgmmaWaitGroup | SetMaxNReg | WarpBarrier
    | ClusterBarrier | StoreMatrix
)  # fmt: skip


def hopper_expressions(node: HopperNode) -> tuple[Expr, ...]:
    """What such a node computes."""
    match node:
        case MbarrierInit(index=index):
            return index
        case MbarrierArrive(index=index, rank=rank):
            return index if rank is None else (*index, rank)
        case MbarrierWait(index=index, parity=parity):
            return (*index, parity)
        case TmaLoad(multicast_mask=mask):
            parts = (*node.index, *node.coordinates, *node.offsets, *node.barrier_index)
            return parts if mask is None else (*parts, mask)
        case TmaStore(coordinates=coordinates, index=index):
            return (*coordinates, *index)
        case WarpgroupMma(index=index, a=a, b=b, accumulate=accumulate):
            return (*index, *a.index, *b.index, accumulate)
        case StoreMatrix(index=at, source_index=index):
            return (*at, *index)
        case _:
            return ()


def describe_hopper_node(node: HopperNode) -> str:
    """What is said of such a node to people."""
    match node:
        case MbarrierInit(barrier=barrier, arrivals=arrivals):
            return f"{barrier}[...] expects {arrivals} arrivals"
        case MbarrierArrive(barrier=barrier, expect_tx_bytes=size):
            return f"arrive at {barrier}[...]{'' if size is None else f', {size} bytes to come'}"
        case MbarrierWait(barrier=barrier):
            return f"await {barrier}[...]"
        case TmaLoad(tensor=tensor, tensor_map=name, barrier=barrier):
            return f"bulk load of {name} to {tensor}[...], on {barrier}[...]"
        case TmaStore(tensor=tensor, tensor_map=name):
            return f"bulk store of {tensor}[...] to {name}"
        case TmaStoreWaitGroup(pending=pending):
            return f"await bulk stores, {pending} pending"
        case WarpgroupMma(tensor=tensor, columns=columns, a=a, b=b):
            return f"{tensor}[...] += {a.tensor} * {b.tensor}, 64 x {columns}"
        case WgmmaWaitGroup(pending=pending):
            return f"await products, {pending} pending"
        case StoreMatrix(tensor=tensor, count=count, source=source):
            return f"{tensor}[...] = {count} matrices of {source}"
        case SetMaxNReg(count=count):
            return f"{count} registers a thread"
        case _:
            return type(node).__name__
