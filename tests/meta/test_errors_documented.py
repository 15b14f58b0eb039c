"""Every error code of the source is in docs/errors.md, and every code there is in the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"[a-z]+(-[a-z]+)+|timeout|internal|unauthorized")
# Functions that take a code without naming it.
TAKES_CODE = {"error", "syntax_error", "refuse", "SyntaxFault", "_EquationError", "problem"}


def codes_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(names_codes(target) for target in node.targets):
            yield from constants(node.value)
        if isinstance(node, ast.Call):
            yield from (code for keyword in node.keywords if keyword.arg == "code" for code in constants(keyword.value))
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in TAKES_CODE:
                yield from (code for argument in node.args for code in constants(argument) if CODE.fullmatch(code))


def names_codes(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and (target.id == "default_code" or target.id.endswith(("_CODE", "_CODES")))


def constants(node: ast.expr) -> Iterator[str]:
    """Text in an expression; of an f-string the pattern of what it can become."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from constants(node.body)
        yield from constants(node.orelse)
    elif isinstance(node, ast.Dict):
        yield from (code for value in node.values for code in constants(value))


@functools.cache
def in_source() -> frozenset[str]:
    files = (*(ROOT / "roller_svc").rglob("*.py"), *(ROOT / "bench").rglob("*.py"))
    return frozenset(code for path in files for code in codes_of(ast.parse(path.read_text(encoding="utf-8"))))


def documented() -> list[str]:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)


def test_every_code_is_documented_once() -> None:
    codes = {code for code in in_source() if "*" not in code}
    assert sorted(codes - set(documented())) == []
    assert len(documented()) == len(set(documented()))


def test_every_documented_code_exists() -> None:
    patterns = [re.compile(code.replace("*", "[a-z]+")) for code in in_source()]
    assert [code for code in documented() if not any(p.fullmatch(code) for p in patterns)] == []


def test_codes_are_kebab_case() -> None:
    assert [code for code in in_source() if "*" not in code and not CODE.fullmatch(code)] == []


def test_every_row_says_what_to_do() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \|.*\|([^|]*)\|$", text, re.MULTILINE)
    assert len(rows) == len(documented())
    assert [code for code, action in rows if not action.strip()] == []
