"""roller keys: add, list, limit and revoke the API keys of a service, in its database."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from roller_svc import settings
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.farm.api_keys import ApiKey, ApiKeys, Scope
from roller_svc.farm.audit import AuditLog, ClientUse, local_client
from roller_svc.farm.database.migrate import open_upgraded

DAY_S = 86_400.0
COLUMNS = ("id", "name", "scopes", "quota", "created", "expires", "state", "last used")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    added = actions.add_parser("add", help="make a key and print it, once", allow_abbrev=False)
    added.add_argument("name", help="whose key it is")
    added.add_argument(
        "--scope",
        action="append",
        default=[],
        choices=[scope.value for scope in Scope],
        help="read, compile, measure or admin; each includes the ones before it (default: compile)",
    )
    added.add_argument("--quota", type=int, metavar="N", help="queued and running builds (default: the service's)")
    added.add_argument("--days", type=float, metavar="N", help="time until it expires (default: never)")
    listed = actions.add_parser("list", help="list all keys, without their secrets", allow_abbrev=False)
    revoked = actions.add_parser("revoke", help="revoke a key, within seconds", allow_abbrev=False)
    revoked.add_argument("id", help="id of the key; `roller keys list` has it")
    limited = actions.add_parser("limit", help="change the quota of a key, within seconds", allow_abbrev=False)
    limited.add_argument("id", help="id of the key")
    limited.add_argument("--quota", type=int, metavar="N", help="queued and running builds (default: the service's)")
    for action in (added, listed, revoked, limited):
        action.add_argument("--store", metavar="DIR", help="directory of the service's store, which has the database")
        action.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    with open_upgraded(settings.read_settings(store=options.store).database_url) as database:
        keys = ApiKeys(database)
        match options.action:
            case "add":
                return _add(keys, options)
            case "list":
                return _list(keys, AuditLog(database), options)
            case "limit":
                _check_quota(options)
                keys.limit(options.id, options.quota, local_client())
                return 0
            case _:
                keys.revoke(options.id, local_client())
                return 0


def _add(keys: ApiKeys, options: argparse.Namespace) -> int:
    _check_quota(options)
    common.check_positive(options, *(["days"] if options.days is not None else []))
    scopes = {Scope(name) for name in options.scope or [Scope.COMPILE.value]}
    lifetime_s = None if options.days is None else options.days * DAY_S
    text, key = keys.add(options.name, scopes, quota=options.quota, lifetime_s=lifetime_s, by=local_client())
    show.print_result(options, {"key": text, **_facts(key)}, text)
    if not options.json:
        print(f"key {key.id} of {key.name}: keep it, as it is not shown again", file=sys.stderr)
        if len(keys.all()) == 1:
            print("it is the first one: from now on the service refuses requests without a key", file=sys.stderr)
    return 0


def _check_quota(options: argparse.Namespace) -> None:
    common.check_positive(options, *(["quota"] if options.quota is not None else []))


def _list(keys: ApiKeys, log: AuditLog, options: argparse.Namespace) -> int:
    found, uses = keys.all(), {use.client: use for use in log.uses()}
    facts = [_facts(key) | _use(uses.get(key.id)) for key in found]
    rows = [(*_row(key), uses[key.id].last_time if key.id in uses else "never") for key in found]
    show.print_result(options, {"keys": facts}, show.format_table(COLUMNS, rows))
    return 0


def _use(use: ClientUse | None) -> dict[str, Any]:
    return {"first_use_time": use and use.first_time, "last_use_time": use and use.last_time}


def _facts(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "scopes": [scope.value for scope in Scope if scope in key.scopes],
        "quota": key.quota,
        "create_time": key.create_time,
        "expire_time": key.expire_time,
        "revoke_time": key.revoke_time,
        "state": _state(key),
    }


def _row(key: ApiKey) -> tuple[object, ...]:
    scopes = " ".join(scope.value for scope in Scope if scope in key.scopes)
    return (key.id, key.name, scopes, key.quota or "-", key.create_time, key.expire_time or "never", _state(key))


def _state(key: ApiKey) -> str:
    return "revoked" if key.revoke_time else "valid" if key.is_valid else "expired"
