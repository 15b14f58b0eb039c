"""roller why-miss: say which part of a request's key differs from the nearest result in the store."""

from __future__ import annotations

import argparse
import json
from typing import Any

from roller_svc import settings
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import remote
from roller_svc.compiler.action import action_key, shown_contents
from roller_svc.farm.actions import ActionLog, explanation_json
from roller_svc.farm.database.migrate import open_upgraded
from roller_svc.farm.store import Store
from roller_svc.ir.options import KernelOptions

MAX_VALUE_CHARACTERS = 60
COLUMNS = ("part", "field", "this request", "nearest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    common.add_device(parser)
    common.add_options(parser, KernelOptions, select="model")
    common.add_server(parser)
    parser.add_argument("--store", metavar="DIR", help="directory of the service's store, which has the database")


def execute(options: argparse.Namespace) -> int:
    server = common.server_url(options)
    facts = remote.explain_action(options, server) if server else _explain_locally(options)
    show.print_result(options, facts, _text(facts))
    return 0


def _explain_locally(options: argparse.Namespace) -> dict[str, Any]:
    """Compare with the store and the database of the settings."""
    request = common.parse_request(options)
    key = action_key(request)
    contents = shown_contents(request, key)
    current = settings.read_settings(store=options.store)
    with open_upgraded(current.database_url) as database:
        log = ActionLog(database, Store(current.store, settings.s3_options()))
        return explanation_json(log.explain(key, contents))


def _text(facts: dict[str, Any]) -> str:
    if facts["result"] is not None:
        return f"{facts['action']} is stored: {facts['result']}"
    nearest = facts["nearest"]
    lines = [f"{facts['action']} is not stored"]
    if facts["remembered_error"] is not None:
        error = facts["remembered_error"]
        lines.append(f"its error stands until {error['until']}: {error['code']}: {error['message']}")
    if nearest is None:
        return "\n".join([*lines, "nothing comparable was built"])
    lines.append(f"the nearest is {nearest['action']} of {nearest['create_time']}, which differs in")
    rows = [
        (part["part"], field["field"], _short(field["this"]), _short(field["nearest"]))
        for part in nearest["differences"]
        for field in part["fields"] or [{"field": "", "this": "", "nearest": ""}]
    ]
    return "\n".join([*lines, show.format_table(COLUMNS, rows)])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."
