"""Arguments in messages, in the words of the command line and of requests."""

from __future__ import annotations

import pytest

from roller_svc.ir.option_words import show_as_fields, show_as_flags


@pytest.mark.parametrize(
    ("text", "flags", "fields"),
    [
        ('give dims={"batch": 4, "n": 2}', "give --dim batch=4 --dim n=2", 'give "dims": {"batch": 4, "n": 2}'),
        (
            'inputs={"x": ("float32", (4, 2))}',
            "--input x=float32[4,2]",
            '"inputs": {"x": {"dtype": "float32", "shape": [4, 2]}}',
        ),
        ('runtime="emulator" runs it', "--emulate runs it", '"options": {"runtime": "emulator"} runs it'),
        ("allow_tf32=True", "--allow-tf32", '"options": {"allow_tf32": true}'),
        ("top_k=3 or more", "--top-k 3 or more", '"options": {"top_k": 3} or more'),
        ('donate=["a", "b"]', "--donate a --donate b", '"options": {"donate": ["a", "b"]}'),
        ('dims={"batch": [1, 2]}', "--dim batch=1,2", '"dims": {"batch": [1, 2]}'),
        ('tiles={"m": 4}', "--constrain m=4", '"options": {"tiles": {"m": 4}}'),
        ("give inputs={}", "give inputs={}", 'give "inputs": {}'),
        ("conv2d(X, stride=2)", "conv2d(X, stride=2)", "conv2d(X, stride=2)"),
    ],
)
def test_arguments_in_other_words(text: str, flags: str, fields: str) -> None:
    assert show_as_flags(text) == flags
    assert show_as_fields(text) == fields
    assert show_as_flags(fields) == flags  # as the command line shows what a service answers


@pytest.mark.parametrize(
    "text",
    [
        "cannot read models/target=h200/none.txt",
        "/tmp/name=a.onnx cannot be read",
        "--dim threads=abc: expected NAME=EXTENT",
        "unrecognized arguments: --dim name=3",
        "unknown hardware 'target=h200'",
    ],
)
def test_words_of_users_stay(text: str) -> None:
    assert show_as_flags(text) == text


def test_a_command_may_have_flags_of_its_own() -> None:
    assert show_as_flags('inputs={"x": ("int8", (3,))}', {"inputs": "--shape"}) == "--shape x=int8[3]"
