"""Sample the cases to time from a corpus: a fixed few of every class and operand type, by priority."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roller_bench.cases import performance_cases
from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.program import TensorProgram, operators
from roller_svc.runtime.binding import Array
from roller_svc.semantics.inputs import draw_patterns, random_inputs

Json = dict[str, Any]
# Larger cases take longer than several others.
MAX_BYTES = 2 << 30
# For cases with integer inputs, which may be drawn one by one: indices of a scatter are distinct.
MAX_BYTES_WITH_INTEGERS = 256 << 20
SEED = 0
# Period of the random values of larger inputs: longer than any tile, not a power of two, so that rows differ.
DISTINCT = (1 << 20) + 4099
_REFERENCE_SIZES = (8192, 4096)
REFERENCE = "reference"
# Classes of the corpus that are one contraction, possibly with a small epilogue.
PRODUCTS = frozenset({"gemm", "gemm_small_m", "gemv", "matmul", "batch_matmul", "contraction", "kb_matmul"})


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(q k) v with q [batch, heads, queries, features] and k, v [batch, key_heads, keys, features]."""

    heads: int
    key_heads: int
    queries: int
    keys: int
    causal: bool  # the last query attends to all keys


@dataclass(frozen=True, slots=True)
class TimedCase:
    """One program to time."""

    id: str
    cls: str
    expression: str
    inputs: Json
    outputs: tuple[str, ...] | None
    hints: Json
    flops: float | None  # as the corpus counts them: a multiply-add is two
    attention: Attention | None = None  # if the program is only attention

    def program(self) -> TensorProgram:
        return parse(self.expression, dict(tensor_types(self.inputs)), self.outputs)

    @property
    def dtype(self) -> str:
        return str(next(iter(self.inputs.values()))["dtype"])


def references() -> list[TimedCase]:
    """Return square products, for which the vendor's library is known to be close to peak."""
    return [
        TimedCase(
            f"square-{size}-{dtype}",
            REFERENCE,
            "C[m,n] +=! A[m,k] * B[k,n]",
            {name: {"dtype": dtype, "shape": [size, size]} for name in "AB"},
            None,
            {},
            2.0 * size**3,
        )
        for size in _REFERENCE_SIZES
        for dtype in ("bfloat16", "float16")
    ]


def finding_cases(path: Path) -> list[TimedCase]:
    """Return the cases of the findings in docs/gpu.md. Raises ArgumentError for another kind of file."""
    return [
        TimedCase(case.id, case.cls, case.expression, case.inputs, case.outputs, case.hints, _flops(case.program()))
        for case in performance_cases(path)
    ]


def _flops(program: TensorProgram) -> float:
    """Return the operators of all points, and one more for each point that a reduction or scatter combines."""
    return float(sum(s.points * (operators(s.body) + (s.combine is not None)) for s in program.statements))


def sampled_cases(path: Path, per_class: int) -> list[TimedCase]:
    """Return all attention cases, then `per_class` performance cases of every class and type of the first operand.

    Each class starts with the median by flops, then the largest and the smallest. Classes are interleaved, products
    before others, so that a truncated list still covers all classes.
    """
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
    """Return the bytes of all inputs and outputs."""
    types = [kind for _, kind in program.inputs] + [program.types[out.tensor] for out in program.outputs]
    return sum(kind.dtype.bytes * int(np.prod(kind.shape, dtype=np.int64)) for kind in types)


def timing_inputs(case: TimedCase, program: TensorProgram) -> dict[str, Array]:
    """Return random arrays, large ones with a period of DISTINCT values; checking regenerates them from the seed."""
    return dict(random_inputs(program, SEED, case.hints, DISTINCT))


def timing_patterns(case: TimedCase, program: TensorProgram) -> dict[str, Array]:
    """Return one period of each array; the device repeats it, so that little is drawn and copied."""
    return dict(draw_patterns(program, SEED, case.hints, DISTINCT))


def _cases(path: Path) -> Iterator[TimedCase]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    except (OSError, ValueError, KeyError) as problem:
        raise ArgumentError(f"{path}: not a case file: {problem}", code="unreadable-file") from problem
    rows_to_time = (row for row in rows if "performance" in row["use"] and row["bytes"] <= _max_bytes(row))
    for row in sorted(rows_to_time, key=lambda row: (row["flops"], row["id"])):
        yield TimedCase(
            row["id"],
            row["cls"],
            row["expr"],
            row["inputs"],
            tuple(row["out_meta"]),
            row.get("hints") or {},
            float(row["flops"]),
            _attention(row),
        )


def _attention(row: Json) -> Attention | None:
    """Return the sizes of an attention case, or None if its `attrs` lack them, as with compressed keys."""
    sizes = row.get("attrs") or {}
    if not row["cls"].startswith("attention") or not {"H", "KV", "S", "T"} <= sizes.keys():
        return None
    return Attention(sizes["H"], sizes["KV"], sizes["S"], sizes["T"], bool(sizes["causal"]))


def _max_bytes(row: Json) -> int:
    floats = all("float" in kind["dtype"] for kind in row["inputs"].values())
    return MAX_BYTES if floats else MAX_BYTES_WITH_INTEGERS


def _sample_order(count: int, per_class: int) -> list[int]:
    """Order 0 .. count - 1: the middle, the last, the first, then the middles between."""
    shares = [0.5, 1.0, 0.0, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875]
    return list(dict.fromkeys(round(share * (count - 1)) for share in shares))[:per_class]
