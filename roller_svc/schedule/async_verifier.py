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
_TOGETHER = {
    WarpgroupMma: "warpgroup", WgmmaFence: "warpgroup", WgmmaCommitGroup: "warpgroup", WgmmaWaitGroup: "warpgroup",
    SetMaxNReg: "warpgroup", WarpBarrier: "warp", StoreMatrix: "warp", ClusterBarrier: "block",
}  # fmt: skip


class _Barrier(IntEnum):
    """How far a room of barriers is."""

    UNKNOWN = 0
    INITIALISED = 1
    FENCED = 2
    READY = 3  # all threads have met since


class _Arrival(Enum):
    """How far the first copies to a room are: slots that are filled again later are the schedule's own affair."""

    BEGUN = "begun"
    AWAITED = "awaited"  # by the thread that began them; bulk copies: by a barrier, whoever waits there
    VISIBLE = "visible"  # to all threads of the block


@dataclass(slots=True)
class AsyncOrder:
    """What the nodes so far have begun and not awaited."""

    arrival: dict[str, _Arrival] = field(default_factory=dict)  # of what is copied asynchronously
    barriers: dict[str, _Barrier] = field(default_factory=dict)
    unfenced: set[str] = field(default_factory=set)  # shared rooms that threads wrote, unseen by the async proxy
    begun: set[str] = field(default_factory=set)  # registers of products that no group has yet
    committed: list[frozenset[str]] = field(default_factory=list)  # and those of groups that are not awaited
    stores: set[str] = field(default_factory=set)  # rooms of bulk stores that no group has yet
    stored: set[str] = field(default_factory=set)
    registers_fenced: bool = False

    @property
    def in_flight(self) -> set[str]:
        """Registers that products may still write, or read."""
        return self.begun.union(*self.committed)

    def node(self, node: HopperNode) -> None:
        """Raises ScheduleError where it comes too early."""
        match node:
            case MbarrierInit(barrier=barrier):
                self.barriers[barrier] = _Barrier.INITIALISED
            case FenceMbarrierInit():
                self._advance(_Barrier.INITIALISED)
            case ClusterBarrier():
                self.met()
            case MbarrierArrive(barrier=barrier) | MbarrierWait(barrier=barrier) | TmaLoad(barrier=barrier):
                self._barrier(node, barrier)
            case StoreMatrix(tensor=tensor):
                self.written(tensor)
            case FenceProxyAsync():
                self.unfenced.clear()
            case WgmmaFence():
                self.registers_fenced = True
            case WarpgroupMma(tensor=tensor, a=a, b=b):
                self._product(tensor, tuple(side.tensor for side in (a, b) if isinstance(side, SharedMatrix)))
                if isinstance(a, RegisterMatrix):
                    self.begun.add(a.tensor)
            case WgmmaCommitGroup():
                self.committed.append(frozenset(self.begun))
                self.begun.clear()
            case WgmmaWaitGroup(pending=pending):
                del self.committed[: max(0, len(self.committed) - pending)]
            case TmaStore(tensor=tensor):
                self._seen(tensor)
                self.stores.add(tensor)
            case TmaStoreCommitGroup():
                self.stored |= self.stores
                self.stores.clear()
            case TmaStoreWaitGroup(pending=0):
                self.stored.clear()
            case _:
                pass

    def met(self) -> None:
        """All threads have met."""
        self._advance(_Barrier.FENCED)
        self._arrive(_Arrival.AWAITED, _Arrival.VISIBLE)

    def copied(self, room: str) -> None:
        """A thread has begun copies to a shared room (cp.async)."""
        self.written(room)
        self.arrival.setdefault(room, _Arrival.BEGUN)

    def awaited(self) -> None:
        """And has awaited them."""
        self._arrive(_Arrival.BEGUN, _Arrival.AWAITED)

    def read(self, tensor: str) -> None:
        """Raises ScheduleError where it is not there yet."""
        if tensor in self.in_flight:
            raise ScheduleError(f"{tensor} is read while products on it are under way", code="schedule-order")
        if self.arrival.get(tensor, _Arrival.VISIBLE) is not _Arrival.VISIBLE:
            raise ScheduleError(
                f"{tensor} is read while copies to it are under way", code="schedule-order",
                hint="await the copies, then let all threads of the block meet",
            )  # fmt: skip

    def changed(self, registers: str) -> None:
        """Raises ScheduleError where a product may still write or read them."""
        if registers in self.in_flight:
            raise ScheduleError(f"{registers} is written while products on it are under way", code="schedule-order")

    def written(self, room: str) -> None:
        """A thread has written to a shared room."""
        self.unfenced.add(room)

    def settle(self) -> None:
        """Raises ScheduleError where something is never awaited."""
        for tensor in sorted(self.in_flight | self.stores | self.stored):
            raise ScheduleError(f"what was begun on {tensor} is never awaited", code="schedule-order")

    def _barrier(self, node: HopperNode, barrier: str) -> None:
        if self.barriers.get(barrier, _Barrier.UNKNOWN) is not _Barrier.READY:
            raise ScheduleError(
                f"{barrier} is used before all threads know that it is initialised", code="schedule-order",
                hint="initialise it, fence it, then let all threads meet",
            )  # fmt: skip
        if isinstance(node, TmaLoad):
            self.arrival.setdefault(node.tensor, _Arrival.AWAITED)
        elif isinstance(node, MbarrierWait):
            self._arrive(_Arrival.AWAITED, _Arrival.VISIBLE)

    def _arrive(self, before: _Arrival, after: _Arrival) -> None:
        for tensor, state in self.arrival.items():
            if state is before:
                self.arrival[tensor] = after

    def _advance(self, state: _Barrier) -> None:
        for barrier, known in self.barriers.items():
            if known is state:
                self.barriers[barrier] = _Barrier(state + 1)

    def _product(self, tensor: str, rooms: tuple[str, ...]) -> None:
        for room in rooms:
            self._seen(room)
        if not self.registers_fenced:
            raise ScheduleError(f"a product uses {tensor} without a fence of registers", code="schedule-order")
        self.begun.add(tensor)

    def _seen(self, room: str) -> None:
        if room in self.unfenced:
            raise ScheduleError(
                f"{room} is used asynchronously, but what threads wrote there is not fenced", code="schedule-order"
            )


def together(node: HopperNode) -> str | None:
    """All threads of what must get to a node: a warp, a warpgroup, a block; None: any of them alone."""
    return _TOGETHER.get(type(node))
