"""Operator calls in expressions: expansion, mixing with statements, error positions."""

from __future__ import annotations

import json

import numpy as np
import pytest

import roller_svc
from roller_svc.cli import main
from roller_svc.compiler.action import action_digest
from roller_svc.compiler.estimates.batch import EstimateCache, Item
from roller_svc.compiler.request import build_request
from roller_svc.errors import InputError
from roller_svc.frontend import lang
from roller_svc.frontend.lang.limits import MAX_STATEMENTS
from roller_svc.frontend.ops import expression
from roller_svc.frontend.ops.calls import expand
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

CONV = {"X": ("float32", (1, 3, 8, 8)), "W": ("float32", (4, 3, 3, 3))}
INPUTS = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in CONV.items()}
MATRICES = {"A": TensorType(DType.FLOAT32, (4, 6)), "B": TensorType(DType.FLOAT32, (6, 5))}


@pytest.mark.parametrize(
    "call",
    [
        "conv2d(stride=2, padding=1)",
        "conv2d(X, W, stride=2, padding=1)",
        "output0 = conv2d(X, W, stride=2, padding=1)",
        "output0=conv2d( X,W , padding = [1, +1,],stride=(2,2), ) ;",
        "# two\n# lines\n\noutput0 =\n conv2d(X, W,\n  stride=2, # so\n  padding=1)\n",
        "conv2d(stride=2, padding=1, layout='NCHW', activation=none, dtype=None)",
        'conv2d(stride=2, padding=1, weight_layout="OIHW", activation=`none`)',
    ],
)
def test_a_call_is_its_expression(call: str) -> None:
    assert parse(call, INPUTS) == lang.parse(expression("conv2d", CONV, stride=2, padding=1), INPUTS)


@pytest.mark.parametrize(
    "text",
    [
        "C[m, n] +=! A[m, k] * B[k, n]",
        "C[m, n] +=! A[m, k] * B[k, n];\nD[m, n] = max(\n  exp(C[m, n]),\n  0)",
        'einsum("mk,kn->mn")',
        'C = einsum("mk,kn->mn", A, B);',
        "C[m, n] = # Y = relu(X)\n A[m, n]",
        "# ; Y = relu(X)\nC[m, n] = A[m, n]",
    ],
)
def test_text_without_calls_stays(text: str) -> None:
    assert expand(text, MATRICES).text == text
    assert parse(text, MATRICES) == lang.parse(text, MATRICES)


def test_calls_stand_among_statements() -> None:
    text = """
    H = matmul(A, B)          # 4 × 5
    S = softmax(H, axis=0); T[m, n] = S[m, n] * 2
    U[m] +=! T[m, n]
    V = einsum("mn,mn->m", S, T); W = add(U, V)
    """
    a, b = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), np.linspace(0, 1, 30, dtype=np.float32).reshape(6, 5)
    types = {"A": ("float32", (4, 6)), "B": ("float32", (6, 5))}
    e = np.exp(a @ b)
    s = e / e.sum(0)
    got = roller_svc.reference(text, types, {"A": a, "B": b})
    assert list(got) == ["W"]
    np.testing.assert_allclose(got["W"], (2 * s).sum(1) + (2 * s * s).sum(1), rtol=1e-5)
    kernel = roller_svc.compile(text, types, select="model", top_k=1)
    np.testing.assert_allclose(kernel(A=a, B=b)["W"], got["W"], rtol=1e-5)


