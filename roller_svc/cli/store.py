"""roller store: collect, verify, pin, export and import the results in a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from roller_svc import settings
from roller_svc.cli import format as show
from roller_svc.errors import ArgumentError
from roller_svc.farm.collection import collect, verify
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
    for action in (collected, verified, pinned, exported, imported):
        action.add_argument("--store", metavar="DIR", help="directory of the store, or s3://BUCKET/PREFIX")
        action.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    current = settings.read_settings(store=options.store)
    store = _open_store(current)
    match options.action:
        case "gc":
            return _collect(store, current, options)
        case "verify":
            return _verify(store, options)
        case "pin":
            return _pin(store, options)
        case "export":
            copied = export_results(store, Path(options.file), options.digest)
        case _:
            copied = import_results(store, Path(options.file))
    facts = {"names": copied.names, "bytes": copied.size_bytes}
    show.print_result(options, facts, f"{copied.names} names and {copied.size_bytes} bytes of blobs")
    return 0


def _open_store(current: settings.Settings) -> Store:
    if current.store == MEMORY:
        raise ArgumentError("a store in memory belongs to its service: expected a directory or s3://BUCKET/PREFIX")
    if current.is_local_store and not current.folder.is_dir():
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


def _pin(store: Store, options: argparse.Namespace) -> int:
    if options.digest is None:
        if options.remove:
            raise ArgumentError("--remove needs a digest", code="invalid-option")
        pins = store.pins()
        show.print_result(options, {"pins": pins}, "\n".join(pins))
    elif options.remove:
        store.unpin(options.digest)
    else:
        store.pin(options.digest)
    return 0
