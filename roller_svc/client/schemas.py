"""Pydantic models of HTTP requests and responses, from which /openapi.json and docs/api.md follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from roller_svc.ir.options import (
    CommonOptions,
    EstimateOptions,
    InputNames,
    KernelOptions,
    NamedOptions,
    Option,
    Tiles,
    encode,
    options_of,
)

HTTP_ERROR_CODE = "http-error"  # of a response without a code of this project
MAX_NAME_CHARACTERS = 200
MAX_TEXT_CHARACTERS = 1 << 17  # above the language's own limit, whose error message is better
MAX_INPUTS = 256
MAX_TARGETS = 64
MAX_ITEMS = 10_000  # upper bound of the setting, which is the actual limit
MAX_DIMENSIONS = 64
MAX_TILES = 64
MAX_PRIORITY = 100
MAX_TRIALS = 10_000  # of a model
MAX_TIMEOUT_S = 7 * 86_400.0
MAX_FIELDS = 64  # of an object, including unknown ones
MAX_SPEC_VALUES = 4096  # the largest shipped spec has about 450
MAX_SCHEDULE_CHARACTERS = 64 << 10
MAX_SCHEDULE_VALUES = 16_384
MAX_CONSTANT_VALUES = 16_384  # larger arrays belong in the model's file


def check_size(limit: int) -> BeforeValidator:
    """Return a validator that rejects a collection by its length before it validates the members."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise _too_long(value, limit)
        return value

    return BeforeValidator(check)


def check_values(limit: int, what: str) -> BeforeValidator:
    """Return a validator that rejects nested collections with too many values, at any depth, before it validates them."""

    def check(value: object) -> object:
        count, level = 0, [value]
        while level and count <= limit:
            count += len(level)
            children = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
            level = [child for node in children for child in node]
        if count + len(level) > limit:
            raise PydanticCustomError("too_long", f"too many values in {what}: the limit is {{most}}", {"most": limit})
        return value

    return BeforeValidator(check)


def _too_long(value: Sized, limit: int) -> PydanticCustomError:
    facts = {"most": limit, "given": len(value)}
    return PydanticCustomError("too_long", "too many entries: the limit is {most}, got {given}", facts)


Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
FailFast = Field(fail_fast=True)  # report only the first invalid member of a long list
Names = Annotated[list[Name], FailFast, check_size(MAX_INPUTS)]


Extent = Annotated[int, Field(ge=0)]
Extents = Annotated[list[Extent], Field(min_length=1, fail_fast=True), check_size(MAX_DIMENSIONS)]
Schedule = (
    Annotated[str, Field(max_length=MAX_SCHEDULE_CHARACTERS)]
    | Annotated[dict[str, Any], check_values(MAX_SCHEDULE_VALUES, "the schedule")]
)
Spec = Annotated[dict[str, Any], check_values(MAX_SPEC_VALUES, "the spec")]
Number = bool | int | Annotated[float, Field(allow_inf_nan=False)]
Numbers = TypeAliasType("Numbers", "Number | Annotated[list[Numbers], FailFast]")  # a number, or an array as nested lists


