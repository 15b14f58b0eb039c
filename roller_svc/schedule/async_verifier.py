"""Verifier of asynchronous operations: copies, mbarriers, proxy fences, wgmma.

It follows the order of the tree: a role of warps waits below the operations that another role does before it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from roller_svc.errors import ScheduleError
from roller_svc.ir.schedule_hopper import (
    ClusterBarrier,
    FenceMbarrierInit,
    FenceProxyAsync,
    HopperNode,
    MbarrierArrive,
    MbarrierInit,
    MbarrierWait,
    NamedBarrier,
    RegisterMatrix,
    SetMaxNReg,
    SharedMatrix,
    StoreMatrix,
    TmaLoad,
    TmaStore,
    TmaStoreCommitGroup,
    TmaStoreWaitGroup,
    WarpBarrier,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)

# Collective nodes and the threads that must all execute them.
_COLLECTIVES = {
    WarpgroupMma: "warpgroup", WgmmaFence: "warpgroup", WgmmaCommitGroup: "warpgroup", WgmmaWaitGroup: "warpgroup",
    SetMaxNReg: "warpgroup", WarpBarrier: "warp", StoreMatrix: "warp", ClusterBarrier: "block", NamedBarrier: "warp",
}  # fmt: skip


class _BarrierState(IntEnum):
    """State of a buffer of mbarriers."""

    UNKNOWN = 0
    INITIALISED = 1
    FENCED = 2
    READY = 3  # the block has synchronized since


class _CopyState(Enum):
    """State of the first copies to a buffer. Refills of pipeline stages are not tracked."""

    ISSUED = "begun"
    WAITED = "awaited"  # for, by the issuing thread; TMA copies: by an mbarrier, for any thread
    VISIBLE = "visible"  # to all threads of the block


@dataclass(slots=True)
class AsyncVerifier:
    """Follows the nodes of a tree and the asynchronous operations in flight. Its checks raise ScheduleError."""

    copies: dict[str, _CopyState] = field(default_factory=dict)  # by destination
    barriers: dict[str, _BarrierState] = field(default_factory=dict)
    unfenced: set[str] = field(default_factory=set)  # shared buffers that threads wrote without a proxy fence since
    uncommitted: set[str] = field(default_factory=set)  # registers of wgmma that are not in a group yet
    committed: list[frozenset[str]] = field(default_factory=list)  # registers of wgmma groups not waited for
    uncommitted_stores: set[str] = field(default_factory=set)  # sources of TMA stores that are not in a group yet
    pending_stores: set[str] = field(default_factory=set)
    registers_fenced: bool = False

    @property
    def in_flight(self) -> set[str]:
        """Return the registers that wgmma may still read or write."""
        return self.uncommitted.union(*self.committed)

    def visit(self, node: HopperNode) -> None:
        """Check a node and record what it starts."""
        match node:
            case MbarrierInit(barrier=barrier):
                self.barriers[barrier] = _BarrierState.INITIALISED
            case FenceMbarrierInit():
                self._advance_barriers(_BarrierState.INITIALISED)
            case ClusterBarrier():
                self.block_barrier()
            case MbarrierArrive(barrier=barrier) | MbarrierWait(barrier=barrier) | TmaLoad(barrier=barrier):
                self._barrier(node, barrier)
            case StoreMatrix(tensor=tensor):
                self.note_shared_write(tensor)
            case FenceProxyAsync():
                self.unfenced.clear()
            case WgmmaFence():
                self.registers_fenced = True
            case WarpgroupMma(tensor=tensor, a=a, b=b):
                self._wgmma(tensor, tuple(side.tensor for side in (a, b) if isinstance(side, SharedMatrix)))
                if isinstance(a, RegisterMatrix):
                    self.uncommitted.add(a.tensor)
            case WgmmaCommitGroup():
                self.committed.append(frozenset(self.uncommitted))
                self.uncommitted.clear()
            case WgmmaWaitGroup(pending=pending):
                del self.committed[: max(0, len(self.committed) - pending)]
            case TmaStore(tensor=tensor):
                self._check_fenced(tensor)
                self.uncommitted_stores.add(tensor)
            case TmaStoreCommitGroup():
                self.pending_stores |= self.uncommitted_stores
                self.uncommitted_stores.clear()
            case TmaStoreWaitGroup(pending=0):
                self.pending_stores.clear()
            case _:
                pass

    def block_barrier(self) -> None:
        """Record a synchronization of the block."""
        self._advance_barriers(_BarrierState.FENCED)
        self._advance_copies(_CopyState.WAITED, _CopyState.VISIBLE)

    def cp_async_issued(self, buffer: str) -> None:
        """Record a cp.async to a shared buffer."""
        self.note_shared_write(buffer)
        self.copies.setdefault(buffer, _CopyState.ISSUED)

    def cp_async_waited(self) -> None:
        """Record a wait for cp.async."""
        self._advance_copies(_CopyState.ISSUED, _CopyState.WAITED)

    def check_read(self, tensor: str) -> None:
        """Check that a tensor's data is complete and visible."""
        if tensor in self.in_flight:
            raise ScheduleError(f"{tensor} is read before wgmma.wait_group", code="schedule-order")
        if self.copies.get(tensor, _CopyState.VISIBLE) is not _CopyState.VISIBLE:
            raise ScheduleError(
                f"{tensor} is read while asynchronous copies to it are in flight",
                code="schedule-order",
                hint="wait for the copies, then synchronize the block",
            )

    def check_register_write(self, registers: str) -> None:
        """Check that no wgmma may still read or write the registers."""
        if registers in self.in_flight:
            raise ScheduleError(f"{registers} is written before wgmma.wait_group", code="schedule-order")

    def note_shared_write(self, buffer: str) -> None:
        """Record a thread's write to a shared buffer."""
        self.unfenced.add(buffer)

    def check_all_waited(self) -> None:
        """Check that all asynchronous operations have been waited for."""
        for tensor in sorted(self.in_flight | self.uncommitted_stores | self.pending_stores):
            raise ScheduleError(f"asynchronous operation on {tensor} is never waited for", code="schedule-order")

    def _barrier(self, node: HopperNode, barrier: str) -> None:
        if self.barriers.get(barrier, _BarrierState.UNKNOWN) is not _BarrierState.READY:
            raise ScheduleError(
                f"mbarrier {barrier} is used before fence.mbarrier_init and a block barrier",
                code="schedule-order",
                hint="initialise it, fence it, then synchronize the block",
            )
        if isinstance(node, TmaLoad):
            self.copies.setdefault(node.tensor, _CopyState.WAITED)
        elif isinstance(node, MbarrierWait):
            self._advance_copies(_CopyState.WAITED, _CopyState.VISIBLE)

    def _advance_copies(self, before: _CopyState, after: _CopyState) -> None:
        for tensor, state in self.copies.items():
            if state is before:
                self.copies[tensor] = after

    def _advance_barriers(self, state: _BarrierState) -> None:
        for barrier, known in self.barriers.items():
            if known is state:
                self.barriers[barrier] = _BarrierState(state + 1)

    def _wgmma(self, tensor: str, buffers: tuple[str, ...]) -> None:
        for buffer in buffers:
            self._check_fenced(buffer)
        if not self.registers_fenced:
            raise ScheduleError(f"wgmma uses {tensor} without wgmma.fence", code="schedule-order")
        self.uncommitted.add(tensor)

    def _check_fenced(self, buffer: str) -> None:
        if buffer in self.unfenced:
            raise ScheduleError(
                f"{buffer} is read by the async proxy without fence.proxy.async after writes of threads",
                code="schedule-order",
            )


def convergence_of(node: HopperNode) -> str | None:
    """Return the threads that must all execute a node: warp, warpgroup, block; None: a single thread may."""
    if isinstance(node, ClusterBarrier) and node.roles:
        return "warp"
    return _COLLECTIVES.get(type(node))
