"""Any text is parsed or refused with an InputError: nothing else comes out of the front door."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from roller_svc.errors import InputError
from roller_svc.frontend.ops import OPS
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

INPUTS = {
    "X": TensorType(DType.FLOAT32, (1, 2, 4, 3)),
    "W": TensorType(DType.FLOAT16, (2, 2, 1, 2)),
    "i": TensorType(DType.INT32, (3,)),
}
PARAMETERS = sorted({parameter.name for operator in OPS.values() for parameter in operator.parameters})
VALUES = st.one_of(
    st.integers(-3, 3).map(str),
    st.sampled_from(["1e9", "-0.5", "true", "None", "'same'", "[1, 2]", "[]", "[0, -1, 2]", "float16", "X", "99" * 30]),
)
ARGUMENTS = st.one_of(
    st.sampled_from(["X", "W", "i", "Y", "'ij->i'"]),
    st.tuples(st.sampled_from(PARAMETERS), VALUES).map(lambda pair: f"{pair[0]}={pair[1]}"),
)
CALLS = st.builds(
    lambda name, arguments, output: f"{output}{name}({', '.join(arguments)})",
    st.sampled_from([*sorted(OPS), "einsum", "nothing"]),
    st.lists(ARGUMENTS, max_size=4),
    st.sampled_from(["Y = ", "Z = ", "", "X = "]),
)
PIECES = st.sampled_from(["Y", "=", "relu", "(", ")", "X", ",", ";", "\n", "[", "]", "1", "'", "#", "axis", " ", "é"])


@settings(max_examples=examples(400))
@given(st.lists(CALLS, min_size=1, max_size=3).map("\n".join))
def test_calls_of_any_kind(text: str) -> None:
    outcome(text)


@settings(max_examples=examples(400))
@given(st.lists(PIECES, max_size=14).map("".join))
def test_scraps_of_calls(text: str) -> None:
    outcome(text)


def outcome(text: str) -> None:
    refused: InputError | None = None
    try:
        assert parse(text, INPUTS).outputs
    except InputError as error:
        refused = error
    if refused is not None:
        assert refused.line is None or 1 <= refused.line <= text.count("\n") + 1
