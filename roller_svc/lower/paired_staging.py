"""Two operands that are staged alike → nodes that bring a tile of each into one room, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, num
from roller_svc.ir.expr import Expr
from roller_svc.ir.operand import Operand
from roller_svc.ir.schedule import Node
from roller_svc.lower.staging import Staging
from roller_svc.perf.mma_tile import StagedOperand


@dataclass(frozen=True, slots=True)
class PairedStaging(Staging):
    """`operand` fills the first half of the room's rows (of each row, where those lie along n), `second` the other.
    `tile`: of one of them; `half`: how it lies."""

    second: Operand
    half: StagedOperand

    def registers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Room for what is held in registers, around the nodes that fetch and store it."""
        if not self.is_prefetched:
            return body
        for part in self._parts:
            body = part.registers(body)
        return body

    def copies(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """Begins to fill the slot, asynchronously."""
        return tuple(node for part in self._parts for node in part.copies(step, slot))

    def fetches(self, step: Expr) -> tuple[Node, ...]:
        """Loads into registers."""
        return tuple(node for part in self._parts for node in part.fetches(step))

    def stores(self, slot: Expr) -> tuple[Node, ...]:
        """What was fetched, into the slot."""
        return tuple(node for part in self._parts for node in part.stores(slot))

    def moves(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """From memory into the slot, one item after the other."""
        return tuple(node for part in self._parts for node in part.moves(step, slot))

    @property
    def _parts(self) -> tuple[_Half, _Half]:
        first, second = (
            _Half(self.room, operand, self.half, self.load, self.axis, self.k, self.tile, self.threads, begins)
            for operand, begins in ((self.operand, 0), (self.second, self.tile[0]))
        )
        return first, second


@dataclass(frozen=True, slots=True)
class _Half(Staging):
    """`begins`: where along m or n in the room its tile does."""

    begins: int

    @property
    def fetched(self) -> str:
        """Registers between memory and the room."""
        return f"{self.room}.fetched.{self.begins}"

    def _at(self, slot: Expr, lane: Expr) -> tuple[Expr, ...]:
        slot, row, element = Staging._at(self, slot, lane)
        if self.staged.along_k:
            return slot, add(row, num(self.begins)), element
        return slot, row, add(element, num(self.begins))
