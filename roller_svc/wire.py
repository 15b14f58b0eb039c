"""The bodies of HTTP requests and answers, as pydantic models. docs/api.md and /openapi.json come from these."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

HTTP_ERROR_CODE = "http-error"  # of an answer that has no code of ours
NAME_CHARACTERS = 200
TEXT_CHARACTERS = 1 << 17  # above the language's own limit, whose refusal is better
INPUTS_MOST = 256
TARGETS_MOST = 64

Name = Annotated[str, Field(max_length=NAME_CHARACTERS)]


class Body(BaseModel):
    """A request's part: an unknown field is refused, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorTypeBody(Body):
    dtype: Name
    shape: list[int] = Field(max_length=64)


class ProgramBody(Body):
    expression: str = Field(max_length=TEXT_CHARACTERS, examples=["C[m, n] +=! A[m, k] * B[k, n]"])
    inputs: dict[Name, TensorTypeBody] = Field(max_length=INPUTS_MOST)
    outputs: list[Name] | None = Field(None, max_length=INPUTS_MOST)


class OptionsBody(Body):
    top_k: int = 10
    select: Name = Field("model", description="model: trust the ranking; measure: time the top_k and keep the fastest")
    allow_tf32: bool = False
    runtime: Name = "auto"
    family: Name | None = Field(
        None, description="simt, mma or wgmma: what contractions on a GPU run on; default: the faster"
    )
    tiles: dict[Name, int] = Field(
        {}, description="values that lanes, split_k, stages, raster, stream_k, blocks, cluster_m or cluster_n must have"
    )
    constants: list[Name] = Field(
        [], max_length=INPUTS_MOST, description="inputs that stay the same from call to call: prepared once, on CPUs"
    )


class CompileBody(ProgramBody):
    """`hardware`, a spec as JSON, may stand in place of `target`."""

    target: Name | None = None
    hardware: dict[str, Any] | None = None
    options: OptionsBody = OptionsBody()

    @model_validator(mode="after")
    def _one_device(self) -> CompileBody:
        if (self.target is None) == (self.hardware is None):
            raise ValueError("give one of target and hardware")
        return self


class EstimateBody(Body):
    items: list[ProgramBody] = Field(min_length=1)
    targets: list[Name] = Field(min_length=1, max_length=TARGETS_MOST)
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


class EstimateAnswer(BaseModel):
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


class KernelAnswer(BaseModel):
    digest: str
    target: str
    expression: str
    language: str
    launches: list[Launch]
    resources: list[LaunchResources]
    estimate: EstimateAnswer
    measurement: dict[str, Any] | None
    notes: list[str] = []
    links: dict[str, str]


class OperationMetadata(BaseModel):
    stage: str
    cache: str
    create_time: str


class OperationAnswer(BaseModel):
    """AIP-151: `response` or `error` once done, neither before."""

    name: str
    done: bool
    metadata: OperationMetadata
    response: KernelAnswer | None = None
    error: Problem | None = None


class RoofAnswer(BaseModel):
    """Every tensor once at the bandwidth of a memory level, or all operations at the rate of "compute"."""

    level: str
    seconds: float
    bytes: int | None = None
    operations: int | None = None


class ItemEstimates(BaseModel):
    """Of one item on one target: `roofline` and `candidates`, or `error`."""

    item: int
    target: str
    roofline: list[RoofAnswer] | None = None
    candidates: list[EstimateAnswer] | None = None
    error: Problem | None = None


class EstimatesAnswer(BaseModel):
    estimates: list[ItemEstimates]
