"""The bodies of HTTP requests and answers, as pydantic models. docs/api.md and /openapi.json come from these."""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

HTTP_ERROR_CODE = "http-error"  # of an answer that has no code of ours
MAX_NAME_CHARACTERS = 200
MAX_TEXT_CHARACTERS = 1 << 17  # above the language's own limit, whose refusal is better
MAX_INPUTS = 256
MAX_TARGETS = 64
MAX_ITEMS = 10_000  # of the setting of that name, which decides
MAX_DIMENSIONS = 64
MAX_TILES = 64
MAX_FIELDS = 64  # of an object, known and unknown ones
MAX_SPEC_VALUES = 4096  # our largest spec has some 450


def check_size(limit: int) -> BeforeValidator:
    """Refuse a collection by its length, before the first of its members costs anything."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise _too_long(value, limit)
        return value

    return BeforeValidator(check)


def _too_long(value: Sized, limit: int) -> PydanticCustomError:
    facts = {"most": limit, "given": len(value)}
    return PydanticCustomError("too_long", "there may be {most} entries at most, not {given}", facts)


Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
FailFast = Field(fail_fast=True)  # the first wrong member is told; a list of thousands has no more faults than that
Names = Annotated[list[Name], FailFast, check_size(MAX_INPUTS)]


class RequestModel(BaseModel):
    """A request's part: an unknown field is refused, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise _too_long(value, MAX_FIELDS)
        return value


class TensorTypeModel(RequestModel):
    dtype: Name
    shape: Annotated[list[int], FailFast, check_size(MAX_DIMENSIONS)]


class ProgramModel(RequestModel):
    expression: str = Field(max_length=MAX_TEXT_CHARACTERS, examples=["C[m, n] +=! A[m, k] * B[k, n]"])
    inputs: Annotated[dict[Name, TensorTypeModel], check_size(MAX_INPUTS)]
    outputs: Names | None = None


class CompileOptions(RequestModel):
    top_k: int = 10
    select: Name = Field("model", description="model: trust the ranking; measure: time the top_k and keep the fastest")
    allow_tf32: bool = False
    runtime: Name = "auto"
    family: Name | None = Field(
        None, description="simt, mma or wgmma: what contractions on a GPU run on; default: the faster"
    )
    tiles: Annotated[dict[Name, int], check_size(MAX_TILES)] = Field(
        {}, description="values that lanes, split_k, stages, raster, stream_k, blocks, cluster_m or cluster_n must have"
    )
    constants: Names = Field([], description="inputs that stay the same from call to call: prepared once, on CPUs")


def _limit_spec(value: object) -> object:
    """Refuse a spec of more values, at any depth, than a spec may have."""
    count, level = 0, [value]
    while level and count <= MAX_SPEC_VALUES:
        count += len(level)
        children = [
            node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
        ]
        level = [child for node in children for child in node]
    if count + len(level) > MAX_SPEC_VALUES:
        message = "a spec may have {most} values at most"
        raise PydanticCustomError("too_long", message, {"most": MAX_SPEC_VALUES})
    return value


class CompileRequest(ProgramModel):
    """`hardware`, a spec as JSON, may stand in place of `target`."""

    target: Name | None = None
    hardware: Annotated[dict[str, Any], BeforeValidator(_limit_spec)] | None = None
    options: CompileOptions = CompileOptions()

    @model_validator(mode="after")
    def _one_device(self) -> CompileRequest:
        if (self.target is None) == (self.hardware is None):
            raise ValueError("give one of target and hardware")
        return self


class EstimateRequest(RequestModel):
    items: Annotated[list[ProgramModel], Field(min_length=1, fail_fast=True), check_size(MAX_ITEMS)]
    targets: Annotated[list[Name], Field(min_length=1, fail_fast=True), check_size(MAX_TARGETS)]
    top_k: int = 1
    allow_tf32: bool = False


class ProblemItem(BaseModel):
    pointer: str | None = None
    line: int | None = None
    column: int | None = None
    end_column: int | None = None
    message: str
    hint: str | None = None


class Problem(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemItem] = []


class Stage(BaseModel):
    name: str
    seconds: float


class PlanEstimate(BaseModel):
    model_config = ConfigDict(extra="allow")

    seconds: float
    bound: str
    stages: list[Stage]
    occupancy: float
    waves: int


class Launch(BaseModel):
    name: str
    grid: list[int]
    block: list[int]
    shared_bytes: int


class LaunchResources(BaseModel):
    registers_per_thread: int
    shared_bytes: int
    spill_bytes: int


class KernelResponse(BaseModel):
    digest: str
    target: str
    expression: str
    language: str
    launches: list[Launch]
    resources: list[LaunchResources]
    estimate: PlanEstimate
    measurement: dict[str, Any] | None
    notes: list[str] = []
    links: dict[str, str]


class OperationMetadata(BaseModel):
    stage: str
    cache: str
    create_time: str


class OperationResponse(BaseModel):
    """AIP-151: `response` or `error` once done, neither before."""

    name: str
    done: bool
    metadata: OperationMetadata
    response: KernelResponse | None = None
    error: Problem | None = None


class RooflineLevel(BaseModel):
    """Every tensor once at the bandwidth of a memory level, or all operations at the rate of "compute"."""

    level: str
    seconds: float
    bytes: int | None = None
    operations: int | None = None


class ItemEstimates(BaseModel):
    """Of one item on one target: `roofline` and `candidates`, or `error`."""

    item: int
    target: str
    roofline: list[RooflineLevel] | None = None
    candidates: list[PlanEstimate] | None = None
    error: Problem | None = None


class EstimateResponse(BaseModel):
    estimates: list[ItemEstimates]
