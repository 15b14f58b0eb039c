"""Random small contractions in random tiles, several in one text: each agrees with the reference interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plans
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

EPILOGUES = ("", "; Y[m, n] = C[m, n].call(`relu`)", "; Y[m, n] = C[m, n] * C[m, n] + bias[n]")
AVX2 = hardware.load("cpu-x86-avx2")


@pytest.mark.slow
@settings(max_examples=8)
@given(
    extents=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 600)),
    layouts=st.tuples(st.sampled_from(("m, k", "k, m")), st.sampled_from(("k, n", "n, k"))),
    then=st.sampled_from(EPILOGUES),
)
def test_candidates_of_one_text_agree(extents: tuple[int, int, int], layouts: tuple[str, str], then: str) -> None:
    size = dict(zip("mnk", extents, strict=True))
    shapes = {name: tuple(size[x] for x in at.split(", ")) for name, at in zip("AB", layouts, strict=True)}
    if "bias" in then:
        shapes["bias"] = (size["n"],)
    types = {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()}
    program = parse(f"C[m, n] +=! A[{layouts[0]}] * B[{layouts[1]}]{then}", types)
    groups, ranked, _ = rank_best_partition(program, AVX2, 4)
    assert groups == partition(program, AVX2)
    sources = emit_plans(best_plans(ranked, 4), program, groups, AVX2)
    arrays = random_inputs(program, seed=1)
    compiled, want = compile_source(sources[0]), evaluate(program, arrays)
    for source in sources:
        agreement = agrees(program, CpuModule(replace(compiled, source=source)).run(arrays), want)
        assert agreement.ok, f"{agreement}\n{source.text}"
