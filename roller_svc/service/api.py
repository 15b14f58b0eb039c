"""The HTTP interface without its resources: routes, errors, and the OpenAPI document.

`python -m roller_svc.service.api FILE` writes the document, whose copy is docs/openapi.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import Lifespan

from roller_svc.client.schemas import Problem
from roller_svc.service.access import OPEN_PATHS, RequiredScope, routes_of
from roller_svc.service.problems import MEDIA_TYPE, add_handlers
from roller_svc.service.routes import (
    actions,
    estimates,
    farm,
    hardware,
    health,
    kernel_batches,
    kernels,
    models,
    operations,
    page,
    schedules,
    stories,
    workers,
)
from roller_svc.version import __version__

ROUTE_MODULES = (
    kernels,
    kernel_batches,
    stories,
    operations,
    actions,
    estimates,
    schedules,
    models,
    hardware,
    workers,
    farm,
    health,
    page,
)
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "an API key, or a token of the identity provider"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_VALIDATION_SCHEMAS = ("HTTPValidationError", "ValidationError")  # FastAPI's, which no response of this service has


def create_api(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Create the application with its routes."""
    api = _Api(
        title="roller-svc",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would echo the client's Host header
        generate_unique_id_function=lambda route: route.name,
    )
    add_handlers(api)
    for module in ROUTE_MODULES:
        api.include_router(module.router)
    return api


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return _document(self)


def _document(api: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document: FastAPI's, with problems for all errors and the scopes of routes."""
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        components = document["components"]
        for name in _VALIDATION_SCHEMAS:
            components["schemas"].pop(name, None)
        components["schemas"]["Problem"] = _problem_schema()
        components["securitySchemes"] = SECURITY_SCHEMES
        problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
        scopes = {route.path_format: _scope_of(route.dependant.dependencies) for route in routes_of(api)}
        for path, operation in _operations(document):
            responses = operation["responses"]
            for status in [status for status in responses if status >= "400"]:
                del responses[status]
            responses["default"] = {"description": "an error (RFC 9457)", "content": problem}
            operation["security"] = [] if path in OPEN_PATHS else [{name: []} for name in SECURITY_SCHEMES]
            if scopes[path] is not None:
                operation["x-scope"] = scopes[path]
        api.openapi_schema = document
    return api.openapi_schema


def _problem_schema() -> dict[str, Any]:
    """Return the schema of a problem, whose parts are in the document already or inlined."""
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return schema


def _scope_of(dependencies: list[Any]) -> str | None:
    return next((each.call.scope.value for each in dependencies if isinstance(each.call, RequiredScope)), None)


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the object of each operation."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def format_document(api: FastAPI) -> str:
    return json.dumps(api.openapi(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(format_document(create_api()), encoding="utf-8")
