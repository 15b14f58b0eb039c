"""A corpus → the cases to time: a fixed few of every class and operand type, by priority."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.program import TensorProgram
from roller_svc.reference.inputs import drawn_patterns, random_inputs
from roller_svc.runtime.binding import Array

Json = dict[str, Any]
# Beyond it a case takes longer than several others.
MAX_BYTES = 2 << 30
# The same with integers among them, which may be drawn one by one: indices of a scatter are distinct.
MAX_BYTES_WITH_INTEGERS = 256 << 20
SEED = 0
# Random values that larger inputs repeat: more than any tile, and no power of two, so that rows differ.
DISTINCT = (1 << 20) + 4099
_REFERENCE_SIZES = (8192, 4096)
REFERENCE = "reference"
# Classes of the corpus that are one contraction, or one with a little after it.
PRODUCTS = frozenset({"gemm", "gemm_small_m", "gemv", "matmul", "batch_matmul", "contraction", "kb_matmul"})


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(q k) v of q [batch, heads, queries, features], k and v [batch, key_heads, keys, features]; `causal`: the
    last query sees every key."""

    heads: int
    key_heads: int
    queries: int
    keys: int
    causal: bool


@dataclass(frozen=True, slots=True)
class TimedCase:
    """One program to time. `flops`: as the corpus counts them, a multiply and an add being two. `attention`: what it
    is, where it is that and nothing else."""

    id: str
    cls: str
    expression: str
    inputs: Json
    outputs: tuple[str, ...] | None
    hints: Json
    flops: float | None
    attention: Attention | None = None

    def program(self) -> TensorProgram:
        return parse(self.expression, dict(tensor_types(self.inputs)), self.outputs)

    @property
    def dtype(self) -> str:
        return str(next(iter(self.inputs.values()))["dtype"])


def references() -> list[TimedCase]:
    """Square products for which the vendor's library is known to come close to what the device can do."""
    return [
        TimedCase(f"square-{size}-{dtype}", REFERENCE, "C[m,n] +=! A[m,k] * B[k,n]",
                  {name: {"dtype": dtype, "shape": [size, size]} for name in "AB"}, None, {}, 2.0 * size**3)
        for size in _REFERENCE_SIZES for dtype in ("bfloat16", "float16")
    ]  # fmt: skip


def sampled_cases(path: Path, per_class: int) -> list[TimedCase]:
    """All cases of attention; then `each` performance cases of every class and type of the first operand: the one in
    the middle by flops, the largest, the smallest, then those between; first the first of all classes, products before
    others, then the second of all."""
    attention: list[TimedCase] = []
    groups: dict[tuple[bool, str, str], list[TimedCase]] = {}
    for case in _cases(path):
        if case.attention is not None:
            attention.append(case)
        else:
            groups.setdefault((case.cls not in PRODUCTS, case.cls, case.dtype), []).append(case)
    order = [[group[i] for i in _sample_order(len(group), per_class)] for _, group in sorted(groups.items())]
    return attention + [picked[position] for position in range(per_class) for picked in order if position < len(picked)]


def data_bytes(program: TensorProgram) -> int:
    """Inputs and outputs, once each."""
    types = [kind for _, kind in program.inputs] + [program.types[out.tensor] for out in program.outputs]
    return sum(kind.dtype.bytes * int(np.prod(kind.shape, dtype=np.int64)) for kind in types)


def timing_inputs(case: TimedCase, program: TensorProgram) -> dict[str, Array]:
    """Random arrays, of large ones a million values again and again: the judge makes them anew from the same seed."""
    return dict(random_inputs(program, SEED, case.hints, DISTINCT))


def timing_patterns(case: TimedCase, program: TensorProgram) -> dict[str, Array]:
    """The same before they are repeated, which a device does itself: little has to be drawn and sent."""
    return dict(drawn_patterns(program, SEED, case.hints, DISTINCT))


def _cases(path: Path) -> Iterator[TimedCase]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    except (OSError, ValueError, KeyError) as problem:
        raise ArgumentError(f"{path}: not a case file: {problem}", code="unreadable-file") from problem
    rows_to_time = (row for row in rows if "performance" in row["use"] and row["bytes"] <= _max_bytes(row))
    for row in sorted(rows_to_time, key=lambda row: (row["flops"], row["id"])):
        yield TimedCase(row["id"], row["cls"], row["expr"], row["inputs"], tuple(row["out_meta"]),
                        row.get("hints") or {}, float(row["flops"]), _attention(row))  # fmt: skip


def _attention(row: Json) -> Attention | None:
    """Of a row that says which sizes it has; one with compressed keys has others."""
    sizes = row.get("attrs") or {}
    if not row["cls"].startswith("attention") or not {"H", "KV", "S", "T"} <= sizes.keys():
        return None
    return Attention(sizes["H"], sizes["KV"], sizes["S"], sizes["T"], bool(sizes["causal"]))


def _max_bytes(row: Json) -> int:
    floats = all("float" in kind["dtype"] for kind in row["inputs"].values())
    return MAX_BYTES if floats else MAX_BYTES_WITH_INTEGERS


def _sample_order(count: int, per_class: int) -> list[int]:
    """Of 0 .. count - 1: the middle, the last, the first, then halves of what lies between."""
    shares = [0.5, 1.0, 0.0, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875]
    return list(dict.fromkeys(round(share * (count - 1)) for share in shares))[:per_class]