class RequestModel(BaseModel):
    """Base of request models: rejects unknown fields and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise _too_long(value, MAX_FIELDS)
        return value


class TensorTypeModel(RequestModel):
    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, value: object) -> object:
        if isinstance(value, str | list):
            expected = '{"dtype": "float32", "shape": [64, 32]}'
            raise PydanticCustomError(
                "tensor_type", "expected {expected}, got {given}", {"expected": expected, "given": f"{value!r:.60}"}
            )
        return value

    dtype: Name
    shape: Annotated[list[int], FailFast, check_size(MAX_DIMENSIONS)]


class ProgramModel(RequestModel):
    expression: str = Field(max_length=MAX_TEXT_CHARACTERS, examples=["C[m, n] +=! A[m, k] * B[k, n]"])
    inputs: Annotated[dict[Name, TensorTypeModel], check_size(MAX_INPUTS)]
    outputs: Names | None = None


# The type of an option in a request, by the type in which callers give it in Python.
_TYPES: dict[Any, Any] = {
    str: Name,
    str | None: Name | None,
    Sequence[str]: Names,
    Mapping[str, int] | None: Annotated[dict[Name, int], check_size(MAX_TILES)],
    str | Mapping[str, Any] | None: Schedule | None,
}
_DEFAULTS: dict[Any, Any] = {InputNames: [], Tiles: {}}


def _options_model(record: type[CommonOptions], *, checked: bool) -> Any:
    """Return the base of a model with the options of a record. `checked`: the model checks values, not only types."""
    options: dict[str, Any] = {name: _option_field(option, checked=checked) for name, option in options_of(record).items()}
    return create_model(record.__name__, __base__=RequestModel, **options)


def _option_field(option: Option, *, checked: bool) -> tuple[Any, Any]:
    kind = _TYPES.get(option.argument_type, option.argument_type)
    bounds: dict[str, Any] = {"ge": option.least, "le": option.most} if checked and option.type is int else {}
    if checked and option.choices:
        kind = Literal[option.choices]
    default = option.default if option.service_default is None else option.service_default
    return kind, Field(_DEFAULTS.get(option.type, encode(default)), description=option.help, **bounds)


_KernelOptions: Any = _options_model(KernelOptions, checked=False)
_EstimateOptions: Any = _options_model(EstimateOptions, checked=False)
_NamedOptions: Any = _options_model(NamedOptions, checked=True)


class CompileOptions(_KernelOptions):
    """The options of roller_svc.compile."""


class CheckScheduleRequest(ProgramModel):
    """A request to check a schedule by hand, as text or as JSON (roller-schedule/1).

    With a `target`, or `hardware`, a spec as JSON, the rules of that device are checked, too.
    """

    schedule: Schedule
    target: Name | None = None
    hardware: Spec | None = None

    @model_validator(mode="after")
    def _at_most_one_device(self) -> CheckScheduleRequest:
        if self.target is not None and self.hardware is not None:
            raise ValueError("expected at most one of target and hardware")
        return self


class ScheduleProblem(BaseModel):
    """A step that breaks a rule. `step` counts from 0, `line` and `column` from 1; null for JSON."""

    step: int | None
    rule: str
    message: str
    hint: str | None
    line: int | None
    column: int | None


class CheckedSchedule(BaseModel):
    """The first step that breaks a rule, if one does; else the schedule tree, as text, and its price on the device."""

    problems: list[ScheduleProblem]
    tree: str | None
    cost: dict[str, Any] | None = Field(description="an estimate with `launches`; null without a device")


class BuildTerms(RequestModel):
    """Treatment of a build. It has no effect on the result."""

    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="among the builds of this client; the highest is first")
    timeout_s: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="fail with deadline-exceeded if it is not done in this time"
    )


def _check_one(**fields: object) -> None:
    """Raise ValueError unless exactly one of the fields is given."""
    if sum(value is not None for value in fields.values()) != 1:
        *some, last = fields
        raise ValueError(f"expected exactly one of {', '.join(some)} and {last}")


class CompileRequest(ProgramModel, BuildTerms):
    """A request to compile a kernel for a `target` or for `hardware`, a spec as JSON."""

    target: Name | None = None
    hardware: Spec | None = None
    options: CompileOptions = CompileOptions()

    @model_validator(mode="after")
    def _one_device(self) -> CompileRequest:
        _check_one(target=self.target, hardware=self.hardware)
        return self


def _check_distinct(names: list[str]) -> list[str]:
    """Raise PydanticCustomError if a name is there twice."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise PydanticCustomError("not_distinct", "expected each name once, got '{name}' twice", {"name": name[:100]})
    return names


Targets = Annotated[
    list[Name],
    Field(min_length=1, fail_fast=True, json_schema_extra={"uniqueItems": True}),
    check_size(MAX_TARGETS),
    AfterValidator(_check_distinct),
]


