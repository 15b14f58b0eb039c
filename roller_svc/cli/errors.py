"""Errors → stderr for people and, with --json, the one document on stdout."""

from __future__ import annotations

import sys

from roller_svc.cli import format as show
from roller_svc.compiler.serialize import error_json
from roller_svc.errors import CompileError, InputError, RollerError, SpecError
from roller_svc.frontend.lang import render

LOG_LINES = 40


def print_error(error: RollerError, expression: str, *, as_json: bool) -> None:
    print(render_error(error, expression), file=sys.stderr)
    if as_json:
        show.print_json({"error": error_json(error)})


def render_error(error: RollerError, expression: str) -> str:
    """What a terminal shows: with the place in the expression, or the end of what the compiler said."""
    match error:
        case SpecError():  # its lines are those of the spec, which the message names
            location = "" if error.line is None else f"line {error.line}, column {error.column}: "
            hint = f"\nhint: {error.hint}" if error.hint else ""
            return f"error: {location}{error.code}: {error.message}{hint}"
        case InputError():
            return f"error: {render(error, expression)}"
        case CompileError() if error.log:
            lines = error.log.strip().splitlines()[:LOG_LINES]
            return "\n".join([f"error: {error.code}: {error.message}", *(f"  {line}" for line in lines)])
    return f"error: {error.code}: {error.message}"
