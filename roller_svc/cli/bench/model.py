"""roller bench model: what the model expects beside times that others published, or that this CPU takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.bench.cases import BenchCase
from roller_svc.bench.cpu.report import machine
from roller_svc.bench.cpu.run import MachineLock
from roller_svc.bench.model.candidate_plans import sample_sizes
from roller_svc.bench.model.measurement_passes import PassKey, merge_passes, passes_of, pending_passes
from roller_svc.bench.model.published import COLUMNS, TARGET, bench_published, bench_tiles
from roller_svc.bench.model.report import read_measurements, report
from roller_svc.bench.model.run import BuiltCase, Settings, Worker, build_case, failed_case, measure_pass
from roller_svc.calibration import merge_calibrations
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.bench import cpu as cpu_bench
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
    "of halves", "top-1 regret", "p90", "worst", "top-10 regret",
)  # fmt: skip
# Options, by what they are for; given without need they would be ignored.
OF_CASES = ("cases", "every", "only")
OF_MEASURING = ("threads", "top", "sample", "class_sample", "seed", "uncalibrated", "lock", "resume")
Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument("--published", metavar="FILE", help="operators with times that others measured")
    parser.add_argument(
        "--target", metavar="ID",
        help=f"a CPU that is this one or a part of it ({default.target}); with --published the device ({TARGET}), of"
        " nvidia-k80 and amd-mi50 each published tile is estimated",
    )  # fmt: skip
    cpu_bench.add_cases(parser)
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N", help="cores to use (%(default)s)")
    parser.add_argument(
        "--top", type=int, default=default.top, metavar="K",
        help="plans to time that the model puts first (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=int, default=default.sample, metavar="N",
        help="random plans to time beside, of each case at least (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--class-sample", type=int, default=default.class_sample, metavar="N",
        help="the same of each class at least: of classes of few cases more of each (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="of the random plans (%(default)s)")
    parser.add_argument(
        "--uncalibrated", action="store_true", help="take the spec as it is shipped; measure no figures first"
    )
    parser.add_argument(
        "--measurements", metavar="FILE", help="judge what an earlier run measured (its --json); measure nothing"
    )
    cpu_bench.add_run(parser)


def execute(options: argparse.Namespace) -> int:
    _check(options)
    if options.published:
        results, shown = _published(Path(options.published), options.target or TARGET)
        return _tell(options, results, shown)
    cases = {case.id: case for case in cpu_bench.chosen_cases(options)}
    if options.measurements:
        results = report(read_measurements(Path(options.measurements)), cases)
        return _tell(options, results, _text(results))
    document, journal = _measured(cases.values(), options)
    results = report(document, cases)
    _tell(options, results, _text(results))
    journal.drop()  # nothing that was measured is lost before it is out
    return 0


def _check(options: argparse.Namespace) -> None:
    """ArgumentError for numbers that mean nothing and for options that would be ignored."""
    common.check_positive(options, "threads", "top", "every")
    for name in ("sample", "class-sample"):
        if getattr(options, name.replace("-", "_")) < 0:
            raise ArgumentError(f"--{name} must not be negative", code="invalid-option")
    if options.published:
        _refuse(options, "published", ("measurements", *OF_CASES, *OF_MEASURING))
    elif options.measurements:
        _refuse(options, "measurements", ("target", *OF_MEASURING))


def _refuse(options: argparse.Namespace, with_option: str, others: Iterable[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args([])
    for name in others:
        if getattr(options, name) != getattr(defaults, name):
            given = name.replace("_", "-")
            raise ArgumentError(f"--{with_option} and --{given} exclude each other", code="invalid-option")


def _tell(options: argparse.Namespace, results: Json, shown: str) -> int:
    if options.json:
        show.print_json(results)
    else:
        print(shown)
    sys.stdout.flush()
    return 0


def _measured(cases: Collection[BenchCase], options: argparse.Namespace) -> tuple[Json, Journal]:
    """The document of the cases' measured candidates, and the journal, in which a row stands as soon as it is there."""
    target = options.target or Settings().target
    chosen = Settings(
        target, options.threads, options.top, options.sample, options.class_sample, options.seed,
        calibrate=not options.uncalibrated,
    )  # fmt: skip
    shipped = cpu_bench.cpu_target(chosen.target)
    document: Json = {"machine": machine(shipped), "settings": asdict(chosen)}
    journal = cpu_bench.journal_of("model", options, cases, [document["settings"], document["machine"]["cpu"]])
    turnstile = MachineLock(Path(options.lock) if options.lock else None)
    run = _Run(cases, chosen, Worker(chosen.target, chosen.threads), turnstile, journal)
    try:
        run.measure_all()
    finally:
        turnstile.close()
        run.worker.close()
    return document | run.document_(), journal