class BatchCompileItem(CompileRequest):
    """A request of a batch to compile a kernel: for a `target`, for each of several `targets`, or for `hardware`."""

    targets: Targets | None = None

    @model_validator(mode="after")
    def _one_device(self) -> BatchCompileItem:
        _check_one(target=self.target, targets=self.targets, hardware=self.hardware)
        return self

    def for_each_target(self) -> list[CompileRequest]:
        """Return the requests that this one stands for."""
        if self.targets is None:
            return [self]
        fields = {name: getattr(self, name) for name in CompileRequest.model_fields}
        return [CompileRequest(**fields | {"target": target}) for target in self.targets]


class BatchCompileRequest(RequestModel):
    """Requests to compile kernels, which are accepted or rejected one by one."""

    requests: Annotated[list[BatchCompileItem], Field(min_length=1, fail_fast=True), check_size(MAX_ITEMS)]


class CancelRequest(RequestModel):
    for_all: bool = Field(default=False, description="end it even if other clients wait for it; needs the scope admin")


class ValidateHardwareRequest(RequestModel):
    hardware: Spec | Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)] = Field(
        description="a spec as JSON, or the text of a YAML file"
    )


class EstimateRequest(_EstimateOptions):
    """A request to estimate programs for `targets`, for `hardware`, a spec as JSON, or for both."""

    items: Annotated[list[ProgramModel], Field(min_length=1, fail_fast=True), check_size(MAX_ITEMS)]
    targets: Targets | None = None
    hardware: Spec | None = None
    top_k: int = 1

    @model_validator(mode="after")
    def _any_device(self) -> EstimateRequest:
        if self.targets is None and self.hardware is None:
            raise ValueError("expected targets, hardware, or both")
        return self


class GraphSource(RequestModel):
    """An ONNX file in a blob, or a JSON graph."""

    blob: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    graph: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> GraphSource:
        if (self.blob is None) == (self.graph is None):
            raise ValueError("expected exactly one of blob and graph")
        return self


class TuneOptionsModel(RequestModel):
    """The options of trials."""

    budget_trials: int = Field(64, ge=1, le=MAX_TRIALS, description="of a bucket, before whole calls are compared")
    budget_s: float | None = Field(None, gt=0, description="seconds after which no trial begins")
    exact: bool = Field(default=False, description="keep only kernels whose results have the same bits")


class GraphOptions(_NamedOptions):
    """The options of compile_model."""

    tune: Literal["off", "now"] = Field(
        "off", description="`now` chooses kernels by trials of the whole model on the worker, and makes `select` `measure`"
    )
    tune_options: TuneOptionsModel = TuneOptionsModel()

    threads: int | None = Field(None, ge=1)
    plan: Literal["auto", "serial", "parallel", "rammer", "eager", "launches", "graph", "waves", "persistent"] = "auto"
    dims: Annotated[dict[Name, Extent | Extents], check_size(MAX_DIMENSIONS)] = Field(
        {}, description="extents of symbolic dimensions; a list makes a bucket for each"
    )
    constants: Annotated[dict[Name, Numbers], check_size(MAX_INPUTS), check_values(MAX_CONSTANT_VALUES, "the constants")] = Field(
        {}, description="values of inputs, which the compiled model does not have; of an array, nested lists of its elements"
    )
    inputs: Annotated[dict[Name, TensorTypeModel], check_size(MAX_INPUTS)] = Field(
        {}, description="types of inputs that an ONNX model leaves open"
    )
    states: Annotated[dict[Name, Name], check_size(MAX_INPUTS)] = Field(
        {}, description="inputs that calls update in place, each with the output that is its new value; a * in both is any text"
    )
    devices: Annotated[dict[Name, Name], check_size(MAX_INPUTS)] = Field(
        {}, description="devices of nodes by name, or by a pattern with *: an id, or python:NAME for a function of the service"
    )
    across: Literal["merged", "split"] = Field("merged", description="how subgraphs of several devices follow each other")
    order: Literal["dataflow", "serial"] = "dataflow"
    sink: Literal["auto", "require"] = Field("auto", description="`require` refuses a model whose call is several submissions")

    @model_validator(mode="before")
    @classmethod
    def _select_by_trials(cls, value: object) -> object:
        """Let trials measure: they choose among kernels that are measured."""
        tunes = isinstance(value, dict) and value.get("tune") == "now" and "select" not in value
        return {**value, "select": "measure"} if isinstance(value, dict) and tunes else value

    @model_validator(mode="after")
    def _check_trials(self) -> GraphOptions:
        if self.tune == "now" and self.select != "measure":
            raise ValueError('tune measures kernels: expected select "measure", got "model"')
        if self.tune == "off" and self.tune_options != TuneOptionsModel():
            raise ValueError('tune_options are those of tune "now"')
        if self.tune == "now" and self.devices:
            raise ValueError('trials are of models on one device: expected tune "off" with devices')
        return self


