"""Read and validate JSON files; errors name the file and the field."""

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
    """Base of all schemas: extra fields are ignored; no coercion, no NaN."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class InputModel(Read):
    """An input; whether dtype and shape are valid is checked by the language."""

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
    """Times on a device by system; `roller_top10_ms` is the best of ROLLER's ten candidates."""

    library_ms: Annotated[Milliseconds | None, Field(validation_alias=AliasChoices("cudalib_tf_ms", "lib_tf_ms"))] = None
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
    """`roller_best_config` is the tile of the best candidate."""

    roller_best_config: str


class OperatorModel(Read):
    """`below_direct_floor`: the best time is below the compute bound of the direct algorithm."""

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
    """A kind of file: the message for other files, and a hint where such files come from."""

    is_none: str
    hint: str | None = None

    def refusal(self, path: Path, problem: str) -> ArgumentError:
        return ArgumentError(f"{path}: {self.is_none}: {problem}", code="unreadable-file", hint=self.hint)


def read_json(path: Path, kind: Kind) -> Any:
    """Parse a JSON file; raise ArgumentError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise kind.refusal(path, failure.strerror or str(failure)) from failure
    except (ValueError, RecursionError) as failure:
        raise kind.refusal(path, str(failure)) from failure


def checked(path: Path, kind: Kind, schema: type[M], content: object, where: str = "") -> M:
    """Validate content by a schema; raise ArgumentError with the path of the first error, below `where`."""
    try:
        return schema.model_validate(content)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, (*([where] if where else []), *first["loc"])))
        raise kind.refusal(path, f"{place}: {first['msg']}" if place else first["msg"]) from invalid
