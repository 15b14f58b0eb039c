"""roller bench model: compare the model with published times, or with times measured on this CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roller_bench.cases import BenchCase
from roller_bench.cli import cpu as cpu_bench
from roller_bench.cpu.report import machine
from roller_bench.cpu.run import MachineLock
from roller_bench.model.candidate_plans import sample_sizes
from roller_bench.model.measurement_passes import (
    EXTRA_PASSES,
    PassKey,
    merge_passes,
    passes_of,
    pending_passes,
)
from roller_bench.model.published import COLUMNS, TARGET, bench_published, bench_tiles
from roller_bench.model.report import read_measurements, report
from roller_bench.model.run import BuiltCase, Settings, Worker, build_case, failed_case, measure_pass
from roller_svc import hardware
from roller_svc.calibration import merge_calibrations
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.journal import Journal
from roller_svc.errors import ArgumentError, RollerError
from roller_svc.ir.hardware import HardwareSpec

PUBLISHED_COLUMNS = (
    "class", "cases", "median |log ratio|", "ROLLER's roofline", "peaks' roofline", "Spearman", "within uncertainty",
)  # fmt: skip
TILE_COLUMNS = (
    "class", "cases", "median |log ratio|", "Spearman", "our top 10 within its estimate", "within its time",
)  # fmt: skip
MEASURED_COLUMNS = (
    "class", "cases", "plans", "median |log ratio|", "of the first", "Spearman", "within cases",
    "of halves", "top-1 regret", "p90", "worst", "top-3 regret", "random top-1", "random top-3",
)  # fmt: skip
# Options that are rejected where they would be ignored.
OF_CASES = ("cases", "every", "only")
OF_MEASURING = ("threads", "top", "sample", "class_sample", "seed", "passes", "uncalibrated", "lock", "resume")
Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument("--published", metavar="FILE", help="file of operators with published times")
    parser.add_argument(
        "--target",
        metavar="ID",
        help=f"CPU target (default: {default.target}); with --published the device (default: {TARGET}), for nvidia-k80"
        " and amd-mi50 the published tiles are estimated",
    )
    cpu_bench.add_cases(parser)
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N", help="cores to use (default: %(default)s)")
    parser.add_argument(
        "--top",
        type=int,
        default=default.top,
        metavar="K",
        help="model's first plans to time (default: %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=default.sample,
        metavar="N",
        help="random plans to time for each case, at least (default: %(default)s)",
    )
    parser.add_argument(
        "--class-sample",
        type=int,
        default=default.class_sample,
        metavar="N",
        help="random plans to time for each class, at least (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, metavar="N", help="seed of the random plans (default: %(default)s)"
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=default.passes,
        metavar="N",
        help="times that all cases are measured (default: %(default)s)",
    )
    parser.add_argument("--uncalibrated", action="store_true", help="use the shipped spec without calibration")
    parser.add_argument("--measurements", metavar="FILE", help="evaluate the JSON document of an earlier run; measure nothing")
    parser.add_argument("--hardware", metavar="FILE", help="with --measurements: evaluate with this spec, not with that of the run")
    cpu_bench.add_run(parser)


def execute(options: argparse.Namespace) -> int:
    _check(options)
    if options.published:
        results, shown = _published(Path(options.published), options.target or TARGET)
        return _print(options, results, shown)
    cases = {case.id: case for case in cpu_bench.chosen_cases(options)}
    if options.measurements:
        results = report(_read_measurements(options), cases)
        return _print(options, results, _text(results))
    document, journal = _measured(cases.values(), options)
    results = report(document, cases)
    _print(options, results, _text(results))
    journal.drop()  # only after the results are written
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ArgumentError for invalid numbers and for options that would be ignored."""
    common.check_positive(options, "threads", "top", "every", "passes")
    for name in ("sample", "class-sample"):
        if getattr(options, name.replace("-", "_")) < 0:
            raise ArgumentError(f"--{name} must not be negative", code="invalid-option")
    if options.published:
        _reject(options, "published", ("measurements", "hardware", *OF_CASES, *OF_MEASURING))
    elif options.measurements:
        _reject(options, "measurements", ("target", *OF_MEASURING))
    elif options.hardware:
        raise ArgumentError("--hardware requires --measurements", code="invalid-option")


