"""A table of what a service has built for which target."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.errors import RollerError

if TYPE_CHECKING:  # local commands load no HTTP client
    from roller_svc.client.calls import AnyOperation

COLUMNS = ("target", "stage", "cache", "result", "operation")


def print_builds(options: argparse.Namespace, builds: Mapping[str, Mapping[str, AnyOperation | RollerError]]) -> int:
    """Print what is built for each target, of one thing or of several by their names. Return 1 if anything failed."""
    facts = [
        {**({"name": name} if name else {}), "target": target, **_facts(result)}
        for name, by_target in builds.items()
        for target, result in by_target.items()
    ]
    columns = (*(("name",) if any(builds) else ()), *COLUMNS)
    failed = [fact for fact in facts if fact["error"] is not None]
    hits = sum(fact["cache"] == "hit" for fact in facts)
    table = show.format_table(columns, ([_cell(fact, column) for column in columns] for fact in facts))
    lines = [table, *(f"{fact.get('name', '')} {fact['target']}: {fact['error']['message']}".strip() for fact in failed)]
    lines.append(f"{len(facts)} build{'s' if len(facts) != 1 else ''}: {hits} hits, {len(failed)} failed")
    show.print_result(options, {"builds": facts}, "\n".join(lines))
    return 1 if failed else 0


def _facts(result: AnyOperation | RollerError) -> dict[str, Any]:
    if isinstance(result, RollerError):
        error = {"code": result.code, "message": result.message}
        return {"operation": None, "stage": "failed", "cache": None, "digest": None, "error": error}
    digest = None if result.response is None else result.response.digest
    metadata = result.metadata
    return {"operation": result.name, "stage": metadata.stage, "cache": metadata.cache, "digest": digest, "error": None}


def _cell(fact: Mapping[str, Any], column: str) -> str:
    if column == "result":
        return str(fact["error"]["code"] if fact["error"] else fact["digest"] or "")[:19] or "-"
    return str(fact[column] or "-").removeprefix("operations/")