def test_intermediate_names_avoid_those_of_the_text() -> None:
    program = parse("S = softmax(A); S_max[i] = S[i, 0]; k[i] = S[i, 1]", MATRICES)
    assert [s.name for s in program.statements] == ["S_max_", "S_exp", "S_sum", "S", "S_max", "k"]


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "end"),
    [
        ("Y = cov2d(X, W)", "unknown-op", 1, 5, 10),
        ("print(1)", "unknown-op", 1, 1, 6),
        ("\n Y = conv2d(X, V)", "unknown-name", 2, 16, 17),
        ("Y = conv2d(X, W, strid=2)", "unknown-parameter", 1, 18, 25),
        ("Y = conv2d(X, W, stride=0)", "invalid-parameter", 1, 18, 26),
        ("Y = conv2d(X, W, stride=1, stride=1)", "invalid-parameter", 1, 28, 36),
        ("Y = conv2d(X, W, stride=1e999)", "invalid-parameter", 1, 18, 30),
        ("Y = conv2d(X)", "wrong-arguments", 1, 1, 14),
        ("Y = conv2d(X, 2)", "bad-call", 1, 15, 16),
        ("Y = conv3d(X, W)", "operand-shape", 1, 1, 17),
        ("Y = relu(X) + 1", "bad-call", 1, 13, 14),
        ("Y = relu(X)\n + 1", "bad-call", 2, 2, 3),
        ("Y = relu(X) Z = relu(Y)", "bad-call", 1, 13, 14),
        ("Y = relu(X[i])", "bad-call", 1, 11, 12),
        ("Y = relu(exp(X))", "bad-call", 1, 13, 14),
        ("Y = relu(X, [[1]])", "bad-call", 1, 14, 15),
        ("Y = relu(X", "bad-call", 1, 10, 11),
        ("Y = relu(-X)", "bad-call", 1, 11, 12),
        ("Y = relu(" + "1" * 5000 + ")", "bad-call", 1, 10, 5010),
        ("__import__('os').system('x')", "bad-call", 1, 17, 18),
        ("Y = relu(X); Y = relu(X)", "written-twice", 1, 14, 25),
        ("X = relu(X)", "input-written", 1, 1, 12),
        ("Y = relu(X)\nZ[i] = Y[i, 0, 0, 9]", "index-out-of-range", 2, 19, 20),
        ("Z[i] = Q[i]\nY = relu(Z)", "unknown-name", 1, 8, 9),
        ("Y = relu(X)\nZ[i] = Q[i]\nV = relu(Z)", "unknown-name", 2, 8, 9),
        ("Y = relu(X); Z = relu(V)", "unknown-name", 1, 23, 24),
        ("Y = relu(X); Z = einsum('ab->a', X)", "wrong-rank", 1, 14, 36),
        ("Y = relu(X); Z = einsum(X)", "bad-einsum", 1, 14, 27),
        ("; ".join(f"Y{i} = relu(X)" for i in range(65)), "too-many-statements", 1, None, None),
    ],
)
def test_errors_point_into_the_given_text(text: str, code: str, line: int, column: int | None, end: int | None) -> None:
    with pytest.raises(InputError) as refused:
        parse(text, INPUTS)
    found = refused.value
    assert (found.code, found.line) == (code, line)
    assert column is None or (found.column, found.end_column) == (column, end)


def test_every_door_takes_calls() -> None:
    text, same = "conv2d(padding=1)", expression("conv2d", CONV, padding=1)
    digests = [action_digest(build_request(t, CONV, target="cpu-x86-avx2", select="model")) for t in (text, same)]
    assert digests[0] == digests[1]
    estimates = EstimateCache().estimates([Item(text, CONV), Item("conv3(X)", CONV)], ["nvidia-h200-sxm"], 1)
    assert estimates[0]["candidates"]
    assert isinstance(estimates[1]["error"], dict)
    assert estimates[1]["error"]["code"] == "unknown-op"
    assert roller_svc.estimate(text, CONV, ["amd-mi300x"])["amd-mi300x"][0].seconds > 0


def test_the_command_line_takes_calls(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ["--input", "A=float32[40,30]", "--input", "B=float32[30,20]"]
    assert main(["run", "matmul(activation=gelu)", *inputs, "--top-k", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["checked"]
    assert facts["expression"].startswith("output0_sum[m, n] +=! A[m, k] * B[k, n]")
    assert main(["estimate", "Y = matmull(A, B)", *inputs]) == 2
    assert "did you mean `matmul`?" in capsys.readouterr().err


def test_long_texts_take_no_time_to_look_at() -> None:
    """A pattern that rescans white space or names would be quadratic on each of these."""
    scraps = "\n", "\na", "a ", "a", "# x\n", "a=", "\na =", " ;a"
    for text in (scrap * (60_000 // len(scrap)) for scrap in scraps):
        with pytest.raises(InputError):
            parse(text, INPUTS)


def test_operators_of_many_statements_stand_together() -> None:
    """Statements of operators do not count as those that a text has."""
    inputs = {"X": TensorType(DType.FLOAT32, (8, 16384))}
    program = parse("Y = top_k_indices(X, k=50); Z = top_k_indices(X, k=9, largest=false)", inputs)
    assert [output.name for output in program.outputs] == ["Y", "Z"]
    assert len(program.statements) > MAX_STATEMENTS


def test_many_calls_in_a_row() -> None:
    text = "Y0 = conv2d(X, W, padding=1)\n" + "\n".join(f"Y{i + 1} = relu(Y{i})" for i in range(60))
    program = parse(text, INPUTS)
    assert [out.name for out in program.outputs] == ["Y60"]