class GraphRequest(BuildTerms):
    """A request to compile or estimate a model."""

    model: GraphSource
    target: Name
    options: GraphOptions = GraphOptions()


class CheckPlanRequest(RequestModel):
    """Programs of the vEUs of a compiled model for a CPU, to check."""

    model: Name
    bucket: int = Field(0, ge=0, le=MAX_ITEMS)
    programs: list[Any] = Field(description="for each step of the plan with `vdevice`, in order: `programs` as there, [vEU][order]")


class CheckedPlan(BaseModel):
    """When each instruction of a legal plan runs, by the performance model."""

    seconds: float
    instructions: list[dict[str, Any]] = Field(description="as those of the model's story")


class GraphBatchItem(BuildTerms):
    """A request of a batch to compile a model: for each of several targets."""

    model: GraphSource
    targets: Targets
    options: GraphOptions = GraphOptions()

    def for_each_target(self) -> list[GraphRequest]:
        """Return the requests that this one stands for."""
        terms = {name: getattr(self, name) for name in BuildTerms.model_fields}
        return [GraphRequest(model=self.model, target=target, options=self.options, **terms) for target in self.targets]


class GraphBatchRequest(RequestModel):
    """Requests to compile models, which are accepted or rejected one by one."""

    requests: Annotated[list[GraphBatchItem], Field(min_length=1, fail_fast=True), check_size(MAX_ITEMS)]


class ProblemItem(BaseModel):
    pointer: str | None = None
    line: int | None = None
    column: int | None = None
    end_column: int | None = None
    message: str
    hint: str | None = None


class UnsupportedNodeModel(BaseModel):
    operator: str
    name: str
    reason: str


class Problem(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemItem] = []
    nodes: list[UnsupportedNodeModel] | None = None  # of a model with unsupported ones


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
    once_s: float = 0.0


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
    estimate: PlanEstimate | None = Field(description="null of a schedule by hand")
    measurement: dict[str, Any] | None
    notes: list[str] = []
    links: dict[str, str]


class OperationMetadata(BaseModel):
    stage: Literal["queued", "building", "done"]
    cache: Literal["hit", "miss", "joined"]
    create_time: str
    start_time: str | None = Field(None, description="when a worker began the last attempt")
    end_time: str | None = Field(None, description="when it was done")
    action: str | None = Field(None, description="digest of everything that decides the result")
    attempt: int = Field(0, description="workers that have begun to build it so far")
    queue: str | None = Field(None, description="machines that can build it")
    worker: str | None = Field(None, description="id of the worker that builds it")
    queue_position: int | None = Field(None, description="builds of its queue that start first; of a queued operation")
    waiting_for: str | None = Field(None, description="queue of the operation, while no worker takes from it")


class OperationRequest(BaseModel):
    """A request as an operation names it: an expression or the blob of a model, and the device."""

    expression: str | None = None
    model: str | None = None
    target: str | None


