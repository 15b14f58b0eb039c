"""Nodes of the schedule tree that sm_90 adds: mbarriers, TMA copies, wgmma.

Names and semantics are those of the PTX ISA: "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg",
"stmatrix". A warpgroup is four warps. TMA copies and wgmma access shared memory through the async proxy, which sees
the writes of threads only after a proxy fence.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr

WARP_THREADS = 32  # of NVIDIA's devices (CUDA programming guide, "SIMT Architecture")

Index = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class MbarrierInit:
    """Initialize barrier[index] to expect `arrivals` arrivals a phase. One thread does it, before any other use."""

    barrier: str
    index: Index
    arrivals: int


@dataclass(frozen=True, slots=True)
class FenceMbarrierInit:
    """Make initialized mbarriers visible to other threads, blocks and TMA copies after the next synchronization."""


@dataclass(frozen=True, slots=True)
class MbarrierArrive:
    """Arrive at barrier[index]."""

    barrier: str
    index: Index
    expect_tx_bytes: int | None = None  # bytes of TMA copies that must complete before the phase ends
    rank: Expr | None = None  # block of the cluster whose barrier it is; None: this block


@dataclass(frozen=True, slots=True)
class MbarrierWait:
    """Wait until the phase of this parity has completed. The phase before phase 0 has parity 1 and has completed."""

    barrier: str
    index: Index
    parity: Expr


@dataclass(frozen=True, slots=True)
class TmaLoad:
    """Load a box from memory to shared memory at tensor[index]. barrier[barrier_index] counts its arriving bytes."""

    tensor: str
    index: Index
    tensor_map: str  # symbol of the tree's tensor map
    coordinates: Index  # innermost dimension first
    offsets: Index  # of im2col maps, innermost dimension first
    barrier: str
    barrier_index: Index
    multicast_mask: Expr | None = None  # blocks of the cluster that get the box, one bit each, at the same offset


@dataclass(frozen=True, slots=True)
class TmaStore:
    """Store a box from shared memory at tensor[index] to memory. Elements outside of the map's tensor are skipped."""

    tensor_map: str
    coordinates: Index
    tensor: str
    index: Index


@dataclass(frozen=True, slots=True)
class TmaStoreCommitGroup:
    """Commit the TMA stores that this thread has issued since the last commit as one group."""


@dataclass(frozen=True, slots=True)
class TmaStoreWaitGroup:
    """Wait for all of this thread's groups of TMA stores but the latest `pending` ones."""

    pending: int
    read: bool  # wait only until their source is read and may be overwritten


@dataclass(frozen=True, slots=True)
class FenceProxyAsync:
    """Make this thread's writes to shared memory visible to later TMA stores and wgmma (fence.proxy.async)."""


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A wgmma operand in shared memory at tensor[index], the first row of a swizzle pattern."""

    tensor: str
    index: Index
    dtype: DType
    k_major: bool  # else MN-major
    swizzle_bytes: int  # length of a row, within which 16-byte chunks are permuted
    leading_bytes: int  # between adjacent columns of such rows (MN-major only)
    stride_bytes: int  # between groups of eight rows
    advance_bytes: int = 0  # offset of the operand, in the unswizzled layout


@dataclass(frozen=True, slots=True)
class RegisterMatrix:
    """An A operand in registers: four words of a thread at tensor[index].

    A warp has 16 rows, in the layout of mma.sync m16n8k(32 bytes).
    """

    tensor: str
    index: Index
    dtype: DType


@dataclass(frozen=True, slots=True)
class WarpgroupMma:
    """Issue a warpgroup's 64 x `columns` accumulator += a * b over 32 bytes of k (wgmma.mma_async).

    tensor[index] is a thread's first element. Where `accumulate` is 0 the accumulator becomes a * b. Its registers must
    not be accessed until a WgmmaWaitGroup.
    """

    tensor: str
    index: Index
    columns: int
    a: SharedMatrix | RegisterMatrix
    b: SharedMatrix
    accumulate: Expr


@dataclass(frozen=True, slots=True)
class WgmmaFence:
    """Order earlier register accesses before later wgmma that use the registers (wgmma.fence)."""


@dataclass(frozen=True, slots=True)
class WgmmaCommitGroup:
    """Commit the wgmma issued since the last commit as one group."""


@dataclass(frozen=True, slots=True)
class WgmmaWaitGroup:
    """Wait for all groups of wgmma but the latest `pending` ones."""

    pending: int
    accumulator: str | None = None  # tensor whose wgmma are all complete: the compiler keeps its reads after this wait


@dataclass(frozen=True, slots=True)
class SetMaxNReg:
    """Set the registers of each thread of the warpgroup (setmaxnreg)."""

    count: int
    increase: bool  # more than before, else fewer


@dataclass(frozen=True, slots=True)
class WarpBarrier:
    """Synchronize the threads of a warp and make their writes visible to each other."""


@dataclass(frozen=True, slots=True)
class NamedBarrier:
    """Synchronize `threads` threads of a block, in whole warps (barrier.sync). Barrier 0 is that of all threads."""

    number: int
    threads: int


@dataclass(frozen=True, slots=True)
class ClusterBarrier:
    """Synchronize the threads of a cluster and make their writes visible to each other.

    `roles`: each role of warps has such a node of its own.
    """

    roles: bool = False


@dataclass(frozen=True, slots=True)
class StoreMatrix:
    """Store `count` (1, 2, 4) matrices of 8 rows of 16 bytes from a warp's registers to shared memory (stmatrix).

    Lane 8i + r addresses row r of matrix i: tensor[index] is its first element, aligned to 16 bytes. Word lane % 4 of
    row lane / 4 of matrix i is the lane's i-th pair of 16-bit elements from source[source_index] on.
    """

    tensor: str
    index: Index
    count: int
    source: str
    source_index: Index


HopperNode = (
    MbarrierInit
    | FenceMbarrierInit
    | MbarrierArrive
    | MbarrierWait
    | TmaLoad
    | TmaStore
    | TmaStoreCommitGroup
    | TmaStoreWaitGroup
    | FenceProxyAsync
    | WarpgroupMma
    | WgmmaFence
    | WgmmaCommitGroup
    | WgmmaWaitGroup
    | SetMaxNReg
    | WarpBarrier
    | NamedBarrier
    | ClusterBarrier
    | StoreMatrix
)


def hopper_expressions(node: HopperNode) -> tuple[Expr, ...]:
    """Return the expressions of a node."""
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
        case StoreMatrix(index=index, source_index=source_index):
            return (*index, *source_index)
        case _:
            return ()


def describe_hopper_node(node: HopperNode) -> str:
    """Return one line that describes a node."""
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
        case NamedBarrier(threads=threads):
            return f"await {threads} threads"
        case _:
            return type(node).__name__
