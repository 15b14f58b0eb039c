"""Contraction operand → panels of words of adjacent k, packed for a CPU's dot-product instructions (VNNI layout).

A word takes the place of an element in `packed[panel][k][lane]`. Positions along k are counted in words. Elements
beyond the end of k are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.fused_axis import member_values
from roller_svc.errors import InvariantError
from roller_svc.families.common.cpu.dot import cast_element
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.cpu.contraction.packing import K_CHUNK, K_COUNT, K_FIRST, K_ROW, PANEL_ROW, Packing, Panels
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.index import add, div, lt, min_, mul, num, ref, sub
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage, Transpose
from roller_svc.schedule.guards import unswitch_guards

_CHUNKS, _TRANSPOSED, _WIDENED = "k.chunks", ".transposed", ".widened"


@dataclass(frozen=True, slots=True)
class VnniPacking(Packing):
    """Packing of words of `group` elements of type `element`.

    `sign_mask` is xored with each word. `kc` counts words, and `dtype` is the type of a word.
    """

    element: DType
    group: int
    sign_mask: int = 0

    @property
    def _tail_elements(self) -> int:
        """Return the number of elements in an incomplete last word of k, 0 if it is complete."""
        return self.k.extent % self.group

    @property
    def _full_words(self) -> int:
        """Return the number of complete words of k."""
        return self.k.extent // self.group

    def _loop_over_k(self, nodes: tuple[Node, ...]) -> Node:
        return Loop(K_ROW, self.kc, LoopKind.SERIAL, nodes, ref(K_COUNT))

    def _pack_row(self, panels: Panels, at: dict[str, Expr], count: int) -> tuple[Node, ...]:
        def row(elements: int) -> tuple[Node, ...]:
            word = Compute(self.packed, (panels.buffer_index, ref(K_ROW), ref(LANE)), self._word(at, ref(K_ROW), elements))
            return (unswitch_guards(Loop(LANE, count, LoopKind.VECTOR, (word,))),)

        return (*self._full_or_tail(ref(K_ROW), row), *self._zero_fill(panels, count))

    def _full_or_tail(self, row: Expr, nodes: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
        """Return the nodes of a word with `group` elements, or with the tail's at the end of k."""
        if not self._tail_elements:
            return nodes(self.group)
        if not self._full_words:
            return nodes(self._tail_elements)
        return (Branch(lt(add(ref(K_FIRST), row), num(self._full_words)), nodes(self.group), nodes(self._tail_elements)),)

    def _word(self, at: dict[str, Expr], row: Expr, elements: int) -> Expr:
        first = mul(add(ref(K_FIRST), row), num(self.group))
        positions = [member_values(self.k, add(first, num(i))) for i in range(elements)]
        elements_there = tuple(cast_element(substitute(self.source, {**at, **k}), self.element) for k in positions)
        return self._xor_sign_bits(Op(OpKind.WORD, elements_there, self.dtype))

    # contiguous along k -----------------------------------------------------------------------------------------------
    def _pack_transposed(self, panels: Panels, count: int) -> tuple[Node, ...]:
        """Transpose blocks of `lanes` words by `lanes` rows if whole words can be loaded.

        Pack the remaining words one by one.
        """
        filled = self._zero_fill(panels, count)
        nodes = (Loop(K_ROW, self.kc, LoopKind.SERIAL, filled, ref(K_COUNT)),) if filled else ()
        if count == 1 or self.kc < self.lanes or not self._has_whole_words:
            return (self._pack_words(panels, count, num(0), self.kc), *nodes)
        blocks = tuple(self._block(panels, first, min(self.lanes, count - first)) for first in range(0, count, self.lanes))
        whole = min_(ref(K_COUNT), sub(num(self._full_words), ref(K_FIRST))) if self._tail_elements else ref(K_COUNT)
        done = mul(ref(_CHUNKS), num(self.lanes))
        blocks_loop = Loop(K_CHUNK, self.kc // self.lanes, LoopKind.SERIAL, blocks, ref(_CHUNKS))
        return (
            Let(_CHUNKS, div(whole, self.lanes), (blocks_loop, self._pack_words(panels, count, done, self.lanes))),
            *nodes,
        )

    def _pack_words(self, panels: Panels, count: int, done: Expr, max_words: int) -> Node:
        """Pack at most `max_words` words of each row, after the first `done`."""
        row = add(done, ref(K_ROW))

        def words(elements: int) -> tuple[Node, ...]:
            at = {panels.axis.members[0].name: add(panels.position, ref(PANEL_ROW))}
            word = Compute(self.packed, (panels.panel, row, ref(PANEL_ROW)), self._word(at, row, elements))
            return (Loop(PANEL_ROW, count, LoopKind.SERIAL, (word,)),)

        return Loop(K_ROW, max_words, LoopKind.SERIAL, self._full_or_tail(row, words), sub(ref(K_COUNT), done))

    @property
    def _has_whole_words(self) -> bool:
        """Return whether each row's words are contiguous, with a stride of whole words between rows.

        Rows of other elements are converted first.
        """
        return not self.operand.plain or self.operand.panel_stride % self.group == 0

    def _block(self, panels: Panels, first: int, count: int) -> Node:
        """Transpose one block of words, of `lanes` rows or fewer, in registers."""
        word = mul(ref(K_CHUNK), num(self.lanes))
        position = mul(add(ref(K_FIRST), word), num(self.group))
        at = {panels.axis.members[0].name: add(panels.position, num(first)), **member_values(self.k, position)}
        source = cast_element(substitute(self.source, at), self.element)
        if isinstance(source, Cast):
            return self._widened_block(panels, first, count)
        if not isinstance(source, Load):
            raise InvariantError(f"operand transposed by words must be a plain load, got {source}")
        stride = self.operand.panel_stride // self.group
        if not self.sign_mask:
            corner = (panels.panel, word, num(first))
            return Transpose(self.packed, corner, panels.size, source, stride, count, dtype=self.dtype)
        transpose = Transpose(_TRANSPOSED, (num(0), num(0)), count, source, stride, count, dtype=self.dtype)
        index = (panels.panel, add(word, ref(K_ROW)), add(num(first), ref(LANE)))
        value = self._xor_sign_bits(Load(_TRANSPOSED, (ref(K_ROW), ref(LANE)), self.dtype))
        lanes = Loop(LANE, count, LoopKind.VECTOR, (Compute(self.packed, index, value),))
        nodes = (transpose, Loop(K_ROW, self.lanes, LoopKind.UNROLL, (lanes,)))
        return Storage(_TRANSPOSED, self.dtype, (self.lanes, count), Scope.STACK, nodes)

    def _widened_block(self, panels: Panels, first: int, count: int) -> Node:
        """Convert a block of words to a storage, one row after the other, and transpose it from there."""
        word, wide = mul(ref(K_CHUNK), num(self.lanes)), self.lanes * self.group
        position = add(mul(add(ref(K_FIRST), word), num(self.group)), ref(LANE))
        at = {panels.axis.members[0].name: add(panels.position, add(num(first), ref(PANEL_ROW)))}
        element = cast_element(substitute(self.source, {**at, **member_values(self.k, position)}), self.element)
        row = Loop(LANE, wide, LoopKind.VECTOR, (Compute(_WIDENED, (ref(PANEL_ROW), ref(LANE)), element),))
        source = Load(_WIDENED, (num(0), num(0)), self.element)
        corner = (panels.panel, word, num(first))
        transpose = Transpose(self.packed, corner, panels.size, source, self.lanes, count, dtype=self.dtype)
        nodes = (Loop(PANEL_ROW, count, LoopKind.UNROLL, (row,)), transpose)
        return Storage(_WIDENED, self.element, (count, wide), Scope.STACK, nodes)

    def _xor_sign_bits(self, word: Expr) -> Expr:
        return Op(OpKind.BITXOR, (word, Const(self.sign_mask, self.dtype)), self.dtype) if self.sign_mask else word

    def _pack_gathered(self, panels: Panels, count: int) -> tuple[Node, ...] | None:
        """Return None: words are built from single elements."""
        return None
