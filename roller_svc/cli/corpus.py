"""roller corpus: compile, run and check every case of a file, in worker processes."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import progress
from roller_svc.cli.journal import Journal
from roller_svc.compiler.action import generator_digest
from roller_svc.compiler.request import read_options
from roller_svc.errors import ArgumentError, RollerError
from roller_svc.farm.workers import map_unordered
from roller_svc.ir.options import KernelOptions, encode, options_of
from roller_svc.settings import settings
from roller_svc.verify import corpus
from roller_svc.verify.corpus import Row, Run, Task

MAX_FAILURES_SHOWN = 40
CONSTRAINTS = ("family", "tiles")  # on every kernel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.json", help="corpus file")
    parser.add_argument("--target", default="local", metavar="ID", help="device (default: %(default)s)")
    common.add_calibration(parser)
    parser.add_argument("--small", action="store_true", help="use the small variant of each case, if it has one")
    parser.add_argument("--emulate", action="store_true", help="run GPU kernels in the CPU emulator")
    parser.add_argument("--races", action="store_true", help="with --emulate: run the race detector (slower)")
    for name in CONSTRAINTS:
        option = options_of(KernelOptions)[name]
        common.add_option(parser, option, encode(option.default))
    seeds = "run each case on inputs from N seeds; the emulator also uses another thread schedule for each"
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help=seeds)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run every Nth case")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="worker processes")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="timeout per program, seconds")
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run")
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    common.check_positive(options, "seeds", "every", "jobs", "timeout")
    if options.races and not options.emulate:
        raise ArgumentError("--races requires --emulate", code="invalid-option")
    common.calibrate_local(options, options.target)
    run = _run(options)
    text = common.read_text_file(options.file)
    try:
        document = json.loads(text)
    except ValueError as failure:
        raise ArgumentError(f"{options.file} is not JSON: {failure}", code="invalid-corpus") from failure
    cases = corpus.parse_cases(document, small=options.small, every=options.every)
    start = time.monotonic()
    journal = Journal(settings().folder / "corpus" / f"{_run_id(options, run, text)}.jsonl", keep=options.resume)
    done = {row["id"]: Row(**row) for row in journal.rows()}
    pending = [case for case in cases if case.id not in done]
    tasks = corpus.group_tasks(pending, run)
    for rows in progress.show_progress(_run_tasks(tasks, options), len(tasks), options.target):
        journal.add(row.as_json() for row in rows)
        done |= {row.id: row for row in rows}
    rows_in_order = [done[case.id] for case in cases]
    totals = corpus.summarize(rows_in_order) | {"target": options.target, "seconds": time.monotonic() - start}
    journal.drop()
    facts = {"cases": [row.as_json() for row in rows_in_order], "summary": totals}
    show.print_result(options, facts, _report(rows_in_order, totals))
    return 1 if totals["wrong"] or totals["error"] else 0


def _run_tasks(tasks: list[Task], options: argparse.Namespace) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of each task in order of completion."""
    for task, result in map_unordered(corpus.verify_task, tasks, options.jobs, options.timeout):
        yield corpus.failed_rows(task, result) if isinstance(result, RollerError) else result


def _run(options: argparse.Namespace) -> Run:
    return Run(
        options.target,
        options.emulate,
        options.seeds,
        options.races,
        **read_options(KernelOptions, {"family": options.family, "tiles": common.parse_tiles(options.tiles)}),
    )


def _run_id(options: argparse.Namespace, run: Run, text: str) -> str:
    """Hash everything that determines the rows: the file, the options, this version."""
    parts = [text, options.small, options.every, repr(run), generator_digest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _report(rows: list[Row], totals: corpus.Json) -> str:
    failures = [row for row in rows if row.status != "ok"]
    lines = [f"{row.status:8} {row.id:40} {row.cls:18} {row.detail[:150]}" for row in failures[:MAX_FAILURES_SHOWN]]
    if len(failures) > MAX_FAILURES_SHOWN:
        lines.append(f"... and {len(failures) - MAX_FAILURES_SHOWN} more (--json has them all)")
    counts = ", ".join(f"{totals[status]} {status}" for status in corpus.STATUS_ORDER)
    spilled = f", {totals['spilled']} spilled" if totals["spilled"] else ""
    families = ", ".join(f"{count} {name}" for name, count in totals["kernels"]["family"].items())
    if families:
        lines.append(f"kernels of the cases that are ok: {families}")
    lines.append(
        f"{totals['cases']} cases on {totals['target']}: {counts} ({totals['ok_share']:.1%} ok){spilled};"
        f" compile median {show.format_seconds(totals['compile_median_s'])}; {totals['seconds']:.0f} s in all"
    )
    return "\n".join(lines)
