"""JSON files that clients bring → checked: what is wrong in one, and where, or its content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from roller_svc.errors import ArgumentError

Json = dict[str, Any]
M = TypeVar("M", bound="Read")
Milliseconds = Annotated[float, Field(gt=0)]


class Read(BaseModel):
    """Fields that are read; others may be there and are not looked at. No coercion, no NaN."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class InputModel(Read):
    """What it means the language says: whether the type is one, and the shape one of a tensor."""

    dtype: str
    shape: list[int]


class CaseModel(Read):
    id: str
    cls: str = ""
    expr: str
    inputs: dict[str, InputModel]
    outputs: list[str] | None = None
    out_meta: dict[str, Any] | None = None
    hints: Json | None = None


class TimesModel(Read):
    """Times on a device by system; `roller_top10_ms`: of the best of ROLLER's ten."""

    library_ms: Annotated[Milliseconds | None, Field(validation_alias=AliasChoices("cudalib_tf_ms", "lib_tf_ms"))] = (
        None
    )
    tvm_autotvm_ms: Milliseconds | None = None
    ansor_ms: Milliseconds | None = None
    roller_top10_ms: Milliseconds

    @property
    def best_s(self) -> float:
        every = (self.library_ms, self.tvm_autotvm_ms, self.ansor_ms, self.roller_top10_ms)
        return min(ms for ms in every if ms is not None) / 1e3

    @property
    def roller_s(self) -> float:
        return self.roller_top10_ms / 1e3


class TileModel(TimesModel):
    """`roller_best_config`: the tile of that best."""

    roller_best_config: str


class OperatorModel(Read):
    """`below_direct_floor`: the best time is below what the direct algorithm's operations take at the peak."""

    id: str
    kind: str
    expr: str
    expr_inputs: dict[str, InputModel]
    flops: Annotated[float, Field(ge=0)]
    min_bytes: Annotated[float, Field(ge=0)]
    below_direct_floor: bool = False
    v100_ms: TimesModel
    k80: TileModel | None = None
    mi50: TileModel | None = None


class PublishedModel(Read):
    ops: Annotated[list[OperatorModel], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file should be: what is said of one that `is_none`, and where such files come from."""

    is_none: str
    hint: str | None = None

    def refusal(self, path: Path, problem: str) -> ArgumentError:
        return ArgumentError(f"{path}: {self.is_none}: {problem}", code="unreadable-file", hint=self.hint)


def read_json(path: Path, kind: Kind) -> Any:
    """A file's content, not looked at yet; ArgumentError where it cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise kind.refusal(path, failure.strerror or str(failure)) from failure
    except (ValueError, RecursionError) as failure:
        raise kind.refusal(path, str(failure)) from failure


def checked(path: Path, kind: Kind, schema: type[M], content: object, where: str = "") -> M:
    """The content as the schema has it; ArgumentError with the place, `where` and below, of what is wrong first."""
    try:
        return schema.model_validate(content)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, (*([where] if where else []), *first["loc"])))
        raise kind.refusal(path, f"{place}: {first['msg']}" if place else first["msg"]) from invalid
