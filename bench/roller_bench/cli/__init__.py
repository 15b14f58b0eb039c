"""roller bench: benchmarks of kernels, construction and the model."""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator
from typing import Any

from roller_bench import lint
from roller_bench.cases import BenchCase, performance_cases
from roller_bench.cli import cpu as cpu_bench
from roller_bench.cli import gpu_models as gpu_models_bench
from roller_bench.cli import model as model_bench
from roller_bench.cli import tuning as tuning_bench
from roller_bench.cli import zoo as zoo_bench
from roller_bench.construct import bench_construct
from roller_svc import hardware
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import progress
from roller_svc.errors import RollerError
from roller_svc.farm.workers import map_unordered
from roller_svc.toolchain.binaries.sass import disassembler
from roller_svc.verify.lint_reports import check_target

TARGETS = ("nvidia-v100-sxm2", "nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "local")

LINT_COLUMNS = (
    "target", "kernels", "unspilled", "C75xx", "on tensor cores", "by warpgroups", "compile median", "p95", "findings",
    "errors",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    construct = kinds.add_parser("construct", help="time construction: from a program to its ranked candidates", allow_abbrev=False)
    _add_cases(construct)

    machine_code = kinds.add_parser(
        "lint",
        help="lint compiled CUDA kernels (spills, warnings, instructions) and time their compilation",
        allow_abbrev=False,
    )
    _add_cases(machine_code)
    machine_code.add_argument("--every", type=int, default=1, metavar="N", help="run every Nth case")
    machine_code.add_argument(
        "--jobs",
        type=int,
        default=min(2, len(os.sched_getaffinity(0))),
        metavar="N",
        help="worker processes; use 1 for undisturbed compile times (default: %(default)s)",
    )
    machine_code.add_argument("--timeout", type=float, default=120.0, metavar="S", help="timeout per program, seconds")
    machine_code.add_argument("--resume", action="store_true", help="resume an interrupted run of the same command")

    model_bench.add_arguments(
        kinds.add_parser("model", help="compare the model with measured or published times", allow_abbrev=False)
    )
    cpu_bench.add_arguments(
        kinds.add_parser("cpu", help="compare our kernels with numpy and torch on this CPU", allow_abbrev=False)
    )
    zoo_bench.add_arguments(
        kinds.add_parser("model-zoo", help="compare whole models with other engines on this CPU", allow_abbrev=False)
    )
    tuning_bench.add_arguments(
        kinds.add_parser("tuning", help="compare models with those that trials in their calls have tuned", allow_abbrev=False)
    )
    gpu_models_bench.add_arguments(
        kinds.add_parser("gpu-models", help="compile whole models for GPUs, without a device", allow_abbrev=False)
    )


def _add_cases(parser: argparse.ArgumentParser) -> None:
    cpu_bench.add_case_file(parser, "public.json")
    parser.add_argument("--target", action="append", default=[], metavar="ID", help="device; may be repeated")
    parser.add_argument("--json", action="store_true", help="write one JSON document to stdout")


def execute(options: argparse.Namespace) -> int:
    match options.kind:
        case "cpu":
            return cpu_bench.execute(options)
        case "model":
            return model_bench.execute(options)
        case "model-zoo":
            return zoo_bench.execute(options)
        case "tuning":
            return tuning_bench.execute(options)
        case "gpu-models":
            return gpu_models_bench.execute(options)
        case "lint":
            results = _lint(options)
            shown = show.format_table(LINT_COLUMNS, _lint_rows(results))
        case _:
            results = bench_construct(options.cases, tuple(options.target) or TARGETS)
            shown = show.format_table(("target", "cases", "median", "p99", "max"), _construct_rows(results))
    if options.json:
        show.print_json(results)
    else:
        print(shown)
    return 0


def _lint(options: argparse.Namespace) -> dict[str, Any]:
    """Lint every case on every target in worker processes; rows are journaled until all are done."""
    common.check_positive(options, "every", "jobs", "timeout")
    disassembler()  # fail once, not in every row
    cases = [case for case in performance_cases(options.cases) if zlib.crc32(case.id.encode()) % options.every == 0]
    results = {}
    for target in tuple(options.target) or lint.TARGETS:
        check_target(hardware.load(target))
        journal = cpu_bench.journal_of("lint", options, cases, [target])
        done = {row["id"]: row for row in journal.rows()}
        pending = [case for case in cases if case.id not in done]
        for row in progress.show_progress(_rows(pending, target, options), len(pending), target):
            journal.add([row])
            done[row["id"]] = row
        rows = [done[case.id] for case in cases]
        results[target] = lint.summary(rows) | {"cases": rows}
        journal.drop()
    return {"targets": results}


def _rows(cases: list[BenchCase], target: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows as they finish. Cases of a failed task are retried one by one."""
    alone: list[BenchCase] = []
    tasks = lint.batch_tasks(cases, target)
    for task, answer in map_unordered(lint.lint_cases, tasks, options.jobs, options.timeout * lint.CASES_PER_TASK):
        if isinstance(answer, RollerError):
            alone += task.cases
        else:
            yield from answer
    for task, answer in map_unordered(lint.lint_cases, lint.batch_tasks(alone, target, 1), options.jobs, options.timeout):
        (case,) = task.cases
        yield from [lint.failed_row(case, answer)] if isinstance(answer, RollerError) else answer


def _construct_rows(results: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (target, len(one["cases"]), *(show.format_seconds(one[key]) for key in ("median_s", "p99_s", "max_s")))
        for target, one in results["targets"].items()
    ]


def _lint_rows(results: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            target,
            one["kernels"],
            show.percent(one["zero_spill_share"]),
            one["c75xx"],
            f"{show.percent(one['tensor_core_share'])} of {one['half_contractions']}",
            show.percent(one["warpgroup_share"]),
            show.format_seconds(one["compile_median_s"]),
            show.format_seconds(one["compile_p95_s"]),
            ", ".join(f"{kind} {count}" for kind, count in one["findings"].items()) or "none",
            one["errors"],
        )
        for target, one in results["targets"].items()
    ]
