"""What of a schedule tree is there to be read where: the rules of scope and order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import AxisRef, Expr, Load, walk
from roller_svc.ir.schedule import Loop, LoopKind, Scope, Storage
from roller_svc.lower.asynchronous import AsyncOrder
from roller_svc.lower.dependence import Dependence
from roller_svc.lower.disjoint import Value, Variables


@dataclass(slots=True)
class Scopes:
    """Follows the walk over a tree: storage nodes around, and what has been written so far."""

    storages: frozenset[str]  # all of the tree
    computed: frozenset[str]
    buffers: Collection[str] | None
    rooms: dict[str, tuple[int, Scope]] = field(default_factory=dict)  # tensor → loops around its storage node
    dependence: Dependence = field(default_factory=Dependence)
    written: set[str] = field(default_factory=set)
    pending: set[str] = field(default_factory=set)  # read in a branch before they are written, perhaps a round ago
    order: AsyncOrder = field(default_factory=AsyncOrder)

    @property
    def loops(self) -> list[Loop]:
        return self.dependence.loops

    @property
    def variables(self) -> Variables:
        return self.dependence.variables

    @contextmanager
    def bound(self, name: str, value: Value) -> Iterator[None]:
        """Within a loop over that variable, or a binding of it."""
        values = self.variables.values
        saved = values.get(name)
        values[name] = value
        yield
        if saved is None:
            del values[name]
        else:
            values[name] = saved

    @contextmanager
    def opened(self, storage: Storage) -> Iterator[None]:
        """Within a storage node: its room has no contents at first, and all that was read of it has been written."""
        name = storage.tensor
        saved = self.rooms.get(name)
        if alive := [t for t in storage.over if t in self.rooms]:
            raise ScheduleError(f"{name} takes the memory of {', '.join(alive)}, still in use", code="schedule-scope")
        self.rooms[name] = (len(self.loops), storage.scope)
        self.written.discard(name)
        self.variables.contents.pop(name, None)
        yield
        self.settle(self.pending & {name})
        if saved is None:
            del self.rooms[name]
        else:
            self.rooms[name] = saved

    def room(self, tensor: str) -> tuple[int, Scope | None]:
        return self.rooms.get(tensor, (0, None))

    def in_scope(self, tensor: str) -> None:
        if tensor in self.rooms:
            return
        if tensor in self.storages or (self.buffers is not None and tensor not in self.buffers):
            raise ScheduleError(f"{tensor} is used outside of its storage node", code="schedule-scope")

    def reads(self, expr: Expr) -> None:
        for node in walk(expr):
            if isinstance(node, AxisRef):
                if node.name not in self.variables.values:
                    raise ScheduleError(f"{node.name} is used outside of its loop", code="schedule-scope")
            elif isinstance(node, Load):
                self.read(node)

    def read(self, load: Load) -> None:
        tensor = load.tensor
        self.in_scope(tensor)
        if tensor not in self.computed and tensor not in self.rooms:
            return
        if tensor not in self.written:
            self._read_early(tensor)
        self.order.read(tensor)
        self.record(tensor, load.index, is_write=False)

    def _read_early(self, tensor: str) -> None:
        """In a branch, within a serial loop, an earlier round may have written it: known when the loop ends."""
        room = self.room(tensor)[0]
        in_branch = any(depth > room for depth, _ in self.dependence.branches)
        if not in_branch or all(loop.kind is not LoopKind.SERIAL for loop in self.loops[room:]):
            raise ScheduleError(f"{tensor} is read before it is computed", code="schedule-order")
        self.pending.add(tensor)

    def round_ended(self) -> None:
        """Of a serial loop: what it has written the next round may read."""
        self.pending -= {t for t in self.pending if t in self.written and self.room(t)[0] <= len(self.loops)}

    def settle(self, pending: Collection[str]) -> None:
        if pending:
            raise ScheduleError(f"{min(pending)} is read before it is computed", code="schedule-order")

    def record(self, tensor: str, index: tuple[Expr, ...], *, is_write: bool) -> None:
        self.dependence.record(tensor, index, self.room(tensor), is_write=is_write)