def _reject(options: argparse.Namespace, with_option: str, names: Iterable[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args([])
    for name in names:
        if getattr(options, name) != getattr(defaults, name):
            option = name.replace("_", "-")
            raise ArgumentError(f"--{with_option} and --{option} exclude each other", code="invalid-option")


def _read_measurements(options: argparse.Namespace) -> Json:
    """Read the document of an earlier run, with another spec if one is given."""
    document = read_measurements(Path(options.measurements))
    if options.hardware is None:
        return document
    spec = hardware.load_yaml(common.read_text_file(options.hardware), options.hardware)
    return document | {"hardware": hardware.to_mapping(spec)}


def _print(options: argparse.Namespace, results: Json, shown: str) -> int:
    if options.json:
        show.print_json(results)
    else:
        print(shown)
    sys.stdout.flush()
    return 0


def _measured(cases: Collection[BenchCase], options: argparse.Namespace) -> tuple[Json, Journal]:
    """Measure the cases; return the document and the journal, to which each row is added at once."""
    target = options.target or Settings().target
    chosen = Settings(
        target,
        options.threads,
        options.top,
        options.sample,
        options.class_sample,
        options.seed,
        options.passes,
        calibrate=not options.uncalibrated,
    )
    shipped = cpu_bench.cpu_target(chosen.target)
    document: Json = {"machine": machine(shipped), "settings": asdict(chosen)}
    journal = cpu_bench.journal_of("model", options, cases, [document["settings"], document["machine"]["cpu"]])
    lock = MachineLock(Path(options.lock) if options.lock else None)
    run = _Run(cases, chosen, Worker(chosen.target, chosen.threads), lock, journal)
    try:
        run.measure_all()
    finally:
        lock.close()
        run.worker.close()
    return document | run.results(), journal


@dataclass(slots=True)
class _Run:
    """Measurement passes over all cases, with a calibration before each pass and after the last.

    Noisy neighbours may lower the memory bandwidth that one calibration measures. The journal has the rows of an
    interrupted run.
    """

    cases: Collection[BenchCase]
    chosen: Settings
    worker: Worker
    lock: MachineLock
    journal: Journal
    specs: list[HardwareSpec] = field(default_factory=list)
    done: dict[PassKey, Json] = field(default_factory=dict)

    def measure_all(self) -> None:
        rows = self.journal.rows()
        self.specs = [hardware.from_mapping(row["hardware"]) for row in rows if "hardware" in row]
        self.done = {(row["id"], row.pop("visit")): row for row in rows if "id" in row}
        self.lock.enter()
        first = self.worker.start(calibrate=self.chosen.calibrate and not self.specs)
        if not self.specs:
            self._add_spec(first)
        samples = sample_sizes(self.cases, self.chosen.sample, self.chosen.class_sample)
        built: dict[str, BuiltCase] = {}
        extra = min(self.chosen.passes, EXTRA_PASSES)
        for pass_, number, case in pending_passes(self.cases, self.done, self.chosen.passes, extra):
            self.lock.enter()
            self._calibrate(pass_)
            try:
                if case.id not in built:
                    built[case.id] = build_case(case, self.chosen, samples[case.cls], self.specs[0])
                row = measure_pass(built[case.id], self.specs[0], self.worker)
            except RollerError as failure:
                row = failed_case(case, failure)
            self.done[case.id, pass_] = row
            self.journal.add([row | {"visit": pass_}])
            where = f"pass {pass_ + 1}, {number} of {len(self.cases)}"
            print(f"[{where}] {_line(row)}", file=sys.stderr, flush=True)
        self._calibrate(1 + max((pass_ for _, pass_ in self.done), default=0))

    def results(self) -> Json:
        rows = [merge_passes(passes_of(case, self.done)) for case in self.cases]
        return {"hardware": hardware.to_mapping(merge_calibrations(self.specs)), "cases": rows}

    def _calibrate(self, before: int) -> None:
        """Calibrate once before each pass and after the last."""
        if self.chosen.calibrate and len(self.specs) <= before:
            self._add_spec(self.worker.recalibrate(self.specs[-1]))

    def _add_spec(self, spec: HardwareSpec) -> None:
        self.specs.append(spec)
        self.journal.add([{"hardware": hardware.to_mapping(spec)}])


def _line(row: Json) -> str:
    if row["error"]:
        return f"{row['id']} {row['cls']}: {row['error']}"
    failed = sum(candidate["error"] is not None for candidate in row["candidates"])
    best = min((c["min_s"] for c in row["candidates"] if c["min_s"] is not None), default=None)
    disturbed = ", disturbed" if row["disturbed"] else ""
    counts = f"{len(row['candidates'])} candidates, {failed} failed"
    return f"{row['id']} {row['cls']}: {counts}, best {show.format_seconds(best)}{disturbed}"


def _text(document: Json) -> str:
    header = f"{document['machine']['cpu']}, {document['settings']['threads']} threads, {document['machine']['date']}"
    rows = [_measured_row(name, metrics) for name, metrics in _by_class(document)]
    return "\n".join([header, show.format_table(MEASURED_COLUMNS, rows), *_errors(document)])


def _measured_row(name: str, metrics: Json) -> tuple[object, ...]:
    logs = (metrics["median_abs_log_ratio"], metrics["chosen_median_abs_log_ratio"])
    names = ("top1_regret_mean", "top1_regret_p90", "top1_regret_max", "top3_regret_mean", "random_top1_regret_mean",
             "random_top3_regret_mean")  # fmt: skip
    ranks = (metrics["spearman"], metrics["spearman_within"], metrics["spearman_halves"])
    return (
        name,
        metrics["cases"],
        metrics["plans"],
        *map(_three_places, (*logs, *ranks)),
        *(show.percent(metrics[name]) for name in names),
    )


def _published(published: Path, target: str) -> tuple[Json, str]:
    """Return the results and their table: of published tiles where the file has them, else of times."""
    if target in COLUMNS:
        results = bench_tiles(published, target)
        shown = show.format_table(TILE_COLUMNS, [_tile_row(*named) for named in _by_class(results)])
    elif target == TARGET:
        results = bench_published(published)
        shown = show.format_table(PUBLISHED_COLUMNS, [_published_row(*named) for named in _by_class(results)])
    else:
        raise ArgumentError(
            f"no times are published for {target}", code="invalid-option", hint=f"--target: {', '.join((TARGET, *COLUMNS))}"
        )
    return results, "\n".join([shown, *_errors(results)])


def _errors(results: Json) -> list[str]:
    return [f"{row['id']}: {row['error']}" for row in results["cases"] if row["error"]]


def _by_class(results: Json) -> list[tuple[str, Json]]:
    return [("overall", results["overall"]), *results["classes"].items()]


def _published_row(name: str, metrics: Json) -> tuple[object, ...]:
    logs = (metrics["median_abs_log_ratio"], metrics["rooflines"]["artifact"], metrics["rooflines"]["peaks"])
    return (
        name,
        metrics["cases"],
        *map(_three_places, (*logs, metrics["spearman"])),
        _percent(metrics["within_uncertainty"]),
    )


def _tile_row(name: str, metrics: Json) -> tuple[object, ...]:
    shares = (_percent(metrics[key]) for key in ("top10_within_estimate", "top10_within_published"))
    return (
        name,
        metrics["cases"],
        *map(_three_places, (metrics["median_abs_log_ratio"], metrics["spearman"])),
        *shares,
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _three_places(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
