"""What goes on beside a thread → whether it has ended by then: copies awaited, barriers, fences, products.

Order is that of the text: what a role of warps awaits stands below what another does before it arrives.
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

# What all threads of these must do together, or none of them.
_COLLECTIVES = {
    WarpgroupMma: "warpgroup", WgmmaFence: "warpgroup", WgmmaCommitGroup: "warpgroup", WgmmaWaitGroup: "warpgroup",
    SetMaxNReg: "warpgroup", WarpBarrier: "warp", StoreMatrix: "warp", ClusterBarrier: "block",
}  # fmt: skip


class _BarrierState(IntEnum):
    """How far a room of barriers is."""

    UNKNOWN = 0
    INITIALISED = 1
    FENCED = 2
    READY = 3  # all threads have met since


class _CopyState(Enum):
    """How far the first copies to a room are: slots that are filled again later are the schedule's own affair."""

    ISSUED = "begun"
    WAITED = "awaited"  # by the thread that began them; bulk copies: by a barrier, whoever waits there
    VISIBLE = "visible"  # to all threads of the block


@dataclass(slots=True)
class AsyncVerifier:
    """What the nodes so far have begun and not awaited."""

    copies: dict[str, _CopyState] = field(default_factory=dict)  # of what is copied asynchronously
    barriers: dict[str, _BarrierState] = field(default_factory=dict)
    unfenced: set[str] = field(default_factory=set)  # shared rooms that threads wrote, unseen by the async proxy
    uncommitted: set[str] = field(default_factory=set)  # registers of products that no group has yet
    committed: list[frozenset[str]] = field(default_factory=list)  # and those of groups that are not awaited
    uncommitted_stores: set[str] = field(default_factory=set)  # rooms of bulk stores that no group has yet
    pending_stores: set[str] = field(default_factory=set)
    registers_fenced: bool = False

    @property
    def in_flight(self) -> set[str]:
        """Registers that products may still write, or read."""
        return self.uncommitted.union(*self.committed)

    def visit(self, node: HopperNode) -> None:
        """Raises ScheduleError where it comes too early."""
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
        """All threads have met."""
        self._advance_barriers(_BarrierState.FENCED)
        self._advance_copies(_CopyState.WAITED, _CopyState.VISIBLE)

    def cp_async_issued(self, buffer: str) -> None:
        """A thread has begun copies to a shared room (cp.async)."""
        self.note_shared_write(buffer)
        self.copies.setdefault(buffer, _CopyState.ISSUED)

    def cp_async_waited(self) -> None:
        """And has awaited them."""
        self._advance_copies(_CopyState.ISSUED, _CopyState.WAITED)

    def check_read(self, tensor: str) -> None:
        """Raises ScheduleError where it is not there yet."""
        if tensor in self.in_flight:
            raise ScheduleError(f"{tensor} is read while products on it are under way", code="schedule-order")
        if self.copies.get(tensor, _CopyState.VISIBLE) is not _CopyState.VISIBLE:
            raise ScheduleError(
                f"{tensor} is read while copies to it are under way", code="schedule-order",
                hint="await the copies, then let all threads of the block meet",
            )  # fmt: skip

    def check_register_write(self, registers: str) -> None:
        """Raises ScheduleError where a product may still write or read them."""
        if registers in self.in_flight:
            raise ScheduleError(f"{registers} is written while products on it are under way", code="schedule-order")

    def note_shared_write(self, buffer: str) -> None:
        """A thread has written to a shared room."""
        self.unfenced.add(buffer)

    def check_all_waited(self) -> None:
        """Raises ScheduleError where something is never awaited."""
        for tensor in sorted(self.in_flight | self.uncommitted_stores | self.pending_stores):
            raise ScheduleError(f"what was begun on {tensor} is never awaited", code="schedule-order")

    def _barrier(self, node: HopperNode, barrier: str) -> None:
        if self.barriers.get(barrier, _BarrierState.UNKNOWN) is not _BarrierState.READY:
            raise ScheduleError(
                f"{barrier} is used before all threads know that it is initialised", code="schedule-order",
                hint="initialise it, fence it, then let all threads meet",
            )  # fmt: skip
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
            raise ScheduleError(f"a product uses {tensor} without a fence of registers", code="schedule-order")
        self.uncommitted.add(tensor)

    def _check_fenced(self, buffer: str) -> None:
        if buffer in self.unfenced:
            raise ScheduleError(
                f"{buffer} is used asynchronously, but what threads wrote there is not fenced", code="schedule-order"
            )


def convergence_of(node: HopperNode) -> str | None:
    """All threads of what must get to a node: a warp, a warpgroup, a block; None: any of them alone."""
    return _COLLECTIVES.get(type(node))