class OperationResponse(BaseModel):
    """AIP-151: `response` or `error` once done, neither before."""

    name: str
    done: bool
    metadata: OperationMetadata
    request: OperationRequest | None = None
    response: KernelResponse | None = None
    error: Problem | None = None


class FieldDifference(BaseModel):
    """A field of a part of the key, by its path; null: the part lacks it."""

    field: str
    this: Any
    nearest: Any


class PartDifference(BaseModel):
    part: Literal["expression", "spec", "options", "compiler", "generator"]
    fields: list[FieldDifference] = Field(description="at most 50")


class NearestAction(BaseModel):
    """The stored action whose key is the most alike: the same expression first, then the most equal parts."""

    action: str
    result: str
    create_time: str
    differences: list[PartDifference]


class RememberedError(BaseModel):
    """An error of the request's own, which the same request gets without another build."""

    code: str
    message: str
    until: str


class ActionResponse(BaseModel):
    """`nearest` is null if there is a result, or nothing to compare with."""

    action: str
    result: str | None = Field(description="digest of the kernel or model in the store")
    remembered_error: RememberedError | None
    parts: dict[str, str] = Field(description="hashes of the parts of the key; empty for an action of an older version")
    nearest: NearestAction | None


class ReadyResponse(BaseModel):
    status: Literal["ready"]
    parts: dict[str, Literal["ok", "failed", "timeout"]]  # what the service needs, by name


class BlobResponse(BaseModel):
    digest: str
    bytes: int


class ModelTensor(BaseModel):
    name: str
    dtype: str
    shape: list[int]


class ModelKernelUse(BaseModel):
    """A kernel of a model: the number of nodes it computes, and the estimated seconds of all its runs in a call."""

    digest: str
    uses: int
    seconds: float


class ModelSeconds(BaseModel):
    seconds: float


class ModelSubgraph(BaseModel):
    """Nodes that one device runs in a call, or one function of Python."""

    device: str
    nodes: list[str]
    inputs: list[str]
    outputs: list[str]
    seconds: float


class OutsideNode(BaseModel):
    node: str
    reason: str


class ModelSinks(BaseModel):
    """Count the submissions of a call, and name the nodes outside of them."""

    submissions: int
    outside: list[OutsideNode]


class ModelResponse(BaseModel):
    digest: str
    target: str
    inputs: list[ModelTensor]
    outputs: list[ModelTensor]
    states: list[ModelTensor] = Field([], description="memory of the caller that a call updates")
    kernels: list[ModelKernelUse]
    plan: dict[str, Any]
    estimate: ModelSeconds
    lowerings: dict[str, dict[str, Any]] = Field(
        {}, description="of a GPU: the seconds of a call by each kind of plans, or why the model cannot have it"
    )
    tuning: dict[str, Any] | None = Field(None, description="of `tune: now`: the kernels that trials have chosen, and the gain")
    subgraphs: list[ModelSubgraph] = Field([], description="of a model over several devices")
    copies: list[dict[str, Any]] = Field([], description="between memories of devices: tensor, from, to, bytes, seconds, reason")
    sinks: ModelSinks | None = None
    links: dict[str, str]


class ModelOperationResponse(BaseModel):
    """The operation of a model, as OperationResponse is that of a kernel."""

    name: str
    done: bool
    metadata: OperationMetadata
    request: OperationRequest | None = None
    response: ModelResponse | None = None
    error: Problem | None = None


class QueueFigures(BaseModel):
    """Operations of a queue in one state."""

    queue: str
    state: Literal["queued", "building"]
    operations: int
    oldest_s: float = Field(description="age of the oldest")


