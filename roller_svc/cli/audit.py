"""roller audit: who made, used and revoked keys; who asked for, cancelled and pinned what."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from roller_svc import settings
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.farm.audit import AuditEntry, AuditEvent, AuditLog, ClientUse
from roller_svc.farm.database.migrate import open_upgraded
from roller_svc.farm.usage import DailyUsage
from roller_svc.settings import Resource

DAY_S = 86_400.0
DEFAULT_COUNT = 50
DEFAULT_DAYS = 30
USAGE_COLUMNS = ("client", "name", "build seconds", "stored bytes")
COLUMNS = ("time", "client", "event", "subject", "details")
CLIENT_COLUMNS = ("client", "name", "first used", "last used")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    events = actions.add_parser("events", help="list events, the latest first", allow_abbrev=False)
    events.add_argument("--client", metavar="ID", help="only those of a client")
    events.add_argument("--event", choices=[event.value for event in AuditEvent], help="only those of a kind")
    events.add_argument("--days", type=float, metavar="N", help="only those of the last days")
    events.add_argument("--count", type=int, default=DEFAULT_COUNT, metavar="N", help="default: %(default)s")
    clients = actions.add_parser("clients", help="list when each client was used first and last", allow_abbrev=False)
    usage = actions.add_parser("usage", help="sum what each client used: seconds of builds, stored bytes", allow_abbrev=False)
    usage.add_argument("--days", type=int, default=DEFAULT_DAYS, metavar="N", help="default: %(default)s, today included")
    for action in (events, clients, usage):
        action.add_argument("--store", metavar="DIR", help="directory of the service's store, which has the database")
        action.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    with open_upgraded(settings.read_settings(store=options.store).database_url) as database:
        log = AuditLog(database)
        if options.action == "usage":
            common.check_positive(options, "days")
            names = {use.client: use.name for use in log.uses()}
            totals = DailyUsage(database).totals(options.days)
            facts = [{"client": client, "name": names.get(client), **used} for client, used in totals.items()]
            show.print_result(options, {"clients": facts}, _usage_table(facts))
            return 0
        if options.action == "clients":
            uses = log.uses()
            show.print_result(options, {"clients": [asdict(use) for use in uses]}, _client_table(uses))
            return 0
        common.check_positive(options, "count", *(["days"] if options.days is not None else []))
        entries = log.entries(
            client=options.client,
            event=None if options.event is None else AuditEvent(options.event),
            newer_than_s=None if options.days is None else options.days * DAY_S,
            limit=options.count,
        )
        show.print_result(options, {"events": [asdict(entry) for entry in entries]}, _event_table(entries))
    return 0


def _usage_table(facts: list[dict[str, Any]]) -> str:
    rows = (
        (fact["client"] or "-", fact["name"] or "-", f"{fact[Resource.BUILD_SECONDS]:.1f}", f"{fact[Resource.STORED_BYTES]:.0f}")
        for fact in facts
    )
    return show.format_table(USAGE_COLUMNS, rows)


def _client_table(uses: list[ClientUse]) -> str:
    return show.format_table(CLIENT_COLUMNS, ((use.client, use.name, use.first_time, use.last_time) for use in uses))


def _event_table(entries: list[AuditEntry]) -> str:
    return show.format_table(
        COLUMNS, ((entry.time, entry.client or "-", entry.event, entry.subject, _details(entry)) for entry in entries)
    )


def _details(entry: AuditEntry) -> str:
    return " ".join(f"{name}={value!r}" if name == "program" else f"{name}={value}" for name, value in entry.details.items())
