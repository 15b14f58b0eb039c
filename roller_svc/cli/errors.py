"""Print errors to stderr and, with --json, as a JSON document to stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roller_svc.cli import format as show
from roller_svc.cli.context import CommandContext
from roller_svc.errors import CompileError, InputError, RollerError, SpecError
from roller_svc.ir.option_words import show_as_flags
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.compiler.serialize import error_json
else:
    error_json = OnUse("roller_svc.compiler.serialize:error_json")


LOG_LINES = 40


def print_error(error: RollerError, context: CommandContext, *, as_json: bool) -> None:
    error.message = show_as_flags(error.message, context.flags)
    if isinstance(error, InputError) and error.hint:
        error.hint = show_as_flags(error.hint, context.flags)
    show.print_message(render_error(error, context.expression))
    if as_json:
        show.print_json({"error": error_json(error)})


def render_error(error: RollerError, expression: str) -> str:
    """Format an error with its place in the expression, or with the compiler's output."""
    match error:
        case SpecError():  # line and column refer to the spec file that the message names
            location = "" if error.line is None else f"line {error.line}, column {error.column}: "
            hint = f"\nhint: {error.hint}" if error.hint else ""
            return f"error: {location}{error.code}: {error.message}{hint}"
        case InputError():
            return f"error: {error.render(error.text or expression)}"
        case CompileError() if error.log:
            lines = error.log.strip().splitlines()[:LOG_LINES]
            return "\n".join([f"error: {error.code}: {error.message}", *(f"  {line}" for line in lines)])
    return f"error: {error.code}: {error.message}"