@dataclass(slots=True)
class _Run:
    """Visits to all cases, and a calibration before each round of them and after the last: of memory that others read
    for minutes each may say less than there is. `journal` has what a run before this one did."""

    cases: Collection[BenchCase]
    chosen: Settings
    worker: Worker
    turnstile: MachineLock
    journal: Journal
    specs: list[HardwareSpec] = field(default_factory=list)
    done: dict[PassKey, Json] = field(default_factory=dict)

    def measure_all(self) -> None:
        rows = self.journal.rows()
        self.specs = [hardware.from_mapping(row["hardware"]) for row in rows if "hardware" in row]
        self.done = {(row["id"], row.pop("visit")): row for row in rows if "id" in row}
        self.turnstile.enter()
        first = self.worker.start(calibrate=self.chosen.calibrate and not self.specs)
        if not self.specs:
            self._keep(first)
        samples = sample_sizes(self.cases, self.chosen.sample, self.chosen.class_sample)
        built: dict[str, BuiltCase] = {}
        for pass_, number, case in pending_passes(self.cases, self.done):
            self.turnstile.enter()
            self._calibrate(pass_)
            try:
                if case.id not in built:
                    built[case.id] = build_case(case, self.chosen, samples[case.cls], self.specs[0])
                row = measure_pass(built[case.id], self.specs[0], self.worker)
            except RollerError as failure:
                row = failed_case(case, failure)
            self.done[case.id, pass_] = row
            self.journal.add([row | {"visit": pass_}])
            where = f"visit {pass_ + 1}, {number} of {len(self.cases)}"
            print(f"[{where}] {_line(row)}", file=sys.stderr, flush=True)
        self._calibrate(1 + max((pass_ for _, pass_ in self.done), default=0))

    def document_(self) -> Json:
        rows = [merge_passes(passes_of(case, self.done)) for case in self.cases]
        return {"hardware": hardware.to_mapping(merge_calibrations(self.specs)), "cases": rows}

    def _calibrate(self, before: int) -> None:
        """Once before each round of visits, and after all."""
        if self.chosen.calibrate and len(self.specs) <= before:
            self._keep(self.worker.recalibrate(self.specs[-1]))

    def _keep(self, spec: HardwareSpec) -> None:
        self.specs.append(spec)
        self.journal.add([{"hardware": hardware.to_mapping(spec)}])


def _line(row: Json) -> str:
    if row["error"]:
        return f"{row['id']} {row['cls']}: {row['error']}"
    failed = sum(candidate["error"] is not None for candidate in row["candidates"])
    best = min((c["min_s"] for c in row["candidates"] if c["min_s"] is not None), default=None)
    disturbed = ", disturbed" if row["disturbed"] else ""
    of = f"{len(row['candidates'])} candidates, {failed} failed"
    return f"{row['id']} {row['cls']}: {of}, best {show.format_seconds(best)}{disturbed}"


def _text(document: Json) -> str:
    on = f"{document['machine']['cpu']}, {document['settings']['threads']} threads, {document['machine']['date']}"
    parts = [on]
    for title, document_ in (("constants as shipped", document["as_shipped"]), ("fitted to the other half", document)):
        rows = [_measured_row(name, one) for name, one in _by_class(document_)]
        parts += [f"\n{title}", show.format_table(MEASURED_COLUMNS, rows)]
    return "\n".join([*parts, *_errors(document)])


def _measured_row(name: str, one: Json) -> tuple[object, ...]:
    logs = (one["median_abs_log_ratio"], one["chosen_median_abs_log_ratio"])
    regrets = (one[f"top1_regret_{which}"] for which in ("mean", "p90", "max"))
    ranks = (one["spearman"], one["spearman_within"], one["spearman_halves"])
    return (
        name, one["cases"], one["plans"], *map(_three_places, (*logs, *ranks)), *map(show.percent, regrets),
        show.percent(one["top10_regret_mean"]),
    )  # fmt: skip


def _published(published: Path, target: str) -> tuple[Json, str]:
    """The results, and their table: of tiles where the file has them for the device, else of the best times."""
    if target in COLUMNS:
        results = bench_tiles(published, target)
        shown = show.format_table(TILE_COLUMNS, [_tile_row(*named) for named in _by_class(results)])
    elif target == TARGET:
        results = bench_published(published)
        shown = show.format_table(PUBLISHED_COLUMNS, [_published_row(*named) for named in _by_class(results)])
    else:
        raise ArgumentError(f"no times are published for {target}", code="invalid-option",
                            hint=f"--target: {', '.join((TARGET, *COLUMNS))}")  # fmt: skip
    return results, "\n".join([shown, *_errors(results)])


def _errors(results: Json) -> list[str]:
    return [f"{row['id']}: {row['error']}" for row in results["cases"] if row["error"]]


def _by_class(results: Json) -> list[tuple[str, Json]]:
    return [("overall", results["overall"]), *results["classes"].items()]


def _published_row(name: str, one: Json) -> tuple[object, ...]:
    logs = (one["median_abs_log_ratio"], one["rooflines"]["artifact"], one["rooflines"]["peaks"])
    return name, one["cases"], *map(_three_places, (*logs, one["spearman"])), _percent(one["within_uncertainty"])


def _tile_row(name: str, one: Json) -> tuple[object, ...]:
    shares = (_percent(one[key]) for key in ("top10_within_estimate", "top10_within_published"))
    return name, one["cases"], *map(_three_places, (one["median_abs_log_ratio"], one["spearman"])), *shares


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _three_places(document_: float | None) -> str:
    return "-" if document_ is None else f"{document_:.3f}"
