"""The OpenAPI document: its copy in docs/, and the whole API against it by Schemathesis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import Builder, digest_of
from fastapi import Request
from serving import running

from roller_svc.errors import UnsupportedModelError, UnsupportedNode
from roller_svc.service.api import create_api, format_document
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "docs" / "openapi.json"
KEY = "a-key-for-schemathesis"
TIMEOUT_S = 580

# Checks of Schemathesis that say nothing here: a request that the schema allows may name an unknown device, or hold
# text that is not an expression.
REACHED = (
    ("/v1/kernels:compile", 200), ("/v1/kernels:compile", 202), ("/v1/kernels:measure", 202),
    ("/v1/kernels:batchCompile", 200), ("/v1/operations", 200), ("/v1/operations/{operation_id}", 200),
    ("/v1/operations/{operation_id}/events", 200), ("/v1/operations/{operation_id}:cancel", 200),
    ("/v1/estimates", 200), ("/v1/blobs/{digest}", 200), ("/v1/kernels/{digest}", 200),
)  # fmt: skip
EXCLUDED_CHECKS = ("positive_data_acceptance",)
# 413 is not in Schemathesis' own list.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]
"""


def test_the_copy_is_current() -> None:
    current = format_document(create_api())
    assert COPY.read_text(encoding="utf-8") == current, "python -m roller_svc.service.api docs/openapi.json"


def test_the_document_is_complete() -> None:
    document = create_api().openapi()
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert max(Counter(each["operationId"] for each in operations).values()) == 1
    for operation in operations:
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        assert operation["description"]
    schemas = set(document["components"]["schemas"])
    text = json.dumps(document)
    assert {name for name in schemas if f'"#/components/schemas/{name}"' not in text} == set()
    assert "HTTPValidationError" not in text


def prepared(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what Schemathesis needs to get far: likely values, and links to operations."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    schemas = changed["components"]["schemas"]
    # batches and estimates report such faults by item, with status 200
    schemas["BatchItem"] = json.loads(json.dumps(schemas["CompileRequest"]).replace("TensorTypeModel", "AnyType"))
    schemas["ProgramModel"] = json.loads(json.dumps(schemas["ProgramModel"]).replace("TensorTypeModel", "AnyType"))
    schemas["AnyType"] = json.loads(json.dumps(schemas["TensorTypeModel"]))
    schemas["BatchCompileRequest"]["properties"]["requests"]["items"] = {"$ref": "#/components/schemas/BatchItem"}
    schemas["TensorTypeModel"]["properties"]["dtype"] = {"enum": ["float32", "int8"]}
    # JSON Schema takes 1.0 as an integer, which the service refuses
    schemas["TensorTypeModel"]["properties"]["shape"]["items"] = {"enum": [1, 7, 64]}
    compiled = schemas["CompileRequest"]
    compiled["properties"]["priority"] = {"enum": [-100, 0, 7]}
    del compiled["properties"]["hardware"]  # it excludes a target, and almost no random value is a spec
    compiled["required"].append("target")
    estimated = schemas["EstimateRequest"]
    del estimated["properties"]["hardware"]
    estimated["required"].append("targets")
    del changed["paths"]["/v1/farm/events"]  # it has no end
    one_output = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
    compiled["properties"]["outputs"] = {"anyOf": [one_output, {"type": "null"}]}
    for name in ("CompileRequest", "GraphRequest"):
        schemas[name]["properties"]["target"] = {"enum": ["cpu-x86-avx2", "nvidia-h200-sxm", "local"]}
    compiled["properties"]["options"] = {
        "type": "object", "additionalProperties": False,
        "properties": {
            "select": {"enum": ["model", "measure"]}, "top_k": {"type": "integer", "minimum": 1, "maximum": 100},
        },
    }  # fmt: skip
    operation = {"operation_id": "$response.body#/name#regex:operations/(.+)"}
    links = {
        "operation": {"operationId": "operation", "parameters": operation},
        "events": {"operationId": "operation_events", "parameters": operation},
        "cancel": {"operationId": "cancel_operation", "parameters": operation, "requestBody": {}},
    }
    for verb in ("kernels:compile", "kernels:measure", "graphs:compile"):
        for status in ("200", "202"):
            changed["paths"][f"/v1/{verb}"]["post"]["responses"][status].setdefault("links", {}).update(links)
    return changed


def counting(statuses: Counter[tuple[str, int]]) -> Any:
    """A middleware that counts responses by route and status."""

    async def count(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        route = request.scope.get("route")
        statuses[getattr(route, "path_format", "?"), response.status_code] += 1
        return response

    return count


@pytest.mark.slow
def test_schemathesis_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack_settings: dict[str, Any]) -> None:
    """All phases, with a builder that needs no time: no 5xx, nothing that the document does not have."""
    limits = "refusals=100000/100000"  # requests without a key are a part of it
    settings = Settings(
        store=tmp_path / "store", api_keys=KEY, queue_length=100_000, max_wait_s=1.0, limits=limits, **stack_settings
    )
    app = create_app(settings, Builder(), digest_of)
    node = UnsupportedNode("Op", "name", "it is a test")

    def refuse(_: Any) -> Any:
        raise UnsupportedModelError((node,))

    for verb in ("build", "estimate"):  # models take processes, which have tests of their own
        monkeypatch.setattr(app.state.roller.models, verb, refuse)
    schema = tmp_path / "openapi.json"
    schema.write_text(json.dumps(prepared(app.openapi())))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    statuses: Counter[tuple[str, int]] = Counter()
    app.middleware("http")(counting(statuses))
    with running(app) as (_, port):
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", str(schema), "--url", f"http://127.0.0.1:{port}",
            "--header", f"Authorization: Bearer {KEY}", "--phases", "examples,coverage,fuzzing,stateful",
            "--checks", "all", "--exclude-checks", ",".join(EXCLUDED_CHECKS), "--max-examples", "60", "--seed", "1",
            "--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off",
        ]  # fmt: skip
        environment = os.environ | {"NO_COLOR": "1"}
        result = subprocess.run(  # the command of this test
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    report = result.stdout[-20_000:] + result.stderr[-2_000:]
    assert result.returncode == 0, report
    # it got through: builds began and ended, were followed and cancelled
    for path, status in REACHED:
        assert statuses[path, status], f"{path} {status}: {sorted(statuses.items())}"
    summary = result.stdout.split("Test Phases:")[1].split("Test cases:")[0]
    assert [line.split()[1] for line in summary.splitlines() if "✅" in line] == [
        "Examples",
        "Coverage",
        "Fuzzing",
        "Stateful",
    ], report
