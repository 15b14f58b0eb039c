"""Fragments of Q, K, V and P in a warp's registers, and their products, for `mma.sync` and MFMA.

`mma.sync` computes S = QK^T and O = PV. MFMA computes the transposes, so that a lane has its scores of one row, and they
are the next product's operand: K and V^T are operands A, Q^T and P^T operands B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.families.common.gpu.attention.score_rows import SCORES
from roller_svc.families.common.gpu.attention.tile import MmaAttentionTile
from roller_svc.families.common.gpu.attention.weights import SECOND_SCORES
from roller_svc.families.common.gpu.matrix.mainloop import ACC, A, B, a_fragment, b_fragments, lane_elements
from roller_svc.families.common.gpu.matrix.tile import SHARED_A, SHARED_B, StagedTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load
from roller_svc.ir.index import num, ref
from roller_svc.ir.schedule import Compute, LoadMatrix, Loop, LoopKind, Mma, Node, PackFragment, Storage
from roller_svc.schedule.nest_statements import register

VALUES = ".v_shared"
QUERIES, KEYS = (SHARED_A, ".second_q_shared"), (SHARED_B, ".second_k_shared")  # of each product
SCORES_OF = (SCORES, SECOND_SCORES)
PROBABILITIES = ".weights"  # a fragment of P
_F32 = DType.FLOAT32


@dataclass(frozen=True, slots=True)
class WarpFragments:
    """Fragments of one attention kernel; those of Q and P have an index for each fragment of rows."""

    tile: MmaAttentionTile

    @property
    def together(self) -> int:
        """Fragments of K, or of V, of one load."""
        return round(1 / self.tile.fragment.b_loads)

    @property
    def key_step_fragments(self) -> int:
        """Fragments of S along the keys that are one fragment of P."""
        return self.tile.kv_fragments // self.tile.kv_steps

    def allocate_q(self, steps: int, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate Q for `steps` instructions along head_dim around the nodes that use it."""
        return (replace(self._register(A, steps, self.tile.row_fragments), body=body),)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Registers of K or V, and of P."""
        return self._register(B, self.together), self._register(PROBABILITIES, self.tile.row_fragments)

    def load_q(self, product: int, row: Expr, step: Expr, index: tuple[Expr, ...]) -> tuple[Node, ...]:
        """Load a fragment of Q of a product at a row and an instruction along head_dim."""
        buffer = QUERIES[product]
        if self.tile.fragment.is_square:
            return lane_elements(self.tile.q, self.tile.fragment, (buffer, row, step), (A, index))
        return _from(buffer, a_fragment(self.tile.q, row, step, index))

    def load_k(self, product: int, key: Expr, step: Expr) -> tuple[Node, ...]:
        """Load fragments of K of a product from a key on, at an instruction along head_dim."""
        return self._load(KEYS[product], self.tile.k, key, step)

    def load_v(self, column: Expr, step: Expr) -> tuple[Node, ...]:
        """Load fragments of V from an output column on, at an instruction along the keys."""
        return self._load(SHARED_B if self.tile.has_values_in_keys else VALUES, self.tile.v, column, step)

    def pack_p(self, step: int) -> tuple[Node, ...]:
        """Round the scores of an instruction along the keys to a fragment of P."""
        dtype, first = self.tile.q.dtype, step * self.key_step_fragments
        row = ref("m.fragment")
        if self.tile.fragment.is_square:
            score = Load(SCORES, (row, num(first), ref(".word")), _F32)
            pack = Compute(PROBABILITIES, (row, ref(".word")), Cast(score, dtype, implicit=True))
            return (Loop(".word", self._elements, LoopKind.VECTOR, (pack,)),)
        words = range(self.tile.fragment.a_words)
        scores = [Load(SCORES, (row, num(first + w // 2), num(2 * (w % 2))), _F32) for w in words]
        return tuple(PackFragment(PROBABILITIES, (row, num(w)), scores[w], dtype) for w in words)

    def multiply_k(self, product: int, fragment: Expr, q: tuple[Expr, ...], which: int) -> Mma:
        """S of a row fragment += Q times the loaded fragment `which` of K."""
        return self._product(SCORES_OF[product], fragment, (A, q), which)

    def multiply_v(self, fragment: Expr, which: int) -> Mma:
        """O of a row fragment += P times the loaded fragment `which` of V."""
        return self._product(ACC, fragment, (PROBABILITIES, (ref("m.fragment"),)), which)

    def _product(self, sums: str, fragment: Expr, rows: tuple[str, tuple[Expr, ...]], which: int) -> Mma:
        left, right = (*rows, self.tile.q.dtype), (B, (num(which),), self.tile.k.dtype)
        if self.tile.fragment.is_transposed:
            left, right = right, left
        return Mma(sums, (ref("m.fragment"), fragment), *left, *right)

    def _load(self, buffer: str, staged: StagedTile, column: Expr, step: Expr) -> tuple[Node, ...]:
        if self.tile.fragment.is_square:
            return lane_elements(staged, self.tile.fragment, (buffer, column, step), (B, (num(0),)))
        return _from(buffer, b_fragments(staged, column, step, (num(0),), self.together))

    @property
    def _elements(self) -> int:
        """Elements of a lane's fragment of Q or P."""
        return self.tile.fragment.a_words * DType.UINT32.bytes // self.tile.q.dtype.bytes

    def _register(self, name: str, *shape: int) -> Storage:
        fragment = self.tile.fragment
        if fragment.is_square:
            return register(name, self.tile.q.dtype, *shape, self._elements)
        return register(name, DType.UINT32, *shape, fragment.b_words if name == B else fragment.a_words)


def _from(buffer: str, loads: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(replace(node, source=buffer) if isinstance(node, LoadMatrix) else node for node in loads)
