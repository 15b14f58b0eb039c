"""Runs of adjacent elements of index expressions, against every point."""

from __future__ import annotations

import itertools

import pytest

from roller_svc.analysis.congruences import aligned_run, mean_segment, permuted_block
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import TensorType

POINTS = 128


@pytest.mark.parametrize(
    ("index", "run"),
    [
        ("(d + 64) % 128", 64),
        ("(d + 40) % 128", 8),
        ("(d + 3) % 128", 1),
        ("d % 32", 32),
        ("d // 16 * 16 + d % 16", 16),
        ("d // 8 % 2 * 64 + d // 16 * 8 + d % 8", 8),
        ("d // 2", 1),
        ("d % 2 * 64 + d // 2", 1),
        ("d + 1 - d % 2 * 2", 1),
        ("(127 - d) % 128", 1),
        ("d % 24", 8),
    ],
)
def test_aligned_run_has_adjacent_elements_from_multiples_on(index: str, run: int) -> None:
    program = parse(f"y[d] = x[{index}] where d in {POINTS}", {"x": TensorType(DType.FLOAT32, (POINTS,))})
    (load,) = loads_of(program.statements[0].body)
    assert aligned_run(load.index[0], "d", POINTS) == run
    elements = [eval(index, {"d": d}) for d in range(POINTS)]
    for start in range(0, POINTS, run):
        assert elements[start] % run == 0
        assert elements[start : start + run] == list(range(elements[start], elements[start] + run))


@pytest.mark.parametrize(
    ("index", "segment", "block"),
    [
        ("(d + 64) % 128", 128, 1),
        ("(d + 3) % 128", 128, 1),
        ("(d + 16) % 32", 32, 1),
        ("d // 32 * 32 + (d + 16) % 32", 16, 32),
        ("d // 2 * 2 + (d + 1) % 2", 1, 2),
        ("d // 8 * 8 + (7 - d) % 8", 4, 8),
        ("d // 8 * 16 + d % 8", 4, 1),
        ("d // 2", 1, 1),
        ("d * 2 % 128", 1, 1),
    ],
)
def test_segments_have_adjacent_elements_in_the_mean(index: str, segment: int, block: int) -> None:
    program = parse(f"y[d] = x[{index}] where d in {POINTS}", {"x": TensorType(DType.FLOAT32, (2 * POINTS,))})
    (load,) = loads_of(program.statements[0].body)
    assert (mean_segment(load.index[0], "d", POINTS), permuted_block(load.index[0], "d")) == (segment, block)
    elements = [eval(index, {"d": d}) for d in range(POINTS)]
    jumps = sum(abs(b - a) != 1 for a, b in itertools.pairwise(elements))
    assert segment == 1 or jumps <= POINTS // segment
    for start in range(0, POINTS, block):
        part = elements[start : start + block]
        assert block == 1 or sorted(part) == list(range(start, start + block))
