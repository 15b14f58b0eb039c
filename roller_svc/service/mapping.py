"""Bodies of requests → what the core takes; operations → bodies of answers."""

from __future__ import annotations

from urllib.parse import quote

from roller_svc.client.schemas import CompileBody, ProgramBody
from roller_svc.compiler.estimates.batch import Item
from roller_svc.compiler.request import build_request
from roller_svc.farm.build import BINARY, METADATA, SOURCE
from roller_svc.farm.operations import Operation
from roller_svc.farm.store import Json
from roller_svc.ir.report import BuildRequest
from roller_svc.service.problems import recorded_problem


def build_request_of(body: CompileBody) -> BuildRequest:
    device = {"target": body.target} if body.hardware is None else {"hardware": body.hardware}
    return build_request(
        body.expression,
        plain_inputs(body),
        outputs=body.outputs,
        top_k=body.options.top_k,
        select=body.options.select,
        runtime=body.options.runtime,
        allow_tf32=body.options.allow_tf32,
        family=body.options.family,
        tiles=body.options.tiles,
        constants=body.options.constants,
        **device,
    )


def item_of(body: ProgramBody, *, allow_tf32: bool) -> Item:
    return Item(body.expression, plain_inputs(body), body.outputs, allow_tf32)


def plain_inputs(body: ProgramBody) -> dict[str, object]:
    return {name: (kind.dtype, kind.shape) for name, kind in body.inputs.items()}


def operation_json(operation: Operation) -> Json:
    """AIP-151: `response` or `error` once it is done, neither before."""
    answer: Json = {
        "name": f"operations/{operation.id}",
        "done": operation.done,
        "metadata": {
            "stage": operation.stage.value,
            "cache": operation.cache.value,
            "create_time": operation.create_time,
        },
    }
    if operation.facts is not None:
        answer["response"] = kernel_answer(operation.facts)
    if operation.error is not None:
        answer["error"] = recorded_problem(operation.error)
    return answer


def kernel_answer(facts: Json) -> Json:
    """A kernel's facts with links to its files in place of their names."""
    base = f"/v1/kernels/{quote(str(facts['digest']), safe=':')}"
    kinds = [SOURCE, BINARY, METADATA, *(["ptx", "sass"] if facts["language"] == "cuda" else []), "bundle"]
    shown = {key: value for key, value in facts.items() if key != "files"}
    return shown | {"links": {kind: f"{base}/{kind}" for kind in kinds}}
