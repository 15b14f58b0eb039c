"""Compile a kernel on a service (--server)."""

from __future__ import annotations

import argparse
import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from roller_svc import api, hardware
from roller_svc.cli import options as common
from roller_svc.client.client import Client
from roller_svc.client.schemas import CompileRequest
from roller_svc.errors import ArgumentError, BuildServiceError
from roller_svc.settings import settings

B = TypeVar("B", bound=BaseModel)
MAX_FILE_BYTES = 1 << 30


def open_client(server: str) -> Client:
    return Client(server, api_key=settings().api_key.get_secret_value())


def kernel(options: argparse.Namespace, server: str) -> api.Kernel:
    """Compile a kernel on the service and load it in this process."""
    with open_client(server) as service:
        operation = service.compile(_compile_request(options))
        if operation.response is None:
            raise BuildServiceError(f"unexpected response from {server}: no kernel", code="bad-answer")
        bundle = service.file(operation.response.links["bundle"])
    with tempfile.TemporaryDirectory(prefix="roller-") as folder:
        unpack(bundle, Path(folder))
        return api.load(folder)


def unpack(bundle: bytes, folder: Path) -> None:
    """Extract a bundle into a directory; accept only plain names and bounded sizes."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            for entry in archive.infolist():
                if Path(entry.filename).name != entry.filename or entry.file_size > MAX_FILE_BYTES:
                    raise BuildServiceError(
                        f"unexpected file in the service's bundle: expected a plain name and at most {MAX_FILE_BYTES} "
                        f"bytes, got {entry.filename!r} with {entry.file_size}",
                        code="bad-answer",
                    )
                (folder / entry.filename).write_bytes(archive.read(entry))
    except zipfile.BadZipFile as failure:
        raise BuildServiceError("the service's bundle is not a zip archive", code="bad-answer") from failure


def program_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the program fields of a request body."""
    inputs = common.parse_inputs(options)
    return {
        "expression": common.read_expression(options),
        "inputs": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in inputs.items()},
        "outputs": options.output or None,
    }


def validate_body(model: type[B], fields: dict[str, Any]) -> B:
    """Validate a request body. Raises ArgumentError with the service's message."""
    try:
        return model.model_validate(fields)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArgumentError(f"{field}: {first['msg']}", code="invalid-body") from failure


def _compile_request(options: argparse.Namespace) -> CompileRequest:
    # The service knows the specs of its targets; send a spec from a file along.
    device = common.parse_device(options)
    if "hardware" in device:
        device = {"hardware": hardware.to_mapping(device["hardware"])}
    choice = {
        "top_k": options.top_k,
        "select": options.select,
        "runtime": common.runtime_name(options),
        "allow_tf32": options.allow_tf32,
        "family": options.family,
        "tiles": common.parse_tiles(options),
        "constants": options.constant,
        "winograd": options.winograd,
    }
    return validate_body(CompileRequest, program_fields(options) | device | {"options": choice})
