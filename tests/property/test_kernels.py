"""Random shapes of every class of program: the compiled kernel agrees with the reference interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roller_svc
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

Signature = dict[str, tuple[str, tuple[int, ...]]]
Case = tuple[str, Signature]

small = st.integers(1, 9)
odd = st.integers(1, 70)
floats = st.sampled_from(["float32", "float16", "bfloat16", "float64"])


@st.composite
def contractions(draw: st.DrawFn) -> Case:
    b, m, n, k = draw(small), draw(odd), draw(odd), draw(odd)
    dtype = draw(floats)
    left = draw(st.sampled_from([("b, m, k", (b, m, k)), ("m, k, b", (m, k, b)), ("k, m", (k, m)), ("m, k", (m, k))]))
    right = draw(st.sampled_from([("b, k, n", (b, k, n)), ("n, k, b", (n, k, b)), ("b, n, k", (b, n, k))]))
    out = draw(st.sampled_from(["b, m, n", "n, b, m", "m, n, b"]))
    epilogue = draw(st.sampled_from(["", f"; Y[{out}] = max(C[{out}] + bias[n], 0)", f"; Y[b, n, m] = C[{out}] * 0.5"]))
    inputs: Signature = {"A": (dtype, left[1]), "B": (dtype, right[1])}
    if "bias" in epilogue:
        inputs["bias"] = (dtype, (n,))
    return f"C[{out}] +=! A[{left[0]}] * B[{right[0]}]{epilogue}", inputs


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    n, c, f = draw(st.integers(1, 3)), draw(small), draw(st.integers(1, 20))
    k, s = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    p, d, h = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(9, 15))
    o = (h + 2 * p - d * (k - 1) - 1) // s + 1
    y, x = f"ho * {s} + kh * {d} - {p}", f"wo * {s} + kw * {d} - {p}"
    guard = f".when([{y} >= 0, {y} < {h}, {x} >= 0, {x} < {h}], 0.0)" if p else ""
    depthwise = draw(st.booleans())
    weights = "W[c, kh, kw]" if depthwise else "W[f, c, kh, kw]"
    out = "c" if depthwise else "f"
    expression = f"Y[n, {out}, ho, wo] +=! X[n, c, {y}, {x}]{guard} * {weights} where ho in {o}, wo in {o}"
    shape = (c, k, k) if depthwise else (f, c, k, k)
    return expression, {"X": ("float32", (n, c, h, h)), "W": ("float32", shape)}


@st.composite
def rows(draw: st.DrawFn) -> Case:
    a, b, c = draw(small), draw(odd), draw(odd)
    dtype = draw(floats)
    expression = draw(
        st.sampled_from(
            [
                "m[a, b] >=! x[a, b, c]; s[a, b] +=! exp(x[a, b, c] - m[a, b]); y[a, b, c] = exp(x[a, b, c] - m[a, b]) / s[a, b]",
                "s[b] +=! x[a, b, c]; q[b] +=! (x[a, b, c] - s[b] / 7.0) * (x[a, b, c] - s[b] / 7.0);"
                " y[a, b, c] = (x[a, b, c] - s[b] / 7.0) * rsqrt(q[b] + 0.001)",
                "y[a, c] +=! x[a, b, c]",
                "y[b] >=! x[a, b, c]",
                "y[] +=! x[a, b, c]",
                "y[c, a] <=! x[a, b, c]",
                "y[c, b, a] = x[a, b, c] * 2.0",
                "y[a, b] +=! x[a, b, c] * x[a, b, c]; z[a, b] = sqrt(y[a, b])",
                "y[a, b, c] = gelu(x[a, b, c]) + x[a, 0, c]",
                f"m[a, b] >=! x[a, b, c]; y[a, b] <=! c.when([x[a, b, c] == m[a, b]], {c})",
            ]
        )
    )
    return expression, {"x": (dtype, (a, b, c))}


@st.composite
def moves(draw: st.DrawFn) -> Case:
    a, b = draw(odd), draw(odd)
    table: Signature = {"t": ("float32", (a, b)), "i": ("int32", (draw(odd),))}
    scatter = f"t[i[n], b] +=. 2.0 where b in {b}, n in {table['i'][1][0]}"
    expression = draw(st.sampled_from(["y[n, b] = t[i[n], b]", scatter, "y[n] +=! t[i[n], b]"]))
    return expression, table


def check(case: Case, **options: str) -> None:
    expression, signature = case
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in signature.items()})
    arrays = random_inputs(program, seed=1)
    kernel = roller_svc.compile(expression, signature, select="model", top_k=1, **options)
    verdict = agrees(program, kernel(**arrays), evaluate(program, arrays))
    assert verdict.ok, f"{expression} {signature}: {verdict}\n{kernel.source}"


programs = st.one_of(contractions(), convolutions(), rows(), moves())


@given(programs)
@settings(max_examples=20)
def test_cpu_kernels_agree_with_the_reference(case: Case) -> None:
    check(case, target="local")


@given(programs)
@settings(max_examples=12)
def test_avx2_kernels_agree_with_the_reference(case: Case) -> None:
    check(case, target="cpu-x86-avx2")


@pytest.mark.slow
@given(programs)
@settings(max_examples=300)
def test_many_cpu_kernels_agree_with_the_reference(case: Case) -> None:
    check(case, target="local")


@pytest.mark.slow
@pytest.mark.emulator
@given(programs, st.sampled_from(["nvidia-a100-sxm-80gb", "nvidia-t4", "nvidia-h200-sxm"]))
@settings(max_examples=60)
def test_cuda_kernels_agree_with_the_reference_in_the_emulator(case: Case, target: str) -> None:
    check(case, target=target, runtime="emulator")
