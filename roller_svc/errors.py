"""Every exception of the project.

RollerError(code)
├── InputError            invalid input      HTTP 422; exit 2; line, column, end_column, hint
│   ├── ExprSyntaxError       the text is not in the language
│   ├── ExprTypeError         invalid types, names or arguments
│   ├── ShapeError            mismatched extents or ranks
│   ├── IndexRangeError       an index out of bounds, at compile time or at the call; also an IndexError
│   ├── SpecError             an invalid hardware spec: file and field
│   ├── ArgumentError         an invalid option, array or name in a call
│   ├── NoCandidateError      no rProgram fits the device: the rejecting rules
│   ├── UnsupportedModelError a model with nodes that are not supported: all of them
│   ├── ScheduleError         an illegal transform or schedule tree
│   ├── ConflictError         the request contradicts an earlier one: HTTP 409
│   ├── ForbiddenError        the API key may not do that: HTTP 403
│   └── NotFoundError         HTTP 404
│       ├── UnknownHardwareError
│       ├── UnknownOpError        no such named operator or ONNX node
│       └── UnknownKernelError    no such digest, operation or artifact
├── BuildError            failed build       recorded in its CandidateResult; exit 1
│   ├── CompileError(log)         compilation failed
│   ├── ToolchainMissingError     exit 3: what is missing and how to install it
│   ├── LaunchError               the kernel launch failed
│   ├── KernelTimeoutError        a compiler or kernel exceeded its time limit
│   └── WrongAnswerError          the kernel disagrees with the reference
├── BuildServiceError     transient          HTTP 503; exit 1
│   ├── QueueFullError
│   │   └── QuotaExceededError    HTTP 429
│   ├── CancelledError        a client cancelled the operation: 499 in operations
│   ├── EstimatesTimeoutError
│   └── StoreError
└── InvariantError        a bug              HTTP 500; exit 1
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TypeVar

T = TypeVar("T")
MAX_SHOWN_CHARACTERS = 160  # of a line of the text


class RollerError(Exception):
    """Base of all errors of this project. `code` is kebab-case and listed in docs/errors.md."""

    default_code = "internal"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code

    def _repr_html_(self) -> str:
        """Return what a notebook shows of an error as a value: its code and its text."""
        return f"<pre>{escape(self.code)}: {escape(str(self))}</pre>"


class InputError(RollerError):
    """Invalid input. `line`, `column`, `end_column` count from 1; None if the error has no place in a text.

    `text` is the text, if the code that raised the error had it. `str` shows its line with carets, and the hint.
    """

    default_code = "invalid-input"

    def __init__(  # a span is four fields, and spelled out is how callers read it
        self,
        message: str,
        *,
        code: str | None = None,
        line: int | None = None,
        column: int | None = None,
        end_column: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.line = line
        self.column = column
        self.end_column = end_column
        self.hint = hint
        self.text: str | None = None

    def __str__(self) -> str:
        hint = [f"hint: {self.hint}"] if self.hint else []
        return "\n".join([self.message, *self.excerpt(self.text), *hint])

    def excerpt(self, text: str | None) -> list[str]:
        """Return the line of a text that the error is about, and a line with carets below it; [] without a place."""
        if self.line is None or self.column is None or text is None:
            return []
        lines = text.split("\n")
        line = lines[self.line - 1] if self.line <= len(lines) else ""
        end_column = self.end_column or self.column + 1
        # A window around the span keeps a line of 64 KiB readable.
        first = max(0, min(self.column - 1, len(line)) - MAX_SHOWN_CHARACTERS // 2)
        window = "".join(c if c.isprintable() else " " for c in line[first : first + MAX_SHOWN_CHARACTERS])
        margin = f"{self.line} | "
        offset = self.column - 1 - first
        width = max(1, min(end_column - self.column, len(window) - offset))
        return [margin + window, " " * (len(margin) - 2) + "| " + " " * offset + "^" * width]

    def render(self, text: str | None) -> str:
        """Render the error for a terminal: place, code, message, the text's line with carets, hint."""
        excerpt = self.excerpt(text)
        place = f"line {self.line}, column {self.column}: " if excerpt else ""
        hint = [f"hint: {self.hint}"] if self.hint else []
        return "\n".join([f"{place}{self.code}: {self.message}", *excerpt, *hint])

    @property
    def reason(self) -> str:
        """The message, with what to do about it."""
        return self.message if self.hint is None else f"{self.message}; {self.hint}"


