"""The inputs that the page infers from a text, run by node."""

from __future__ import annotations

import json

import pytest
from explorer_pages import SOURCE, run_node

from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse

pytestmark = [pytest.mark.needs("node")]

INFER = """
import { inferInputs } from '%s';
const { text, known } = JSON.parse(process.argv[1]);
const last = (name, rank) => (rank === undefined || known[name]?.shape.length === rank ? known[name] : undefined);
console.log(JSON.stringify(inferInputs(text, last, 'float16')));
"""


def infer(text: str, **known: list[int]) -> dict[str, list[int]]:
    """The shapes of the inputs of a text, where some are known."""
    types = {name: {"dtype": "float16", "shape": shape} for name, shape in known.items()}
    inferred = run_node(INFER % (SOURCE / "infer.js").as_uri(), json.dumps({"text": text, "known": types}))
    return {name: kind["shape"] for name, kind in inferred.items()}


@pytest.mark.parametrize(
    ("text", "known", "shapes"),
    [
        ("C[m, n] +=! A[m, k] * B[k, n]", {}, {"A": [1024, 1024], "B": [1024, 1024]}),
        ("C[m, n] +=! A[m, k] * Q[k, n]", {"A": [7, 5]}, {"A": [7, 5], "Q": [5, 1024]}),
        ("C[m, n]: float32 +=! A[m, k]  # B[k, n]", {}, {"A": [1024, 1024]}),
        ("t[i] = exp(x[i]); y[i] = t[i] * 1e5", {"x": [9]}, {"x": [9]}),  # t is computed, e5 is a number
        ("y[n, c] = table[ids[n], c]", {"ids": [40]}, {"table": [64, 1024], "ids": [40]}),
        ("y[i] = x[i]\n    + z[i]\n    where i in 5", {}, {"x": [5], "z": [5]}),
        ('Y = conv2d(X, W, padding=1, activation="relu")', {"X": [1, 2, 3, 4]}, {"X": [1, 2, 3, 4], "W": [1024, 1024]}),
        ("y[i] = x[i", {"x": [3, 4]}, {"x": [3, 4]}),  # while it is typed
        ("<script>", {}, {}),
    ],
)
def test_inputs_are_those_that_the_text_reads(text: str, known: dict[str, list[int]], shapes: dict[str, list[int]]) -> None:
    assert infer(text, **known) == shapes


def test_examples_are_in_the_language_and_have_the_inferred_inputs() -> None:
    program = f"import {{ EXAMPLES }} from '{(SOURCE / 'examples.js').as_uri()}'; console.log(JSON.stringify(EXAMPLES));"
    for example in run_node(program):
        parse(example["expression"], dict(tensor_types(example["inputs"])))
        shapes = {name: kind["shape"] for name, kind in example["inputs"].items()}
        assert infer(example["expression"], **shapes) == shapes
