"""roller warm: build models for targets ahead, such as after an upgrade, whose first requests would all be misses."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from importlib import import_module
from pathlib import Path

import httpx
from pydantic import SecretStr

from roller_svc import settings
from roller_svc.cli import options as common
from roller_svc.cli import remote
from roller_svc.cli.builds import print_builds
from roller_svc.cli.model import add_graph_options, graph_options
from roller_svc.client.async_client import AsyncClient
from roller_svc.client.calls import ModelFile
from roller_svc.client.client import MODEL_TIMEOUT_S
from roller_svc.client.schemas import GraphOptions, ModelOperationResponse
from roller_svc.errors import ArgumentError, RollerError
from roller_svc.ir.options import SelectionMode

Builds = dict[str, dict[str, ModelOperationResponse | RollerError]]
OWN_SERVICE = "http://127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="MODEL", help="ONNX files and JSON graphs")
    parser.add_argument("--targets", required=True, metavar="ID,ID", help="devices; `roller targets` lists them")
    add_graph_options(parser, select=SelectionMode.MODEL.value)  # the default of requests to a service
    parser.add_argument("--timeout", type=float, default=MODEL_TIMEOUT_S, metavar="S", help="for all (default: %(default)s)")
    common.add_server(parser)
    parser.add_argument("--store", metavar="DIR", help="without --server: directory of the store that is filled")
    parser.add_argument("--workers", type=int, help="without --server: builds at once")
    common.add_calibration(parser)
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    """Build. Return 1 if anything failed. Running it again goes on: what is built is a hit, what is queued is joined."""
    common.check_positive(options, "timeout")
    sources: dict[str, ModelFile] = {file: remote.model_source(Path(file)) for file in options.files}
    targets, graph = common.parse_targets(options.targets), graph_options(options)
    if server := common.server_url(options):
        if options.store or options.workers:
            raise ArgumentError("--store and --workers are those of this process: leave out --server", code="invalid-option")
        with remote.open_client(server) as service:
            builds: Builds = service.compile_models(sources, targets, graph, options.timeout)
    else:
        common.pin_local(options)
        builds = asyncio.run(_build_here(options, sources, targets, graph))
    return print_builds(options, builds)


async def _build_here(
    options: argparse.Namespace, sources: dict[str, ModelFile], targets: list[str], graph: GraphOptions
) -> Builds:
    """Build by a service in this process that nobody else can connect to, with the store and database of the settings."""
    key = secrets.token_urlsafe()
    current = settings.read_settings(store=options.store, workers=options.workers)
    own = current.model_copy(update={"api_keys": SecretStr(key), "host": "127.0.0.1", "processes": 1})
    app = import_module("roller_svc.service.app").create_app(own)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), AsyncClient(OWN_SERVICE, api_key=key, transport=transport) as service:
        return await service.compile_models(sources, targets, graph, options.timeout)
