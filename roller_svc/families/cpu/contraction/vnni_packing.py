"""Operand of a contraction → panels of words of neighbours along k, packed for a CPU's dot-product instructions.

A word takes the place of an element in `packed[panel][k][lane]`, so that all but its making is as for single elements.
Places along k are counted in words; beyond its end a word has zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.families.common.cpu.dot import element
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.view import member_values
from roller_svc.families.cpu.contraction.packing import K_CHUNK, K_COUNT, K_FIRST, K_ROW, PANEL_ROW, Packing, Panels
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.index import add, div, lt, min_, mul, num, ref, sub
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage, Transpose
from roller_svc.schedule.guards import without_guards_inside

_CHUNKS, _TURNED = "k.chunks", ".turned"


@dataclass(frozen=True, slots=True)
class WordPacking(Packing):
    """`group` elements of a word, each an `element`; `flip`: bits of it that are packed the other way round. `kc` is in
    words, `dtype` a word's."""

    element: DType
    group: int
    flip: int = 0

    @property
    def along(self) -> Load | None:
        """Words lie nowhere in memory along a panel."""
        return None

    @property
    def _left(self) -> int:
        """Elements of the last word of k, if these are not all of its group."""
        return self.k.extent % self.group

    @property
    def _whole(self) -> int:
        """Words of all of k that have no zeros behind its end."""
        return self.k.extent // self.group

    def _rows(self, nodes: tuple[Node, ...]) -> Node:
        return Loop(K_ROW, self.kc, LoopKind.SERIAL, nodes, ref(K_COUNT))

    def _row(self, panels: Panels, at: dict[str, Expr], count: int) -> tuple[Node, ...]:
        def row(elements: int) -> tuple[Node, ...]:
            word = Compute(self.packed, (panels.room, ref(K_ROW), ref(LANE)), self._word(at, ref(K_ROW), elements))
            return (without_guards_inside(Loop(LANE, count, LoopKind.VECTOR, (word,))),)

        return (*self._whole_or_last(ref(K_ROW), row), *self._filled(panels, count))

    def _whole_or_last(self, row: Expr, nodes: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
        """The nodes of a word with so many elements: all of its group, or what is left at the end of k."""
        if not self._left:
            return nodes(self.group)
        if not self._whole:
            return nodes(self._left)
        return (Branch(lt(add(ref(K_FIRST), row), num(self._whole)), nodes(self.group), nodes(self._left)),)

    def _word(self, at: dict[str, Expr], row: Expr, elements: int) -> Expr:
        first = mul(add(ref(K_FIRST), row), num(self.group))
        places = [member_values(self.k, add(first, num(i))) for i in range(elements)]
        elements_there = tuple(element(substitute(self.factor, {**at, **k}), self.element) for k in places)
        return self._flipped(Op(OpKind.WORD, elements_there, self.dtype))

    # neighbours along k -----------------------------------------------------------------------------------------------
    def _across(self, panels: Panels, count: int) -> tuple[Node, ...]:
        """Blocks of `lanes` words by as many rows, if words can be moved as they lie; then those left, one by one."""
        filled = self._filled(panels, count)
        nodes = (Loop(K_ROW, self.kc, LoopKind.SERIAL, filled, ref(K_COUNT)),) if filled else ()
        if count == 1 or self.kc < self.lanes or not self._lies_in_words:
            return (self._single(panels, count, num(0), self.kc), *nodes)
        blocks = tuple(
            self._block(panels, first, min(self.lanes, count - first)) for first in range(0, count, self.lanes)
        )
        whole = min_(ref(K_COUNT), sub(num(self._whole), ref(K_FIRST))) if self._left else ref(K_COUNT)
        done = mul(ref(_CHUNKS), num(self.lanes))
        turned = Loop(K_CHUNK, self.kc // self.lanes, LoopKind.SERIAL, blocks, ref(_CHUNKS))
        return (Let(_CHUNKS, div(whole, self.lanes), (turned, self._single(panels, count, done, self.lanes))), *nodes)

    def _single(self, panels: Panels, count: int, done: Expr, most: int) -> Node:
        """At most so many words of each row, behind those that are done."""
        row = add(done, ref(K_ROW))

        def words(elements: int) -> tuple[Node, ...]:
            at = {panels.axis.members[0].name: add(panels.place, ref(PANEL_ROW))}
            word = Compute(self.packed, (panels.panel, row, ref(PANEL_ROW)), self._word(at, row, elements))
            return (Loop(PANEL_ROW, count, LoopKind.SERIAL, (word,)),)

        return Loop(K_ROW, most, LoopKind.SERIAL, self._whole_or_last(row, words), sub(ref(K_COUNT), done))

    @property
    def _lies_in_words(self) -> bool:
        """Whether each row's words are neighbours in memory, rows whole words apart."""
        return self.operand.plain and self.operand.panel_stride % self.group == 0

    def _block(self, panels: Panels, first: int, count: int) -> Node:
        """One square of words, or of fewer rows: turned in registers."""
        word = mul(ref(K_CHUNK), num(self.lanes))
        place = mul(add(ref(K_FIRST), word), num(self.group))
        at = {panels.axis.members[0].name: add(panels.place, num(first)), self.k.members[0].name: place}
        source = element(substitute(self.factor, at), self.element)
        if not isinstance(source, Load):
            raise InvariantError("words are turned where they lie, but the operand is no plain load")
        stride = self.operand.panel_stride // self.group
        if not self.flip:
            corner = (panels.panel, word, num(first))
            return Transpose(self.packed, corner, panels.size, source, stride, count, dtype=self.dtype)
        turned = Transpose(_TURNED, (num(0), num(0)), count, source, stride, count, dtype=self.dtype)
        index = (panels.panel, add(word, ref(K_ROW)), add(num(first), ref(LANE)))
        value = self._flipped(Load(_TURNED, (ref(K_ROW), ref(LANE)), self.dtype))
        lanes = Loop(LANE, count, LoopKind.VECTOR, (Compute(self.packed, index, value),))
        nodes = (turned, Loop(K_ROW, self.lanes, LoopKind.UNROLL, (lanes,)))
        return Storage(_TURNED, self.dtype, (self.lanes, count), Scope.STACK, nodes)

    def _flipped(self, word: Expr) -> Expr:
        return Op(OpKind.BITXOR, (word, Const(self.flip, self.dtype)), self.dtype) if self.flip else word

    def _gathered(self, panels: Panels, count: int) -> tuple[Node, ...] | None:
        """No words lie anywhere as a whole."""
        return None