class FarmResponse(BaseModel):
    """The build farm at one moment."""

    window_s: float = Field(description="seconds before now in which the operations of `ended`, `wait_s` and `build_s` ended")
    queues: list[QueueFigures] = Field(description="operations that are not done")
    workers: dict[str, int] = Field(description="workers that are alive, by state")
    ended: dict[str, int] = Field(description='operations by the code of their error; "ok" for those without')
    wait_s: dict[str, float] = Field(description="from the request to the last attempt, by quantile")
    build_s: dict[str, float] = Field(description="of the last attempt, by quantile")
    submissions: dict[str, int] = Field(description="requests that this service accepted, by how they met the cache")


class OperationList(BaseModel):
    """A page of operations, the latest first (AIP-158)."""

    operations: list[OperationResponse | ModelOperationResponse]
    next_page_token: str = Field(description="for the next page; empty on the last one")


class BatchEntry(BaseModel):
    """A build of a batch, or why it was rejected."""

    request: int = Field(0, description="number of the request in the batch, from 0")
    target: str | None = Field(None, description="null: the request has a spec")
    error: Problem | None = None


class BatchResult(BatchEntry):
    """The operation of a kernel for one target, or why it was rejected."""

    operation: OperationResponse | None = None


class BatchCompileResponse(BaseModel):
    results: list[BatchResult] = Field(description="one for each request and target, in their order")


class GraphBatchResult(BatchEntry):
    """The operation of a model for one target, or why it was rejected."""

    operation: ModelOperationResponse | None = None


class GraphBatchResponse(BaseModel):
    results: list[GraphBatchResult] = Field(description="one for each request and target, in their order")


class ValidHardware(BaseModel):
    hardware: dict[str, Any] = Field(description="the spec in its normal form, with every field")


class OperationEvent(BaseModel):
    """An event of an operation: `queued`, `building`, `retry` or `done`. Its number is the id of the SSE event."""

    number: int
    type: str
    time: str
    data: dict[str, Any]


class ClassEstimate(BaseModel):
    """The estimate of a kernel of a model: the nodes it computes, and the seconds of all its runs in a call."""

    expression: str
    uses: int
    seconds: float


class GraphEstimateResponse(BaseModel):
    target: str
    dims: dict[str, int] = Field({}, description="extents of the symbolic dimensions of the bucket that is estimated, the first")
    buckets: int = Field(1, description="number of buckets that the request's dims make")
    seconds: float
    kernels: list[ClassEstimate]
    plan: str | None = Field(None, description="of a GPU: the kind of plans that has these seconds")
    lowerings: dict[str, dict[str, Any]] = Field(
        {}, description="of a GPU: the seconds of a call by each kind of plans, or why it has none without a compiler"
    )


class RooflineLevel(BaseModel):
    """A lower bound: compulsory traffic at the bandwidth of a memory level, or all operations at the compute rate."""

    level: str
    seconds: float
    bytes: int | None = None
    operations: int | None = None


class Floor(BaseModel):
    """The least time of a program, whichever kernels compute it.

    Inputs and outputs once, the operations on the fastest units that their types allow, one launch.
    """

    seconds: float
    level: str
    bytes: int
    traffic_seconds: float
    unit: str
    operations: int
    arithmetic_seconds: float
    launch_seconds: float


class EstimatedPlan(PlanEstimate):
    floor_share: float = Field(description="the floor's seconds over those of this plan")
    above_floor: str | None = Field(None, description="why the plan takes more than three times the floor")


class ItemEstimates(BaseModel):
    """The estimates of one item on one target: `roofline`, `floor` and `candidates`, or `error`."""

    item: int
    target: str
    roofline: list[RooflineLevel] | None = None
    floor: Floor | None = None
    candidates: list[EstimatedPlan] | None = None
    notes: list[str] = Field([], description="what is slow or looks mistaken, and what would be better")
    error: Problem | None = None


class EstimateResponse(BaseModel):
    estimates: list[ItemEstimates]


# Former names.
CompileBody = CompileRequest
EstimateBody = EstimateRequest
KernelAnswer = KernelResponse
OperationAnswer = OperationResponse
EstimatesAnswer = EstimateResponse
