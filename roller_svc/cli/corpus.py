"""roller corpus: every case of a file compiled, run and judged, in worker processes."""

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
from roller_svc.compiler.request import checked_tiles, one_of
from roller_svc.errors import ArgumentError, RollerError
from roller_svc.farm.action import generator_digest
from roller_svc.farm.workers import spread
from roller_svc.ir.constraints import KernelFamily
from roller_svc.settings import settings
from roller_svc.verify import corpus
from roller_svc.verify.corpus import Row, Run, Task

BAD_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.json", help="the corpus")
    parser.add_argument("--target", default="local", metavar="ID", help="the device (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="the small variant of a case, where it has one")
    parser.add_argument("--emulate", action="store_true", help="run kernels of GPUs on the CPU")
    parser.add_argument("--races", action="store_true", help="with --emulate: report races of threads too; slower")
    common.add_family(parser)
    seeds = "run each case on inputs of N seeds; the emulator's threads run in another order each time"
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help=seeds)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one case of N, the same ones every time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="worker processes")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="longest time for one program")
    parser.add_argument("--resume", action="store_true", help="go on where the same command was interrupted")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")


def execute(options: argparse.Namespace) -> int:
    common.check_positive(options, "seeds", "every", "jobs", "timeout")
    if options.races and not options.emulate:
        raise ArgumentError("--races is for emulated kernels: --emulate --races", code="invalid-option")
    run = _run(options)
    text = common.text_file(options.file)
    try:
        document = json.loads(text)
    except ValueError as failure:
        raise ArgumentError(f"{options.file} is not JSON: {failure}", code="invalid-corpus") from failure
    cases = corpus.cases_of(document, small=options.small, every=options.every)
    began = time.monotonic()
    journal = Journal(settings().store / "corpus" / f"{_run_id(options, run, text)}.jsonl", keep=options.resume)
    done = {row["id"]: Row(**row) for row in journal.rows()}
    left = [case for case in cases if case.id not in done]
    tasks = corpus.tasks_of(left, run)
    for rows in progress.shown(_judged(tasks, options), len(tasks), options.target):
        journal.add(row.as_json() for row in rows)
        done |= {row.id: row for row in rows}
    found = [done[case.id] for case in cases]
    totals = corpus.summary(found) | {"target": options.target, "seconds": time.monotonic() - began}
    journal.drop()
    if options.json:
        show.as_json({"cases": [row.as_json() for row in found], "summary": totals})
    else:
        print(_report(found, totals))
    return 1 if totals["wrong"] or totals["error"] else 0


def _judged(tasks: list[Task], options: argparse.Namespace) -> Iterator[tuple[Row, ...]]:
    """Rows as they come, one task after the other in each of the worker processes."""
    for task, answer in spread(corpus.judge, tasks, options.jobs, options.timeout):
        yield corpus.failed(task, answer) if isinstance(answer, RollerError) else answer


def _run(options: argparse.Namespace) -> Run:
    return Run(
        options.target, options.emulate, options.seeds, options.races,
        None if options.family is None else one_of(KernelFamily, "family", options.family),
        checked_tiles(common.tiles_of(options)),
    )  # fmt: skip


def _run_id(options: argparse.Namespace, run: Run, text: str) -> str:
    """Of what decides the rows: the file, the options, this version."""
    parts = [text, options.small, options.every, repr(run), generator_digest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _report(rows: list[Row], totals: corpus.Json) -> str:
    bad = [row for row in rows if row.status != "ok"]
    lines = [f"{row.status:8} {row.id:40} {row.cls:18} {row.detail[:150]}" for row in bad[:BAD_SHOWN]]
    if len(bad) > BAD_SHOWN:
        lines.append(f"... and {len(bad) - BAD_SHOWN} more (--json has them all)")
    counts = ", ".join(f"{totals[status]} {status}" for status in corpus.RANK)
    spilled = f", {totals['spilled']} spilled" if totals["spilled"] else ""
    families = ", ".join(f"{count} {name}" for name, count in totals["kernels"]["family"].items())
    if families:
        lines.append(f"kernels of the cases that are ok: {families}")
    lines.append(
        f"{totals['cases']} cases on {totals['target']}: {counts} ({totals['ok_share']:.1%} ok){spilled};"
        f" compile median {show.duration(totals['compile_median_s'])}; {totals['seconds']:.0f} s in all"
    )
    return "\n".join(lines)
