"""roller bench cpu: compare our kernels with numpy, torch and TVM on this CPU."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roller_bench import DATA
from roller_bench.baselines import BASELINES, DEFAULT_BASELINES
from roller_bench.cases import BenchCase, performance_cases
from roller_bench.cpu.report import limits_json, machine, summary
from roller_bench.cpu.run import MachineLock, Settings, Workers, bench_case, limits_of
from roller_svc import hardware
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.journal import Journal
from roller_svc.compiler.action import digest_sources, generator_digest
from roller_svc.errors import ArgumentError
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.settings import settings

SOURCES = Path(__file__).resolve().parents[1]
COLUMNS = ("ratio", "of medians", "GFLOP/s", "GB/s", "of peak", "build")  # after the case, ours and the baselines
CLASS_COLUMNS = ("class", "cases", "geomean", "of medians", "least", "median", "build p95", "errors")
Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cases(parser)
    parser.add_argument("--target", default="local", metavar="ID", help="CPU target; its ISA must be a subset of this machine's")
    common.add_calibration(parser)
    parser.add_argument(
        "--threads",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="cores to use; may be repeated (default: 1)",
    )
    parser.add_argument("--select", default="measure", metavar="HOW", help="select our kernel by: measure or model")
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help="candidates to measure (default: %(default)s)")
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT_BASELINES),
        metavar="NAMES",
        help=f"baselines: some of {','.join(BASELINES)} (default: %(default)s); '' for none",
    )
    add_run(parser)


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add the options that select cases."""
    add_case_file(parser, "cpu_bench.json")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run every Nth case")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="class or prefix of ids; may be repeated")


