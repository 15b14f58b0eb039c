"""Whatever the text, the parser returns a program or an InputError. tests/fuzz/fuzz_parser.py runs the long form."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from roller_svc.errors import InputError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType

INPUTS = {"x": TensorType(DType.FLOAT32, (4, 5)), "i": TensorType(DType.INT32, (4,))}


def _script() -> ModuleType:
    """The fuzzing script, which is no part of the package."""
    path = Path(__file__).parents[2] / "fuzz" / "fuzz_parser.py"
    spec = importlib.util.spec_from_file_location("fuzz_parser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_parser"] = module
    spec.loader.exec_module(module)
    return module


def parsed_or_refused(text: str) -> bool:
    """Whether the parser does what it may do with a text."""
    try:
        return isinstance(parse(text, INPUTS), TensorProgram)
    except InputError as error:
        return bool(error.render(text)) and error.line is not None and error.column is not None


SCRIPT = _script()
SEEDS = SCRIPT.read_seeds()


@settings(max_examples=examples(400))
@given(st.integers(0, 2**32))
def test_mutated_expressions(seed: int) -> None:
    assert SCRIPT.outcome(SCRIPT.mutated(random.Random(seed), SEEDS))


def test_every_seed_is_a_program() -> None:
    assert [SCRIPT.outcome(seed) for seed in SEEDS] == ["parsed"] * len(SEEDS)


@settings(max_examples=examples(200))
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    assert parsed_or_refused(text)


@settings(max_examples=examples(200))
@given(st.text(alphabet="yxin[],;=+-*/%()<>.!:#`'0123456789ab \n", max_size=60))
def test_the_languages_own_characters(text: str) -> None:
    assert parsed_or_refused("y[n] = x[n, 0] " + text)
