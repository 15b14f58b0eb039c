"""roller operations: list, show, watch and cancel the builds of a service."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import remote
from roller_svc.client.calls import AnyOperation
from roller_svc.client.client import Client
from roller_svc.client.problems import error_from_problem
from roller_svc.errors import ArgumentError, BuildError

DEFAULT_COUNT = 20
COLUMNS = ("operation", "stage", "cache", "created", "attempt", "queue", "result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list your operations, the latest first", allow_abbrev=False)
    listed.add_argument("--count", type=int, default=DEFAULT_COUNT, metavar="N", help="default: %(default)s")
    shown = actions.add_parser("show", help="show one operation", allow_abbrev=False)
    watched = actions.add_parser("watch", help="print the events of an operation until it is done", allow_abbrev=False)
    cancelled = actions.add_parser("cancel", help="withdraw from an operation", allow_abbrev=False)
    cancelled.add_argument("--for-all", action="store_true", help="end it for every client; needs the scope admin")
    for action in (shown, watched, cancelled):
        action.add_argument("id", help="id of the operation")
    for action in (listed, shown, watched, cancelled):
        action.add_argument("--json", action="store_true", help="write JSON to stdout; `watch`: a line for each event")
        common.add_server(action)


def execute(options: argparse.Namespace) -> int:
    server = common.server_url(options)
    if not server:
        raise ArgumentError("operations are those of a service: name it by --server or ROLLER_SERVER")
    with remote.open_client(server) as service:
        match options.action:
            case "list":
                common.check_positive(options, "count")
                operations = list(islice(service.operations(), options.count))
                _print(options, {"operations": [_facts(operation) for operation in operations]}, operations)
            case "watch":
                _watch(service, _name(options), as_json=options.json)
            case "cancel":
                cancelled = service.cancel(_name(options), for_all=options.for_all)
                _print(options, _facts(cancelled), [cancelled])
            case _:
                found = service.operation(_name(options))
                _print(options, _facts(found), [found])
    return 0


def _name(options: argparse.Namespace) -> str:
    return f"operations/{options.id.removeprefix('operations/')}"


def _print(options: argparse.Namespace, facts: dict[str, Any], operations: Sequence[AnyOperation]) -> None:
    show.print_result(options, facts, show.format_table(COLUMNS, [_row(operation) for operation in operations]))


def _watch(service: Client, name: str, *, as_json: bool) -> None:
    """Print events as they happen. Raises the error of a failed build."""
    for event in service.events(name):
        if as_json:
            print(event.model_dump_json(), flush=True)
        else:
            data = " ".join(f"{key}={value}" for key, value in event.data.items() if value is not None)
            print(f"{event.time}  {event.type}  {data}".rstrip(), flush=True)
    operation = service.operation(name)
    if operation.error is not None:
        raise error_from_problem(operation.error.model_dump(), BuildError)
    if not operation.done:
        print("the stream ended before the operation", file=sys.stderr)


def _facts(operation: AnyOperation) -> dict[str, Any]:
    return operation.model_dump(exclude_none=True)


def _row(operation: AnyOperation) -> tuple[object, ...]:
    metadata = operation.metadata
    result = operation.response.digest[:19] if operation.response else operation.error.code if operation.error else "-"
    name = operation.name.removeprefix("operations/")
    return (
        name,
        metadata.stage,
        metadata.cache,
        metadata.create_time,
        metadata.attempt,
        metadata.queue or "-",
        result,
    )