def add_case_file(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--cases",
        type=Path,
        default=DATA / default,
        metavar="FILE",
        help=f"case file (default: bench/data/{default} of the checkout)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options for sharing a machine and for resuming."""
    parser.add_argument("--lock", metavar="FILE", help="lock this file while a case is timed, for shared machines")
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run of the same command")
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")


def execute(options: argparse.Namespace) -> int:
    common.check_positive(options, "every", "top_k")
    chosen = Settings(options.target, options.select, options.top_k, _parse_baselines(options.peers))
    common.calibrate_local(options, chosen.target)
    hw = cpu_target(chosen.target)
    cases = chosen_cases(options)
    journals: list[Journal] = []
    lock = MachineLock(Path(options.lock) if options.lock else None)
    document: Json = {"machine": machine(hw), "settings": _settings_json(chosen), "threads": {}}
    try:
        for threads in dict.fromkeys(options.threads or [1]):
            journals.append(_journal(options, cases, document, threads))
            document["threads"][str(threads)] = _measured(cases, threads, chosen, lock, journals[-1])
    finally:
        lock.close()
    if options.json:
        show.print_json(document)
    else:
        print(_text(document))
    sys.stdout.flush()
    for journal in journals:  # only after the results are written
        journal.drop()
    return 0


def cpu_target(target: str) -> HardwareSpec:
    """Load the spec of a CPU. Raises ArgumentError for another target."""
    hw = hardware.load(target)
    if hw.family is not TargetKind.CPU:
        raise ArgumentError(f"--target {hw.id} is not a CPU", code="invalid-option")
    return hw


def _measured(cases: Sequence[BenchCase], threads: int, chosen: Settings, lock: MachineLock, journal: Journal) -> Json:
    """Measure all cases with one number of threads; each row is journaled at once."""
    if threads < 1:
        raise ArgumentError("--threads must be positive", code="invalid-option")
    done = {row["id"]: row for row in journal.rows()}
    workers = Workers(threads, chosen)
    rows: list[Json] = []
    try:
        workers.start()
        for note in workers.notes:
            print(f"note: {note}", file=sys.stderr)
        lock.enter()
        limits = limits_of(workers)
        for number, case in enumerate(cases, 1):
            if case.id in done:
                rows.append(done[case.id])
                continue
            lock.enter()
            rows.append(bench_case(case, workers, limits))
            journal.add(rows[-1:])
            print(f"[{threads} threads, {number} of {len(cases)}] {_line(rows[-1])}", file=sys.stderr, flush=True)
    finally:
        lock.leave()
        workers.close()
    return {
        **summary(rows),
        "limits": limits_json(limits),
        "versions": workers.versions,
        "notes": workers.notes,
        "cases": rows,
    }


def _journal(options: argparse.Namespace, cases: Sequence[BenchCase], document: Json, threads: int) -> Journal:
    """Open the journal of this command, cases, machine and generator."""
    return journal_of("cpu", options, cases, [document["settings"], document["machine"]["cpu"], threads])


def journal_of(kind: str, options: argparse.Namespace, cases: Iterable[BenchCase], parts: Sequence[Any]) -> Journal:
    """Open the journal of a run, identified by its cases, `parts`, and the sources of generator and benchmarks."""
    same = [[(case.id, case.cls, case.digest) for case in cases], *parts, generator_digest(), digest_sources(SOURCES)]
    run = hashlib.sha256(json.dumps(same).encode()).hexdigest()[:32]
    return Journal(settings().folder / "bench" / f"{kind}-{run}.jsonl", keep=options.resume)


def chosen_cases(options: argparse.Namespace) -> list[BenchCase]:
    """Return the cases that the options of `add_cases` select."""
    cases = performance_cases(options.cases)
    if unknown := [text for text in options.only if not any(_matches(case, text) for case in cases)]:
        classes = ", ".join(sorted({case.cls for case in cases}))
        raise ArgumentError(
            f"--only {unknown[0]}: expected a prefix of an id or one of the classes {classes}", code="invalid-option"
        )
    return [
        case
        for case in cases
        if zlib.crc32(case.id.encode()) % options.every == 0
        and (not options.only or any(_matches(case, text) for text in options.only))
    ]


def _matches(case: BenchCase, text: str) -> bool:
    """Return whether the text is the class of a case or a prefix of its id."""
    return case.cls == text or case.id.startswith(text)


def _parse_baselines(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in BASELINES]:
        raise ArgumentError(f"--peers: expected some of {', '.join(BASELINES)}, got {unknown[0]}", code="invalid-option")
    return names


def _settings_json(chosen: Settings) -> Json:
    return {"target": chosen.target, "select": chosen.select, "top_k": chosen.top_k, "peers": list(chosen.baselines)}


def _line(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return f"{row['id']} {row['cls']}: {row['error']}"
    baselines = ", ".join(f"{name} {show.format_seconds(seconds)}" for name, seconds in row["peers"].items())
    ratio = "no baseline" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    return f"{row['id']} {row['cls']}: {show.format_seconds(row['ours_s'])}, {baselines}, {ratio}"


def _text(document: Json) -> str:
    baselines = document["settings"]["peers"]
    parts = [f"{document['machine']['cpu']}, {document['machine']['arch']}, {document['machine']['date']}"]
    for threads, results in document["threads"].items():
        parts += [
            f"\n{threads} threads: {_ratio(results['geomean_ratio'])} the best baseline over {results['compared']}"
            f" cases, FMA peak {results['limits']['flops_per_s'] / 1e9:.0f} GFLOP/s\n",
            show.format_table(
                ("case", "class", "ours", *baselines, *COLUMNS), [_cells(row, baselines) for row in results["cases"]]
            ),
            "",
            show.format_table(CLASS_COLUMNS, [_class_cells(name, one) for name, one in results["classes"].items()]),
        ]
        parts += [f"note: {note}" for note in results["notes"]]
    return "\n".join(parts)


def _cells(row: Mapping[str, Any], baselines: Sequence[str]) -> tuple[object, ...]:
    if row["error"]:
        return (row["id"], row["cls"], row["error"], *[""] * (len(baselines) + len(COLUMNS)))
    return (
        row["id"],
        row["cls"],
        show.format_seconds(row["ours_s"]),
        *(show.format_seconds(row["peers"].get(p)) for p in baselines),
        _ratio(row["ratio"]),
        _ratio(row["median_ratio"]),
        f"{row['gflops']:.4g}",
        f"{row['gb_per_s']:.4g}",
        f"{show.percent(row['share_of_peak'])} of {row['bound']}",
        show.format_seconds(row["build_s"]),
    )


def _class_cells(name: str, one: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        name,
        one["cases"],
        _ratio(one["geomean_ratio"]),
        _ratio(one["geomean_median_ratio"]),
        _ratio(one["min_ratio"]),
        _ratio(one["median_ratio"]),
        show.format_seconds(one["build_p95_s"]),
        one["errors"],
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
