"""Every file of ops/ is in the table or is a tool of the others; docs/operators.md has every operator as it is."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest

from roller_svc.frontend.lang import parse
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.ops import OPS
from roller_svc.frontend.ops.calls import expand
from roller_svc.frontend.ops.examples import example_of
from roller_svc.frontend.ops.operator import Operator
from roller_svc.frontend.ops.parameters import Parameter
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.program import TensorType

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
TOOLS = {"table", "operator", "parameters", "text", "windows", "calls", "examples", "selection"}
EXAMPLES = re.findall(r"^```operator\n(.*?)^```\n\n```tensor\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_file_is_in_the_table() -> None:
    files = {path.stem for path in (ROOT / "roller_svc" / "frontend" / "ops").glob("*.py")} - {"__init__"}
    listed = [
        operator.name
        for name in sorted(files - TOOLS)
        for operator in importlib.import_module(f"roller_svc.frontend.ops.{name}").OPERATORS
    ]
    assert sorted(listed) == sorted(OPS)
    assert len(set(listed)) == len(listed)
    assert files >= TOOLS


def sections() -> dict[str, str]:
    """Heading → its text; a heading may name several operators."""
    found = {}
    for part in PAGE.split("\n### ")[1:]:
        heading, body = part.split("\n", 1)
        for name in re.findall(r"`(\w+)`", heading):
            found[name] = body.split("\n## ")[0]
    return found


def shown(parameter: Parameter) -> str:
    if parameter.required:
        return "needed"
    match parameter.default:
        case None:
            return "none"
        case bool(value):
            return f"`{str(value).lower()}`"
        case str(text):
            return f'`"{text}"`'
    return f"`{parameter.default!r}`"


@pytest.mark.parametrize("name", OPS)
def test_every_operator_is_described(name: str) -> None:
    operator, body = OPS[name], sections().get(name)
    if body is not None:
        # A section for one to three dimensions has the layouts of two.
        differ = {"layout", "weight_layout"} if name.endswith(("1d", "3d")) else set()
        rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", body, re.MULTILINE))
        wanted = {p.name: shown(p) for p in operator.parameters if p.name not in differ}
        assert {key: rows.get(key) for key in wanted} == wanted
        return
    row = re.search(rf"^\| `{name}` \| (.*?) \|", PAGE, re.MULTILINE)
    if row is None:
        functions = re.search(r"^Functions of the language.*$", PAGE, re.MULTILINE)
        assert functions is not None
        assert f"`{name}`" in functions[0]
        assert not operator.parameters
        return
    for parameter in operator.parameters:
        assert f"`{parameter.name}` {shown(parameter)}" in row[1]


@pytest.mark.parametrize(("call", "statements"), EXAMPLES)
def test_examples_become_what_is_shown(call: str, statements: str) -> None:
    inputs = {}
    comments = re.findall(r"^# .*\n", call, re.MULTILINE)
    for name, dtype, shape in re.findall(r"^# (\w+): (\w+)\[([\d, ]*)\]$", call, re.MULTILINE):
        kind = dtype_named(dtype)
        assert kind is not None
        inputs[name] = TensorType(kind, tuple(int(extent) for extent in shape.split(",") if extent))
    assert expand(call, inputs).text == "".join(comments) + statements
    assert parse(statements, inputs).outputs


@pytest.mark.parametrize("operator", OPS.values(), ids=lambda operator: operator.name)
def test_the_examples_of_the_package_are_those_of_the_page(operator: Operator) -> None:
    example = example_of(operator)
    assert parse(example.statements, dict(example.inputs)).outputs
    of_page = [re.sub(r"^#.*\n", "", call, flags=re.MULTILINE).strip() for call, _ in EXAMPLES if f" {operator.name}(" in call]
    assert example.call in (of_page or [example.call])


def test_there_is_an_example_for_each_kind() -> None:
    assert len(EXAMPLES) > 35


def test_every_node_is_listed() -> None:
    listed = re.findall(r"`(\w+)`", PAGE.rstrip().splitlines()[-1])
    assert listed == sorted(NODES)


def test_the_python_example_prints_what_is_shown() -> None:
    match = re.search(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(match[1], {})  # the page's own example
    assert printed.getvalue() == match[2]
