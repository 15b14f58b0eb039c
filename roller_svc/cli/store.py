"""roller store: collect, verify, pin, export and import the results in a store; back up a farm, and restore it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from roller_svc import settings
from roller_svc.cli import format as show
from roller_svc.errors import ArgumentError
from roller_svc.farm.audit import AuditEvent, AuditLog, local_client
from roller_svc.farm.backup import back_up, check_restored, restore
from roller_svc.farm.collection import collect, verify
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.migrate import open_upgraded
from roller_svc.farm.objects import MEMORY
from roller_svc.farm.results import is_result
from roller_svc.farm.store import Store
from roller_svc.farm.store_archive import export_results, import_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    collected = actions.add_parser("gc", help="remove what nothing refers to, and the least used", allow_abbrev=False)
    collected.add_argument("--quota", type=int, metavar="BYTES", help="size to which to reduce the store (default: the settings')")
    verified = actions.add_parser("verify", help="check the hashes of everything", allow_abbrev=False)
    verified.add_argument("--remove", action="store_true", help="remove what is damaged; it is built again when needed")
    pinned = actions.add_parser("pin", help="keep a kernel or model; without a digest, list those", allow_abbrev=False)
    pinned.add_argument("digest", nargs="?", help="of a kernel, a model or a blob")
    pinned.add_argument("--remove", action="store_true", help="do not keep it any longer")
    exported = actions.add_parser("export", help="write results to a file", allow_abbrev=False)
    exported.add_argument("file")
    exported.add_argument("digest", nargs="*", help="of kernels and models (default: all)")
    imported = actions.add_parser("import", help="read results from a file of `export`", allow_abbrev=False)
    imported.add_argument("file")
    saved = actions.add_parser("backup", help="copy the database and the store to a folder, beside services", allow_abbrev=False)
    saved.add_argument("folder", help="a new one, or that of an earlier backup, which gets what is missing")
    restored = actions.add_parser("restore", help="fill an empty database and store from a backup", allow_abbrev=False)
    restored.add_argument("folder", help="of `backup`")
    for action in (collected, verified, pinned, exported, imported, saved, restored):
        action.add_argument("--store", metavar="DIR", help="directory of the store, or s3://BUCKET/PREFIX")
        action.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    current = settings.read_settings(store=options.store)
    is_restored = options.action == "restore"
    store = _open_store(current, is_new=is_restored)
    if not is_restored:
        check_restored(store)
    match options.action:
        case "gc":
            return _collect(store, current, options)
        case "verify":
            return _verify(store, options)
        case "pin":
            return _pin(store, current, options)
        case "backup":
            return _back_up(store, current, options)
        case "restore":
            return _restore(store, current, options)
        case "export":
            copied = export_results(store, Path(options.file), options.digest)
        case _:
            copied = import_results(store, Path(options.file))
    facts = {"names": copied.names, "bytes": copied.size_bytes}
    show.print_result(options, facts, f"{copied.names} names and {copied.size_bytes} bytes of blobs")
    return 0


def _open_store(current: settings.Settings, *, is_new: bool) -> Store:
    if current.store == MEMORY:
        raise ArgumentError("a store in memory belongs to its service: expected a directory or s3://BUCKET/PREFIX")
    if current.is_local_store and not is_new and not current.folder.is_dir():
        raise ArgumentError(f"no store in {current.store}", hint="--store DIR, or ROLLER_STORE")
    return Store(current.store, settings.s3_options(), is_result)


def _collect(store: Store, current: settings.Settings, options: argparse.Namespace) -> int:
    if options.quota is not None and options.quota < 0:
        raise ArgumentError(f"--quota must not be negative, got {options.quota}", code="invalid-option")
    quota_bytes = current.store_quota_bytes if options.quota is None else options.quota
    report = collect(store, quota_bytes)
    facts = {
        "removed_results": report.removed_items,
        "removed_blobs": report.removed_blobs,
        "removed_bytes": report.removed_bytes,
        "bytes": report.size_bytes,
    }
    text = (
        f"removed {report.removed_items} results and {report.removed_blobs} blobs, {report.removed_bytes} bytes; "
        f"{report.size_bytes} bytes are left"
    )
    show.print_result(options, facts, text)
    return 0


def _verify(store: Store, options: argparse.Namespace) -> int:
    damage = verify(store, remove=options.remove)
    facts = {
        "checked_blobs": damage.checked_blobs,
        "checked_names": damage.checked_names,
        "damaged_blobs": damage.blobs,
        "incomplete_names": damage.names,
    }
    lines = [*(f"damaged     {name}" for name in damage.blobs), *(f"incomplete  {name}" for name in damage.names)]
    text = f"{damage.checked_blobs} blobs and {damage.checked_names} names checked, {len(lines)} faults"
    show.print_result(options, facts, "\n".join([*lines, text]))
    return 1 if lines and not options.remove else 0


def _pin(store: Store, current: settings.Settings, options: argparse.Namespace) -> int:
    if options.digest is None:
        if options.remove:
            raise ArgumentError("--remove needs a digest", code="invalid-option")
        pins = store.pins()
        show.print_result(options, {"pins": pins}, "\n".join(pins))
    elif options.remove:
        store.unpin(options.digest)
        _record(current, AuditEvent.UNPINNED, options.digest)
    else:
        store.pin(options.digest)
        _record(current, AuditEvent.PINNED, options.digest)
    return 0


def _back_up(store: Store, current: settings.Settings, options: argparse.Namespace) -> int:
    with contextlib.closing(Database(current.database_url)) as database:
        saved = back_up(store, database, Path(options.folder))
    facts = {"names": saved.names, "blobs": saved.blobs, "bytes": saved.size_bytes, "skipped": saved.skipped}
    text = f"the database, {saved.names} names and {saved.blobs} blobs, {saved.size_bytes} bytes"
    show.print_result(options, facts, text if not saved.skipped else f"{text}; {saved.skipped} damaged names are left out")
    return 0


def _restore(store: Store, current: settings.Settings, options: argparse.Namespace) -> int:
    with contextlib.closing(Database(current.database_url)) as database:
        done = restore(Path(options.folder), store, database)
    facts = {
        "names": done.names,
        "blobs": done.blobs,
        "rows": done.rows,
        "damaged_blobs": done.damaged,
        "is_same_generator": done.is_same_generator,
    }
    lines = [f"damaged     {digest}" for digest in done.damaged]
    if not done.is_same_generator:
        lines.append("another version wrote the backup: its results are hits only for that version")
    text = f"{done.rows} rows, {done.names} names and {done.blobs} blobs, {len(done.damaged)} of them damaged"
    show.print_result(options, facts, "\n".join([*lines, text]))
    return 1 if done.damaged else 0


def _record(current: settings.Settings, event: AuditEvent, digest: str) -> None:
    """Add an entry to the audit log of the store's service, if there is one here."""
    if not current.has_database:
        print("not in the audit log: no database here; ROLLER_DATABASE names it", file=sys.stderr)
        return
    with open_upgraded(current.database_url) as database:
        AuditLog(database).record(event, local_client(), digest)