class ExprSyntaxError(InputError):
    default_code = "syntax-error"


class ExprTypeError(InputError):
    default_code = "type-error"


class ShapeError(InputError):
    default_code = "shape-mismatch"


class IndexRangeError(InputError, IndexError):
    default_code = "index-out-of-range"


class SpecError(InputError):
    default_code = "invalid-spec"


class ArgumentError(InputError):
    default_code = "invalid-argument"


class NoCandidateError(InputError):
    """No rProgram fits the device. `rejections` counts the rejections of each rule."""

    default_code = "no-candidate"

    def __init__(self, message: str, *, rejections: dict[str, int] | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rejections = rejections or {}


@dataclass(frozen=True, slots=True)
class UnsupportedNode:
    """A node of a model that cannot be compiled."""

    operator: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator} {self.name!r}: {self.reason}"


class UnsupportedModelError(InputError):
    """A model has nodes that cannot be compiled. `nodes` lists every one."""

    default_code = "unsupported-model"
    MAX_SHOWN = 20  # nodes in the message

    def __init__(self, nodes: tuple[UnsupportedNode, ...], *, hint: str | None = None) -> None:
        shown = [str(node) for node in nodes[: self.MAX_SHOWN]]
        more = [f"and {len(nodes) - self.MAX_SHOWN} more"] if len(nodes) > self.MAX_SHOWN else []
        count = "1 node is" if len(nodes) == 1 else f"{len(nodes)} nodes are"
        super().__init__(f"{count} not supported: " + "; ".join([*shown, *more]), hint=hint)
        self.nodes = nodes


class StrictError(InputError):
    """A program has notes, and the option `strict` is set."""

    default_code = "has-notes"


class ScheduleError(InputError):
    """An illegal schedule. `step` is the step of a schedule by hand that breaks the rule, from 0."""

    default_code = "schedule-illegal"
    step: int | None = None


class ConflictError(InputError):
    default_code = "request-conflict"


class ForbiddenError(InputError):
    default_code = "insufficient-scope"


class NotFoundError(InputError):
    default_code = "not-found"


class UnknownHardwareError(NotFoundError):
    default_code = "unknown-hardware"


class UnknownOpError(NotFoundError):
    default_code = "unknown-op"


class UnknownKernelError(NotFoundError):
    default_code = "unknown-kernel"


class RollerWarning(UserWarning):
    """A note on a program or a model: something slow or mistaken that the compiler or the runtime sees."""


class BuildError(RollerError):
    default_code = "build-failed"


class CompileError(BuildError):
    """Compilation failed. `log` is the compiler's output."""

    default_code = "compile-failed"

    def __init__(self, message: str, *, code: str | None = None, log: str = "") -> None:
        super().__init__(message, code=code)
        self.log = log


class ToolchainMissingError(BuildError):
    default_code = "toolchain-missing"


class LaunchError(BuildError):
    default_code = "launch-failed"


class KernelTimeoutError(BuildError):
    default_code = "timeout"


class WrongAnswerError(BuildError):
    default_code = "wrong-answer"


class BuildServiceError(RollerError):
    default_code = "farm-error"


FarmError = BuildServiceError  # the former name


class QueueFullError(BuildServiceError):
    """Something finite is used up. `retry_after_s` says when to try again; None: soon."""

    default_code = "queue-full"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class QuotaExceededError(QueueFullError):
    default_code = "quota-exceeded"


class SlowRequestError(InputError):
    default_code = "request-timeout"


class CancelledError(BuildServiceError):
    default_code = "operation-cancelled"


class EstimatesTimeoutError(BuildServiceError):
    default_code = "estimates-timeout"


class StoreError(BuildServiceError):
    default_code = "store-error"


class InvariantError(RollerError):
    default_code = "internal"


def require(value: T | None, what: str) -> T:
    """Return a value that other code guarantees to exist. Raises InvariantError, naming `what`, if it is None."""
    if value is None:
        raise InvariantError(f"there is no {what}")
    return value
