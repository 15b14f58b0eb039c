"""A kernel with fixed tiles, and a fault seeded in its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.constraints import OpClass

A100, T4, RTX5090, H200 = "nvidia-a100-sxm-80gb", "nvidia-t4", "nvidia-rtx5090", "nvidia-h200-sxm"
Types = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Fields of an RProgram. `block` and `thread`: extents in the order of the space's axes.

    They are written down, and not what the model would choose: patterns hold until lowering itself changes.
    """

    block: tuple[int, ...]
    thread: tuple[int, ...]
    lanes: int = 1
    split_k: int = 1
    stages: int = 1
    stream_k: int = 0
    blocks: int = 0
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False
    cluster_k: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A program that is one kernel group, and its tiles. `inputs`: name, type and shape of each.

    `unit`: what a contraction runs on. `ranges`: of inputs that are not to be drawn as usual, name, least, limit.
    """

    name: str
    family: str
    expression: str
    inputs: Types
    tiles: Tiles
    target: str = A100
    unit: OpClass | None = None
    allow_tf32: bool = False
    ranges: tuple[tuple[str, int, int], ...] = ()


class Kind(Enum):
    """What is wrong."""

    BARRIER = "a barrier is missing"
    WAIT = "a wait for copies is missing or lets too many groups pass"
    COMMIT = "a group of copies is not committed"
    SLOT = "a slot is read or filled out of turn"
    STEPS = "too few steps or rounds, or too many"
    FRAGMENT = "words of fragments change places, or are of another step"
    LANES = "lane arithmetic"
    SWIZZLE = "two sides of shared memory disagree on where elements are"
    TRANSPOSED = "a tile is turned, or not turned"
    INSTRUCTION = "an instruction of another type or width"
    GUARD = "a guard is missing or off by one"
    PREDICATE = "a copy's predicate"
    PADDING = "what should be zero or the identity is not"
    INITIAL = "the initial value of an accumulator"
    UNINITIALISED = "what is read was never written"
    PLACE = "a wrong row, column or element of memory"
    EPILOGUE = "an epilogue does something else"
    ATOMIC = "an update that is not atomic"
    SHUFFLE = "lanes that are not joined, or twice"
    PART = "parts of a split reduction"
    ROOM = "shared rooms overlap"
    PHASE = "a barrier's phase, its arrivals or its bytes"
    RELEASE = "memory is given up, or taken again, too early"
    FENCE = "a fence is missing"
    DESCRIPTOR = "a product's or a bulk copy's description of memory"
    PEER = "blocks of a cluster"
    SOFTMAX = "maxima, sums or factors of a softmax that is computed step by step"
    NARROWED = "a value or an index in too narrow a type"
    DIVERGENCE = "threads part where they should go together"
    DECLARED = "what a declaration promises"
    ASSEMBLY = "the assembly in a wrapper of an instruction"


class PatternError(ValueError):
    """A pattern of a mutation does not match its kernel as it should."""


@dataclass(frozen=True, slots=True)
class Edit:
    """`pattern` must match `matches` times; `only`: which of them is replaced, counted from 0. None: all."""

    pattern: str
    replacement: str
    matches: int = 1
    only: int | None = None

    def applied(self, text: str) -> str:
        """The text with the edit; raises PatternError where the pattern does not fit or nothing changes."""
        found = list(re.finditer(self.pattern, text, re.MULTILINE))
        if len(found) != self.matches:
            raise PatternError(f"{self.pattern!r} matches {len(found)} times, not {self.matches}")
        replaced = found if self.only is None else [found[self.only]]
        for match in reversed(replaced):
            text = text[: match.start()] + match.expand(self.replacement) + text[match.end() :]
        if all(match.expand(self.replacement) == match[0] for match in replaced):
            raise PatternError(f"{self.pattern!r} changes nothing")
        return text


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug: edits of the text of a case's kernel, one after the other."""

    case: Case
    name: str
    kind: Kind
    edits: tuple[Edit, ...]

    @property
    def id(self) -> str:
        return f"{self.case.name}: {self.name}"

    def applied(self, text: str) -> str:
        """The kernel with the bug; raises PatternError where it is no longer the kernel that the bug was made for."""
        try:
            for edit in self.edits:
                text = edit.applied(text)
        except PatternError as problem:
            raise PatternError(f"{self.id}: {problem}") from None
        return text


def mutant(case: Case, name: str, kind: Kind, *edits: Edit) -> Mutation:
    return Mutation(case, name, kind, edits)
