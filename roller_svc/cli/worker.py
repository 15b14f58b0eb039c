"""roller worker: build what services have queued, until it is interrupted."""

from __future__ import annotations

import argparse
import pkgutil

from roller_svc import hardware, settings
from roller_svc.errors import ArgumentError

RUN_WORKER = "roller_svc.service.worker:run_worker"  # by name, so that no other subcommand loads the database
CHECK_QUEUES, MACHINE_QUEUES = "roller_svc.farm.machine:check_queues", "roller_svc.farm.machine:machine_queues"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queues", metavar="NAMES", help="queues, separated by commas; default: all that this machine serves")
    parser.add_argument("--jobs", type=int, metavar="N", help="builds at once; default: ROLLER_WORKERS")
    parser.add_argument("--store", metavar="DIR", help="directory of the store, the same as the services'")


def execute(options: argparse.Namespace) -> int:
    current = settings.read_settings(store=options.store, workers=options.jobs)
    if not current.workers:
        raise ArgumentError("a worker needs at least one job", code="invalid-setting", hint="--jobs 1")
    settings.use(current)
    if error := hardware.local_spec_error():
        raise error
    names = pkgutil.resolve_name(MACHINE_QUEUES)() if options.queues is None else options.queues.split(",")
    queues = pkgutil.resolve_name(CHECK_QUEUES)(name.strip() for name in names)
    pkgutil.resolve_name(RUN_WORKER)(current, queues)
    return 0
