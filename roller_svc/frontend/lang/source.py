"""Source text with positions, and errors that point into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from roller_svc.errors import ExprSyntaxError, InputError


class Spanned(Protocol):
    """Anything with a span in the text: character offsets, end exclusive."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int


AnyInputError = TypeVar("AnyInputError", bound=InputError)


@dataclass(frozen=True, slots=True)
class Source:
    """The source text. Lines and columns count from 1, columns in characters."""

    text: str

    def position(self, offset: int) -> tuple[int, int]:
        """Return (line, column) of a character offset."""
        line_start = self.text.rfind("\n", 0, offset) + 1
        return self.text.count("\n", 0, offset) + 1, offset - line_start + 1

    def error(
        self,
        kind: type[AnyInputError],
        code: str,
        message: str,
        span: Spanned,
        hint: str | None = None,
    ) -> AnyInputError:
        """Return an error of that kind that points at `at`, truncated at the end of the line."""
        line, column = self.position(span.start)
        stop = self.text.find("\n", span.start, span.end)
        end = span.end if stop < 0 else stop
        end_column = column + max(1, end - span.start)
        error = kind(message, code=code, line=line, column=column, end_column=end_column, hint=hint)
        error.text = self.text
        return error

    def syntax_error(self, code: str, message: str, span: Spanned, hint: str | None = None) -> ExprSyntaxError:
        return self.error(ExprSyntaxError, code, message, span, hint)

    def quote(self, span: Spanned) -> str:
        """Return the text of a span on one line, truncated for a message."""
        text = " ".join(self.text[span.start : span.end].split())
        return text if len(text) <= MAX_QUOTED_CHARACTERS else text[: MAX_QUOTED_CHARACTERS - 1] + "…"


MAX_QUOTED_CHARACTERS = 60
