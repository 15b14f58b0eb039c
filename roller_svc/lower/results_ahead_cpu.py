"""A register tile of a contraction → hints for the lines of memory that its results will take, while it is summed.

Results of a tile are rows of a few lines each, far apart, which no prefetcher foresees: where they go to memory, each
store waits there for its line. Asked for all at once, lines of a high tile fill up what a core has under way, and
panels of B wait behind them: so a row is asked for every few steps along k. On Zen 4 64 x 401408 x 64 takes, in tiles
of 14 x 32, 44 ms without hints, 40 with all of them first, 36 with these.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, ceil_div, div, equal, least, mod, mul, num, ref
from roller_svc.ir.expr import AxisRef, substitute
from roller_svc.ir.program import TensorExpr
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node, Prefetch
from roller_svc.lower.contraction import View
from roller_svc.lower.fused_axis import decoded
from roller_svc.lower.packing_cpu import K_ROW, LINE_BYTES

ROW, LINE = "m.row", ".line"
AT_ONCE = 8  # lines that nothing waits behind


@dataclass(frozen=True, slots=True)
class ResultsAhead:
    """Of the tile of `height` rows at (m.place, n.place), the members of n being known: hints for all lines that its
    rows take, as if its columns were neighbours."""

    view: View
    height: int
    width: int

    def first(self) -> tuple[Node, ...]:
        """What is asked for before anything is summed: few lines, for a test at each k would hold up small tiles."""
        return (Loop(ROW, self.height, LoopKind.SERIAL, self._row()),) if self._is_small else ()

    def beside(self, steps: int) -> tuple[Node, ...]:
        """For one of `steps` along k: a row, or some, every few of them."""
        if self._is_small or not self._lines():
            return ()
        every = 1 << max(1, steps // self.height).bit_length() - 1  # a power of two: the test must cost little
        at_once = ceil_div(self.height, steps)
        row = mul(div(ref(K_ROW), every), num(at_once))
        rows = tuple(Let(ROW, least(add(row, num(i)), num(self.height - 1)), self._row()) for i in range(at_once))
        return rows if every == 1 else (Branch(equal(mod(ref(K_ROW), every), num(0)), rows),)

    @property
    def _is_small(self) -> bool:
        lines = [node.extent for node in self._lines()]
        return 0 < self.height * sum(lines) <= AT_ONCE

    def _row(self) -> tuple[Node, ...]:
        return decoded(self.view.m, add(ref("m.place"), ref(ROW)), self._lines())

    def _lines(self) -> tuple[Loop, ...]:
        found = (_lines_of(self.view, statement, self.width) for statement in self.view.group.statements)
        return tuple(line for line in found if line is not None) if self.height else ()


def _lines_of(view: View, statement: TensorExpr, width: int) -> Loop | None:
    """Of rows that are neighbours in memory."""
    innermost = view.n.members[-1].name
    if statement.output in view.group.locals or statement.index[-1] != AxisRef(innermost) or not width:
        return None
    each = LINE_BYTES // statement.type.dtype.bytes
    place = {innermost: add(ref(innermost), mul(ref(LINE), num(each)))}
    index = tuple(substitute(i, place) for i in statement.index)
    hint = Prefetch(statement.output, index, 0, for_write=True)
    return Loop(LINE, ceil_div(width, each), LoopKind.UNROLL, (hint,))
