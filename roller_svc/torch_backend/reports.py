"""Reports and warnings: which parts of the graphs that torch captured are compiled, and which stay with torch."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.errors import UnsupportedNode

VIEW = "a view, which copies nothing"
_SHOWN_REASONS = 5
MAX_REPORTS = 256  # the last ones are reported


class LeftToTorchWarning(UserWarning):
    """Operators of a graph stay with torch."""


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """One group of nodes that is compiled as a model."""

    nodes: int
    constants: int  # inputs that are parameters or buffers of the module
    failure: str | None = None  # why the group runs with torch nevertheless
    seconds: float | None = None  # of a call; None if it was not timed
    torch_seconds: float | None = None  # of the same nodes with torch, in turns

    def __str__(self) -> str:
        text = f"{self.nodes} nodes with {self.constants} constants"
        if self.seconds is not None and self.torch_seconds is not None:
            text += f", {self.seconds * 1e6:.1f} µs, torch {self.torch_seconds * 1e6:.1f} µs"
        return text if self.failure is None else f"{text}, which run with torch: {self.failure}"


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Report of one graph that torch.compile captured: what was compiled, and what stays with torch."""

    parts: tuple[CompiledPart, ...]
    eager: tuple[UnsupportedNode, ...]  # nodes that stay with torch, and why

    def __str__(self) -> str:
        lines = [f"compiled: {part}" for part in self.parts] + [f"with torch: {node}" for node in self.eager]
        return "\n".join(lines or ["nothing to compile"])


@dataclass(slots=True)
class PartState:
    """The reported state of a part, which its calls change. It does not keep the part alive."""

    nodes: int  # calls of operators
    constants: int
    failure: str | None = None
    seconds: tuple[float, float] | None = None  # of a call, compiled and with torch

    def described(self) -> CompiledPart:
        return CompiledPart(self.nodes, self.constants, self.failure, *(self.seconds or (None, None)))


class Record:
    """A report in progress: parts are built at their first call."""

    def __init__(self, parts: Sequence[PartState], eager: Sequence[UnsupportedNode]) -> None:
        self.parts = tuple(parts)
        self.eager = tuple(eager)
        _RECORDS.append(self)


_RECORDS: deque[Record] = deque(maxlen=MAX_REPORTS)


def report() -> tuple[GraphReport, ...]:
    """Return a report for each graph since the start or the last `reset`."""
    return tuple(GraphReport(tuple(part.described() for part in record.parts), record.eager) for record in _RECORDS)


def reset() -> None:
    """Forget the reports."""
    _RECORDS.clear()


def left_to_torch(eager: Sequence[UnsupportedNode]) -> tuple[UnsupportedNode, ...]:
    """Return the nodes that compute something with torch."""
    return tuple(node for node in eager if node.reason != VIEW)


def warn_of_nodes(compiled: int, left: Sequence[UnsupportedNode]) -> None:
    """Warn of the nodes of a graph that stay with torch, by operator and reason, the most frequent first."""
    reasons = Counter(f"{node.operator}: {node.reason}" for node in left)
    listed = [f"{text} ({number}x)" if number > 1 else text for text, number in reasons.most_common(_SHOWN_REASONS)]
    if len(reasons) > _SHOWN_REASONS:
        listed.append(f"{len(reasons) - _SHOWN_REASONS} more, in roller_svc.torch_backend.report()")
    warn(f"{compiled} of {compiled + len(left)} nodes compiled; left to torch: {'; '.join(listed)}")


def warn(text: str) -> None:
    warnings.warn(text, LeftToTorchWarning, stacklevel=3)
