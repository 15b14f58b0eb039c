"""roller targets: the devices, and what compiles for them here."""

from __future__ import annotations

import argparse

from roller_svc import hardware
from roller_svc.cli import options as common
from roller_svc.cli import remote, show
from roller_svc.describe import device_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    common.add_server(parser)


def execute(options: argparse.Namespace) -> int:
    server = common.server_of(options)
    if server:
        with remote.connected(server) as service:
            rows = service.hardware()
    else:
        rows = [device_json(spec) for spec in hardware.all_specs()]
    if options.json:
        show.as_json({"targets": rows})
        return 0
    shown = [(row["id"], row["arch"], "yes" if row["compiles"] else "no", row["toolchain"]) for row in rows]
    print(show.table(("target", "arch", "compiles", "with, or what is missing"), shown))
    return 0
