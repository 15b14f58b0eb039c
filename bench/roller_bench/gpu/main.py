"""Verify, probe and time every kernel family on the local NVIDIA device.

    bench/gpu --dry --out verdicts.jsonl                (beforehand, without a device)
    bench/gpu --verdicts verdicts.jsonl --out run.jsonl (one call of ten minutes; cut anywhere it is a result)
    bench/gpu --report run.jsonl                        (without a device)
    bench/gpu --rehearse                               (without a device: the whole program, times from the model)

Exit code 0: nothing is wrong; 1: something is wrong; 3: no device, or a package is missing. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from roller_bench import DATA, RESULTS
from roller_bench.gpu import machine, report, wheels
from roller_bench.gpu.cases import checks_for
from roller_bench.gpu.record import Record
from roller_bench.gpu.rehearsal import FAULTS, Rehearsal, no_rehearsal, rehearsal_of
from roller_bench.gpu.rehearsal.subset import rehearsal_cases, rehearsal_checks
from roller_bench.gpu.samples import finding_cases, references, sampled_cases
from roller_bench.gpu.session import (
    DRY_STAGES,
    STAGE_MINUTES,
    Options,
    Session,
    Tasks,
    error_text,
    planned_rows,
    stage_seconds,
)
from roller_bench.gpu.verdicts import read_verdicts
from roller_bench.gpu.workers import BoundedWorker, end_processes
from roller_svc import hardware
from roller_svc.errors import ArgumentError, RollerError, UnknownHardwareError

Json = dict[str, Any]

CASES, FINDINGS = DATA / "public.json", DATA / "gpu_functions.json"
NO_DEVICE = 3
# Defaults of a run, and of a dry run: the smallest that reaches all code. One of five sets of inputs has special values
# (values.py).
SETS, CASES_PER_CLASS, TOP_K, MINUTES = 10, 4, 3, 10.0
DRY_SETS, DRY_CASES_PER_CLASS, DRY_TOP_K, DRY_MINUTES = 2, 1, 1, 8.0
REHEARSED_MINUTES, REHEARSED_WITH_FAULT = 4.0, 0.7
TIMEOUT_S = 25.0
REHEARSED_TIMEOUT_S = 15.0
LATE_S = 20.0  # a run that exceeds its minutes by this is aborted
TARGET = "nvidia-h200-sxm"
# Rough seconds for the printed plan, on a core or on the device. A check with all its sets takes twice CHECK_S;
# TIMING_S is for samples, copies and warm-up of both libraries.
CHECK_S, BUILD_S, TIMING_S = 2.5, 1.5, 1.2


def run(options: Options, rehearsal: Rehearsal) -> int:
    """Run all stages; return the exit code."""
    about = machine.describe_host() | {"dry": options.dry, "rehearsal": options.rehearse, "minutes": options.minutes}
    if not options.dry:
        lack = None if options.rehearse else machine.missing_requirement()
        if lack is not None:
            print(f"bench/gpu: {lack}")
            return NO_DEVICE
        worker: BoundedWorker[None, Json] = BoundedWorker(rehearsal.on_device(machine.device), options.timeout_s)
        try:
            about["device"] = worker.call(None)
        except RollerError as failure:
            print(f"bench/gpu: {error_text(failure)}")
            return NO_DEVICE
        finally:
            worker.close()
    target = _target(options, about.get("device"))
    if target is None:
        print("bench/gpu: hwspecs/ has no spec for this device: name a similar one with --target")
        return NO_DEVICE
    return _run(dataclasses.replace(options, target=target), about | {"target": target}, rehearsal)


def _run(options: Options, about: Json, rehearsal: Rehearsal) -> int:
    square, *others = references()
    checks = checks_for(hardware.load(options.target))
    all_cases = [square, *finding_cases(FINDINGS), *others, *sampled_cases(CASES, options.cases_per_class)]
    if options.rehearse:
        checks, all_cases = rehearsal_checks(checks), rehearsal_cases(all_cases)
    selected = [check for check in checks if options.only.search(check.id)]
    cases = [case for case in all_cases if options.only.search(case.id)]
    about |= {
        "plan": plan(options, len(selected), len(cases)),
        "clocks_before": {} if options.dry else machine.clocks(),
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    work = Tasks(selected, cases, read_verdicts(options.verdicts))
    record = Record(options.out, about, planned_rows(options, work))
    late = threading.Timer(60 * options.minutes + LATE_S, _abort, [record])
    late.daemon = True
    late.start()
    bus_id = about["device"]["bus_id"] if "device" in about else None
    Session(options, record, work, rehearsal.on_device, bus_id).run()
    late.cancel()
    record.finish()
    total = report.report_of([options.out])
    report_path = options.out.with_suffix(".json")
    report.write(total, report_path)
    print(f"\n{report.table(total)}\n\n{record.path}, {report_path}", flush=True)
    return 1 if total["summary"]["wrong"] else 0


def plan(options: Options, checks: int, cases: int) -> Json:
    """Return the number of tasks and a rough time with these jobs; the device times one case at a time."""
    check_s = CHECK_S if options.sets <= DRY_SETS else 2 * CHECK_S
    return {
        "checks": checks,
        "cases": cases,
        "seconds": stage_seconds(options.stages, options.minutes),
        "verify_s": checks * check_s / options.jobs,
        "measure_s": max(cases * BUILD_S / max(1, options.jobs - 1), 0.0 if options.dry else cases * TIMING_S),
    }


def _abort(record: Record) -> None:
    """Abort a run that does not end; its file lacks the section `end`."""
    print(f"bench/gpu: time is up and a task does not end: aborted; see {record.path}", flush=True)
    end_processes()
    os._exit(1)


def _target(options: Options, device: Json | None) -> str | None:
    if options.target or device is None:
        return options.target or TARGET
    spec = machine.target_of(device)
    return None if spec is None else spec.id


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out_dir = os.environ.get("OUT")
    default = Path(out_dir) / "gpu.jsonl" if out_dir else RESULTS / f"gpu-{time.strftime('%Y-%m-%d')}.jsonl"
    parser.add_argument("--out", type=Path, help=f"file of JSON lines (default: {default}; none for a rehearsal)")
    parser.add_argument("--target", default="", help="device spec (default: that of the local device)")
    parser.add_argument("--wheels", type=Path, help="directory of wheels for packages that this Python lacks (wheels.py)")
    parser.add_argument("--minutes", type=float, help=f"minutes for all stages (default: {MINUTES:g}; dry: {DRY_MINUTES:g})")
    parser.add_argument("--dry", action="store_true", help="no device: compile everything, emulate small kernels")
    parser.add_argument("--rehearse", action="store_true", help="simulate a device: times from the model")
    parser.add_argument("--fault", choices=FAULTS, help="fault to inject in a rehearsal")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the report of these files")
    parser.add_argument("--verdicts", type=Path, help="file of a dry run with the emulator's verdicts")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="run ids that match this pattern")
    parser.add_argument(
        "--stages", type=lambda text: tuple(text.split(",")), help=f"comma-separated: {','.join(STAGE_MINUTES)} (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="worker processes (default: number of cores)"
    )
    parser.add_argument("--sets", type=int, help=f"sets of inputs for a check (default: {SETS}; dry: {DRY_SETS})")
    each = f"cases per class and type (default: {CASES_PER_CLASS}; dry: {DRY_CASES_PER_CLASS})"
    parser.add_argument("--each", type=int, help=each)
    parser.add_argument("--top-k", type=int, help=f"candidates timed for a case (default: {TOP_K}; dry: {DRY_TOP_K})")
    parser.add_argument("--timeout", type=float, help=f"time limit for one check or case, seconds (default: {TIMEOUT_S:g})")
    arguments = parser.parse_args(words)
    arguments.out = arguments.out or (None if arguments.rehearse else default)
    arguments.stages = arguments.stages or (DRY_STAGES if arguments.dry else tuple(STAGE_MINUTES))
    unknown = set(arguments.stages) - set(DRY_STAGES if arguments.dry else STAGE_MINUTES)
    if unknown:
        parser.error(
            f"--stages: expected some of {', '.join(DRY_STAGES if arguments.dry else STAGE_MINUTES)}, "
            f"got {', '.join(sorted(unknown))}"
        )
    if arguments.fault and not arguments.rehearse:
        parser.error("--fault requires --rehearse")
    return arguments


def make_options(arguments: argparse.Namespace, out: Path) -> Options:
    """Fill in defaults and order the stages."""
    small = arguments.dry or arguments.rehearse
    minutes = DRY_MINUTES if arguments.dry else MINUTES
    if arguments.rehearse:
        minutes = REHEARSED_WITH_FAULT if arguments.fault else REHEARSED_MINUTES
    stages = tuple(stage for stage in STAGE_MINUTES if stage in arguments.stages)
    return Options(
        out=out,
        target=arguments.target,
        minutes=_or_default(arguments.minutes, minutes),
        dry=arguments.dry,
        only=arguments.only,
        stages=stages,
        jobs=arguments.jobs,
        sets=_or_default(arguments.sets, DRY_SETS if small else SETS),
        cases_per_class=_or_default(arguments.each, DRY_CASES_PER_CLASS if small else CASES_PER_CLASS),
        top_k=_or_default(arguments.top_k, DRY_TOP_K if arguments.dry else TOP_K),
        timeout_s=_or_default(arguments.timeout, REHEARSED_TIMEOUT_S if arguments.rehearse else TIMEOUT_S),
        rehearse=arguments.rehearse,
        verdicts=arguments.verdicts,
    )


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_options(words)
    try:
        if arguments.report:
            total = report.report_of(arguments.report)
            print(report.table(total))
            return 1 if total["summary"]["wrong"] else 0
        if arguments.rehearse:
            with rehearsal_of(arguments.fault) as rehearsal:
                out = arguments.out or rehearsal.folder / "rehearsal.jsonl"
                return run(make_options(arguments, out), rehearsal)
        return run(make_options(arguments, arguments.out), no_rehearsal())
    except (UnknownHardwareError, ArgumentError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


def exit_process(code: int) -> NoReturn:
    """Exit this process, also if a worker process cannot be killed."""
    if end_processes():
        sys.exit(code)
    wheels.remove_unpacked()
    sys.stdout.flush()
    os._exit(code)
