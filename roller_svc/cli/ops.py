"""roller ops: list the named operators; roller ops NAME: explain one, or list those whose description has the word."""

from __future__ import annotations

import argparse
import textwrap

from roller_svc.cli import format as show
from roller_svc.compiler.serialize import Json
from roller_svc.frontend.ops import OPS, operator_named
from roller_svc.frontend.ops.examples import example_of
from roller_svc.frontend.ops.operator import Operator
from roller_svc.frontend.ops.parameters import Parameter

WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="operator to explain, or a word to find (default: list all)")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    word = (options.name or "").lower()
    found = [operator for operator in OPS.values() if word in f"{operator.name} {operator.about}".lower()]
    if word in OPS or not found:
        operator = operator_named(options.name)
        show.print_result(options, _facts(operator), _explanation(operator))
        return 0
    text = "\n".join([*map(_summary, found), "", "`roller ops NAME` explains one, with an example."])
    show.print_result(options, {"operators": [_facts(operator) for operator in found]}, text)
    return 0


def _facts(operator: Operator) -> Json:
    example = example_of(operator)
    return {
        "name": operator.name,
        "about": operator.about,
        "operands": list(operator.operands),
        "needed": operator.min_operands,
        "more": operator.more,
        "parameters": [
            {"name": each.name, "default": each.default, "required": each.required, "takes": each.expected, "about": each.about}
            for each in operator.parameters
        ],
        "example": {
            "inputs": {name: {"dtype": kind.dtype.value, "shape": list(kind.shape)} for name, kind in example.inputs.items()},
            "call": example.call,
            "statements": example.statements,
        },
    }


def _summary(operator: Operator) -> str:
    return f"{operator.name:20} {textwrap.shorten(operator.about, WIDTH - 21, placeholder=' …')}"


def _explanation(operator: Operator) -> str:
    example = example_of(operator)
    parts = [_wrapped(_signature(operator), indent="    "), _wrapped(operator.about)]
    if operator.parameters:
        parts.append(
            "\n".join(
                _wrapped(f"{each.name} ({each.expected}): {each.about}", first="  ", indent="      ")
                for each in operator.parameters
            )
        )
    inputs = [f"  # {name}: {kind.dtype.value}{list(kind.shape)}" for name, kind in example.inputs.items()]
    parts.append("\n".join(["Example:", *inputs, _wrapped(example.call, first="  ", indent="      ")]))
    statements = [_wrapped(line, first="  ", indent="      ") for line in example.statements.splitlines()]
    parts.append("\n".join(["It stands for:", *statements]))
    return "\n\n".join(parts)


def _signature(operator: Operator) -> str:
    operands = [name if position < operator.min_operands else f"[{name}]" for position, name in enumerate(operator.operands)]
    parameters = [each.name if each.required else f"{each.name}={_literal(each)}" for each in operator.parameters]
    return f"{operator.name}({', '.join([*operands, *['...'] * operator.more, *parameters])})"


def _literal(parameter: Parameter) -> str:
    """Return a default as an expression writes it."""
    match parameter.default:
        case None:
            return "none"
        case bool(value):
            return str(value).lower()
        case str(text):
            return f'"{text}"'
    return f"{parameter.default!r}"


def _wrapped(text: str, *, first: str = "", indent: str = "") -> str:
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)
