"""roller serve: run the HTTP service until it is interrupted."""

from __future__ import annotations

import argparse
import pkgutil

from roller_svc import hardware, settings
from roller_svc.cli import options as common

RUN_SERVER = "roller_svc.service.server:run_server"  # by name, so that no other subcommand loads the web framework


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on; requires an API key unless it is loopback")
    parser.add_argument("--port", type=int)
    parser.add_argument("--store", metavar="DIR", help="directory of the store; created if missing")
    parser.add_argument("--workers", type=int, help="build worker processes")
    parser.add_argument("--processes", type=int, help="processes that serve requests; only the first one builds")
    common.add_calibration(parser)


def execute(options: argparse.Namespace) -> int:
    current = settings.read_settings(
        host=options.host, port=options.port, store=options.store, workers=options.workers, processes=options.processes
    )
    settings.use(current)
    if error := hardware.local_spec_error():
        raise error
    common.pin_local(options)
    run_server = pkgutil.resolve_name(RUN_SERVER)
    try:
        has_started: bool = run_server(settings.settings())
    except SystemExit:  # uvicorn has logged why it could not start; its exit code has another meaning here
        return 1
    return 0 if has_started else 1
