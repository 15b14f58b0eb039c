"""Options of estimates, kernels and models: a field each.

The Python API, the command line, the schema of the service, the JSON of requests and the digests of actions are derived
from these records. Nothing else lists the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, Self, TypedDict, get_args, get_type_hints

from roller_svc.ir.constraints import TILE_FIELDS, OpClass, ScheduleConstraints, WinogradMode

InputNames = tuple[str, ...]
Tiles = tuple[tuple[str, int], ...]  # (public option, value); see TILE_FIELDS
LAUNCHERS = ("ctypes", "cupy", "torch", "cpp")  # of saved kernels and models, by what the caller has
HOST_LAUNCHERS = tuple(name for name in LAUNCHERS if name != "cupy")  # of code for CPUs


class ScheduleText(str):
    """Canonical text of a schedule by hand (schedule/step_text.py). Equal ones are equal, however they were written."""

    written: object  # the text, document or steps that it was read from: errors name its lines

    def __new__(cls, text: str, written: object = None) -> Self:
        schedule = super().__new__(cls, text)
        schedule.written = text if written is None else written
        return schedule


class SelectionMode(Enum):
    MEASURE = "measure"  # compile and time the top candidates, keep the fastest
    MODEL = "model"  # trust the ranking


class RuntimeChoice(Enum):
    AUTO = "auto"
    EMULATOR = "emulator"


DONATE = {"help": "inputs that a scatter may overwrite: nothing is copied"}
CONSTANTS = {"help": "inputs that do not change between calls: CPU kernels prepack them once", "flags": ("--constant",)}
WINOGRAD = {
    "help": "3x3 convolutions on CPUs by Winograd's algorithm: auto (where it is accurate), never, or always",
    "metavar": "WHEN",
}
MAX_TOP_K = 100
TOP_K = {"help": "number of candidates to build", "least": 1, "most": MAX_TOP_K, "metavar": "K"}
SCHEDULE = {
    "help": "schedule by hand, instead of construction: docs/schedule.md",
    "metavar": "FILE",
    "only_if_set": True,
}
STRICT = {"help": "fail if there is a note: something slow or mistaken that the compiler sees", "only_if_set": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of all. The metadata of a field are the fields of Option that the field itself does not give."""

    allow_tf32: bool = field(default=False, metadata={"help": "allow TF32 for float32 products"})
    allow_expanded_squares: bool = field(
        default=False,
        metadata={
            "help": "compute sums of (a - b)² as products: errors are relative to the sums of a² and b², not to the result",
            "only_if_set": True,
        },
    )

    @property
    def constraints(self) -> ScheduleConstraints:
        return ScheduleConstraints(self.allow_tf32, allow_expanded_squares=self.allow_expanded_squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions(CommonOptions):
    """Options of estimates."""

    constants: InputNames = field(default=(), metadata=CONSTANTS)
    winograd: WinogradMode = field(default=WinogradMode.AUTO, metadata=WINOGRAD)
    donate: InputNames = field(default=(), metadata=DONATE)
    strict: bool = field(default=False, metadata=STRICT)
    schedule: ScheduleText | None = field(default=None, metadata=SCHEDULE)

    @property
    def constraints(self) -> ScheduleConstraints:
        return ScheduleConstraints(self.allow_tf32, winograd=self.winograd, allow_expanded_squares=self.allow_expanded_squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(CommonOptions):
    """Options of the search for a kernel, or for each kernel of a model."""

    top_k: int = field(default=3, metadata=TOP_K)
    select: SelectionMode = field(
        default=SelectionMode.MEASURE,
        metadata={
            "help": "measure: time the candidates and keep the fastest; model: trust the ranking",
            "metavar": "HOW",
            "service_default": SelectionMode.MODEL,
        },
    )
    winograd: WinogradMode = field(default=WinogradMode.AUTO, metadata=WINOGRAD)
    max_workspace_bytes: int | None = field(
        default=None,
        metadata={
            "help": "memory that a kernel may allocate for a call; default: any",
            "most": 1 << 60,
            "metavar": "N",
            "only_if_set": True,
        },
    )

    @property
    def constraints(self) -> ScheduleConstraints:
        return ScheduleConstraints(self.allow_tf32, winograd=self.winograd, allow_expanded_squares=self.allow_expanded_squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptions(SearchOptions):
    """Options of kernels and models."""

    name: str | None = field(
        default=None,
        metadata={
            "help": "begins the names of all that the saved code exports; default: roller_ and digits of its digest",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions(NamedOptions):
    """Options of kernels."""

    top_k: int = field(default=10, metadata=TOP_K)
    runtime: RuntimeChoice = field(
        default=RuntimeChoice.AUTO,
        metadata={
            "help": "run a GPU's kernel on the CPU (emulator) or on its device (auto)",
            "flags": ("--emulate",),
            "switch": "emulator",
        },
    )
    family: OpClass | None = field(
        default=None,
        metadata={
            "help": "kernel family of GPU contractions: simt, mma or wgmma; default: the fastest",
            "flags": ("--kernel-family", "--family"),
        },
    )
    tiles: Tiles = field(
        default=(),
        metadata={
            "help": f"values of the candidates' tile fields: {', '.join(TILE_FIELDS)}",
            "flags": ("--constrain", "--tiles"),
            "metavar": "split_k=4,stages=3",
        },
    )
    candidate: int = field(
        default=0,
        metadata={
            "help": "build this candidate alone: its number in the model's ranking, from 1; 0: the best",
            "most": 100,
            "metavar": "N",
            "only_if_set": True,
        },
    )
    schedule: ScheduleText | None = field(default=None, metadata=SCHEDULE)
    constants: InputNames = field(default=(), metadata=CONSTANTS)
    donate: InputNames = field(default=(), metadata=DONATE)
    strict: bool = field(default=False, metadata=STRICT)

    @property
    def constraints(self) -> ScheduleConstraints:
        return ScheduleConstraints(self.allow_tf32, self.family, self.tiles, self.winograd, self.allow_expanded_squares)


class CommonArguments(TypedDict, total=False):
    """The types in which callers give the fields of CommonOptions."""

    allow_tf32: bool
    allow_expanded_squares: bool


class EstimateArguments(CommonArguments, total=False):
    constants: Sequence[str]
    winograd: str
    donate: Sequence[str]
    strict: bool
    schedule: str | Mapping[str, Any] | None


class SearchArguments(CommonArguments, total=False):
    top_k: int
    select: str
    winograd: str
    max_workspace_bytes: int | None


class NamedArguments(SearchArguments, total=False):
    name: str | None


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a record as its readers see it."""

    name: str
    type: Any  # of the value, apart from None
    is_optional: bool
    default: Any
    help: str
    least: int = 0  # of a number
    most: int | None = None
    metavar: str = "NAME"
    flags: tuple[str, ...] = ()  # of the command line; default: the name
    switch: str | None = None  # the value that the flag, which takes none, sets
    service_default: Any = None  # if it differs from that in Python
    only_if_set: bool = False  # in records and digests: true of options that were added after the first stores

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values of an enumeration; () for other types."""
        return tuple(member.value for member in self.type) if self._is_enum else ()

    @property
    def argument_type(self) -> Any:
        """Return the type in which callers give it."""
        kinds = {InputNames: Sequence[str], Tiles: Mapping[str, int] | None, ScheduleText: str | Mapping[str, Any]}
        kind: Any = str if self._is_enum else kinds.get(self.type, self.type)
        return kind | None if self.is_optional else kind

    @property
    def argument_default(self) -> Any:
        """Return the default as callers give it."""
        return None if self.type == Tiles else encode(self.default)

    @property
    def _is_enum(self) -> bool:
        return isinstance(self.type, type) and issubclass(self.type, Enum)


def options_of(record: type[CommonOptions]) -> dict[str, Option]:
    """Return the options of a record by name: the fields with metadata."""
    return _describe_all(record)  # type: ignore[arg-type]  # mypy takes no class with a __hash__ for hashable


def encode(value: Any) -> Any:
    """Return the value of an option as callers give it."""
    return value.value if isinstance(value, Enum) else value


def options_json(options: KernelOptions) -> dict[str, object]:
    """Encode all options as JSON-compatible values."""
    return {name: _encode_json(option, getattr(options, name)) for name, option in options_of(KernelOptions).items()}


def deciding_options_json(options: KernelOptions) -> dict[str, object]:
    """Encode the same without the options that are given only if they are set, and are not."""
    known = options_of(KernelOptions)
    unset = {name for name, each in known.items() if each.only_if_set and getattr(options, name) == each.default}
    return {name: value for name, value in options_json(options).items() if name not in unset}


def chosen_options_json(options: KernelOptions) -> dict[str, object]:
    """Encode the options that differ from those that the service takes by itself."""
    known, encoded = options_of(KernelOptions), options_json(options)
    usual = {name: each.default if each.service_default is None else each.service_default for name, each in known.items()}
    return {name: value for name, value in encoded.items() if getattr(options, name) != usual[name]}


def _encode_json(option: Option, value: Any) -> object:
    return dict(value) if option.type == Tiles else list(value) if isinstance(value, tuple) else encode(value)


@cache
def _describe_all(record: type[CommonOptions]) -> dict[str, Option]:
    hints = get_type_hints(record)
    return {
        each.name: _describe(each.name, hints[each.name], each.default, each.metadata) for each in fields(record) if each.metadata
    }


def _describe(name: str, hint: Any, default: Any, more: Mapping[Any, Any]) -> Option:
    is_optional = type(None) in get_args(hint)
    kind = next(each for each in get_args(hint) if each is not type(None)) if is_optional else hint
    return Option(name, kind, is_optional, default, **more)
