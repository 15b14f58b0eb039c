"""roller tuning: list, export, import and clear the seconds of trials that choose a model's kernels."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from roller_svc.cli import format as show
from roller_svc.errors import ArgumentError
from roller_svc.graph.wiring.index import FILE, clear_profiles, export_profiles, import_profiles
from roller_svc.settings import settings

COLUMNS = ("device", "compiler", "models", "profiles")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="count the profiles of each device; --json has all of them", allow_abbrev=False)
    exported = actions.add_parser("export", help="write all profiles as JSON to FILE, - for stdout", allow_abbrev=False)
    imported = actions.add_parser("import", help="add the profiles of FILE, - for stdin; least seconds win", allow_abbrev=False)
    cleared = actions.add_parser("clear", help="remove all profiles", allow_abbrev=False)
    cleared.add_argument("--device", metavar="NAME", help="only those of a device, by the name that list shows")
    for action in (exported, imported):
        action.add_argument("file", metavar="FILE")
    for action in (listed, imported, cleared):
        action.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    index = settings().cache_folder / FILE
    match options.action:
        case "list":
            document = export_profiles(index)
            show.print_result(options, document | {"file": str(index)}, _table(document["profiles"]))
        case "export":
            _write(options.file, json.dumps(export_profiles(index), indent=1) + "\n")
        case "import":
            number = import_profiles(index, _read(options.file))
            show.print_result(options, {"imported": number}, f"{number} profiles imported")
        case _:
            number = clear_profiles(index, options.device)
            show.print_result(options, {"removed": number}, f"{number} profiles removed")
    return 0


def _table(profiles: list[dict[str, Any]]) -> str:
    if not profiles:
        return "no profiles"
    groups = Counter((each["device"], each["driver"]) for each in profiles)
    models = Counter((device, driver) for device, driver, _ in {(p["device"], p["driver"], p["bucket"]) for p in profiles})
    return show.format_table(COLUMNS, [(*key, str(models[key]), str(number)) for key, number in sorted(groups.items())])


def _read(file: str) -> object:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise ArgumentError(f"cannot read JSON from {file}: {failure}", code="unreadable-file") from failure


def _write(file: str, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as failure:
        raise ArgumentError(f"cannot write to {file}: {failure.strerror}", code="unwritable-file") from failure
