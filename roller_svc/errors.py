"""Every exception of the project.

RollerError(code)
├── InputError            the caller's       HTTP 422; exit 2; line, column, end_column, hint
│   ├── ExprSyntaxError       the text is not in the language
│   ├── ExprTypeError         types, names, arguments that do not fit
│   ├── ShapeError            extents and ranks that do not fit
│   ├── IndexRangeError       an index leaves its tensor, found at compile time or at the call
│   ├── SpecError             a hardware spec that is wrong: file and field
│   ├── ArgumentError         an option, an array or a name of a call that does not fit
│   ├── NoCandidateError      no rProgram fits the device: the rejecting rules
│   ├── ScheduleError         a transform or a schedule tree that is not legal
│   └── NotFoundError         HTTP 404
│       ├── UnknownHardwareError
│       ├── UnknownOpError        no such named operator, or no such ONNX node
│       └── UnknownKernelError    no such digest, operation or artifact
├── BuildError            one candidate's    recorded in its Attempt; exit 1
│   ├── CompileError(log)         the compiler said no
│   ├── ToolchainMissingError     exit 3: what is missing and how to install it
│   ├── LaunchError               the device refused the kernel
│   ├── KernelTimeoutError        a compiler or kernel outran its limit
│   └── WrongAnswerError          the kernel disagrees with the reference
├── BuildServiceError             ours, transient    HTTP 503
│   ├── QueueFullError
│   ├── EstimatesTimeoutError
│   └── StoreError
└── InvariantError        a bug of ours      HTTP 500; exit 1
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class RollerError(Exception):
    """Anything this project raises on purpose. `code` is kebab-case and listed in docs/errors.md."""

    default_code = "internal"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code


class InputError(RollerError):
    """The caller's fault. `line`, `column`, `end_column` count from 1 and are None where no text is at fault."""

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


class ExprSyntaxError(InputError):
    default_code = "syntax-error"


class ExprTypeError(InputError):
    default_code = "type-error"


class ShapeError(InputError):
    default_code = "shape-mismatch"


class IndexRangeError(InputError):
    default_code = "index-out-of-range"


class SpecError(InputError):
    default_code = "invalid-spec"


class ArgumentError(InputError):
    default_code = "invalid-argument"


class NoCandidateError(InputError):
    """No rProgram fits. `rejections` maps the rule that rejected to how often it did."""

    default_code = "no-candidate"

    def __init__(self, message: str, *, rejections: dict[str, int] | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rejections = rejections or {}


class ScheduleError(InputError):
    default_code = "schedule-illegal"


class NotFoundError(InputError):
    default_code = "not-found"


class UnknownHardwareError(NotFoundError):
    default_code = "unknown-hardware"


class UnknownOpError(NotFoundError):
    default_code = "unknown-op"


class UnknownKernelError(NotFoundError):
    default_code = "unknown-kernel"


class BuildError(RollerError):
    default_code = "build-failed"


class CompileError(BuildError):
    """`log` is what the compiler printed."""

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


class QueueFullError(BuildServiceError):
    default_code = "queue-full"


class EstimatesTimeoutError(BuildServiceError):
    default_code = "estimates-timeout"


class StoreError(BuildServiceError):
    default_code = "store-error"


class InvariantError(RollerError):
    default_code = "internal"


def require(value: T | None, what: str) -> T:
    """The value of something that other code has made sure of; InvariantError says `what` where there is none."""
    if value is None:
        raise InvariantError(f"there is no {what}")
    return value
