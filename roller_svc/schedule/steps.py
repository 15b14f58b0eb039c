"""The language of schedules: its operations, and how a list of steps becomes a schedule.

A step is an operation on a stage, or on the function that is computed or stored elsewhere. `OPERATIONS` has the fields
of each: the parsers of text and of JSON, the printers and the chained Python form all read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.schedule import Scope
from roller_svc.schedule import transforms
from roller_svc.schedule.schedule import Schedule

MAX_STEPS = 256
Value = str | int | tuple[str | int, ...]


class FieldKind(Enum):
    """Kinds of fields of a step."""

    NAME = "a name"  # of a loop or stage
    NUMBER = "a whole number"
    NAMES = "one or more names of loops"
    TWO_NAMES = "two new names of loops"
    NEW_NAME = "a new name of a loop"
    LOOP_AND_FACTOR = "a loop and a factor"
    TAIL = "guard or exact"
    SCOPE = "registers, stack or shared"


SCOPES = {"registers": Scope.REGISTER, "stack": Scope.STACK, "shared": Scope.SHARED}
CHOICES = {FieldKind.TAIL: ("guard", "exact"), FieldKind.SCOPE: tuple(SCOPES)}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an operation. `keyword`, which stands before it in text, marks a field that may be left out."""

    name: str
    kind: FieldKind
    keyword: str | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the language.

    `subject` is the field that stands before the colon in text: a stage, a producer, or an input. `apply` takes the schedule, the
    subject, and the fields by name.
    """

    subject: str
    fields: tuple[Field, ...]
    apply: Callable[..., Schedule]


STAGE, PRODUCER, TENSOR = "stage", "producer", "tensor"


@dataclass(frozen=True, slots=True)
class Step:
    """An operation with its fields; fields that may be left out and are have no entry."""

    op: str
    subject: str
    values: tuple[tuple[str, Value], ...] = ()

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]


def _split(
    schedule: Schedule, stage: str, loop: str, factor: int, names: tuple[str, str] | None = None, tail: str = "guard"
) -> Schedule:
    return transforms.split(schedule, stage, loop, factor, names, exact=tail == "exact")


def _reorder(schedule: Schedule, stage: str, loops: tuple[str, ...]) -> Schedule:
    return transforms.reorder(schedule, stage, *loops)


def _cache(schedule: Schedule, tensor: str, stage: str, loop: str, scope: str) -> Schedule:
    return transforms.cache(schedule, tensor, stage, loop, SCOPES[scope])


def _store_in(schedule: Schedule, producer: str, scope: str) -> Schedule:
    return transforms.store_in(schedule, producer, SCOPES[scope])


_LOOP = Field("loop", FieldKind.NAME)
_SITE = (Field("stage", FieldKind.NAME), _LOOP)
_SCOPE = Field("scope", FieldKind.SCOPE)
_CUT = (Field("names", FieldKind.TWO_NAMES, "as"), Field("tail", FieldKind.TAIL, "tail"))
OPERATIONS = {
    "split": Operation(STAGE, (_LOOP, Field("factor", FieldKind.NUMBER), *_CUT), _split),
    "reorder": Operation(STAGE, (Field("loops", FieldKind.NAMES),), _reorder),
    "fuse": Operation(STAGE, (Field("outer", FieldKind.NAME), Field("inner", FieldKind.NAME)), transforms.fuse),
    "tile": Operation(
        STAGE, (Field("outer", FieldKind.LOOP_AND_FACTOR), Field("inner", FieldKind.LOOP_AND_FACTOR)), transforms.tile
    ),
    "rename": Operation(STAGE, (_LOOP, Field("name", FieldKind.NEW_NAME)), transforms.rename),
    "serial": Operation(STAGE, (_LOOP,), transforms.serial),
    "parallel": Operation(STAGE, (_LOOP,), transforms.parallel),
    "vectorise": Operation(STAGE, (_LOOP,), transforms.vectorise),
    "block": Operation(STAGE, (_LOOP,), transforms.block),
    "thread": Operation(STAGE, (_LOOP,), transforms.thread),
    "unroll": Operation(STAGE, (_LOOP,), transforms.unroll),
    "add_threads": Operation(STAGE, (Field("name", FieldKind.NEW_NAME), Field("extent", FieldKind.NUMBER)), transforms.add_threads),
    "rfactor": Operation(STAGE, (_LOOP,), transforms.rfactor),
    "accumulate_at": Operation(STAGE, (_LOOP,), transforms.accumulate_at),
    "inline": Operation(PRODUCER, (), transforms.inline),
    "compute_root": Operation(PRODUCER, (), transforms.compute_root),
    "compute_at": Operation(PRODUCER, _SITE, transforms.compute_at),
    "store_root": Operation(PRODUCER, (), transforms.store_root),
    "store_at": Operation(PRODUCER, _SITE, transforms.store_at),
    "store_in": Operation(PRODUCER, (_SCOPE,), _store_in),
    "cache": Operation(TENSOR, (*_SITE, _SCOPE), _cache),
}


def apply_step(schedule: Schedule, step: Step) -> Schedule:
    """Return the schedule after a step. Raises ScheduleError with the rule that the step breaks."""
    return step.operation.apply(schedule, step.subject, **dict(step.values))
